//! Running turns: asking the model, its tools, the end, and then the conversation's next turn.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::accept::RunnableTurn;
use super::call::{CallEnd, call};
use super::launch::{LiveSender, LiveUpdate};
use super::outcome::{Outcome, Said};
use super::writer::{WriteOutcome, Writer};
use crate::agent_runtime::Agent;
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::domain::conversation::message::{NewMessage, ToolCall};
use crate::domain::conversation::message_extra::UsageDetails;
use crate::domain::tenant::usage::{UsageCounts, UsageName};
use crate::domain::turn::answer::Answer;
use crate::domain::turn::completion::TokenUsage;
use crate::domain::turn::event::{NewEvent, TURN_WAITING, of_end};
use crate::domain::turn::prompt::{
    HistoryMessage, request_body, token_budget, trim_to_first_user_message,
};
use crate::domain::turn::{StopReason, TurnState};
use crate::error::{Code, Error, Result};
use crate::ids::{SessionId, TenantId};
use crate::notifications::Running;
use crate::store::turn::prompt_history;
use crate::store::turn::turn_claims::TurnLease;
use crate::store::turn::turn_writes::{Change, Fence, WriteAck};
use crate::store::turn::turns;
use crate::telemetry::{self, CalledFor};

/// Between two looks whether the database is back.
const AWAY_PAUSE: Duration = Duration::from_millis(100);

/// Runs a turn that this node has claimed, and then whatever waits in its conversation. Call it after the
/// commit. Goes on when the client leaves.
pub fn start(app: &App, tenant_id: TenantId, claimed: RunnableTurn, direct: Option<LiveSender>) {
    let tasks = app.turn_tasks.clone();
    // Boxed: it is large, and `spawn` moves it several times.
    tasks.spawn(Box::pin(run(app.clone(), tenant_id, claimed, direct)));
}

async fn run(app: App, tenant_id: TenantId, claimed: RunnableTurn, mut direct: Option<LiveSender>) {
    let mut next = Some(claimed);
    while let Some(claimed) = next.take() {
        let turn_id = claimed.lease.id;
        let began = std::time::Instant::now();
        next = match run_one(&app, tenant_id, claimed, direct.take()).await {
            Ok(next) => next,
            Err(error) => {
                // Its lease runs out, and whoever takes it over finds out what there is.
                tracing::error!(turn = %turn_id, error = %error, cause = ?error.cause, "a turn broke off");
                None
            }
        };
        telemetry::record_turn(began.elapsed());
    }
}

struct Run {
    agent: Arc<Agent>,
    lease: TurnLease,
    past: Vec<HistoryMessage>,
    direct: Option<LiveSender>,
    running: Running,
    usage: TokenUsage,
    usage_details: UsageDetails,
}

async fn run_one(
    app: &App,
    tenant_id: TenantId,
    claimed: RunnableTurn,
    direct: Option<LiveSender>,
) -> Result<Option<RunnableTurn>> {
    let RunnableTurn {
        lease,
        session_id,
        past,
    } = claimed;
    telemetry::record_queue(app.clock.now() - lease.created_at);
    let writer = Writer {
        app: app.clone(),
        tenant_id,
        conversation_id: lease.conversation_id,
        session_id,
        speaker: lease.speaker.clone(),
        attempt: lease.attempt,
        fence: Fence {
            turn_id: lease.id,
            fence: lease.fence,
            version: lease.version,
        },
        pending_text: String::new(),
        reply_to: lease.reply_to.clone(),
    };
    let prepared = prepare(app, tenant_id, &lease.agent, session_id, past).await?;
    let Some((agent, past)) = prepared else {
        let error = Error::new(Code::ModelNotFound, "the agent was deleted");
        return fail_early(writer, &error).await;
    };
    let run = Run {
        running: app.live.run(lease.id),
        past: trim_to_first_user_message(past),
        agent,
        lease,
        direct,
        usage: TokenUsage::NONE,
        usage_details: UsageDetails::default(),
    };
    run.rounds(writer).await
}

