//! `/openapi.json`, and `/docs`: a viewer for it whose files are all inside the binary.

use std::sync::Arc;

use actix_web::http::header;
use actix_web::{HttpResponse, web};

use crate::error::{Error, Result};

/// Scripts and styles come only from here. The viewer sets styles on elements.
const CONTENT_SECURITY_POLICY: &str = "default-src 'self'; style-src 'self' 'unsafe-inline'; \
     img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'";

/// The committed document. A test compares it with the handlers.
const DOCUMENT: &str = include_str!("../../openapi/openapi.json");

pub async fn get_document() -> HttpResponse {
    HttpResponse::Ok()
        .content_type(mime::APPLICATION_JSON)
        .insert_header((header::CACHE_CONTROL, "no-cache"))
        .body(DOCUMENT)
}

pub async fn redirect_to_docs() -> HttpResponse {
    HttpResponse::PermanentRedirect()
        .insert_header((header::LOCATION, "/docs/"))
        .finish()
}

pub async fn get_docs_file(file: web::Path<String>) -> Result<HttpResponse> {
    let config = Arc::new(utoipa_swagger_ui::Config::from("/openapi.json"));
    let found = utoipa_swagger_ui::serve(&file, config)
        .map_err(|error| Error::internal(anyhow::anyhow!("{error}")))?
        .ok_or_else(|| Error::not_found("page"))?;
    Ok(HttpResponse::Ok()
        .content_type(found.content_type)
        .insert_header((header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY))
        .insert_header((header::X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .body(found.bytes.into_owned()))
}
