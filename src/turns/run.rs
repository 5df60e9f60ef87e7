//! Runs turns: calls the model in rounds, answers its tool calls, ends the turn, and starts the conversation's next.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};
use tracing::{Instrument, Span};

use super::accept::RunnableTurn;
use super::call::{CallEnd, ModelCall};
use super::live::{LiveSender, LiveUpdate};
use super::outcome::{TurnOutcome, TurnResult, end_event};
use super::writer::{TurnWriter, WriteOutcome};
use crate::agent_runtime::Agent;
use crate::app::App;
use crate::domain::conversation::message::{NewMessage, ToolCall};
use crate::domain::conversation::message_extra::UsageDetails;
use crate::domain::tenant::usage::{UsageCounts, UsageKey};
use crate::domain::turn::answer::Answer;
use crate::domain::turn::completion::TokenUsage;
use crate::domain::turn::event::{NewEvent, TURN_WAITING};
use crate::domain::turn::prompt::{HistoryMessage, request_body, token_budget};
use crate::domain::turn::{StopReason, TurnState};
use crate::error::{Code, Error, Result};
use crate::ids::TenantId;
use crate::notifications::RunningTurn;
use crate::store::turn::turn_writes::{Change, WriteAck};
use crate::store::turn::{prompt_history, turns};
use crate::telemetry::{self, CallPurpose};

/// Between attempts to read while the database is away.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Runs a turn that this node has claimed, and then the next ones of its conversation. Call it after the commit. The
/// turn goes on when its caller leaves.
pub fn start(app: &App, tenant_id: TenantId, turn: RunnableTurn, live: Option<LiveSender>) {
    let tasks = app.turn_tasks.clone();
    // Here, and not in the task: below the span of the request that started it.
    let span = span_of(&turn, tenant_id);
    // Boxed: it is large, and `spawn` moves it several times.
    tasks.spawn(Box::pin(run_all(app.clone(), tenant_id, turn, live, span)));
}

fn span_of(turn: &RunnableTurn, tenant_id: TenantId) -> Span {
    telemetry::turn_span(turn.lease.id, tenant_id, turn.lease.attempt)
}

async fn run_all(
    app: App,
    tenant_id: TenantId,
    turn: RunnableTurn,
    live: Option<LiveSender>,
    span: Span,
) {
    let mut next = run(&app, tenant_id, turn, live).instrument(span).await;
    while let Some(turn) = next.take() {
        let span = span_of(&turn, tenant_id);
        next = run(&app, tenant_id, turn, None).instrument(span).await;
    }
}

/// Runs one turn, and answers the conversation's next one.
async fn run(
    app: &App,
    tenant_id: TenantId,
    turn: RunnableTurn,
    live: Option<LiveSender>,
) -> Option<RunnableTurn> {
    let began = std::time::Instant::now();
    let next = match try_run(app, tenant_id, turn, live).await {
        Ok(next) => next,
        Err(error) => {
            // Its lease expires, and the node that claims it finds what was committed.
            tracing::error!(error = %error, cause = ?error.cause, "turn aborted");
            None
        }
    };
    telemetry::record_turn(began.elapsed());
    next
}

/// A turn while it runs.
struct Run {
    agent: Arc<Agent>,
    writer: TurnWriter,
    history: Vec<HistoryMessage>,
    live: Option<LiveSender>,
    running: RunningTurn,
    usage: TokenUsage,
    usage_details: UsageDetails,
}

async fn try_run(
    app: &App,
    tenant_id: TenantId,
    turn: RunnableTurn,
    live: Option<LiveSender>,
) -> Result<Option<RunnableTurn>> {
    let RunnableTurn { lease, prompt } = turn;
    telemetry::record_queue(app.clock.now() - lease.created_at);
    let writer = TurnWriter {
        app: app.clone(),
        tenant_id,
        lease,
        pending_text: String::new(),
    };
    let prompt = match prompt {
        Some(prompt) => Some(prompt),
        None => read_prompt(&writer).await?,
    };
    let Some((agent, history)) = prompt else {
        let error = Error::new(Code::ModelNotFound, "the agent was deleted");
        return fail_early(writer, &error).await;
    };
    let run = Run {
        running: app.notifications.run_turn(writer.lease.id),
        history,
        agent,
        writer,
        live,
        usage: TokenUsage::NONE,
        usage_details: UsageDetails::default(),
    };
    run.rounds().await
}

/// The agent, if it is still there, and the transcript. While the database is away both are read again: no other node
/// can claim the turn before its lease has expired.
async fn read_prompt(writer: &TurnWriter) -> Result<Option<(Arc<Agent>, Vec<HistoryMessage>)>> {
    let until = Instant::now() + writer.app.config.turn_lease;
    loop {
        match try_read_prompt(writer).await {
            Err(error) if error.is_transient() && Instant::now() < until => {
                sleep(RETRY_PAUSE).await;
            }
            prompt => return prompt,
        }
    }
}

