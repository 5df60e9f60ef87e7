//! `/v1/operator/…`: keys for tenants that lost theirs, the nodes that run, and the operator's own audit.

use actix_web::{HttpResponse, get, post, web};
use chrono::{DateTime, Utc};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};

use super::api_keys::CreatedApiKeyResponse;
use super::audit::{AuditEntryResponse, ListAuditParams};
use crate::app::App;
use crate::domain::people::display_name::DisplayName;
use crate::error::{Error, Result};
use crate::http::auth::keys::Operator;
use crate::http::request::extract::{PathId, Query};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::OptionalJsonBody;
use crate::http::request::paging::{ListName, ListResponse};
use crate::idempotency::Answer;
use crate::ids::{BootId, TenantId};
use crate::store;
use crate::store::db::nodes::NodeRow;
use crate::tenants;

const UNNAMED: &str = "admin key of the operator";

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateAdminKeyRequest {
    /// Unless given: `admin key of the operator`.
    pub name: Option<DisplayName>,
}

/// Make an admin key for a tenant that lost its own. It does not expire.
///
/// It stands in the tenant's audit and in the operator's. It is also made where the tenant has as many keys as its
/// limits allow, and while the tenant is suspended.
#[utoipa::path(
    operation_id = "create_admin_key",
    tag = "operator",
    security(("operator_key" = [])),
    params(("id" = TenantId, Path, description = "The tenant")),
    request_body = Option<CreateAdminKeyRequest>,
    responses((status = 201, description = "Made", body = CreatedApiKeyResponse))
)]
#[post("/operator/tenants/{id}/api-keys")]
pub async fn create_admin_key(
    app: web::Data<App>,
    Operator(operator): Operator,
    PathId(id): PathId<TenantId>,
    retryable: IdempotencyKey,
    body: OptionalJsonBody<CreateAdminKeyRequest>,
) -> Result<HttpResponse> {
    let hash = body.hash();
    let name = match body.0.and_then(|body| body.value.name) {
        Some(name) => name,
        None => UNNAMED.parse().map_err(Error::internal)?,
    };
    let tx = operator.begin(&app.db).await?;
    let actor = operator.principal();
    retryable
        .answer(&app, tx, actor.clone(), hash, async |tx| {
            let made = tenants::create_admin_key(&app, tx, &actor, id, name).await?;
            let answer = Answer::new(
                201,
                &CreatedApiKeyResponse {
                    id: made.key.id,
                    name: made.key.name,
                    key: Some(made.text.expose_secret().to_owned()),
                    scopes: made.key.scopes,
                    platforms: made.key.platforms,
                    expires_at: made.key.expires_at,
                    created_at: made.key.created_at,
                },
            )?;
            Ok(answer.with_secret("key"))
        })
        .await
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct NodeResponse {
    /// Names one start of a node.
    pub id: BootId,
    /// Where other nodes reach it; null if that is not configured.
    pub address: Option<String>,
    /// The version it runs; null for one that does not say.
    pub version: Option<String>,
    /// When it last said that it lives, by the clock of the database.
    pub last_seen_at: DateTime<Utc>,
    /// Whether it missed less than two of its signs of life, which come every five seconds.
    pub live: bool,
}

impl From<NodeRow> for NodeResponse {
    fn from(row: NodeRow) -> Self {
        Self {
            id: row.boot_id,
            address: row.addr,
            version: row.version,
            last_seen_at: row.seen_at,
            live: row.live,
        }
    }
}

/// The nodes that run, and those that were lost in the last minute.
#[utoipa::path(
    operation_id = "list_nodes",
    tag = "operator",
    security(("operator_key" = [])),
    responses((status = 200, description = "All of them", body = ListResponse<NodeResponse>))
)]
#[get("/operator/nodes")]
pub async fn list_nodes(app: web::Data<App>, _operator: Operator) -> Result<HttpResponse> {
    let nodes = store::db::nodes::list(&app.db).await?;
    let response = ListResponse::whole(nodes, NodeResponse::from);
    Ok(HttpResponse::Ok().json(response))
}

/// What operators did, newest first. What they did to a tenant stands in that tenant's audit too, until it is
/// deleted.
#[utoipa::path(
    operation_id = "list_operator_audit",
    tag = "operator",
    security(("operator_key" = [])),
    params(ListAuditParams),
    responses((status = 200, description = "A page", body = ListResponse<AuditEntryResponse>))
)]
#[get("/operator/audit")]
pub async fn list_operator_audit(
    app: web::Data<App>,
    Operator(operator): Operator,
    Query(params): Query<ListAuditParams>,
) -> Result<HttpResponse> {
    let name = ListName::of_operator(&operator, params.list_name());
    let request = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let mut tx = operator.begin(&app.db).await?;
    let page = store::tenant::audit::list(&mut tx, &params.into_filter(), &request).await?;
    tx.commit().await?;
    let response = name.close(&app.keyring, page, AuditEntryResponse::from)?;
    Ok(HttpResponse::Ok().json(response))
}