/// The agent, if it is still there, and the transcript. While the database is away both are asked for again:
/// nobody else has the turn before its lease has run out.
async fn prepare(
    app: &App,
    tenant_id: TenantId,
    agent: &str,
    session_id: SessionId,
    read: Option<(Arc<Agent>, Vec<HistoryMessage>)>,
) -> Result<Option<(Arc<Agent>, Vec<HistoryMessage>)>> {
    if read.is_some() {
        return Ok(read);
    }
    let until = Instant::now() + app.config.turn_lease;
    loop {
        match try_prepare(app, tenant_id, agent, session_id).await {
            Err(error) if error.is_transient() && Instant::now() < until => sleep(AWAY_PAUSE).await,
            prepared => return prepared,
        }
    }
}

async fn try_prepare(
    app: &App,
    tenant_id: TenantId,
    agent: &str,
    session_id: SessionId,
) -> Result<Option<(Arc<Agent>, Vec<HistoryMessage>)>> {
    let Some(agent) = app.models.find(tenant_id, agent).await? else {
        return Ok(None);
    };
    let budget = token_budget(&agent.spec);
    let caller = ServiceCaller::for_tenant(tenant_id);
    let mut tx = caller.begin(&app.db).await?;
    let past = prompt_history::list(&mut tx, session_id, budget).await?;
    Ok(Some((agent, past)))
}

async fn fail_early(mut writer: Writer, error: &Error) -> Result<Option<RunnableTurn>> {
    let change = Change {
        state: Some(TurnState::Failed),
        reason: Some(error.code.as_str()),
        detail: Some(&error.detail),
        ..Change::default()
    };
    let event = end_event(TurnState::Failed, Some(error.code.as_str()));
    let (_, next) = writer.end(&[], &[event], &change).await?;
    Ok(next)
}

fn end_event(state: TurnState, reason: Option<&str>) -> NewEvent {
    NewEvent::new(of_end(state)).with(json!({ "reason": reason }))
}

impl Run {
    /// Asks the model until it has said its last word, or the turn ends otherwise.
    async fn rounds(mut self, mut writer: Writer) -> Result<Option<RunnableTurn>> {
        let mut round = 0;
        loop {
            let spec = &self.agent.spec;
            let body = request_body(spec, &self.lease.input, &self.past)?;
            let asked_bytes = body.len();
            let forwards = spec.upstream.forward_session_key;
            let session_key = self
                .lease
                .session_info
                .memory_key
                .clone()
                .filter(|_| forwards);
            let mut answer = Answer::default();
            let (returned, called) = call(
                writer,
                &self.agent,
                body,
                session_key.as_deref(),
                &mut answer,
                &mut self.direct,
                &self.running,
            )
            .await;
            let gone = || Error::internal(anyhow::anyhow!("a turn lost its writer"));
            writer = returned.ok_or_else(gone)?;
            let said_something = answer.said() > 0;
            let used = answer.usage.or_else(|| {
                said_something.then(|| TokenUsage::estimate(asked_bytes, answer.said()))
            });
            self.usage.add(used.unwrap_or(TokenUsage::NONE));
            self.usage_details.add(answer.usage_details.clone());
            match called {
                CallEnd::Lost => {
                    self.tell(LiveUpdate::Lost);
                    return Ok(None);
                }
                CallEnd::Leaving => {
                    writer.release().await?;
                    self.tell(LiveUpdate::Lost);
                    return Ok(None);
                }
                CallEnd::Failed(error) => {
                    return self.fail(writer, &answer, &error).await;
                }
                CallEnd::Stopped(reason) => {
                    return self.stop(writer, &answer, reason).await;
                }
                CallEnd::Answered => {}
            }
            let calls = answer.tool_calls();
            if calls.is_empty() {
                return self.complete(writer, &answer).await;
            }
            if self.waits_for_client(&calls) {
                return self.wait_for_client(writer, &answer, calls).await;
            }
            round += 1;
            if round > self.agent.spec.max_tool_rounds {
                let error = Error::new(
                    Code::TooManyToolRounds,
                    format!("the model called tools in more than {} rounds", round - 1),
                );
                return self.fail(writer, &Answer::default(), &error).await;
            }
            let Some(heard) = self.answer_unknown(&mut writer, &answer, calls).await? else {
                return Ok(None);
            };
            if let Some(reason) = heard.stop {
                return self.stop(writer, &Answer::default(), reason).await;
            }
        }
    }

