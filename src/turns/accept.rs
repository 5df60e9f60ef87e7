//! Accepts a message: finds its session, and makes it a turn, in one transaction of the caller's. In an idle
//! conversation the turn starts in the same transaction.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::outcome::{interrupt, try_begin_next};
use super::starts::{continue_waiting, new_turn, start, start_counted};
use super::target::{self, ResolvedTarget, Target};
use super::{limit, runner};
use crate::agent_runtime::Agent;
use crate::app::App;
use crate::crypto;
use crate::domain::bridge::delivery::{ReplyTo, ReplyVia};
use crate::domain::conversation::message::Role;
use crate::domain::conversation::session::ConversationHandle;
use crate::domain::conversation::session_name::session_not_found;
use crate::domain::people::access::Access;
use crate::domain::tenant::agent::OnBusy;
use crate::domain::turn::prompt::HistoryMessage;
use crate::domain::turn::{Admission, SessionInfo, StopReason, TurnInput, TurnState, unknown_call};
use crate::error::{Error, Result};
use crate::ids::{SessionId, TurnId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::conversations;
use crate::store::people::presence::PresenceUpdate;
use crate::store::turn::turn_claims::{self, Wait};
use crate::store::turn::turn_lease::TurnLease;
use crate::store::turn::turn_stops;
use crate::store::turn::turns;

/// What a caller wants an agent to answer, in a session.
pub struct TurnRequest<'a> {
    pub access: &'a Access,
    pub target: Target,
    pub agent: Arc<Agent>,
    pub input: TurnInput,
    /// The credential and the one it acts for: identifies retries.
    pub principal: &'a str,
    /// Whether the client says that this is a retry.
    pub is_retry: bool,
    /// Instead of what the agent says.
    pub on_busy: Option<OnBusy>,
    /// Where the answer goes, for a message of a platform.
    pub reply: Option<(ReplyTo, ReplyVia)>,
}

/// An accepted message. None of it is true before the transaction is committed.
#[derive(Debug)]
pub struct Accepted {
    pub turn_id: TurnId,
    pub name: ConversationHandle,
    /// The tip.
    pub session_id: SessionId,
    /// The sender's user, where a chat was named.
    pub user_id: Option<UserId>,
    pub session_info: SessionInfo,
    pub disposition: Disposition,
    /// A stopping node waits until accepted turns have been launched: until this is dropped.
    pub launching: TaskTrackerToken,
}

#[derive(Debug)]
pub enum Disposition {
    /// This node runs it: `launch` it after the commit.
    Started(Box<RunnableTurn>),
    /// It waits for its turn, which any node may start.
    Queued {
        /// A turn that starts because this one made room: `start` it after the commit.
        next: Option<Box<RunnableTurn>>,
    },
    /// The request is a retry, and this is its first try's turn.
    Attached,
}

/// A turn that this node has to run.
#[derive(Debug)]
pub struct RunnableTurn {
    pub lease: TurnLease,
    /// The agent and as much of the transcript as fits it; read later if it is not here.
    pub prompt: Option<(Arc<Agent>, Vec<HistoryMessage>)>,
}

impl TurnRequest<'_> {
    /// Whether it can only become a turn of its own.
    fn is_new(&self) -> bool {
        !self.is_retry && !self.input.has_tool_results()
    }

    /// Identifies what is asked: a retry asks the same.
    pub(super) fn hash(&self) -> Result<[u8; 32]> {
        let messages = serde_json::to_vec(&self.input.messages).map_err(Error::internal)?;
        Ok(crypto::sha256(&messages))
    }
}

/// Accepts. Where the conversation is idle the turn starts by one statement. Otherwise the conversation is locked
/// until `tx` ends, and its state then decides.
pub async fn accept(
    app: &App,
    tx: &mut TenantTx,
    request: TurnRequest<'_>,
    now: DateTime<Utc>,
) -> Result<Accepted> {
    let agent = request.agent.name.as_str();
    let hash = request.hash()?;
    // Before the check: a node that waits for its turns waits for this one too.
    let _launching = app.turn_tasks.token();
    app.shutdown.check_accepts_turns()?;
    for _ in 0..target::ATTEMPTS {
        let found = target::find(
            tx,
            request.access,
            &request.target,
            agent,
            &request.input,
            now,
        )
        .await?;
        let running = limit::uncounted(app, request.agent.limits.concurrent_turns);
        if request.is_new() && running > 0 {
            let turn = new_turn(&request, hash, &found);
            if let Some(started) = start(app, tx, &request, &turn, Some(running), now).await? {
                // A chat's sender was checked by the statement itself, which began after the slot was locked.
                if found.chat_of.is_none() {
                    target::still_holds(tx, request.access, &found, now).await?;
                }
                note_presence(tx, &request, &found, now);
                return Ok(found.started(app, started));
            }
        }
        let tip = conversations::lock(tx, found.tip.name.conversation_id).await?;
        let tip = tip.ok_or_else(session_not_found)?;
        if target::still_holds(tx, request.access, &found, now).await? {
            return accept_locked(app, tx, request, hash, (found, tip), now).await;
        }
    }
    Err(Error::unavailable(
        "the user",
        anyhow::anyhow!("the identity is linked and unlinked again and again"),
    ))
}

