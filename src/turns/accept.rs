//! Accepts a message: the session it goes to, its turn and what it says, in one transaction of the
//! caller's. In an idle conversation it starts in the same transaction.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::limit;
use super::outcome::{interrupted, try_begin_next};
use super::runner;
use crate::agent_runtime::Agent;
use crate::app::App;
use crate::domain::bridge::delivery::{ReplyTo, ReplyVia};
use crate::domain::conversation::message::{NewMessage, Role};
use crate::domain::conversation::session::ConversationHandle;
use crate::domain::conversation::session_name::session_not_found;
use crate::domain::people::access::Access;
use crate::domain::tenant::agent::OnBusy;
use crate::domain::turn::event::{NewEvent, TURN_STARTED};
use crate::domain::turn::prompt::{HistoryMessage, token_budget};
use crate::domain::turn::{
    Admission, SessionInfo, StopReason, TurnInput, TurnState, interrupted_result, match_results,
    unknown_call,
};
use crate::error::{Error, Result};
use crate::ids::{BootId, SessionId, TurnId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::conversations;
use crate::store::people::presence::Seen;
use crate::store::turn::prompt_history;
use crate::store::turn::turn_claims::{self, TurnLease};
use crate::store::turn::turn_starts::{self, Allowance, Started};
use crate::store::turn::turn_stops;
use crate::store::turn::turn_writes::{self, Change, Fence, Write};
use crate::store::turn::turns::{self, NewTurn};
use crate::turns::target::{self, ResolvedTarget, Target};

/// What somebody asks of an agent, in a session.
pub struct TurnRequest<'a> {
    pub access: &'a Access,
    pub place: Target,
    pub agent: Arc<Agent>,
    pub input: TurnInput,
    /// Who asks: a retry is told by it.
    pub principal: &'a str,
    pub hash: [u8; 32],
    /// Whether the client says that it asks again.
    pub is_retry: bool,
    /// Otherwise as the agent has it.
    pub on_busy: Option<OnBusy>,
    /// Where the answer goes, for what came from a platform.
    pub reply: Option<(ReplyTo, ReplyVia)>,
}

/// The turn that it became. Nothing of it is true before the transaction is committed.
#[derive(Debug)]
pub struct Accepted {
    pub turn_id: TurnId,
    pub name: ConversationHandle,
    /// The end of the conversation.
    pub session_id: SessionId,
    /// The sender's user, where a chat was named.
    pub user_id: Option<UserId>,
    pub session_info: SessionInfo,
    pub disposition: Disposition,
    /// A node that stops waits until what it accepted has begun: until this is dropped.
    pub accepting: TaskTrackerToken,
}

#[derive(Debug)]
pub enum Disposition {
    /// It is this node's to run: `start` it after the commit.
    Started(Box<RunnableTurn>),
    /// It waits for its turn, which another may start.
    Queued {
        /// The turn that was asked to stop for it, and the node to tell.
        stopped: Option<(TurnId, Option<BootId>)>,
        /// What begins because it made room: `start` it after the commit.
        next: Option<Box<RunnableTurn>>,
    },
    /// It is what the client asked before.
    Attached,
}

/// A turn that is this node's to run, with what it said so far in the transcript.
#[derive(Debug)]
pub struct RunnableTurn {
    pub lease: TurnLease,
    pub session_id: SessionId,
    /// The transcript, as much as fits the agent it was accepted for, which answers it; read when it is needed if
    /// it is not here.
    pub past: Option<(Arc<Agent>, Vec<HistoryMessage>)>,
}

impl TurnRequest<'_> {
    /// Whether it is new for certain: a turn of its own, if anything.
    fn is_new(&self) -> bool {
        !self.is_retry && !self.input.answers_tools()
    }
}

