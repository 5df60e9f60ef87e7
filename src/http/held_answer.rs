//! Large answers: each counts as memory of its tenant until its client has taken the last of it, so that clients who
//! read slowly cannot fill a node.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::ServiceResponse;
use actix_web::http::Method;
use actix_web::web::{self, Bytes};

use super::json_body::holder_of;
use crate::app::App;
use crate::error::{Error, Result};
use crate::limits::{Memory, SMALL};

/// A piece is handed to the connection when it has room for one.
const PIECE: usize = 32 * 1024;

/// Counts the body of an answer, if it is large; fails if its tenant has no room for it. Only of what was read: what
/// has changed something is answered in any case.
pub fn hold(response: ServiceResponse<BoxBody>) -> Result<ServiceResponse<BoxBody>> {
    let size = match response.response().body().size() {
        BodySize::Sized(size) if size > SMALL as u64 => size as usize,
        BodySize::Sized(_) | BodySize::None | BodySize::Stream => return Ok(response),
    };
    let request = response.request();
    let app = request.app_data::<web::Data<App>>();
    let (Some(app), &Method::GET) = (app, request.method()) else {
        return Ok(response);
    };
    let memory = app.shares.answer(holder_of(request), size);
    let memory = memory.ok_or_else(|| Error::busy("too many large answers are under way"))?;
    Ok(response.map_body(|_, body| match body.try_into_bytes() {
        Ok(bytes) => BoxBody::new(Held {
            bytes,
            _memory: memory,
        }),
        Err(body) => body,
    }))
}

struct Held {
    bytes: Bytes,
    _memory: Memory,
}

impl MessageBody for Held {
    type Error = Infallible;

    fn size(&self) -> BodySize {
        BodySize::Sized(self.bytes.len() as u64)
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Bytes, Infallible>>> {
        if self.bytes.is_empty() {
            return Poll::Ready(None);
        }
        let piece = self.bytes.len().min(PIECE);
        Poll::Ready(Some(Ok(self.bytes.split_to(piece))))
    }
}
