//! A tenant's agents as callers of models: which agent it is, as of less than a second ago, and the call
//! itself, to its upstream or to the demo model. Decides nothing about conversations.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;
use serde_json::Value;
use url::Url;

use crate::auth::ServiceCaller;
use crate::cache::ShortCache;
use crate::clock::Clock;
use crate::crypto::Keyring;
use crate::domain::tenant::agent::{AgentSpec, UpstreamKind};
use crate::domain::tenant::limits::Limits;
use crate::domain::turn::completion_object::CompletionObject;
use crate::domain::turn::demo_model;
use crate::error::{Code, Error, FailedCall, FieldError, Result};
use crate::ids::TenantId;
use crate::store::Db;
use crate::store::tenant::{agents, tenants};
use crate::upstream::{CallError, CompletionStream, Completions, GuardedClient, ModelServer};

const SMALL: usize = 64 * 1024;

/// An agent, ready to be asked.
pub struct Agent {
    pub tenant_id: TenantId,
    pub name: String,
    pub spec: AgentSpec,
    /// What its tenant may use.
    pub limits: Limits,
    model: Model,
}

/// Who answers for an agent.
enum Model {
    Demo,
    Server(ModelServer, Arc<CalledServer>),
}

/// A model's server as the log names it when a call fails: no path, no key.
pub struct CalledServer {
    tenant_id: TenantId,
    agent: String,
    host: String,
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut agent = f.debug_struct("Agent");
        agent.field("name", &self.name).finish_non_exhaustive()
    }
}

/// The member of a request that names its agent.
#[derive(Debug, Clone, Copy)]
pub enum AgentMember {
    /// `model`, as clients of OpenAI have it.
    Model,
    /// `agent`, of our own endpoints.
    Agent,
}

impl AgentMember {
    fn missing(self) -> Error {
        let detail = "there is no such agent";
        match self {
            Self::Model => {
                Error::fields(Code::ModelNotFound, vec![FieldError::new("/model", detail)])
            }
            Self::Agent => Error::invalid(vec![FieldError::new("/agent", detail)]),
        }
    }
}

/// A tenant's name for an agent.
type AgentName = (TenantId, String);

#[derive(Clone)]
pub struct AgentRuntime {
    db: Db,
    keyring: Arc<Keyring>,
    completions: Completions,
    agents: Arc<ShortCache<AgentName, Option<Arc<Agent>>>>,
}

/// Binds a sealed key to the agent it is for.
pub fn key_context(tenant_id: TenantId, agent: &str) -> String {
    format!("agents/{tenant_id}/{agent}/api_key")
}

impl AgentRuntime {
    pub fn new(db: Db, clock: Clock, keyring: Arc<Keyring>, client: GuardedClient) -> Self {
        Self {
            db,
            keyring,
            completions: Completions::new(client),
            agents: Arc::new(ShortCache::new(clock)),
        }
    }

    /// The agent of a name, as it is or was less than a second ago.
    pub async fn find(&self, tenant_id: TenantId, name: &str) -> Result<Option<Arc<Agent>>> {
        self.agents
            .get_with((tenant_id, name.to_owned()), || async {
                Ok(self.read(tenant_id, name).await?.map(Arc::new))
            })
            .await
    }

    /// The agent that a request names.
    pub async fn get(
        &self,
        tenant_id: TenantId,
        name: &str,
        member: AgentMember,
    ) -> Result<Arc<Agent>> {
        let agent = self.find(tenant_id, name).await?;
        agent.ok_or_else(|| member.missing())
    }

    /// An agent was changed on this node: later calls get it as it is now. Call it after the commit.
    pub async fn invalidate(&self, tenant_id: TenantId, name: &str) {
        self.agents.invalidate(&(tenant_id, name.to_owned())).await;
    }

    async fn read(&self, tenant_id: TenantId, name: &str) -> Result<Option<Agent>> {
        let caller = ServiceCaller::for_tenant(tenant_id);
        let mut tx = caller.begin(&self.db).await?;
        let row = agents::find(&mut tx, name).await?;
        let limits = tenants::get_limits(&mut tx).await?;
        tx.commit().await?;
        let Some(row) = row else {
            return Ok(None);
        };
        let api_key = match &row.api_key_enc {
            Some(sealed) => {
                let context = key_context(tenant_id, name);
                let opened = self
                    .keyring
                    .open(&context, sealed)
                    .map_err(Error::internal)?;
                Some(SecretString::from(
                    String::from_utf8(opened).map_err(Error::internal)?,
                ))
            }
            None => None,
        };
        Ok(Some(Agent {
            tenant_id,
            name: row.name,
            model: model_of(tenant_id, name, &row.spec, api_key.as_ref())?,
            spec: row.spec,
            limits,
        }))
    }

