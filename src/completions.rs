//! Use case of a completion without a session: a request goes to the agent's model and the answer comes back. Only
//! its usage is stored. It ends with the connection.

use std::sync::Arc;

use crate::agent_runtime::{Agent, AgentMember, Chunks};
use crate::app::App;
use crate::domain::tenant::usage::{UsageCounts, UsageKey};
use crate::domain::turn::completion::{CompletionRequest, TokenUsage};
use crate::error::{Code, Error, Result};
use crate::fair_queue::Holder;
use crate::ids::{TenantId, UserId};
use crate::limits::StreamGuard;

/// A call of a model for a tenant or one of its users.
pub struct Call {
    app: App,
    agent: Arc<Agent>,
    user_id: Option<UserId>,
    wants_stream: bool,
    /// Whether the client asked for a chunk about the usage.
    include_usage: bool,
    /// The request body for the model, until the call begins.
    body: Vec<u8>,
    /// The size of that body.
    request_bytes: usize,
    /// Held until the answer has ended.
    _open: StreamGuard,
}

impl Call {
    pub async fn new(
        app: &App,
        tenant_id: TenantId,
        user_id: Option<UserId>,
        request: &CompletionRequest,
    ) -> Result<Self> {
        let models = &app.models;
        let agent = models.get(tenant_id, &request.model, AgentMember::Model);
        let agent = agent.await?;
        let limit = agent.limits.tokens_per_minute;
        app.limits.check_tokens(tenant_id, limit).await?;
        let open = app
            .limits
            .open_call(tenant_id, agent.limits.concurrent_calls)?;
        let body = request.for_model(&agent.spec)?;
        Ok(Self {
            app: app.clone(),
            agent,
            user_id,
            wants_stream: request.stream,
            include_usage: request.include_usage,
            request_bytes: body.len(),
            body,
            _open: open,
        })
    }

    pub fn wants_stream(&self) -> bool {
        self.wants_stream
    }

    /// The whole answer, as JSON.
    pub async fn complete(mut self) -> Result<String> {
        let body = std::mem::take(&mut self.body);
        let holder = Holder::Tenant(self.agent.tenant_id);
        let mut reserved = Vec::new();
        let mut room = |bytes| {
            let memory = self.app.shares.answer(holder, bytes);
            let has_room = memory.is_some();
            reserved.extend(memory);
            has_room
        };
        let answer = self.app.models.complete(&self.agent, body, &mut room);
        let answer = answer.await?;
        self.count(answer.usage, answer.output_bytes);
        if answer.choices == 0 {
            let detail = "the model's server answered without a choice";
            return Err(Error::new(Code::UpstreamFailed, detail));
        }
        Ok(answer.with_model(&self.agent.name))
    }

    /// The answer in chunks. A failure before the first chunk is an error and no stream.
    pub async fn stream(mut self) -> Result<CompletionStream> {
        let body = std::mem::take(&mut self.body);
        let chunks = self.app.models.stream(&self.agent, body, None).await?;
        Ok(CompletionStream {
            call: self,
            chunks,
            answer_bytes: 0,
            reported: None,
        })
    }

    /// Counts the usage that the model reported, or else an estimate from the number of bytes.
    fn count(&self, reported: Option<TokenUsage>, answer_bytes: usize) {
        let estimate = || TokenUsage::estimate(self.request_bytes, answer_bytes);
        let usage = reported.unwrap_or_else(estimate);
        let now = self.app.clock.now();
        let name = UsageKey::model_call(
            now,
            &self.agent.name,
            &self.agent.spec,
            self.user_id,
            &usage,
        );
        let counts = UsageCounts {
            requests: 0,
            turns: 1,
            input_tokens: usage.input,
            output_tokens: usage.output,
        };
        self.app.usage.count(self.agent.tenant_id, name, &counts);
        let limit = self.agent.limits.tokens_per_minute;
        let tokens = usage.input.saturating_add(usage.output);
        self.app
            .limits
            .charge_tokens(self.agent.tenant_id, limit, tokens);
    }
}

/// An answer in progress.
pub struct CompletionStream {
    call: Call,
    chunks: Chunks,
    /// The bytes of the answer so far.
    answer_bytes: usize,
    reported: Option<TokenUsage>,
}

impl CompletionStream {
    /// Whether a part of the answer was received.
    pub fn has_begun(&self) -> bool {
        self.answer_bytes > 0
    }

    /// The next chunk for the client, as JSON. The usage chunk is sent only on request: it has no choice, which
    /// plain loops over a stream do not expect.
    ///
    /// The future can be dropped without a loss.
    pub async fn next(&mut self) -> Result<Option<String>> {
        loop {
            let Some(chunk) = self.chunks.next().await? else {
                return Ok(None);
            };
            self.reported = chunk.usage.or(self.reported);
            if chunk.choices == 0 && !self.call.include_usage {
                continue;
            }
            self.answer_bytes += chunk.output_bytes;
            return Ok(Some(chunk.with_model(&self.call.agent.name)));
        }
    }
}

/// Counts however the stream ends: a client that disconnects has used the received part.
impl Drop for CompletionStream {
    fn drop(&mut self) {
        self.call.count(self.reported, self.answer_bytes);
    }
}
