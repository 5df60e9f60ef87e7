//! The operation behind a chat request in a session: accepts it, starts its turn, and answers the turn's stream.

use tokio::sync::mpsc;

use super::accept::{Accepted, Disposition, TurnRequest, accept};
use super::live::{LiveSender, LiveUpdate};
use super::run::start;
use super::stream::{AcceptedTurn, TurnStream};
use crate::app::App;
use crate::auth::TenantCaller;
use crate::domain::conversation::session::Permission;
use crate::domain::conversation::session_name::SessionRef;
use crate::domain::people::access::Access;
use crate::error::Result;
use crate::idempotency;
use crate::ids::{TenantId, TurnId};
use crate::sessions;
use crate::store::TenantTx;
use crate::store::turn::{events, turns};

/// Accepts a request, at most once for each `idempotency` name, and launches its turn. A retry gets the turn that its
/// first try was accepted as.
pub async fn ask(
    app: &App,
    caller: &TenantCaller,
    request: TurnRequest<'_>,
    idempotency: Option<&idempotency::Request>,
) -> Result<TurnStream> {
    let tenant_id = caller.tenant_id();
    let tokens_per_minute = request.agent.limits.tokens_per_minute;
    // Before the transaction: the limiter may wait for Redis.
    app.limits
        .check_tokens(tenant_id, tokens_per_minute)
        .await?;
    let access = request.access;
    let mut tx = caller.begin(&app.db).await?;
    if let Some(idempotency) = idempotency
        && let Some(turn_id) = idempotency::find_turn(app, &mut tx, idempotency).await?
    {
        return attach(app, tx, access, turn_id).await;
    }
    let has_tool_results = request.input.has_tool_results();
    let accepted = accept(app, &mut tx, request, app.clock.now()).await?;
    if let Disposition::Attached = accepted.disposition {
        return attach(app, tx, access, accepted.turn_id).await;
    }
    if let Some(idempotency) = idempotency {
        idempotency::note_turn(&mut tx, idempotency, accepted.turn_id).await?;
    }
    // The answer to these results begins after what the turn wrote before it waited for them.
    let after = if has_tool_results {
        events::find_answer_start(&mut tx, accepted.turn_id).await?
    } else {
        0
    };
    tx.commit().await?;
    let (turn, live) = launch(app, tenant_id, accepted, LiveUpdates::Subscribe);
    Ok(TurnStream::new(app, tenant_id, turn, live, after))
}

/// The stream of a turn that an earlier request was accepted as, from its answer to that request.
async fn attach(
    app: &App,
    mut tx: TenantTx,
    access: &Access,
    turn_id: TurnId,
) -> Result<TurnStream> {
    let turn = turns::get(&mut tx, turn_id).await?;
    let session = SessionRef::Id(turn.conversation_id);
    let now = app.clock.now();
    let tip = sessions::find(&mut tx, access, &session, Permission::Participate, now).await?;
    let after = events::find_answer_start(&mut tx, turn_id).await?;
    let tenant_id = tx.tenant_id();
    tx.commit().await?;
    let turn = AcceptedTurn {
        id: turn_id,
        name: tip.name,
        session_id: turn.session_id(),
        session_info: turn.session_info,
        user_id: None,
        is_replay: true,
    };
    Ok(TurnStream::new(app, tenant_id, turn, None, after))
}

/// Whether the caller gets updates of the turn ahead of its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiveUpdates {
    Subscribe,
    Ignore,
}

/// What an accepted turn needs after its commit: starts what this node has to run. Live updates come only of a turn
/// that runs here.
pub fn launch(
    app: &App,
    tenant_id: TenantId,
    accepted: Accepted,
    updates: LiveUpdates,
) -> (AcceptedTurn, Option<mpsc::Receiver<LiveUpdate>>) {
    let live = match accepted.disposition {
        Disposition::Started(turn) if updates == LiveUpdates::Subscribe => {
            let (sender, receiver) = LiveSender::new();
            start(app, tenant_id, *turn, Some(sender));
            Some(receiver)
        }
        Disposition::Started(turn) => {
            start(app, tenant_id, *turn, None);
            None
        }
        Disposition::Queued { next } => {
            if let Some(next) = next {
                start(app, tenant_id, *next, None);
            }
            None
        }
        Disposition::Attached => None,
    };
    let turn = AcceptedTurn {
        id: accepted.turn_id,
        name: accepted.name,
        session_id: accepted.session_id,
        session_info: accepted.session_info,
        user_id: accepted.user_id,
        is_replay: false,
    };
    (turn, live)
}
