//! `/v1/issuers`: the issuers of the tenant's user tokens.

use actix_web::{HttpResponse, delete, get, put, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::app::App;
use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::issuer::{Issuer, KeySource, TokenAlgorithm, without_private_members};
use crate::domain::values::resource_name::ResourceName;
use crate::error::{Error, Result};
use crate::http::auth::keys::{Admin, Reader};
use crate::http::request::extract::PathName;
use crate::http::request::json_body::JsonBody;
use crate::http::request::paging::ListResponse;
use crate::store;
use crate::tenants::issuers::{self, NewIssuer};

/// Exactly one of `secret` (with HS256), `jwks` and `jwks_url` (with the other algorithms) is required.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PutIssuerRequest {
    /// The `iss` of its tokens.
    #[schema(min_length = 1, max_length = 512)]
    pub issuer: String,
    /// The `aud` that its tokens must have. Without it, they must have the tenant's id, or no `aud` at all.
    #[schema(min_length = 1, max_length = 512)]
    pub audience: Option<String>,
    /// A token's `sub` is the identity `platform:sub`. Either one issuer or bridge keys vouch for a platform.
    #[schema(
        value_type = String,
        max_length = 32,
        pattern = "^(?!(dm|group|channel|thread|user|main)$)[a-z][a-z0-9_-]{0,31}$"
    )]
    pub platform: PlatformScope,
    pub algorithm: TokenAlgorithm,
    /// At least 32 bytes, which may be as few as 8 characters; never returned.
    #[schema(min_length = 8, max_length = 4096)]
    pub secret: Option<String>,
    #[schema(value_type = Option<Object>)]
    pub jwks: Option<Value>,
    /// Fetched on demand, and once more when a token names an unknown key.
    #[schema(max_length = 2048)]
    pub jwks_url: Option<String>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct IssuerResponse {
    pub name: ResourceName,
    pub issuer: String,
    pub audience: Option<String>,
    pub platform: String,
    pub algorithm: TokenAlgorithm,
    #[schema(value_type = Option<Object>)]
    pub jwks: Option<Value>,
    pub jwks_url: Option<String>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl From<Issuer> for IssuerResponse {
    fn from(issuer: Issuer) -> Self {
        let (jwks, jwks_url) = match issuer.keys {
            KeySource::Secret(_) => (None, None),
            KeySource::Document(document) => (Some(without_private_members(document)), None),
            KeySource::Url(url) => (None, Some(url)),
        };
        Self {
            name: issuer.name,
            issuer: issuer.iss,
            audience: issuer.audience,
            platform: issuer.platform,
            algorithm: issuer.algorithm,
            jwks,
            jwks_url,
            created_at: issuer.created_at,
            updated_at: issuer.updated_at,
        }
    }
}

/// Register an issuer, or replace it as a whole.
#[utoipa::path(
    operation_id = "put_issuer",
    tag = "issuers",
    security(("api_key" = ["admin"])),
    params(("name" = ResourceName, Path, description = "The issuer's name")),
    request_body = PutIssuerRequest,
    responses(
        (status = 200, description = "Replaced", body = IssuerResponse),
        (status = 201, description = "Registered", body = IssuerResponse),
        (status = 409, description = "The platform or the issuer is in use already", body = crate::http::response::problem::Problem,
         content_type = "application/problem+json"),
    )
)]
#[put("/issuers/{name}")]
pub async fn put_issuer(
    app: web::Data<App>,
    caller: Admin,
    path: PathName,
    body: JsonBody<PutIssuerRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let new = NewIssuer {
        name: path.or_invalid()?,
        iss: request.issuer,
        audience: request.audience,
        platform: request.platform,
        algorithm: request.algorithm,
        secret: request.secret,
        jwks: request.jwks,
        jwks_url: request.jwks_url,
    };
    let mut tx = caller.begin(&app.db).await?;
    let (issuer, is_new) = issuers::register(&app, &mut tx, &caller.principal(), new).await?;
    tx.commit().await?;
    let response = IssuerResponse::from(issuer);
    Ok(if is_new {
        HttpResponse::Created().json(response)
    } else {
        HttpResponse::Ok().json(response)
    })
}

/// List all issuers of the tenant, by name.
#[utoipa::path(
    operation_id = "list_issuers",
    tag = "issuers",
    security(("api_key" = ["admin", "read"])),
    responses((status = 200, description = "All of them", body = ListResponse<IssuerResponse>))
)]
#[get("/issuers")]
pub async fn list_issuers(app: web::Data<App>, caller: Reader) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let issuers = store::tenant::issuers::list(&mut tx).await?;
    tx.end().await?;
    Ok(HttpResponse::Ok().json(ListResponse::whole(issuers, IssuerResponse::from)))
}

/// Get an issuer.
#[utoipa::path(
    operation_id = "get_issuer",
    tag = "issuers",
    security(("api_key" = ["admin", "read"])),
    params(("name" = ResourceName, Path, description = "The issuer's name")),
    responses((status = 200, description = "The issuer", body = IssuerResponse))
)]
#[get("/issuers/{name}")]
pub async fn get_issuer(
    app: web::Data<App>,
    caller: Reader,
    path: PathName,
) -> Result<HttpResponse> {
    let name = path.or_missing()?;
    let mut tx = caller.begin(&app.db).await?;
    let issuer = store::tenant::issuers::find(&mut tx, name.as_str()).await?;
    tx.end().await?;
    let issuer = issuer.ok_or_else(|| Error::not_found("issuer"))?;
    Ok(HttpResponse::Ok().json(IssuerResponse::from(issuer)))
}

/// Delete an issuer. Within one second no node accepts its tokens.
#[utoipa::path(
    operation_id = "delete_issuer",
    tag = "issuers",
    security(("api_key" = ["admin"])),
    params(("name" = ResourceName, Path, description = "The issuer's name")),
    responses((status = 204, description = "Deleted"))
)]
#[delete("/issuers/{name}")]
pub async fn delete_issuer(
    app: web::Data<App>,
    caller: Admin,
    path: PathName,
) -> Result<HttpResponse> {
    let name = path.or_missing()?;
    let mut tx = caller.begin(&app.db).await?;
    issuers::delete(&app, &mut tx, &caller.principal(), &name).await?;
    tx.commit().await?;
    Ok(HttpResponse::NoContent().finish())
}
