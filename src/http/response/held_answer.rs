//! Large answers: each counts as memory of its tenant until its client has taken the last of it, so that clients who
//! read slowly cannot fill a node.

use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::body::{BodySize, BoxBody, MessageBody, SizedStream};
use actix_web::dev::ServiceResponse;
use actix_web::http::Method;
use actix_web::web::{self, Bytes};
use futures_util::{Stream, stream};

use super::slow_readers::{Patience, WatchedBody};
use crate::app::App;
use crate::error::{Error, Result};
use crate::http::request::json_body::holder_of;
use crate::limits::{Memory, SMALL};

/// A piece is handed to the connection when it has room for one.
const PIECE: usize = 32 * 1024;
/// A client takes all of an answer within this time.
const READ_LIMIT: Duration = Duration::from_secs(5 * 60);

/// Says of an answer that nothing was stored for it.
pub const STATELESS: &str = "x-throughline-stateless";

/// Counts the body of an answer, if it is large; refuses it if its tenant has no room for it. What has changed
/// something is answered in any case.
pub fn hold(
    response: ServiceResponse<BoxBody>,
    refuse: impl FnOnce(Error) -> HttpResponse,
) -> ServiceResponse<BoxBody> {
    let size = match response.response().body().size() {
        BodySize::Sized(size) if size > SMALL as u64 => size as usize,
        BodySize::Sized(_) | BodySize::None | BodySize::Stream => return response,
    };
    let request = response.request();
    let app = request.app_data::<web::Data<App>>();
    let Some(app) = app else {
        return response;
    };
    let is_read = request.method() == Method::GET || response.headers().contains_key(STATELESS);
    let memory = match app.shares.answer(holder_of(request), size) {
        None if is_read => {
            let refusal = refuse(Error::busy("too many large responses are in progress"));
            return response.into_response(refusal);
        }
        memory => memory.unwrap_or_default(),
    };
    response.map_body(|_, body| match body.try_into_bytes() {
        Ok(bytes) => {
            let patience = Patience::within(READ_LIMIT);
            let pieces = WatchedBody::new(pieces(bytes, memory), patience, std::future::pending());
            BoxBody::new(SizedStream::new(size as u64, pieces))
        }
        Err(body) => body,
    })
}

fn pieces(bytes: Bytes, memory: Memory) -> impl Stream<Item = Result<Bytes>> {
    stream::unfold((bytes, memory), async |(mut bytes, memory)| {
        if bytes.is_empty() {
            return None;
        }
        let piece = bytes.split_to(bytes.len().min(PIECE));
        Some((Ok(piece), (bytes, memory)))
    })
}
