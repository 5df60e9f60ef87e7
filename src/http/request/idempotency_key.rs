//! The `Idempotency-Key` header: with it a client may safely repeat a request.

use std::future::{Ready, ready};

use actix_web::dev::Payload;
use actix_web::http::StatusCode;
use actix_web::{FromRequest, HttpRequest, HttpResponse, web};

use super::json_body::BodyHash;
use crate::app::App;
use crate::crypto;
use crate::error::{Code, Error, FieldError, Result};
use crate::idempotency::{self, Answer, Outcome, Request};
use crate::store::TenantTx;

pub const HEADER: &str = "idempotency-key";
pub const MAX_KEY: usize = 255;

/// The parts of a request that make it repeatable.
pub struct IdempotencyKey {
    app: web::Data<App>,
    key: Option<String>,
    route: String,
    path: String,
}

impl FromRequest for IdempotencyKey {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(parse(request))
    }
}

fn parse(request: &HttpRequest) -> Result<IdempotencyKey> {
    let key = match request.headers().get(HEADER) {
        None => None,
        Some(value) => Some(
            value
                .to_str()
                .ok()
                .filter(|key| (1..=MAX_KEY).contains(&key.len()))
                .filter(|key| key.bytes().all(|byte| byte.is_ascii_graphic()))
                .map(str::to_owned)
                .ok_or_else(invalid_key)?,
        ),
    };
    let pattern = request.match_pattern().unwrap_or_default();
    let app = request.app_data::<web::Data<App>>().cloned();
    let app = app.ok_or_else(|| Error::internal(anyhow::anyhow!("the routes have no app")))?;
    Ok(IdempotencyKey {
        app,
        key,
        route: format!("{} {pattern}", request.method()),
        path: request.path().to_owned(),
    })
}

fn invalid_key() -> Error {
    let detail = format!("must be 1 to {MAX_KEY} visible ASCII characters");
    let error = FieldError::new("/header/Idempotency-Key", detail);
    Error::fields(Code::InvalidIdempotencyKey, vec![error])
}

impl IdempotencyKey {
    pub fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// The request's name and hash, if it has a key.
    pub fn request(&self, principal: String, body_hash: BodyHash) -> Option<Request> {
        let route = self.route.clone();
        let key = self.key.clone()?;
        let hash = request_hash(&self.path, body_hash.get()?);
        Some(Request::new(&self.app, principal, route, key, hash))
    }

    /// Runs `work` in `tx` and commits, once for each key of `principal`; without a key, once a call.
    pub async fn answer(
        self,
        app: &App,
        mut tx: TenantTx,
        principal: String,
        body_hash: BodyHash,
        work: impl AsyncFnOnce(&mut TenantTx) -> Result<Answer>,
    ) -> Result<HttpResponse> {
        let Some(request) = self.request(principal, body_hash) else {
            let answer = work(&mut tx).await?;
            tx.commit().await?;
            return render(Outcome::Fresh(answer));
        };
        render(idempotency::once(app, tx, &request, work).await?)
    }
}

/// The path is part of the request: one key for two resources is a conflict.
fn request_hash(path: &str, body_hash: [u8; 32]) -> [u8; 32] {
    let mut content = path.as_bytes().to_vec();
    content.push(0);
    content.extend_from_slice(&body_hash);
    crypto::sha256(&content)
}

pub const REPLAYED: (&str, &str) = ("idempotency-replayed", "true");

/// The answer, marked if it is a replay.
pub fn render(outcome: Outcome) -> Result<HttpResponse> {
    let (answer, replayed) = match outcome {
        Outcome::Fresh(answer) => (answer, false),
        Outcome::Replayed(answer) => (answer, true),
    };
    let status = StatusCode::from_u16(answer.status).map_err(Error::internal)?;
    let mut response = HttpResponse::build(status);
    if replayed {
        response.insert_header(REPLAYED);
    }
    Ok(response.json(answer.into_body()))
}