/// Accepts in a conversation that is locked.
async fn accept_locked(
    app: &App,
    tx: &mut TenantTx,
    request: TurnRequest<'_>,
    hash: [u8; 32],
    (found, tip): (ResolvedTarget, SessionId),
    now: DateTime<Utc>,
) -> Result<Accepted> {
    let conversation_id = found.tip.name.conversation_id;
    let (load, latest) = turns::load(tx, conversation_id).await?;
    if request.is_retry
        && let Some(latest) = latest
        && latest.principal == request.principal
        && latest.request_hash == hash
    {
        return Ok(found.accepted(app, latest.id, tip, Disposition::Attached));
    }
    note_presence(tx, &request, &found, now);
    let is_waiting = |(_, state): &(TurnId, TurnState)| *state == TurnState::WaitingClient;
    let waiting = load.active.filter(is_waiting).map(|(turn_id, _)| turn_id);
    if request.input.has_tool_results() {
        let turn_id = waiting.ok_or_else(|| unknown_call(0))?;
        let started = continue_waiting(app, tx, request, hash, (turn_id, tip), now).await?;
        return Ok(found.started(app, started));
    }
    let on_busy = request.on_busy.unwrap_or(request.agent.spec.on_busy);
    let concurrent_turns = request.agent.limits.concurrent_turns;
    let admission = load.admit(on_busy, concurrent_turns)?;
    make_room(app, tx, admission, waiting, now).await?;
    let turn = new_turn(&request, hash, &found);
    match admission {
        Admission::Start => {
            let started = start_counted(app, tx, &request, &turn, tip, now).await?;
            Ok(found.started(app, started))
        }
        Admission::Supersede(_) => {
            limit::allow_one(app, tx, concurrent_turns).await?;
            let started = start(app, tx, &request, &turn, None, now).await?;
            Ok(found.started(app, started.ok_or_else(not_idle)?))
        }
        Admission::Queue | Admission::Interrupt(_) => {
            turns::queue(tx, &turn.row, now).await?;
            let next = match waiting {
                Some(_) => try_begin_next(app, tx, conversation_id, now).await?,
                None => None,
            };
            let next = next.map(Box::new);
            let turn_id = turn.row.id;
            Ok(found.accepted(app, turn_id, tip, Disposition::Queued { next }))
        }
    }
}

pub(super) fn not_idle() -> Error {
    Error::internal(anyhow::anyhow!("a locked conversation is not idle"))
}

impl ResolvedTarget {
    fn accepted(
        &self,
        app: &App,
        turn_id: TurnId,
        session_id: SessionId,
        disposition: Disposition,
    ) -> Accepted {
        Accepted {
            turn_id,
            name: self.tip.name.clone(),
            session_id,
            user_id: self.chat_of,
            session_info: self.session_info.clone(),
            disposition,
            launching: app.turn_tasks.token(),
        }
    }

    fn started(&self, app: &App, turn: RunnableTurn) -> Accepted {
        let turn_id = turn.lease.id;
        let session_id = turn.lease.session_id;
        let disposition = Disposition::Started(Box::new(turn));
        self.accepted(app, turn_id, session_id, disposition)
    }
}

/// Asks the running turn to stop, where a message does that, or ends the one that waits for its client. Every
/// message does the latter, also one that has to wait for others itself.
async fn make_room(
    app: &App,
    tx: &mut TenantTx,
    admission: Admission,
    waiting: Option<TurnId>,
    now: DateTime<Utc>,
) -> Result<()> {
    if let Some(waiting) = waiting {
        let lease = turn_claims::claim_waiting(tx, waiting, runner(app), Wait::Any).await?;
        if let Some(mut lease) = lease {
            interrupt(tx, &mut lease, StopReason::Superseded, now).await?;
        }
        return Ok(());
    }
    match admission {
        Admission::Start | Admission::Queue | Admission::Supersede(_) => Ok(()),
        Admission::Interrupt(active) => {
            turn_stops::request_stop(tx, active, StopReason::Superseded, now).await
        }
    }
}

/// Notes where the sender is present. A chat that was resolved has noted it.
fn note_presence(
    tx: &mut TenantTx,
    request: &TurnRequest<'_>,
    found: &ResolvedTarget,
    now: DateTime<Utc>,
) {
    let messages = &request.input.messages;
    let has_spoken = messages.iter().any(|message| message.role == Role::User);
    if let Some(sender) = &request.access.sender
        && has_spoken
        && found.chat_of.is_none()
    {
        tx.note_presence(PresenceUpdate {
            identity_id: sender.id,
            slot_id: found.slot_id,
            at: now,
        });
    }
}
