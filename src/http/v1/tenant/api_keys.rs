//! `/v1/api-keys`: a tenant's credentials. A key's text is only in the answer that creates it.

use actix_web::{HttpResponse, delete, get, post, web};
use chrono::{DateTime, Utc};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::domain::people::display_name::DisplayName;
use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::api_key::{ApiKey, NewApiKey, Scope};
use crate::domain::values::timestamp;
use crate::error::Result;
use crate::http::auth::keys::{Admin, Reader};
use crate::http::request::extract::{PathId, Query};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::JsonBody;
use crate::http::request::paging::{ListName, ListResponse, PageParams};
use crate::idempotency::Answer;
use crate::ids::ApiKeyId;
use crate::store;
use crate::tenants::api_keys;

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateApiKeyRequest {
    pub name: DisplayName,
    #[schema(min_items = 1, max_items = 4)]
    pub scopes: Vec<Scope>,
    /// Required with the scope `bridge`, refused without it: `platform` or `platform@scope`.
    #[serde(default)]
    #[schema(max_items = 100)]
    pub platforms: Vec<PlatformScope>,
    #[serde(default, deserialize_with = "timestamp::optional")]
    pub expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct CreatedApiKeyResponse {
    pub id: ApiKeyId,
    pub name: String,
    /// The key's text, shown once; null in a retry after ten minutes.
    pub key: Option<String>,
    pub scopes: Vec<Scope>,
    pub platforms: Vec<PlatformScope>,
    pub expires_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ApiKeyResponse {
    pub id: ApiKeyId,
    pub name: String,
    pub scopes: Vec<Scope>,
    pub platforms: Vec<PlatformScope>,
    pub expires_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub revoked_at: Option<DateTime<Utc>>,
    /// To the minute.
    pub last_used_at: Option<DateTime<Utc>>,
}

impl From<ApiKey> for ApiKeyResponse {
    fn from(key: ApiKey) -> Self {
        Self {
            id: key.id,
            name: key.name,
            scopes: key.scopes,
            platforms: key.platforms,
            expires_at: key.expires_at,
            created_at: key.created_at,
            revoked_at: key.revoked_at,
            last_used_at: key.last_used_at,
        }
    }
}

/// Create an API key.
#[utoipa::path(
    operation_id = "create_api_key",
    tag = "api keys",
    security(("api_key" = ["admin"])),
    request_body = CreateApiKeyRequest,
    responses((status = 201, description = "Created", body = CreatedApiKeyResponse))
)]
#[post("/api-keys")]
pub async fn create_api_key(
    app: web::Data<App>,
    caller: Admin,
    retryable: IdempotencyKey,
    body: JsonBody<CreateApiKeyRequest>,
) -> Result<HttpResponse> {
    let tx = caller.begin(&app.db).await?;
    let request = NewApiKey {
        name: body.value.name,
        scopes: body.value.scopes,
        platforms: body.value.platforms,
        expires_at: body.value.expires_at,
    };
    retryable
        .answer(&app, tx, caller.principal(), body.hash, async |tx| {
            let actor = caller.principal();
            let now = app.clock.now();
            let created = api_keys::create(&app.keyring, tx, &actor, &request, now).await?;
            let answer = Answer::new(
                201,
                &CreatedApiKeyResponse {
                    id: created.key.id,
                    name: created.key.name,
                    key: Some(created.text.expose_secret().to_owned()),
                    scopes: created.key.scopes,
                    platforms: created.key.platforms,
                    expires_at: created.key.expires_at,
                    created_at: created.key.created_at,
                },
            )?;
            Ok(answer.with_secret("key"))
        })
        .await
}

/// List the tenant's API keys, newest first, revoked ones included.
#[utoipa::path(
    operation_id = "list_api_keys",
    tag = "api keys",
    security(("api_key" = ["admin", "read"])),
    params(PageParams),
    responses((status = 200, description = "A page", body = ListResponse<ApiKeyResponse>))
)]
#[get("/api-keys")]
pub async fn list_api_keys(
    app: web::Data<App>,
    caller: Reader,
    Query(params): Query<PageParams>,
) -> Result<HttpResponse> {
    let name = ListName::for_key(&caller, "api_keys");
    let request = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let mut tx = caller.begin(&app.db).await?;
    let page = store::tenant::api_keys::list(&mut tx, &request).await?;
    tx.commit().await?;
    let response = name.close(&app.keyring, page, ApiKeyResponse::from)?;
    Ok(HttpResponse::Ok().json(response))
}

/// Revoke an API key. Within one second no node accepts it.
#[utoipa::path(
    operation_id = "revoke_api_key",
    tag = "api keys",
    security(("api_key" = ["admin"])),
    params(("id" = ApiKeyId, Path, description = "The key")),
    responses((status = 204, description = "Revoked, now or earlier"))
)]
#[delete("/api-keys/{id}")]
pub async fn revoke_api_key(
    app: web::Data<App>,
    caller: Admin,
    PathId(id): PathId<ApiKeyId>,
) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let actor = caller.principal();
    let now = app.clock.now();
    api_keys::revoke(&app.keyring, &mut tx, &actor, id, now).await?;
    tx.commit().await?;
    Ok(HttpResponse::NoContent().finish())
}