    fn waits_for_client(&self, calls: &[ToolCall]) -> bool {
        let input = &self.lease.input;
        calls
            .iter()
            .any(|call| input.gives_tool(&call.function.name))
    }

    /// Tells the model of tools that nobody has. `None`: the turn is lost.
    async fn answer_unknown(
        &mut self,
        writer: &mut Writer,
        answer: &Answer,
        calls: Vec<ToolCall>,
    ) -> Result<Option<WriteAck>> {
        let results: Vec<NewMessage> = calls.iter().map(unknown_tool).collect();
        let said = answer.message(calls);
        let messages: Vec<NewMessage> = said.into_iter().chain(results).collect();
        let told: Vec<NewEvent> = (0..messages.len()).map(NewEvent::of_message).collect();
        match writer.write(&messages, &told).await? {
            WriteOutcome::Lost => {
                self.tell(LiveUpdate::Lost);
                Ok(None)
            }
            WriteOutcome::Fine(heard) => {
                for message in &messages {
                    self.past.push(HistoryMessage::of(message)?);
                }
                Ok(Some(heard))
            }
        }
    }

    async fn complete(mut self, writer: Writer, answer: &Answer) -> Result<Option<RunnableTurn>> {
        let finish = answer
            .finish_reason
            .clone()
            .unwrap_or_else(|| "stop".to_owned());
        let change = Change {
            state: Some(TurnState::Completed),
            finish_reason: Some(&finish),
            usage: Some(self.usage),
            ..Change::default()
        };
        let said = Said::Answer {
            content: answer
                .content()
                .map_or_else(|| "".into(), |content| content.value().clone()),
            tool_calls: Value::Null,
            finish_reason: finish.clone(),
            extra: answer.extra(self.usage_details.clone()),
        };
        // Also an answer without a word is one.
        let message = NewMessage {
            extra: answer.extra(self.usage_details.clone()),
            ..answer
                .message(Vec::new())
                .unwrap_or_else(NewMessage::silence)
        };
        self.end(writer, vec![message], &change, Some(said)).await
    }

    /// Leaves the turn to its client, who has to bring what its tools say. What nobody has is told first.
    async fn wait_for_client(
        mut self,
        writer: Writer,
        answer: &Answer,
        calls: Vec<ToolCall>,
    ) -> Result<Option<RunnableTurn>> {
        let input = &self.lease.input;
        let (theirs, unknown): (Vec<ToolCall>, Vec<ToolCall>) = calls
            .into_iter()
            .partition(|call| input.gives_tool(&call.function.name));
        let all: Vec<ToolCall> = theirs.iter().chain(&unknown).cloned().collect();
        let change = Change {
            state: Some(TurnState::WaitingClient),
            finish_reason: Some("tool_calls"),
            calls: Some(&theirs),
            usage: Some(self.usage),
            ..Change::default()
        };
        let said = Said::Answer {
            content: answer
                .content()
                .map_or(Value::Null, |content| content.value().clone()),
            tool_calls: serde_json::to_value(&theirs).map_err(Error::internal)?,
            finish_reason: "tool_calls".to_owned(),
            extra: answer.extra(self.usage_details.clone()),
        };
        let results = unknown.iter().map(unknown_tool);
        let message = answer.message(all).map(|message| NewMessage {
            extra: answer.extra(self.usage_details.clone()),
            ..message
        });
        let messages: Vec<NewMessage> = message.into_iter().chain(results).collect();
        self.end(writer, messages, &change, Some(said)).await
    }

