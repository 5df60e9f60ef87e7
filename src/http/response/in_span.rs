//! Streamed answers: what is done while a client reads is logged with the fields of its request.

use std::pin::Pin;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::ServiceResponse;
use actix_web::web::Bytes;
use tracing::Span;

/// Enters `span` each time a stream is asked for its next piece. A whole body does nothing more.
pub fn body(response: ServiceResponse<BoxBody>, span: Span) -> ServiceResponse<BoxBody> {
    response.map_body(|_, body| match body.size() {
        BodySize::Stream => BoxBody::new(BodyInSpan { body, span }),
        BodySize::None | BodySize::Sized(_) => body,
    })
}

struct BodyInSpan {
    body: BoxBody,
    span: Span,
}

impl MessageBody for BodyInSpan {
    type Error = Box<dyn std::error::Error>;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let this = self.get_mut();
        let _entered = this.span.enter();
        Pin::new(&mut this.body).poll_next(context)
    }
}
