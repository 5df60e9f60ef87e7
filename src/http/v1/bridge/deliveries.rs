//! `/v1/deliveries`: what bridges fetch, acknowledge or give back. Seen and ended only by keys whose platforms
//! cover it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use actix_web::web::{self, Bytes};
use actix_web::{HttpResponse, get, post};
use chrono::{DateTime, Utc};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout_at};

use crate::app::App;
use crate::domain::bridge::chat::Chat;
use crate::domain::bridge::delivery::{Delivery, DeliveryKind, MAX_ATTEMPTS, backoff};
use crate::domain::people::platform::PlatformScope;
use crate::error::{Code, Error, FieldError, Result};
use crate::http::auth::credential::RawCredential;
use crate::http::auth::keys::{BridgeKey, DeliveryReader};
use crate::http::request::extract::{PathId, Query};
use crate::http::request::json_body::JsonBody;
use crate::http::request::paging::{ListName, ListResponse};
use crate::http::response::event_stream::{self, HEARTBEAT, KEEP_ALIVE};
use crate::ids::{DeliveryId, SessionId, TurnId};
use crate::limits::StreamGuard;
use crate::shutdown::Departure;
use crate::store::bridge::deliveries::{self, Covered, End};
use crate::store::bridge::delivery_leases;
use crate::streams::CheckedCredential;

/// As many as are given out at once.
const BATCH: i64 = 50;
const MAX_WAIT: u32 = 55;
/// How often is looked although nobody poked.
const LOOK: Duration = Duration::from_secs(1);
/// What a stream leases and sends together: few, because they would wait for a reader who may never come.
const STREAM_BATCH: i64 = 10;

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct DeliveryResponse {
    pub id: DeliveryId,
    pub kind: DeliveryKind,
    pub platform: String,
    pub scope: Option<String>,
    pub chat: Option<Chat>,
    /// Whom it is for: `platform:external_id`.
    pub identity: Option<String>,
    /// Null for who may not read it.
    pub text: Option<String>,
    pub session_id: Option<SessionId>,
    pub conversation_id: Option<SessionId>,
    pub turn_id: Option<TurnId>,
    /// The platform's id of the message that it answers.
    pub in_reply_to: Option<String>,
    /// Its place in its chat.
    pub seq: i64,
    pub attempt: i32,
    /// Give it back with ack or nack; null of what is not given out.
    pub lease: Option<String>,
    /// What a bridge said when it could not deliver.
    pub error: Option<String>,
    pub created_at: DateTime<Utc>,
}

impl DeliveryResponse {
    fn new(delivery: Delivery, with_text: bool) -> Self {
        Self {
            id: delivery.id,
            kind: delivery.kind,
            platform: delivery.platform,
            scope: Some(delivery.scope).filter(|scope| !scope.is_empty()),
            chat: delivery.chat,
            identity: delivery.identity,
            text: with_text.then_some(delivery.text),
            session_id: delivery.session_id,
            conversation_id: delivery.conversation_id,
            turn_id: delivery.turn_id,
            in_reply_to: delivery.in_reply_to,
            seq: delivery.seq,
            attempt: delivery.attempt,
            lease: delivery.lease.map(|lease| lease.simple().to_string()),
            error: delivery.error,
            created_at: delivery.created_at,
        }
    }
}

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

/// What a key sees, narrowed to what it asks for.
fn covered(key: &BridgeKey, asked: Option<&PlatformScope>) -> Result<Covered> {
    let Some(asked) = asked else {
        return Ok(if key.sees_all() {
            Covered::all()
        } else {
            Covered::of(key.platforms())
        });
    };
    let covers = |own: &PlatformScope| own.covers(asked.platform(), asked.scope());
    if key.sees_all() || key.platforms().iter().any(covers) {
        return Ok(Covered::of(std::slice::from_ref(asked)));
    }
    // A platform whose workspaces it serves in part is narrowed to those.
    let parts: Vec<PlatformScope> = key
        .platforms()
        .iter()
        .filter(|own| asked.covers(own.platform(), own.scope()))
        .cloned()
        .collect();
    if parts.is_empty() {
        let detail = "the key does not serve this platform";
        Err(Error::new(Code::PlatformNotAllowed, detail))
    } else {
        Ok(Covered::of(&parts))
    }
}

async fn lease(app: &App, key: &BridgeKey, covered: &Covered, limit: i64) -> Result<Vec<Delivery>> {
    let mut tx = key.begin(&app.db).await?;
    let leased = delivery_leases::lease(&mut tx, covered, limit).await?;
    tx.commit().await?;
    Ok(leased)
}

