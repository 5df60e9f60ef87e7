//! `/v1/audit`: what was done in a tenant, and where the chain of entries ends.

use actix_web::{HttpResponse, get, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::app::App;
use crate::domain::tenant::audit::{Action, ActorName, AuditEntry, BEGINNING};
use crate::error::Result;
use crate::http::auth::keys::Admin;
use crate::http::request::extract::Query;
use crate::http::request::paging::{ListName, ListResponse};
use crate::store;
use crate::store::tenant::audit::Filter;

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct AuditEntryResponse {
    /// From 1, without a gap, in the order in which changes took effect.
    #[schema(minimum = 1)]
    pub seq: i64,
    pub at: DateTime<Utc>,
    /// Who did it: the id of an API key, `operator:` and what names the operator, or `retention`: the
    /// service itself, as the tenant's retention asks.
    pub actor: String,
    /// What was done, like `api_key.create`.
    pub action: String,
    /// The id of what it was done to.
    pub target: Option<String>,
    #[schema(value_type = Object)]
    pub detail: Value,
    /// The entry's place in the chain, in hex.
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
    /// When the last entry was made; null before the first.
    pub at: Option<DateTime<Utc>>,
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListAuditParams {
    pub limit: Option<u32>,
    pub cursor: Option<String>,
    /// Only entries that tell of this.
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

/// What was done in the tenant, newest first: ids, and no text that a person wrote.
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
    let name = ListName::of_key(&caller, params.list_name());
    let request = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let filter = params.into_filter();
    let mut tx = caller.begin(&app.db).await?;
    let page = store::tenant::audit::list(&mut tx, &filter, &request).await?;
    tx.commit().await?;
    let response = name.close(&app.keyring, page, AuditEntryResponse::from)?;
    Ok(HttpResponse::Ok().json(response))
}

/// Where the tenant's audit ends.
///
/// Keep the answer outside of Throughline, from time to time. Each hash covers all entries before it:
/// if the entry with this `seq` is gone later, or has another `hash`, then an older state of the audit
/// was put back, which nothing inside the database could show.
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
            hash: hex::encode(BEGINNING),
            at: None,
        },
    };
    Ok(HttpResponse::Ok().json(response))
}
