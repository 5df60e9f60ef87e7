//! Use case of chat without a session: a request goes to the agent's model and its answer comes back.
//! Nothing is stored but what it used. Ends with the connection.

use std::sync::Arc;

use crate::agent_runtime::{Agent, AgentMember, Chunks};
use crate::app::App;
use crate::domain::tenant::usage::{UsageCounts, UsageName};
use crate::domain::turn::completion::{CompletionRequest, TokenUsage};
use crate::error::{Code, Error, Result};
use crate::fair_queue::Holder;
use crate::ids::{TenantId, UserId};
use crate::limits::StreamGuard;

/// A call of a model, and for whom.
pub struct Call {
    app: App,
    agent: Arc<Agent>,
    user_id: Option<UserId>,
    wants_stream: bool,
    /// Whether the client asked for a chunk about the usage.
    include_usage: bool,
    /// What the model is asked, until it is asked.
    body: Vec<u8>,
    /// How long that is.
    asked_bytes: usize,
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
            asked_bytes: body.len(),
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
        let mut held = Vec::new();
        let mut room = |bytes| {
            let memory = self.app.shares.answer(holder, bytes);
            let has_room = memory.is_some();
            held.extend(memory);
            has_room
        };
        let answer = self.app.models.complete(&self.agent, body, &mut room);
        let answer = answer.await?;
        self.count(answer.usage, answer.said);
        if answer.choices == 0 {
            let detail = "the model's server answered without a choice";
            return Err(Error::new(Code::UpstreamFailed, detail));
        }
        Ok(answer.with_model(&self.agent.name))
    }

    /// The answer in chunks. What goes wrong before the first is an error and no stream.
    pub async fn stream(mut self) -> Result<Answering> {
        let body = std::mem::take(&mut self.body);
        let chunks = self.app.models.stream(&self.agent, body, None).await?;
        Ok(Answering {
            call: self,
            chunks,
            said: 0,
            told: None,
        })
    }

    /// What it used, as it was told; otherwise by how many bytes were said.
    fn count(&self, told: Option<TokenUsage>, said: usize) {
        let estimate = || TokenUsage::estimate(self.asked_bytes, said);
        let usage = told.unwrap_or_else(estimate);
        let now = self.app.clock.now();
        let name = UsageName::model_call(
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

/// An answer that is under way.
pub struct Answering {
    call: Call,
    chunks: Chunks,
    /// Bytes that were said so far.
    said: usize,
    told: Option<TokenUsage>,
}

impl Answering {
    /// Whether something was said.
    pub fn has_begun(&self) -> bool {
        self.said > 0
    }

    /// The next chunk for the client, as JSON. The one about usage is theirs only if they asked for it: it
    /// has no choice in it, which plain loops over a stream do not expect.
    ///
    /// Nothing is lost when its future is dropped.
    pub async fn next(&mut self) -> Result<Option<String>> {
        loop {
            let Some(chunk) = self.chunks.next().await? else {
                return Ok(None);
            };
            self.told = chunk.usage.or(self.told);
            if chunk.choices == 0 && !self.call.include_usage {
                continue;
            }
            self.said += chunk.said;
            return Ok(Some(chunk.with_model(&self.call.agent.name)));
        }
    }
}

/// Counted however it ends: a client that leaves has used what was said.
impl Drop for Answering {
    fn drop(&mut self) {
        self.call.count(self.told, self.said);
    }
}