/// Fetch what is to be said. Each delivery is leased for a minute: acknowledge it, or give it back. Waits up
/// to `wait` seconds for the first.
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
    if params.wait > MAX_WAIT {
        let error = FieldError::new("/query/wait", "must be at most 55");
        return Err(Error::fields(Code::InvalidRequest, vec![error]));
    }
    let limit = params.limit.map_or(BATCH, i64::from);
    if !(1..=BATCH).contains(&limit) {
        let error = FieldError::new("/query/limit", "must be from 1 to 50");
        return Err(Error::fields(Code::InvalidRequest, vec![error]));
    }
    let covered = covered(&key, params.platform.as_ref())?;
    let guard = open(&app, &key)?;
    let credential = credential.share(&app);
    let mut watching = app.live.watch_deliveries(key.tenant_id());
    let until = Instant::now() + Duration::from_secs(params.wait.into());
    let mut departure = Departure::default();
    let leased = loop {
        credential.check(&app.verifiers).await?;
        let leased = lease(&app, &key, &covered, limit).await?;
        let over = Instant::now() >= until || departure.is_due(&app.shutdown);
        if !leased.is_empty() || over {
            break leased;
        }
        let again = until.min(Instant::now() + LOOK);
        tokio::select! {
            _ = timeout_at(again, watching.news()) => {}
            () = credential.refused() => {}
            () = departure.due(&app.shutdown) => {}
        }
    };
    drop(guard);
    let show = |delivery| DeliveryResponse::new(delivery, true);
    Ok(HttpResponse::Ok().json(ListResponse::whole(leased, show)))
}

fn open(app: &App, key: &BridgeKey) -> Result<StreamGuard> {
    app.limits
        .open_stream(key.tenant_id(), key.limits().open_streams)
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
    let streaming = Streaming {
        covered: covered(&key, params.platform.as_ref())?,
        watching: app.live.watch_deliveries(key.tenant_id()),
        _guard: open(&app, &key)?,
        credential: credential.share(&app),
        app,
        key,
        waiting: VecDeque::new(),
        quiet_since: Instant::now(),
        ended: false,
        departure: Departure::default(),
    };
    Ok(
        event_stream::head().streaming(stream::unfold(streaming, async |mut streaming| {
            let next = streaming.next().await?;
            Some((Ok::<Bytes, Error>(next), streaming))
        })),
    )
}

struct Streaming {
    app: web::Data<App>,
    key: BridgeKey,
    credential: Arc<CheckedCredential>,
    covered: Covered,
    watching: crate::notifications::Watching,
    _guard: StreamGuard,
    waiting: VecDeque<Bytes>,
    quiet_since: Instant,
    ended: bool,
    departure: Departure,
}