/// Accepts. Where the conversation is idle the turn starts by one statement; otherwise the conversation is held
/// until `tx` ends, and what happens there decides.
pub async fn accept(
    app: &App,
    tx: &mut TenantTx,
    request: TurnRequest<'_>,
    now: DateTime<Utc>,
) -> Result<Accepted> {
    let agent = request.agent.name.as_str();
    // Before it is asked whether there is time: whoever waits for this node's turns waits for this one.
    let _accepting = app.turn_tasks.token();
    app.shutdown.check_accepts_turns()?;
    for _ in 0..target::ATTEMPTS {
        let found = target::find(
            tx,
            request.access,
            &request.place,
            agent,
            &request.input,
            now,
        )
        .await?;
        let running = limit::uncounted(app, request.agent.limits.concurrent_turns);
        if request.is_new()
            && running > 0
            && let Some(claimed) = start(app, tx, &request, &found, Some(running), now).await?
        {
            // A chat's sender was checked by the statement itself, which began after the slot was held.
            if found.chat_of.is_none() {
                target::still_holds(tx, request.access, &found, now).await?;
            }
            note_presence(tx, &request, &found, now);
            return Ok(found.started(app, claimed));
        }
        let tip = conversations::lock(tx, found.tip.name.conversation_id).await?;
        let tip = tip.ok_or_else(session_not_found)?;
        if target::still_holds(tx, request.access, &found, now).await? {
            return accept_held(app, tx, request, (found, tip), now).await;
        }
    }
    Err(Error::unavailable(
        "the user",
        anyhow::anyhow!("the identity is linked and unlinked again and again"),
    ))
}

async fn accept_held(
    app: &App,
    tx: &mut TenantTx,
    request: TurnRequest<'_>,
    (found, tip): (ResolvedTarget, SessionId),
    now: DateTime<Utc>,
) -> Result<Accepted> {
    let conversation_id = found.tip.name.conversation_id;
    let (busy, newest) = turns::look(tx, conversation_id).await?;
    if request.is_retry
        && let Some(newest) = newest
        && newest.principal == request.principal
        && newest.request_hash == request.hash
    {
        return Ok(found.accepted(app, newest.id, tip, Disposition::Attached));
    }
    note_presence(tx, &request, &found, now);
    let waits = |(_, state): &(TurnId, TurnState)| *state == TurnState::WaitingClient;
    let waiting = busy.active.filter(waits).map(|(turn_id, _)| turn_id);
    if request.input.answers_tools() {
        let turn_id = waiting.ok_or_else(|| unknown_call(0))?;
        let claimed = go_on(app, tx, request, turn_id, tip, now).await?;
        return Ok(found.started(app, claimed));
    }
    let on_busy = request.on_busy.unwrap_or(request.agent.spec.on_busy);
    let concurrent_turns = request.agent.limits.concurrent_turns;
    let admission = busy.admit(on_busy, concurrent_turns)?;
    let stopped = make_room(app, tx, admission, waiting, now).await?;
    match admission {
        Admission::Start => {
            let claimed = start_counted(app, tx, &request, &found, tip, now).await?;
            Ok(found.started(app, claimed))
        }
        Admission::Supersede(_) => {
            limit::allow_one(app, tx, concurrent_turns).await?;
            let claimed = start(app, tx, &request, &found, None, now).await?;
            Ok(found.started(app, claimed.ok_or_else(not_idle)?))
        }
        Admission::Queue | Admission::Interrupt(_) => {
            let turn = new_turn(&request, &found);
            turns::queue(tx, &turn, now).await?;
            let next = match waiting {
                Some(_) => try_begin_next(app, tx, conversation_id, now).await?,
                None => None,
            };
            let next = next.map(Box::new);
            Ok(found.accepted(app, turn.id, tip, Disposition::Queued { stopped, next }))
        }
    }
}

fn not_idle() -> Error {
    Error::internal(anyhow::anyhow!("a held conversation is not idle"))
}

