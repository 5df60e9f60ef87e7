//! Requests without a handler: 405 with `Allow` on a path that exists, 404 otherwise. The paths come from the OpenAPI
//! document.

use actix_web::dev::ResourceDef;
use actix_web::{HttpRequest, HttpResponse, web};
use utoipa::openapi::{OpenApi, PathItem};

use crate::error::{Code, Error, Result};

/// The document itself and its viewer.
const UNDOCUMENTED: [&str; 3] = ["/openapi.json", "/docs", "/docs/{file:.*}"];

/// The paths of the API, each with its methods.
pub struct KnownPaths(Vec<(ResourceDef, String)>);

impl KnownPaths {
    pub fn from_document(api: &OpenApi) -> Self {
        let documented = api
            .paths
            .paths
            .iter()
            .map(|(path, item)| (ResourceDef::new(path.as_str()), methods(item)));
        let undocumented =
            UNDOCUMENTED.map(|path| (ResourceDef::new(path), "GET, HEAD".to_owned()));
        Self(documented.chain(undocumented).collect())
    }
}

/// In the form of `Allow`.
fn methods(item: &PathItem) -> String {
    let all = [
        ("GET, HEAD", item.get.is_some()),
        ("POST", item.post.is_some()),
        ("PUT", item.put.is_some()),
        ("PATCH", item.patch.is_some()),
        ("DELETE", item.delete.is_some()),
    ];
    let allowed: Vec<&str> = all
        .iter()
        .filter(|(_, is_allowed)| *is_allowed)
        .map(|(name, _)| *name)
        .collect();
    allowed.join(", ")
}

/// The path that some clients of OpenAI call by default.
pub fn is_of_responses(path: &str) -> bool {
    path == "/v1/responses" || path.starts_with("/v1/responses/")
}

pub async fn refuse(request: HttpRequest, paths: web::Data<KnownPaths>) -> Result<HttpResponse> {
    let found = paths
        .0
        .iter()
        .find(|(path, _)| path.is_match(request.path()));
    Err(match found {
        Some((_, allow)) => Error {
            allow: Some(allow.clone()),
            ..Error::new(Code::MethodNotAllowed, format!("this path allows {allow}"))
        },
        None if is_of_responses(request.path()) => Error::new(
            Code::NotFound,
            "there is no Responses API here: use Chat Completions, POST /v1/chat/completions",
        ),
        None => Error::new(Code::NotFound, "no such path"),
    })
}
