//! `/v1/deliveries`: bridges fetch, acknowledge and reject deliveries.

use std::time::Duration;

use actix_web::{HttpResponse, get, post, web};
use serde::Deserialize;
use tokio::time::Instant;

use super::delivery_bodies::{AckRequest, DeliveryResponse, NackRequest, read_lease};
use crate::app::App;
use crate::deliveries::{self, DeliveryFeed, Failure, FeedUpdate, OnOutage};
use crate::domain::people::platform::PlatformScope;
use crate::error::{Code, Error, FieldError, Result};
use crate::http::auth::credential::RawCredential;
use crate::http::auth::keys::{BridgeKey, DeliveryReader};
use crate::http::request::extract::{PathId, Query};
use crate::http::request::json_body::JsonBody;
use crate::http::request::paging::{ListName, ListResponse};
use crate::http::response::problem::Problem;
use crate::http::response::sse::{self, Batch, EventSource};
use crate::ids::DeliveryId;

/// Deliveries that one request leases.
const MAX_FETCHED: i64 = 50;
const MAX_WAIT_SECONDS: u32 = 55;
/// Deliveries that a stream leases and sends together: few, because they would wait for a reader that may have left.
const STREAM_BATCH: i64 = 10;

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FetchParams {
    /// Only this platform, of those that the key covers.
    #[param(inline)]
    platform: Option<PlatformScope>,
    /// Seconds to wait for the first one.
    #[serde(default)]
    #[param(minimum = 0, maximum = 55, default = 0)]
    wait: u32,
    #[param(minimum = 1, maximum = 50, default = 50)]
    limit: Option<u32>,
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StreamParams {
    /// Only this platform, of those that the key covers.
    #[param(inline)]
    platform: Option<PlatformScope>,
}

/// Lease the deliveries that are due. Each lease lasts a minute: acknowledge the delivery, or reject it. Waits up to
/// `wait` seconds for the first.
#[utoipa::path(
    operation_id = "fetch_deliveries",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge"])),
    extensions(("x-acts-for" = json!("the tenant; a bridge for its platforms"))),
    params(FetchParams),
    responses((status = 200, description = "Leased deliveries, one per chat at most", body = ListResponse<DeliveryResponse>))
)]
#[get("/deliveries")]
pub async fn fetch_deliveries(
    app: web::Data<App>,
    key: BridgeKey,
    credential: RawCredential,
    Query(params): Query<FetchParams>,
) -> Result<HttpResponse> {
    if params.wait > MAX_WAIT_SECONDS {
        let error = FieldError::new("/query/wait", "must be at most 55");
        return Err(Error::fields(Code::InvalidRequest, vec![error]));
    }
    let limit = params.limit.map_or(MAX_FETCHED, i64::from);
    if !(1..=MAX_FETCHED).contains(&limit) {
        let error = FieldError::new("/query/limit", "must be from 1 to 50");
        return Err(Error::fields(Code::InvalidRequest, vec![error]));
    }
    let credential = credential.share(&app);
    let platform = params.platform.as_ref();
    let mut feed = DeliveryFeed::open(&app, key.into(), credential, platform, OnOutage::Fail)?;
    let until = Instant::now() + Duration::from_secs(params.wait.into());
    let leased = match feed.next(limit, until).await? {
        FeedUpdate::Leased(leased) => leased,
        FeedUpdate::Idle | FeedUpdate::Departing => Vec::new(),
    };
    Ok(HttpResponse::Ok().json(ListResponse::whole(leased, DeliveryResponse::new)))
}

/// The same as a stream: an event `delivery` for each that is leased.
#[utoipa::path(
    operation_id = "stream_deliveries",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge"])),
    extensions(("x-acts-for" = json!("the tenant; a bridge for its platforms"))),
    params(StreamParams),
    responses((status = 200, description = "Leased deliveries as events", content_type = "text/event-stream", body = String))
)]
#[get("/deliveries/stream")]
pub async fn stream_deliveries(
    app: web::Data<App>,
    key: BridgeKey,
    credential: RawCredential,
    Query(params): Query<StreamParams>,
) -> Result<HttpResponse> {
    let credential = credential.share(&app);
    let platform = params.platform.as_ref();
    let feed = DeliveryFeed::open(&app, key.into(), credential, platform, OnOutage::Wait)?;
    Ok(sse::respond(sse::head(), Batch::default(), feed))
}

