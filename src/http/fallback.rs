//! What no handler takes: 405 with `Allow` on a path that exists, 404 otherwise. The paths come from
//! the OpenAPI document.

use actix_web::dev::ResourceDef;
use actix_web::{HttpRequest, HttpResponse, web};
use utoipa::openapi::{OpenApi, PathItem};

use crate::error::{Code, Error, Result};

/// The document itself and its reader.
const UNDOCUMENTED: [&str; 3] = ["/openapi.json", "/docs", "/docs/{file:.*}"];

/// Known paths, each with the methods it takes.
pub struct KnownPaths(Vec<(ResourceDef, String)>);

impl KnownPaths {
    pub fn of(api: &OpenApi) -> Self {
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

/// As `Allow` has them.
fn methods(item: &PathItem) -> String {
    let known = [
        ("GET, HEAD", item.get.is_some()),
        ("POST", item.post.is_some()),
        ("PUT", item.put.is_some()),
        ("PATCH", item.patch.is_some()),
        ("DELETE", item.delete.is_some()),
    ];
    let taken: Vec<&str> = known
        .iter()
        .filter(|(_, is)| *is)
        .map(|(name, _)| *name)
        .collect();
    taken.join(", ")
}

/// What some clients of OpenAI call by default.
pub fn is_of_responses(path: &str) -> bool {
    path == "/v1/responses" || path.starts_with("/v1/responses/")
}

pub async fn refuse(request: HttpRequest, paths: web::Data<KnownPaths>) -> Result<HttpResponse> {
    let known = paths
        .0
        .iter()
        .find(|(path, _)| path.is_match(request.path()));
    Err(match known {
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
