//! Spans: the fields that every line below them carries. Ids and routes only: no text, no secret, no user.

use tracing::{Span, field};

use crate::ids::{TenantId, TurnId};

const REQUEST: &str = "request";

/// Around all that is done for one request. The tenant is recorded when the caller is known.
pub fn request_span(request_id: &str, method: &str, route: &str) -> Span {
    tracing::info_span!(REQUEST, request_id, method, route, tenant = field::Empty)
}

/// Adds the caller's tenant to the request's span, in which this is called.
pub fn record_tenant(tenant_id: TenantId) {
    Span::current().record("tenant", field::display(tenant_id));
}

/// Around a run of a turn, below the request that started it, if one did. Never below another turn: the next turn of
/// a conversation is begun by the one before it, and would carry its fields.
pub fn turn_span(turn_id: TurnId, tenant_id: TenantId, attempt: i32) -> Span {
    let current = Span::current();
    let in_request = current
        .metadata()
        .is_some_and(|span| span.name() == REQUEST);
    let parent = if in_request { current.id() } else { None };
    tracing::info_span!(
        parent: parent,
        "turn",
        turn = %turn_id,
        tenant = %tenant_id,
        attempt
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_below_its_request_and_never_below_another_turn() {
        let subscriber = tracing_subscriber::fmt()
            .with_writer(std::io::sink)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let request = request_span("r1", "POST", "/v1/chat/completions");
            let _entered = request.enter();
            let tenant = TenantId::generate();
            let first = turn_span(TurnId::generate(), tenant, 1);
            assert!(parent_of(&first) == request.id());
            let _entered = first.enter();
            let second = turn_span(TurnId::generate(), tenant, 1);
            assert!(parent_of(&second).is_none());
        });
    }

    fn parent_of(span: &Span) -> Option<tracing::span::Id> {
        use tracing_subscriber::Registry;
        use tracing_subscriber::registry::LookupSpan;

        let id = span.id()?;
        span.with_subscriber(|(_, dispatch)| {
            let registry = dispatch.downcast_ref::<Registry>()?;
            registry.span(&id)?.parent().map(|parent| parent.id())
        })
        .flatten()
    }
}
