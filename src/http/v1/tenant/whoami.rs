//! `/v1/whoami`: describes the credential of a request. Never a secret, and nothing about other credentials.

use actix_web::{HttpResponse, get, web};
use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::app::App;
use crate::auth::Caller;
use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::api_key::Scope;
use crate::error::{Error, Result};
use crate::http::auth::keys::AnyCaller;
use crate::ids::{ApiKeyId, IdentityId, TenantId, UserId};
use crate::store;

/// The members depend on `kind`, which has the names of `securitySchemes`.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum WhoamiResponse {
    OperatorKey {
        /// The name of this key in the audit.
        actor: String,
    },
    ApiKey {
        tenant_id: TenantId,
        id: ApiKeyId,
        name: String,
        scopes: Vec<Scope>,
        platforms: Vec<PlatformScope>,
        expires_at: Option<DateTime<Utc>>,
        created_at: DateTime<Utc>,
    },
    UserToken {
        tenant_id: TenantId,
        user_id: UserId,
        identity_id: IdentityId,
        /// The one identity that the token proves.
        identity: String,
        platform: String,
        /// The tenant's name of the issuer that signed the token.
        issuer: Option<String>,
    },
}

/// Describe the credential of this request.
#[utoipa::path(
    operation_id = "whoami",
    tag = "whoami",
    security(
        ("user_token" = []),
        ("api_key" = ["admin", "bridge", "chat", "read"]),
        ("operator_key" = [])
    ),
    responses((status = 200, description = "The credential", body = WhoamiResponse))
)]
#[get("/whoami")]
pub async fn whoami(app: web::Data<App>, AnyCaller(caller): AnyCaller) -> Result<HttpResponse> {
    let response = match caller {
        Caller::Operator(operator) => WhoamiResponse::OperatorKey {
            actor: operator.principal(),
        },
        Caller::Key(key) => {
            let mut tx = key.begin(&app.db).await?;
            let stored = store::tenant::api_keys::find(&mut tx, key.key_id()).await?;
            tx.commit().await?;
            let stored = stored.ok_or_else(|| Error::unauthorized("the API key does not exist"))?;
            WhoamiResponse::ApiKey {
                tenant_id: key.tenant_id(),
                id: stored.id,
                name: stored.name,
                scopes: stored.scopes,
                platforms: stored.platforms,
                expires_at: stored.expires_at,
                created_at: stored.created_at,
            }
        }
        Caller::User(user) => WhoamiResponse::UserToken {
            tenant_id: user.tenant_id(),
            user_id: user.user_id(),
            identity_id: user.identity().id,
            identity: user.identity().name.to_string(),
            platform: user.identity().name.platform().platform().to_owned(),
            issuer: user.issuer().map(str::to_owned),
        },
    };
    Ok(HttpResponse::Ok().json(response))
}