async fn try_read_prompt(writer: &TurnWriter) -> Result<Option<(Arc<Agent>, Vec<HistoryMessage>)>> {
    let lease = &writer.lease;
    let models = &writer.app.models;
    let Some(agent) = models.find(writer.tenant_id, &lease.agent).await? else {
        return Ok(None);
    };
    let budget = token_budget(&agent.spec);
    let mut tx = writer.begin().await?;
    let history = prompt_history::list(&mut tx, lease.session_id, budget).await?;
    tx.end().await?;
    Ok(Some((agent, history)))
}

async fn fail_early(mut writer: TurnWriter, error: &Error) -> Result<Option<RunnableTurn>> {
    let change = Change {
        state: Some(TurnState::Failed),
        reason: Some(error.code.as_str()),
        detail: Some(&error.detail),
        ..Change::default()
    };
    let event = end_event(TurnState::Failed, Some(error.code.as_str()));
    let (_, next) = writer.end(&[], &[event], change).await?;
    Ok(next)
}

impl Run {
    /// Calls the model until it has answered without a tool call, or the turn ends otherwise.
    async fn rounds(mut self) -> Result<Option<RunnableTurn>> {
        let mut round = 0;
        loop {
            let mut answer = Answer::default();
            match self.call_model(&mut answer).await? {
                CallEnd::LeaseLost => {
                    self.send_last(LiveUpdate::LeaseLost);
                    return Ok(None);
                }
                CallEnd::Released => {
                    self.writer.release().await?;
                    self.send_last(LiveUpdate::LeaseLost);
                    return Ok(None);
                }
                CallEnd::Failed(error) => return self.fail(&answer, &error).await,
                CallEnd::Stopped(reason) => return self.stop(&answer, reason).await,
                CallEnd::Answered => {}
            }
            let calls = answer.tool_calls();
            if calls.is_empty() {
                return self.complete(&answer).await;
            }
            if self.is_for_client(&calls) {
                return self.wait_for_client(&answer, calls).await;
            }
            round += 1;
            if round > self.agent.spec.max_tool_rounds {
                let error = Error::new(
                    Code::TooManyToolRounds,
                    format!("the model called tools in more than {} rounds", round - 1),
                );
                return self.fail(&Answer::default(), &error).await;
            }
            let Some(ack) = self.answer_unknown_tools(&answer, calls).await? else {
                return Ok(None);
            };
            if let Some(reason) = ack.stop {
                return self.stop(&Answer::default(), reason).await;
            }
        }
    }

    /// One call of the model, and what it used.
    async fn call_model(&mut self, answer: &mut Answer) -> Result<CallEnd> {
        let spec = &self.agent.spec;
        let lease = &self.writer.lease;
        let body = request_body(spec, &lease.input, &self.history)?;
        let request_bytes = body.len();
        let session_key = if spec.upstream.forward_session_key {
            lease.session_info.memory_key.clone()
        } else {
            None
        };
        let call = ModelCall {
            agent: &self.agent,
            writer: &mut self.writer,
            running: &self.running,
            answer,
            live: &mut self.live,
        };
        let end = call.run(body, session_key.as_deref()).await;
        let has_answer = answer.output_bytes() > 0;
        let used = answer.usage.or_else(|| {
            has_answer.then(|| TokenUsage::estimate(request_bytes, answer.output_bytes()))
        });
        self.usage.add(used.unwrap_or(TokenUsage::NONE));
        self.usage_details.add(answer.usage_details.clone());
        Ok(end)
    }

    fn is_for_client(&self, calls: &[ToolCall]) -> bool {
        let input = &self.writer.lease.input;
        calls
            .iter()
            .any(|call| input.has_client_tool(&call.function.name))
    }

    /// Answers calls of tools that do not exist. `None`: the turn is lost.
    async fn answer_unknown_tools(
        &mut self,
        answer: &Answer,
        calls: Vec<ToolCall>,
    ) -> Result<Option<WriteAck>> {
        let results: Vec<NewMessage> = calls.iter().map(unknown_tool).collect();
        let message = answer.message(calls);
        let messages: Vec<NewMessage> = message.into_iter().chain(results).collect();
        let events: Vec<NewEvent> = (0..messages.len()).map(NewEvent::of_message).collect();
        match self.writer.write(&messages, &events).await? {
            WriteOutcome::LeaseLost => {
                self.send_last(LiveUpdate::LeaseLost);
                Ok(None)
            }
            WriteOutcome::Applied(ack) => {
                for message in &messages {
                    self.history.push(HistoryMessage::of(message)?);
                }
                Ok(Some(ack))
            }
        }
    }

    async fn complete(mut self, answer: &Answer) -> Result<Option<RunnableTurn>> {
        let finish_reason = answer
            .finish_reason
            .clone()
            .unwrap_or_else(|| "stop".to_owned());
        let change = Change {
            state: Some(TurnState::Completed),
            finish_reason: Some(&finish_reason),
            usage: Some(self.usage),
            ..Change::default()
        };
        let result = TurnResult::Answer {
            content: answer
                .content()
                .map_or_else(|| "".into(), |content| content.value().clone()),
            tool_calls: Value::Null,
            finish_reason: finish_reason.clone(),
            extra: answer.extra(self.usage_details.clone()),
        };
        // An empty answer is one too.
        let message = NewMessage {
            extra: answer.extra(self.usage_details.clone()),
            ..answer
                .message(Vec::new())
                .unwrap_or_else(NewMessage::empty_answer)
        };
        self.end(vec![message], change, Some(result)).await
    }