    /// The whole answer of an agent's model.
    pub async fn complete(
        &self,
        agent: &Agent,
        body: Vec<u8>,
        room: &mut dyn FnMut(usize) -> bool,
    ) -> Result<CompletionObject> {
        match &agent.model {
            Model::Demo => {
                let answer = off_this_thread(body, demo_model::complete).await?;
                of_demo(&answer)
            }
            Model::Server(server, called) => {
                let answer = self.completions.complete(server, body, room).await;
                answer.map_err(|error| refusal(called, &error))
            }
        }
    }

    /// Its answer in chunks. `session_key` tells a memory provider there whose memory it is.
    pub async fn stream(
        &self,
        agent: &Agent,
        body: Vec<u8>,
        session_key: Option<&str>,
    ) -> Result<Chunks> {
        match &agent.model {
            Model::Demo => {
                let chunks = off_this_thread(body, demo_model::stream).await?;
                Ok(Chunks::Demo(chunks))
            }
            Model::Server(server, called) => {
                let stream = self.completions.stream(server, session_key, body).await;
                let stream = stream.map_err(|error| refusal(called, &error))?;
                Ok(Chunks::Upstream(Box::new(stream), called.clone()))
            }
        }
    }
}

/// What the demo model makes of a request; of a large one it takes long enough for others on its thread to notice.
async fn off_this_thread<T: Send + 'static>(
    body: Vec<u8>,
    answer: fn(&[u8]) -> serde_json::Result<T>,
) -> Result<T> {
    let answered = if body.len() <= SMALL {
        answer(&body)
    } else {
        let answering = tokio::task::spawn_blocking(move || answer(&body));
        answering.await.map_err(Error::internal)?
    };
    answered.map_err(Error::internal)
}

/// The chunks of an answer, as they come.
pub enum Chunks {
    Upstream(Box<CompletionStream>, Arc<CalledServer>),
    Demo(demo_model::Chunks),
}

impl Chunks {
    pub async fn next(&mut self) -> Result<Option<CompletionObject>> {
        match self {
            Self::Upstream(stream, called) => {
                let next = stream.next().await;
                next.map_err(|error| refusal(called, &error))
            }
            Self::Demo(chunks) => chunks.next().as_ref().map(of_demo).transpose(),
        }
    }
}

fn model_of(
    tenant_id: TenantId,
    agent: &str,
    spec: &AgentSpec,
    api_key: Option<&SecretString>,
) -> Result<Model> {
    match spec.upstream.kind {
        UpstreamKind::Demo => Ok(Model::Demo),
        UpstreamKind::Openai => {
            let base_url = spec.upstream.base_url.as_deref().unwrap_or_default();
            let base_url: Url = base_url.parse().map_err(Error::internal)?;
            let timeout = Duration::from_secs(spec.upstream.timeout_seconds.into());
            let server = ModelServer::new(&tenant_id.to_string(), &base_url, api_key, timeout);
            let called = CalledServer {
                tenant_id,
                agent: agent.to_owned(),
                host: host_of(&base_url),
            };
            Ok(Model::Server(server, Arc::new(called)))
        }
    }
}

/// Host and port of a URL, without the rest.
fn host_of(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    }
}

fn of_demo(body: &Value) -> Result<CompletionObject> {
    let read = CompletionObject::read(body.to_string().into_bytes());
    read.map_err(|_| Error::internal(anyhow::anyhow!("the demo model says no completion")))
}

/// The error of a call that failed, for the client: whose fault it is, and whether to try again.
fn refusal(called: &CalledServer, error: &CallError) -> Error {
    let detail = error.to_string();
    let (code, retry_after) = match error {
        CallError::Refused { .. } => (Code::UpstreamRefused, None),
        CallError::Busy { retry_after } => (Code::UpstreamBusy, *retry_after),
        CallError::LeftAlone { retry_after } | CallError::Unavailable { retry_after } => {
            (Code::UpstreamFailed, Some(*retry_after))
        }
        CallError::TooLong(_) => (Code::ContextLengthExceeded, None),
        CallError::TooSlow => (Code::UpstreamTimeout, None),
        CallError::NotReached(_)
        | CallError::Failed(_)
        | CallError::Reported(_)
        | CallError::NotAllowed(_)
        | CallError::Broken
        | CallError::Malformed
        | CallError::TooLarge => (Code::UpstreamFailed, None),
    };
    let seconds =
        |time: Duration| u32::try_from(time.as_secs_f64().ceil() as u64).unwrap_or(u32::MAX);
    let mut errors = Vec::new();
    if let CallError::TooLong(_) = &error {
        errors.push(FieldError::new("/messages", detail.clone()));
    }
    Error {
        retry_after: retry_after.map(seconds),
        // A call that took long was paid for, and a wrong key stays wrong.
        is_final: matches!(error, CallError::TooSlow | CallError::NotAllowed(_)),
        errors,
        failed_call: Some(Box::new(FailedCall {
            tenant_id: called.tenant_id,
            agent: called.agent.clone(),
            host: called.host.clone(),
            reason: error.reason(),
        })),
        ..Error::new(code, detail)
    }
}
