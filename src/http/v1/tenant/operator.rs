//! `/v1/operator/…`: admin keys for tenants that lost theirs, the nodes, and the operator's own audit.

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

const DEFAULT_KEY_NAME: &str = "admin key of the operator";

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateAdminKeyRequest {
    /// Default: `admin key of the operator`.
    pub name: Option<DisplayName>,
}

/// Create an admin key for a tenant that lost its own. It does not expire.
///
/// The tenant's audit and the operator's have an entry. The key is created even if the tenant has reached its limit
/// of keys, and while the tenant is suspended.
#[utoipa::path(
    operation_id = "create_admin_key",
    tag = "operator",
    security(("operator_key" = [])),
    params(("id" = TenantId, Path, description = "The tenant")),
    request_body = Option<CreateAdminKeyRequest>,
    responses((status = 201, description = "Created", body = CreatedApiKeyResponse))
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
        None => DEFAULT_KEY_NAME.parse().map_err(Error::internal)?,
    };
    let tx = operator.begin(&app.db).await?;
    let actor = operator.principal();
    retryable
        .answer(&app, tx, actor.clone(), hash, async |tx| {
            let created = tenants::create_admin_key(&app, tx, &actor, id, name).await?;
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

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct NodeResponse {
    /// Identifies one start of a node.
    pub id: BootId,
    /// The address for other nodes; null if none is configured.
    pub address: Option<String>,
    /// The version of the node; null if it reports none.
    pub version: Option<String>,
    /// The time of its last heartbeat, by the clock of the database.
    pub last_seen_at: DateTime<Utc>,
    /// Whether it missed fewer than two heartbeats, which come every five seconds.
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

/// List the running nodes, and those that were lost in the last minute.
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

/// List the actions of operators, newest first.
///
/// An action on a tenant is in that tenant's audit too, until the tenant is deleted.
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
    let name = ListName::for_operator(&operator, params.list_name());
    let request = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let mut tx = operator.begin(&app.db).await?;
    let page = store::tenant::audit::list(&mut tx, &params.into_filter(), &request).await?;
    tx.commit().await?;
    let response = name.close(&app.keyring, page, AuditEntryResponse::from)?;
    Ok(HttpResponse::Ok().json(response))
}
