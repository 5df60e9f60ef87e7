//! `/v1/retention`: how long a tenant keeps conversations, a preview of a sweep, and its progress.

use actix_web::{HttpResponse, get, post, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::domain::tenant::retention::Sweep;
use crate::error::{Error, FieldError, Result};
use crate::http::auth::keys::{Admin, Reader};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::JsonBody;
use crate::idempotency::Answer;
use crate::sessions::retention::{self, Overview, SweepPreview};

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct RetentionResponse {
    /// Conversations without a message for this many days are deleted, pinned and archived ones too; null keeps
    /// them for ever. Set with `PATCH /v1/tenant`.
    #[schema(minimum = 1, maximum = 36_500)]
    pub conversations_days: Option<u32>,
    /// Conversations that were idle since before this time are too old.
    pub cutoff: Option<DateTime<Utc>>,
    /// The running sweep, or the last one; null before the first.
    #[schema(inline)]
    pub sweep: Option<SweepResponse>,
}

/// A pass over all conversations. It runs once in the whole cluster: when a retention is set, on request, and each
/// hour. A sweep ends early when the retention is extended or removed.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct SweepResponse {
    /// Conversations that were idle since before this time are deleted, unless they are in use.
    pub cutoff: DateTime<Utc>,
    pub started_at: DateTime<Utc>,
    /// Null while it runs.
    pub finished_at: Option<DateTime<Utc>>,
    /// Conversations that it has examined so far.
    #[schema(minimum = 0)]
    pub examined: i64,
    /// Conversations that it has deleted so far.
    #[schema(minimum = 0)]
    pub deleted: i64,
}

/// A preview of a sweep.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct DryRunResponse {
    /// Always true.
    pub dry_run: bool,
    #[schema(minimum = 1, maximum = 36_500)]
    pub conversations_days: u32,
    pub cutoff: DateTime<Utc>,
    #[schema(minimum = 0)]
    pub conversations: i64,
    /// Counts each message once: copies of a compression are not counted.
    #[schema(minimum = 0)]
    pub messages: i64,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SweepRequest {
    /// Only count, and change nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// For a dry run: days to try instead of the tenant's.
    #[schema(minimum = 1, maximum = 36_500)]
    pub conversations_days: Option<u32>,
}

impl From<Overview> for RetentionResponse {
    fn from(overview: Overview) -> Self {
        Self {
            conversations_days: overview.conversations_days,
            cutoff: overview.cutoff,
            sweep: overview.sweep.map(SweepResponse::from),
        }
    }
}

impl From<Sweep> for SweepResponse {
    fn from(sweep: Sweep) -> Self {
        Self {
            cutoff: sweep.cutoff,
            started_at: sweep.started_at,
            finished_at: sweep.finished_at,
            examined: sweep.examined,
            deleted: sweep.deleted,
        }
    }
}

impl From<SweepPreview> for DryRunResponse {
    fn from(preview: SweepPreview) -> Self {
        Self {
            dry_run: true,
            conversations_days: preview.conversations_days,
            cutoff: preview.cutoff,
            conversations: preview.old.conversations,
            messages: preview.old.messages,
        }
    }
}

/// Get the tenant's retention, and the progress of its sweep.
#[utoipa::path(
    operation_id = "get_retention",
    tag = "tenant",
    security(("api_key" = ["admin", "read"])),
    responses((status = 200, description = "The retention", body = RetentionResponse))
)]
#[get("/retention")]
pub async fn get_retention(app: web::Data<App>, caller: Reader) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let overview = retention::overview(&mut tx, app.clock.now()).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(RetentionResponse::from(overview)))
}

/// Sweep now, or preview a sweep.
///
/// Without a retention the answer is 422 `retention_not_set`.
#[utoipa::path(
    operation_id = "sweep_retention",
    tag = "tenant",
    security(("api_key" = ["admin"])),
    request_body = SweepRequest,
    responses(
        (status = 200, description = "A preview; nothing is changed", body = DryRunResponse),
        (status = 202, description = "A sweep is planned for now; `sweep` is still the previous one, or the \
                                      running one", body = RetentionResponse)
    )
)]
#[post("/retention/sweeps")]
pub async fn sweep_retention(
    app: web::Data<App>,
    caller: Admin,
    retryable: IdempotencyKey,
    body: JsonBody<SweepRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    if request.conversations_days.is_some() && !request.dry_run {
        let detail = "is only allowed in a dry run: a sweep uses the tenant's setting";
        let error = FieldError::new("/conversations_days", detail);
        return Err(Error::invalid(vec![error]));
    }
    let tx = caller.begin(&app.db).await?;
    retryable
        .answer(&app, tx, caller.principal(), body.hash, async |tx| {
            let now = app.clock.now();
            if request.dry_run {
                let preview = retention::preview(tx, request.conversations_days, now).await?;
                return Answer::new(200, &DryRunResponse::from(preview));
            }
            let overview = retention::sweep_now(tx, now).await?;
            Answer::new(202, &RetentionResponse::from(overview))
        })
        .await
}
