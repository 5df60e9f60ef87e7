//! What no handler takes: 405 with `Allow` on a path that exists, 404 otherwise. The paths come from
//! the OpenAPI document.

use actix_web::dev::ResourceDef;
use actix_web::{HttpRequest, HttpResponse, web};
use serde_json::Value;

use crate::error::{Code, Error, Result};

/// The document itself and its reader.
const UNDOCUMENTED: [&str; 3] = ["/openapi.json", "/docs", "/docs/{file:.*}"];

/// Known paths, each with the methods it takes.
pub struct KnownPaths(Vec<(ResourceDef, String)>);

impl KnownPaths {
    pub fn of(document: &Value) -> Self {
        let paths = document["paths"].as_object();
        let documented = paths.into_iter().flatten().map(|(path, item)| {
            let methods = item.as_object().into_iter().flat_map(|item| item.keys());
            let mut allow: Vec<String> = methods.map(|method| method.to_uppercase()).collect();
            if allow.iter().any(|method| method == "GET") {
                allow.push("HEAD".to_owned());
            }
            (ResourceDef::new(path.as_str()), allow.join(", "))
        });
        let undocumented =
            UNDOCUMENTED.map(|path| (ResourceDef::new(path), "GET, HEAD".to_owned()));
        Self(documented.chain(undocumented).collect())
    }
}

pub async fn refuse(request: HttpRequest, paths: web::Data<KnownPaths>) -> Result<HttpResponse> {
    let known = paths
        .0
        .iter()
        .find(|(path, _)| path.is_match(request.path()));
    Err(match known {
        Some((_, allow)) => Error {
            allow: Some(allow.clone()),
            ..Error::new(Code::MethodNotAllowed, format!("this path takes {allow}"))
        },
        None => Error::new(Code::NotFound, "no such path"),
    })
}