/// Starts a turn in a conversation that is held and idle, if the tenant's limit allows one more.
async fn start_counted(
    app: &App,
    tx: &mut TenantTx,
    request: &TurnRequest<'_>,
    found: &ResolvedTarget,
    tip: SessionId,
    now: DateTime<Utc>,
) -> Result<RunnableTurn> {
    limit::allow_one(app, tx, request.agent.limits.concurrent_turns).await?;
    if let Some(claimed) = start(app, tx, request, found, None, now).await? {
        return Ok(claimed);
    }
    // No other turn is in the way: the session names a turn that has ended.
    turn_stops::release_ended(tx, tip).await?;
    let claimed = start(app, tx, request, found, None, now).await?;
    claimed.ok_or_else(not_idle)
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
            accepting: app.turn_tasks.token(),
        }
    }

    fn started(&self, app: &App, claimed: RunnableTurn) -> Accepted {
        let turn_id = claimed.lease.id;
        let session_id = claimed.session_id;
        self.accepted(
            app,
            turn_id,
            session_id,
            Disposition::Started(Box::new(claimed)),
        )
    }
}

fn new_turn<'a>(request: &'a TurnRequest<'_>, found: &'a ResolvedTarget) -> NewTurn<'a> {
    let speaker = request.access.speaker.as_ref();
    NewTurn {
        id: TurnId::generate(),
        conversation_id: found.tip.name.conversation_id,
        agent: &request.agent.name,
        principal: request.principal,
        request_hash: request.hash,
        input: &request.input,
        session_info: &found.session_info,
        speaker: speaker.map(|speaker| (speaker.id, speaker.name.platform().to_string())),
        reply: request.reply.as_ref().map(|(to, via)| (to, *via)),
    }
}

/// Starts a turn where its conversation is idle and fewer than `running` of the tenant's turns run.
async fn start(
    app: &App,
    tx: &mut TenantTx,
    request: &TurnRequest<'_>,
    found: &ResolvedTarget,
    running: Option<i64>,
    now: DateTime<Utc>,
) -> Result<Option<RunnableTurn>> {
    let turn = new_turn(request, found);
    let said = &request.input.messages;
    let allowance = Allowance {
        runner: runner(app),
        running,
        // Counted: the conversation is held, and the sender was looked at since.
        sender_of: running.and(found.chat_of),
        tokens: token_budget(&request.agent.spec),
    };
    let session_info = beginning(said);
    let started = turn_starts::start(tx, &turn, &session_info, allowance, now).await?;
    let Some(Started {
        session_id,
        at,
        past,
    }) = started
    else {
        return Ok(None);
    };
    let past = match past {
        Some(mut past) => {
            for message in said {
                past.push(HistoryMessage::of(message)?);
            }
            Some((request.agent.clone(), past))
        }
        None => None,
    };
    Ok(Some(RunnableTurn {
        lease: TurnLease::started(&turn, session_id, found.tip.owner.user_id, at),
        session_id,
        past,
    }))
}

/// What is told of a turn that starts with these messages.
fn beginning(said: &[NewMessage]) -> Vec<NewEvent> {
    let named = (0..said.len()).map(NewEvent::of_message);
    std::iter::once(NewEvent::new(TURN_STARTED))
        .chain(named)
        .collect()
}

/// Asks the running turn to stop, where a message does that, or ends the one that waits for its client, which
/// every message does: also one that itself has to wait for others. Answers whom to tell.
async fn make_room(
    app: &App,
    tx: &mut TenantTx,
    admission: Admission,
    waiting: Option<TurnId>,
    now: DateTime<Utc>,
) -> Result<Option<(TurnId, Option<BootId>)>> {
    if let Some(waiting) = waiting {
        if let Some(lease) = turn_claims::claim_waiting(tx, waiting, runner(app), false).await? {
            interrupted(app, tx, &lease, StopReason::Superseded, now).await?;
        }
        return Ok(None);
    }
    match admission {
        Admission::Start | Admission::Queue | Admission::Supersede(_) => Ok(None),
        Admission::Interrupt(active) => {
            let node = turn_stops::request_stop(tx, active, StopReason::Superseded, now).await?;
            Ok(Some((active, node)))
        }
    }
}