    /// Leaves the turn to its client, who has to bring the results of its tools. Calls of tools that do not exist are
    /// answered first.
    async fn wait_for_client(
        mut self,
        answer: &Answer,
        calls: Vec<ToolCall>,
    ) -> Result<Option<RunnableTurn>> {
        let input = &self.writer.lease.input;
        let (theirs, unknown): (Vec<ToolCall>, Vec<ToolCall>) = calls
            .into_iter()
            .partition(|call| input.has_client_tool(&call.function.name));
        let all: Vec<ToolCall> = theirs.iter().chain(&unknown).cloned().collect();
        let change = Change {
            state: Some(TurnState::WaitingClient),
            finish_reason: Some("tool_calls"),
            calls: Some(&theirs),
            usage: Some(self.usage),
            ..Change::default()
        };
        let result = TurnResult::Answer {
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
        self.end(messages, change, Some(result)).await
    }

    /// The partial text stays, as the caller may have seen it.
    async fn fail(mut self, answer: &Answer, error: &Error) -> Result<Option<RunnableTurn>> {
        let turn_id = self.writer.lease.id;
        if error.code == Code::Internal {
            tracing::error!(cause = ?error.cause, "turn failed");
        }
        if let Some(failed) = &error.failed_call {
            telemetry::warn_of_failed_call(failed, CallPurpose::Turn(turn_id));
        }
        let change = Change {
            state: Some(TurnState::Failed),
            reason: Some(error.code.as_str()),
            detail: Some(&error.detail),
            usage: Some(self.usage),
            ..Change::default()
        };
        let partial = answer.message(Vec::new()).into_iter().collect();
        self.end(partial, change, None).await
    }

    async fn stop(mut self, answer: &Answer, reason: StopReason) -> Result<Option<RunnableTurn>> {
        let change = Change {
            state: Some(reason.state()),
            reason: Some(reason.as_str()),
            usage: Some(self.usage),
            ..Change::default()
        };
        let partial = answer.message(Vec::new()).into_iter().collect();
        self.end(partial, change, None).await
    }

    /// The last write, its usage, and the last update of the live caller.
    async fn end(
        &mut self,
        messages: Vec<NewMessage>,
        change: Change<'_>,
        result: Option<TurnResult>,
    ) -> Result<Option<RunnableTurn>> {
        let state = change.state.unwrap_or(TurnState::Completed);
        let mut events: Vec<NewEvent> = (0..messages.len()).map(NewEvent::of_message).collect();
        events.push(if state.has_ended() {
            end_event(state, change.reason)
        } else {
            NewEvent::new(TURN_WAITING)
        });
        let (outcome, next) = self.writer.end(&messages, &events, change).await?;
        let WriteOutcome::Applied(_) = outcome else {
            self.send_last(LiveUpdate::LeaseLost);
            return Ok(None);
        };
        self.count_usage(state);
        self.send_outcome(result).await;
        Ok(next)
    }

    async fn send_outcome(&mut self, result: Option<TurnResult>) {
        if self.live.is_none() {
            return;
        }
        let lease = &self.writer.lease;
        let outcome = match result {
            Some(result) => Ok(TurnOutcome {
                turn_id: lease.id,
                conversation_id: lease.conversation_id,
                session_id: lease.session_id,
                compressed: false,
                agent: lease.agent.clone(),
                session_info: lease.session_info.clone(),
                created_at: lease.created_at,
                usage: self.usage,
                result,
            }),
            None => read_outcome(&self.writer).await,
        };
        match outcome {
            Ok(outcome) => self.send_last(LiveUpdate::Ended(Box::new(outcome))),
            // The caller finds it in the events.
            Err(_) => self.send_last(LiveUpdate::LeaseLost),
        }
    }

    fn count_usage(&self, state: TurnState) {
        if state.has_ended() {
            telemetry::count_turn(state.as_str());
        }
        let app = &self.writer.app;
        let tenant_id = self.writer.tenant_id;
        let name = UsageKey::model_call(
            app.clock.now(),
            &self.agent.name,
            &self.agent.spec,
            self.writer.lease.user_id,
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

    /// The last update of the live caller.
    fn send_last(&mut self, last: LiveUpdate) {
        if let Some(live) = self.live.take() {
            // A caller that has left, or is too far behind, finds it in the events.
            drop(live.send(last));
        }
    }
}

async fn read_outcome(writer: &TurnWriter) -> Result<TurnOutcome> {
    let mut tx = writer.begin().await?;
    let turn = turns::get(&mut tx, writer.lease.id).await?;
    let outcome = TurnOutcome::read(&mut tx, turn).await?;
    tx.end().await?;
    Ok(outcome)
}

fn unknown_tool(call: &ToolCall) -> NewMessage {
    let text = format!("[there is no tool {}]", call.function.name);
    NewMessage::tool_result(&call.id, &text)
}