impl Streaming {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(next) = self.waiting.pop_front() {
                self.quiet_since = Instant::now();
                return Some(next);
            }
            if self.ended {
                return None;
            }
            if let Err(error) = self.look().await {
                self.waiting.push_back(event_stream::closed(&error));
                self.ended = true;
            }
        }
    }

    async fn look(&mut self) -> Result<()> {
        self.credential.check(&self.app.verifiers).await?;
        if self.departure.is_due(&self.app.shutdown) {
            self.waiting.push_back(event_stream::reconnect());
            self.ended = true;
            return Ok(());
        }
        let leased = match lease(&self.app, &self.key, &self.covered, STREAM_BATCH).await {
            Err(error) if error.is_transient() => Vec::new(),
            leased => leased?,
        };
        let mut events = String::new();
        for delivery in leased {
            let id = delivery.id;
            let body = serde_json::to_string(&DeliveryResponse::new(delivery, true));
            let body = body.map_err(Error::internal)?;
            events.push_str(&format!("id: {id}\nevent: delivery\ndata: {body}\n\n"));
        }
        if !events.is_empty() {
            self.waiting.push_back(Bytes::from(events));
        }
        if self.waiting.is_empty() {
            if self.quiet_since.elapsed() >= HEARTBEAT {
                self.waiting.push_back(KEEP_ALIVE);
                return Ok(());
            }
            let again = Instant::now() + LOOK;
            tokio::select! {
                _ = timeout_at(again, self.watching.news()) => {}
                () = self.credential.refused() => {}
                () = self.departure.due(&self.app.shutdown) => {}
            }
        }
        Ok(())
    }
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AckRequest {
    #[schema(min_length = 32, max_length = 36, pattern = "^[0-9a-f-]+$")]
    pub lease: String,
    /// The platform's id of what was sent.
    #[schema(min_length = 1, max_length = 256)]
    pub external_message_id: Option<String>,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NackRequest {
    #[schema(min_length = 32, max_length = 36, pattern = "^[0-9a-f-]+$")]
    pub lease: String,
    /// Why.
    #[schema(max_length = 500)]
    pub error: String,
    /// Whether to try again later; otherwise it is dead.
    pub retry: bool,
}

fn read_lease(text: &str) -> Result<uuid::Uuid> {
    text.parse().map_err(|_| {
        let error = FieldError::new("/lease", "is not a lease");
        Error::fields(Code::InvalidRequest, vec![error])
    })
}

async fn end(
    app: &App,
    key: &BridgeKey,
    id: DeliveryId,
    lease: &str,
    how: End<'_>,
) -> Result<HttpResponse> {
    let lease = read_lease(lease)?;
    let covered = covered(key, None)?;
    let mut tx = key.begin(&app.db).await?;
    let ended = deliveries::end(&mut tx, &covered, id, lease, how).await?;
    tx.commit().await?;
    match ended {
        None => Err(Error::not_found("delivery")),
        Some(false) => {
            let detail = "the lease is not the delivery's, or not any more";
            Err(Error::new(Code::StaleLease, detail))
        }
        Some(true) => {
            // The next of its chat can go.
            app.live.notify_deliveries(key.tenant_id());
            Ok(HttpResponse::NoContent().finish())
        }
    }
}

/// Say that a delivery was sent.
#[utoipa::path(
    operation_id = "ack_delivery",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge"])),
    extensions(("x-acts-for" = json!("the tenant; a bridge for its platforms"))),
    params(("id" = inline(DeliveryId), Path, description = "The delivery")),
    request_body = AckRequest,
    responses(
        (status = 204, description = "Noted"),
        (status = 409, description = "The lease is stale", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
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
    let external = request.external_message_id.as_deref();
    if external.is_some_and(|id| !(1..=256).contains(&id.chars().count())) {
        let error = FieldError::new("/external_message_id", "must have 1 to 256 characters");
        return Err(Error::fields(Code::InvalidRequest, vec![error]));
    }
    let how = End::Delivered {
        external_message_id: external,
    };
    end(&app, &key, id, &request.lease, how).await
}

/// Say that a delivery could not be sent: it is tried again later, at most ten times, or given up.
#[utoipa::path(
    operation_id = "nack_delivery",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge"])),
    extensions(("x-acts-for" = json!("the tenant; a bridge for its platforms"))),
    params(("id" = inline(DeliveryId), Path, description = "The delivery")),
    request_body = NackRequest,
    responses(
        (status = 204, description = "Noted"),
        (status = 409, description = "The lease is stale", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
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
    let error: String = request
        .error
        .chars()
        .filter(|c| *c != '\0')
        .take(500)
        .collect();
    let covered = covered(&key, None)?;
    let mut tx = key.begin(&app.db).await?;
    let attempt = deliveries::find_attempt(&mut tx, &covered, id).await?;
    tx.commit().await?;
    let attempt = attempt.ok_or_else(|| Error::not_found("delivery"))?;
    let how = if request.retry && attempt < MAX_ATTEMPTS {
        End::Later {
            after: backoff(attempt),
            error: &error,
        }
    } else {
        End::Dead { error: &error }
    };
    end(&app, &key, id, &request.lease, how).await
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

/// Those that were given up, newest first.
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
    let name = ListName::of_key(&key, "deliveries/dead");
    let page = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let covered = if key.sees_all() {
        Covered::all()
    } else {
        Covered::of(key.platforms())
    };
    let mut tx = key.begin(&app.db).await?;
    let page = deliveries::list_dead(&mut tx, &covered, &page).await?;
    tx.commit().await?;
    let with_text = key.reads_texts();
    let show = |delivery| DeliveryResponse::new(delivery, with_text);
    Ok(HttpResponse::Ok().json(name.close(&app.keyring, page, show)?))
}

/// Let one that was given up be tried again.
#[utoipa::path(
    operation_id = "replay_delivery",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge"])),
    extensions(("x-acts-for" = json!("the tenant; a bridge for its platforms"))),
    params(("id" = inline(DeliveryId), Path, description = "The delivery")),
    responses((status = 200, description = "The delivery, which is given out again", body = DeliveryResponse))
)]
#[post("/deliveries/{id}/replay")]
pub async fn replay_delivery(
    app: web::Data<App>,
    key: BridgeKey,
    PathId(id): PathId<DeliveryId>,
) -> Result<HttpResponse> {
    let covered = covered(&key, None)?;
    let mut tx = key.begin(&app.db).await?;
    let replayed = deliveries::replay(&mut tx, &covered, id).await?;
    tx.commit().await?;
    let replayed = replayed.ok_or_else(|| Error::not_found("dead delivery"))?;
    app.live.notify_deliveries(key.tenant_id());
    Ok(HttpResponse::Ok().json(DeliveryResponse::new(replayed, true)))
}