/// Puts what a queued turn was accepted with into the transcript: from here on it runs.
pub(super) async fn begin(
    app: &App,
    tx: &mut TenantTx,
    mut lease: TurnLease,
    tip: SessionId,
    now: DateTime<Utc>,
) -> Result<RunnableTurn> {
    let said = std::mem::take(&mut lease.input.messages);
    let session_info = beginning(&said);
    put(app, tx, &mut lease, tip, (&said, &session_info), now).await?;
    Ok(RunnableTurn {
        lease,
        session_id: tip,
        past: None,
    })
}

/// Goes on with the turn that waits for its client, with the results that it brings.
async fn go_on(
    app: &App,
    tx: &mut TenantTx,
    request: TurnRequest<'_>,
    turn_id: TurnId,
    tip: SessionId,
    now: DateTime<Utc>,
) -> Result<RunnableTurn> {
    limit::allow_one(app, tx, request.agent.limits.concurrent_turns).await?;
    let lease = turn_claims::claim_waiting(tx, turn_id, runner(app), false).await?;
    let mut lease = lease.ok_or_else(|| unknown_call(0))?;
    let calls = lease.calls.take().unwrap_or_default();
    let mut said: Vec<NewMessage> = Vec::new();
    for (call, brought) in match_results(&calls, &request.input.messages)? {
        said.push(match brought {
            Some(brought) => brought.clone(),
            None => interrupted_result(&call.id, "the client brought no result"),
        });
    }
    let others = request.input.messages.iter();
    said.extend(others.filter(|one| one.role != Role::Tool).cloned());
    turn_claims::update_asked(tx, turn_id, request.hash, &request.input).await?;
    lease.input = request.input;
    let session_info: Vec<NewEvent> = (0..said.len()).map(NewEvent::of_message).collect();
    put(app, tx, &mut lease, tip, (&said, &session_info), now).await?;
    let budget = token_budget(&request.agent.spec);
    let past = prompt_history::list(tx, tip, budget).await?;
    Ok(RunnableTurn {
        lease,
        session_id: tip,
        past: Some((request.agent.clone(), past)),
    })
}

/// A write of a turn that this transaction has just taken: nobody can have it instead.
async fn put(
    app: &App,
    tx: &mut TenantTx,
    lease: &mut TurnLease,
    tip: SessionId,
    (messages, session_info): (&[NewMessage], &[NewEvent]),
    now: DateTime<Utc>,
) -> Result<()> {
    let fence = Fence {
        turn_id: lease.id,
        fence: lease.fence,
        version: lease.version,
    };
    let write = Write {
        conversation_id: lease.conversation_id,
        session_id: tip,
        messages,
        speaker: lease.speaker.as_ref(),
        events: session_info,
        attempt: lease.attempt,
        starts: lease.started_at.is_none(),
        change: &Change::default(),
        runner: runner(app),
    };
    let written = turn_writes::write(tx, fence, &write, now).await?;
    let lost = || Error::internal(anyhow::anyhow!("a turn was lost while it was taken"));
    written.ok_or_else(lost)?;
    lease.version += 1;
    lease.steps += i32::try_from(messages.len()).unwrap_or(i32::MAX);
    lease.started_at = lease.started_at.or(Some(now));
    Ok(())
}

/// Notes where the sender is present. A chat that was resolved has noted it.
fn note_presence(
    tx: &mut TenantTx,
    request: &TurnRequest<'_>,
    found: &ResolvedTarget,
    now: DateTime<Utc>,
) {
    let said = &request.input.messages;
    let spoke = said.iter().any(|said| said.role == Role::User);
    if let Some(speaker) = &request.access.speaker
        && spoke
        && found.chat_of.is_none()
    {
        tx.note_presence(Seen {
            identity_id: speaker.id,
            slot_id: found.slot_id,
            at: now,
        });
    }
}