    /// The partial text that was shown stays.
    async fn fail(
        mut self,
        writer: Writer,
        answer: &Answer,
        error: &Error,
    ) -> Result<Option<RunnableTurn>> {
        if error.code == Code::Internal {
            tracing::error!(turn = %self.lease.id, cause = ?error.cause, "a turn failed");
        }
        if let Some(failed) = &error.failed_call {
            telemetry::warn_of_failed_call(failed, CalledFor::Turn(self.lease.id));
        }
        let change = Change {
            state: Some(TurnState::Failed),
            reason: Some(error.code.as_str()),
            detail: Some(&error.detail),
            usage: Some(self.usage),
            ..Change::default()
        };
        let partial = answer.message(Vec::new()).into_iter().collect();
        self.end(writer, partial, &change, None).await
    }

    async fn stop(
        mut self,
        writer: Writer,
        answer: &Answer,
        reason: StopReason,
    ) -> Result<Option<RunnableTurn>> {
        let change = Change {
            state: Some(reason.state()),
            reason: Some(reason.as_str()),
            usage: Some(self.usage),
            ..Change::default()
        };
        let partial = answer.message(Vec::new()).into_iter().collect();
        self.end(writer, partial, &change, None).await
    }

    /// The last write, what is counted of it, and the last word to the client.
    async fn end(
        &mut self,
        mut writer: Writer,
        messages: Vec<NewMessage>,
        change: &Change<'_>,
        said: Option<Said>,
    ) -> Result<Option<RunnableTurn>> {
        let state = change.state.unwrap_or(TurnState::Completed);
        let mut told: Vec<NewEvent> = (0..messages.len()).map(NewEvent::of_message).collect();
        told.push(if state.has_ended() {
            end_event(state, change.reason)
        } else {
            NewEvent::new(TURN_WAITING)
        });
        let (wrote, next) = writer.end(&messages, &told, change).await?;
        let WriteOutcome::Fine(_) = wrote else {
            self.tell(LiveUpdate::Lost);
            return Ok(None);
        };
        self.count(&writer.app, writer.tenant_id, state);
        self.tell_end(&writer, said).await;
        Ok(next)
    }

    async fn tell_end(&mut self, writer: &Writer, said: Option<Said>) {
        if self.direct.is_none() {
            return;
        }
        let lease = &self.lease;
        let outcome = match said {
            Some(said) => Ok(Outcome {
                turn_id: lease.id,
                conversation_id: lease.conversation_id,
                session_id: writer.session_id,
                compressed: false,
                agent: lease.agent.clone(),
                session_info: lease.session_info.clone(),
                created_at: lease.created_at,
                usage: self.usage,
                said,
            }),
            None => read_outcome(writer, lease).await,
        };
        match outcome {
            Ok(outcome) => self.tell(LiveUpdate::Ended(Box::new(outcome))),
            // The client finds it in the events.
            Err(_) => self.tell(LiveUpdate::Lost),
        }
    }

    fn count(&self, app: &App, tenant_id: TenantId, state: TurnState) {
        if state.has_ended() {
            telemetry::count_turn(state.as_str());
        }
        let name = UsageName::model_call(
            app.clock.now(),
            &self.agent.name,
            &self.agent.spec,
            self.lease.user_id,
            &self.usage,
        );
        let counts = UsageCounts {
            requests: 0,
            turns: i64::from(state.has_ended()),
            input_tokens: self.usage.input,
            output_tokens: self.usage.output,
        };
        app.usage.count(tenant_id, name, &counts);
        let limit = self.agent.limits.tokens_per_minute;
        let tokens = self.usage.input.saturating_add(self.usage.output);
        app.limits.charge_tokens(tenant_id, limit, tokens);
    }

    /// The last word to the client that asked.
    fn tell(&mut self, last: LiveUpdate) {
        if let Some(direct) = self.direct.take() {
            // Whoever is gone or behind finds it in the events.
            drop(direct.send(last));
        }
    }
}

async fn read_outcome(writer: &Writer, lease: &TurnLease) -> Result<Outcome> {
    let caller = ServiceCaller::for_tenant(writer.tenant_id);
    let mut tx = caller.begin(&writer.app.db).await?;
    let turn = turns::get(&mut tx, lease.id).await?;
    Outcome::of(&mut tx, turn).await
}

fn unknown_tool(call: &ToolCall) -> NewMessage {
    let text = format!("[there is no tool {}]", call.function.name);
    NewMessage::tool_result(&call.id, &text)
}
