//! `/v1/audit`: the actions in a tenant, and the head of the chain of entries.

use actix_web::{HttpResponse, get, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::app::App;
use crate::domain::tenant::audit::{Action, ActorName, AuditEntry, GENESIS_HASH};
use crate::error::Result;
use crate::http::auth::keys::Admin;
use crate::http::request::extract::Query;
use crate::http::request::paging::{ListName, ListResponse};
use crate::store;
use crate::store::tenant::audit::Filter;

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct AuditEntryResponse {
    /// From 1, without a gap, in the order in which the changes took effect.
    #[schema(minimum = 1)]
    pub seq: i64,
    pub at: DateTime<Utc>,
    /// The actor: the id of an API key, `operator:` and the operator's name, or `retention`: the service itself,
    /// on behalf of the tenant's retention.
    pub actor: String,
    /// The action, like `api_key.create`.
    pub action: String,
    /// The id of the changed object.
    pub target: Option<String>,
    #[schema(value_type = Object)]
    pub detail: Value,
    /// The entry's hash in the chain, in hex.
    #[schema(pattern = "^[0-9a-f]{64}$", min_length = 64, max_length = 64)]
    pub hash: String,
}

impl From<AuditEntry> for AuditEntryResponse {
    fn from(entry: AuditEntry) -> Self {
        Self {
            seq: entry.seq,
            at: entry.at,
            actor: entry.actor,
            action: entry.action,
            target: entry.target,
            detail: entry.detail,
            hash: hex::encode(entry.hash),
        }
    }
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct AuditHeadResponse {
    /// The number of the last entry; 0 before the first.
    #[schema(minimum = 0)]
    pub seq: i64,
    /// The hash of the last entry, in hex.
    #[schema(pattern = "^[0-9a-f]{64}$", min_length = 64, max_length = 64)]
    pub hash: String,
    /// The time of the last entry; null before the first.
    pub at: Option<DateTime<Utc>>,
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListAuditParams {
    pub limit: Option<u32>,
    pub cursor: Option<String>,
    /// Only entries of this action.
    #[param(inline)]
    action: Option<Action>,
    /// Only entries of this actor.
    #[param(inline)]
    actor: Option<ActorName>,
}

impl ListAuditParams {
    /// Names the list and its filter, for cursors.
    pub fn list_name(&self) -> String {
        format!("audit?{}", json!([self.action, self.actor]))
    }

    pub fn into_filter(self) -> Filter {
        Filter {
            action: self.action,
            actor: self.actor.map(ActorName::into_text),
        }
    }
}

/// List the actions in the tenant, newest first: ids, and no text that a user wrote.
#[utoipa::path(
    operation_id = "list_audit",
    tag = "audit",
    security(("api_key" = ["admin"])),
    params(ListAuditParams),
    responses((status = 200, description = "A page", body = ListResponse<AuditEntryResponse>))
)]
#[get("/audit")]
pub async fn list_audit(
    app: web::Data<App>,
    caller: Admin,
    Query(params): Query<ListAuditParams>,
) -> Result<HttpResponse> {
    let name = ListName::for_key(&caller, params.list_name());
    let request = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let filter = params.into_filter();
    let mut tx = caller.begin(&app.db).await?;
    let page = store::tenant::audit::list(&mut tx, &filter, &request).await?;
    tx.commit().await?;
    let response = name.close(&app.keyring, page, AuditEntryResponse::from)?;
    Ok(HttpResponse::Ok().json(response))
}

/// Get the head of the tenant's audit.
///
/// Store the answer outside of Throughline from time to time. Each hash covers all entries before it: if the entry
/// with this `seq` is missing later, or has another `hash`, an older state of the audit was restored. Nothing
/// inside the database could show that.
#[utoipa::path(
    operation_id = "get_audit_head",
    tag = "audit",
    security(("api_key" = ["admin"])),
    responses((status = 200, description = "The head", body = AuditHeadResponse))
)]
#[get("/audit/head")]
pub async fn get_audit_head(app: web::Data<App>, caller: Admin) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let signed = store::tenant::audit::find_head(&mut tx).await?;
    tx.commit().await?;
    let response = match signed {
        Some(signed) => AuditHeadResponse {
            seq: signed.head.seq,
            hash: hex::encode(signed.head.hash),
            at: Some(signed.head.at),
        },
        None => AuditHeadResponse {
            seq: 0,
            hash: hex::encode(GENESIS_HASH),
            at: None,
        },
    };
    Ok(HttpResponse::Ok().json(response))
}