impl EventSource for DeliveryFeed {
    async fn fill(&mut self, batch: &mut Batch, until: Instant) -> Result<()> {
        let update = if self.is_departing() {
            FeedUpdate::Departing
        } else {
            self.next(STREAM_BATCH, until).await?
        };
        match update {
            FeedUpdate::Leased(leased) => {
                for delivery in leased {
                    let id = delivery.id;
                    let body = serde_json::to_string(&DeliveryResponse::new(delivery));
                    let body = body.map_err(Error::internal)?;
                    batch.push(sse::event_with_id(id, "delivery", &body));
                }
            }
            FeedUpdate::Idle => {}
            FeedUpdate::Departing => {
                batch.push(sse::reconnect());
                batch.end();
            }
        }
        Ok(())
    }
}

/// Acknowledge a delivery that was sent.
#[utoipa::path(
    operation_id = "ack_delivery",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge"])),
    extensions(("x-acts-for" = json!("the tenant; a bridge for its platforms"))),
    params(("id" = inline(DeliveryId), Path, description = "The delivery")),
    request_body = AckRequest,
    responses(
        (status = 204, description = "Noted"),
        (status = 409, description = "The lease is stale", body = Problem, content_type = "application/problem+json")
    )
)]
#[post("/deliveries/{id}/ack")]
pub async fn ack_delivery(
    app: web::Data<App>,
    key: BridgeKey,
    PathId(id): PathId<DeliveryId>,
    body: JsonBody<AckRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    request.check()?;
    let delivery = read_lease(id, &request.lease)?;
    let external_message_id = request.external_message_id.as_deref();
    deliveries::acknowledge(&app, &key, delivery, external_message_id).await?;
    Ok(HttpResponse::NoContent().finish())
}

/// Reject a delivery that could not be sent: it is tried again later, at most ten times, or dead.
#[utoipa::path(
    operation_id = "nack_delivery",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge"])),
    extensions(("x-acts-for" = json!("the tenant; a bridge for its platforms"))),
    params(("id" = inline(DeliveryId), Path, description = "The delivery")),
    request_body = NackRequest,
    responses(
        (status = 204, description = "Noted"),
        (status = 409, description = "The lease is stale", body = Problem, content_type = "application/problem+json")
    )
)]
#[post("/deliveries/{id}/nack")]
pub async fn nack_delivery(
    app: web::Data<App>,
    key: BridgeKey,
    PathId(id): PathId<DeliveryId>,
    body: JsonBody<NackRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let delivery = read_lease(id, &request.lease)?;
    let failure = if request.retry {
        Failure::Temporary
    } else {
        Failure::Permanent
    };
    deliveries::reject(&app, &key, delivery, failure, &request.error).await?;
    Ok(HttpResponse::NoContent().finish())
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListDeadParams {
    #[param(minimum = 1, maximum = 200, default = 50)]
    limit: Option<u32>,
    #[param(max_length = 512, pattern = "^[A-Za-z0-9_-]+$")]
    cursor: Option<String>,
}

/// Dead deliveries, newest first.
#[utoipa::path(
    operation_id = "list_dead_deliveries",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge", "read"])),
    extensions(("x-acts-for" = json!("the tenant; a bridge for its platforms"))),
    params(ListDeadParams),
    responses((status = 200, description = "A page; a read key sees no texts", body = ListResponse<DeliveryResponse>))
)]
#[get("/deliveries/dead")]
pub async fn list_dead_deliveries(
    app: web::Data<App>,
    key: DeliveryReader,
    Query(params): Query<ListDeadParams>,
) -> Result<HttpResponse> {
    let name = ListName::for_key(&key, "deliveries/dead");
    let page = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let page = deliveries::list_dead_letters(&app, &key, &page).await?;
    let show = if key.reads_texts() {
        DeliveryResponse::new
    } else {
        DeliveryResponse::without_text
    };
    Ok(HttpResponse::Ok().json(name.close(&app.keyring, page, show)?))
}

/// Let a dead delivery be tried again.
#[utoipa::path(
    operation_id = "replay_delivery",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge"])),
    extensions(("x-acts-for" = json!("the tenant; a bridge for its platforms"))),
    params(("id" = inline(DeliveryId), Path, description = "The delivery")),
    responses((status = 200, description = "The delivery, which is pending again", body = DeliveryResponse))
)]
#[post("/deliveries/{id}/replay")]
pub async fn replay_delivery(
    app: web::Data<App>,
    key: BridgeKey,
    PathId(id): PathId<DeliveryId>,
) -> Result<HttpResponse> {
    let delivery = deliveries::replay_dead_letter(&app, &key, id).await?;
    Ok(HttpResponse::Ok().json(DeliveryResponse::new(delivery)))
}
