//! A tenant's agents as callers of models: which agent it is, as of less than a second ago, and the call
//! itself, to its upstream or to the demo model. Decides nothing about conversations.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moka::future::Cache;
use secrecy::SecretString;
use serde_json::Value;

use crate::auth::JobCaller;
use crate::crypto::Keyring;
use crate::domain::agent::{AgentSpec, UpstreamKind};
use crate::domain::demo_model;
use crate::domain::limits::Limits;
use crate::error::{Code, Error, Result};
use crate::ids::TenantId;
use crate::store::{Db, agents, tenants};
use crate::upstream::{CallError, CompletionStream, Completions, GuardedClient, ModelServer};

/// A change of an agent holds everywhere within this.
const BELIEVED: Duration = Duration::from_millis(800);
const REMEMBERED: u64 = 10_000;

/// An agent, ready to be asked.
pub struct Agent {
    pub tenant_id: TenantId,
    pub name: String,
    pub spec: AgentSpec,
    /// What its tenant may use.
    pub limits: Limits,
    api_key: Option<SecretString>,
}

#[derive(Clone)]
struct Remembered {
    asked_at: Instant,
    agent: Option<Arc<Agent>>,
}

#[derive(Clone)]
pub struct Models {
    db: Db,
    keyring: Arc<Keyring>,
    completions: Completions,
    agents: Cache<(TenantId, String), Remembered>,
}

/// Binds a sealed key to the agent it is for.
pub fn key_context(tenant_id: TenantId, agent: &str) -> String {
    format!("agents/{tenant_id}/{agent}/api_key")
}

impl Models {
    pub fn new(db: Db, keyring: Arc<Keyring>, client: GuardedClient) -> Self {
        Self {
            db,
            keyring,
            completions: Completions::new(client),
            agents: Cache::builder()
                .max_capacity(REMEMBERED)
                .time_to_live(BELIEVED)
                .build(),
        }
    }

    /// The agent of a name, as it is or was less than a second ago.
    pub async fn find(&self, tenant_id: TenantId, name: &str) -> Result<Option<Arc<Agent>>> {
        let wanted = (tenant_id, name.to_owned());
        if let Some(known) = self.agents.get(&wanted).await
            && known.asked_at.elapsed() < BELIEVED
        {
            return Ok(known.agent);
        }
        let asked_at = Instant::now();
        let agent = self.read(tenant_id, name).await?.map(Arc::new);
        let known = Remembered {
            asked_at,
            agent: agent.clone(),
        };
        self.agents.insert(wanted, known).await;
        Ok(agent)
    }

    async fn read(&self, tenant_id: TenantId, name: &str) -> Result<Option<Agent>> {
        let caller = JobCaller::of_served_tenant(tenant_id);
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
            spec: row.spec,
            limits,
            api_key,
        }))
    }

    /// The whole answer of an agent's model.
    pub async fn complete(&self, agent: &Agent, body: Vec<u8>) -> Result<Value> {
        match agent.spec.upstream.kind {
            UpstreamKind::Demo => Ok(demo_model::complete(&parse(&body)?)),
            UpstreamKind::Openai => {
                let (owner, server) = (agent.tenant_id.to_string(), server_of(agent, None)?);
                let answer = self.completions.complete(&owner, &server, &body).await;
                answer.map_err(refusal)
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
        match agent.spec.upstream.kind {
            UpstreamKind::Demo => {
                let chunks = demo_model::stream(&parse(&body)?);
                Ok(Chunks::Demo(chunks.into_iter()))
            }
            UpstreamKind::Openai => {
                let (owner, server) = (agent.tenant_id.to_string(), server_of(agent, session_key)?);
                let stream = self.completions.stream(&owner, &server, &body).await;
                stream.map(Box::new).map(Chunks::Upstream).map_err(refusal)
            }
        }
    }
}

fn parse(body: &[u8]) -> Result<Value> {
    serde_json::from_slice(body).map_err(Error::internal)
}

/// The chunks of an answer, as they come.
pub enum Chunks {
    Upstream(Box<CompletionStream>),
    Demo(std::vec::IntoIter<Value>),
}

impl Chunks {
    pub async fn next(&mut self) -> Result<Option<Value>> {
        match self {
            Self::Upstream(stream) => stream.next().await.map_err(refusal),
            Self::Demo(chunks) => Ok(chunks.next()),
        }
    }
}

fn server_of(agent: &Agent, session_key: Option<&str>) -> Result<ModelServer> {
    let base_url = agent.spec.upstream.base_url.as_deref().unwrap_or_default();
    Ok(ModelServer {
        base_url: base_url.parse().map_err(Error::internal)?,
        api_key: agent.api_key.clone(),
        session_key: session_key.map(str::to_owned),
    })
}

/// What a client is told of a call that failed: whose fault it is, and whether to try again.
fn refusal(error: CallError) -> Error {
    let detail = error.to_string();
    let (code, retry_after) = match &error {
        CallError::Refused { .. } => (Code::UpstreamRefused, None),
        CallError::Busy { retry_after } => (Code::UpstreamBusy, *retry_after),
        CallError::LeftAlone { retry_after } => (Code::UpstreamFailed, Some(*retry_after)),
        CallError::TooSlow => (Code::UpstreamTimeout, None),
        CallError::NotReached(_)
        | CallError::Failed(_)
        | CallError::NotAllowed(_)
        | CallError::Broken
        | CallError::Malformed
        | CallError::TooLarge => (Code::UpstreamFailed, None),
    };
    let seconds =
        |time: Duration| u32::try_from(time.as_secs_f64().ceil() as u64).unwrap_or(u32::MAX);
    Error {
        retry_after: retry_after.map(seconds),
        ..Error::new(code, detail)
    }
}
