//! `App`: what every handler and job works with, built once from the configuration. The only wiring.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use chrono::TimeDelta;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::agent_runtime::AgentRuntime;
use crate::auth::{FirstContact, KeyVerifier, OperatorKeys, TokenVerifier, Verifiers};
use crate::clock::Clock;
use crate::config::Config;
use crate::crypto::Keyring;
use crate::descriptors;
use crate::ids::{BootId, SessionId, TenantId};
use crate::limits::{Limiter, NodeShares};
use crate::notifications::Notifications;
use crate::recent::Recent;
use crate::redis::Redis;
use crate::shutdown::Shutdown;
use crate::store::Db;
use crate::streams::Streams;
use crate::upstream::{GuardedClient, OwnPorts};
use crate::usage::UsageMeter;

/// Cheap to clone; all clones are the same node.
#[derive(Clone)]
pub struct App {
    inner: Arc<Inner>,
}

pub struct Inner {
    pub config: Config,
    /// Tells this start of this node from all others.
    pub boot_id: BootId,
    pub clock: Clock,
    pub db: Db,
    pub redis: Redis,
    pub keyring: Arc<Keyring>,
    /// For every URL that a tenant or user gives.
    pub upstream: GuardedClient,
    pub verifiers: Verifiers,
    pub limits: Limiter,
    /// What tenants share on this node.
    pub shares: NodeShares,
    pub usage: UsageMeter,
    pub models: AgentRuntime,
    /// Subscriptions of this node, and notifications of all nodes.
    pub notifications: Notifications,
    /// Who read which conversation a moment ago: actor and conversation. The audit has it.
    pub recent_reads: Arc<Recent<(TenantId, String, SessionId)>>,
    /// What the open streams of this node share.
    pub streams: Streams,
    /// The turns that run on this node.
    pub turn_tasks: TaskTracker,
    /// Exports take turns, so that however many there are leave connections to the rest.
    pub export_permits: Semaphore,
    /// Whether every node that lives finds a stored answer by the hash of its name; not before that is known.
    pub hashes_names: AtomicBool,
    /// Whether the node drains or stops.
    pub shutdown: Shutdown,
}

impl App {
    pub async fn build(config: Config, clock: Clock) -> anyhow::Result<Self> {
        let keyring = Keyring::new(&config.secret_keys).context("THROUGHLINE_SECRET_KEY")?;
        let keyring = Arc::new(keyring);
        let own_ports = OwnPorts::of(&config);
        let upstream = GuardedClient::new(config.allow_private_upstreams.clone(), own_ports)?;
        let upstream = upstream.marked(&keyring.hop_mark());
        let redis = Redis::new(&config.redis_url)?;
        let boot_id = BootId::generate();
        let notifications = Notifications::new(boot_id);
        let db = Db::connect(&config.database_url, config.database_pool).await?;
        let db = db.with_notifier(notifications.notifier());
        let export_permits = Semaphore::new((config.database_pool as usize / 4).max(1));
        let shares = NodeShares::new(descriptors::limit());
        let limits = Limiter::new(redis.clone(), clock.clone(), shares.clone());
        let first_contact = FirstContact::new(db.clone(), clock.clone(), limits.clone());
        let models =
            AgentRuntime::new(db.clone(), clock.clone(), keyring.clone(), upstream.clone());
        let verifiers = Verifiers {
            operators: OperatorKeys::new(&config.operator_keys),
            keys: KeyVerifier::new(db.clone(), clock.clone()),
            tokens: TokenVerifier::new(
                db.clone(),
                clock.clone(),
                keyring.clone(),
                upstream.clone(),
                first_contact.clone(),
            ),
            first_contact,
        };
        let shutdown = Shutdown::new(&config);
        Ok(Self {
            inner: Arc::new(Inner {
                config,
                boot_id,
                clock,
                db,
                redis,
                keyring,
                upstream,
                verifiers,
                limits,
                shares,
                usage: UsageMeter::default(),
                models,
                notifications,
                recent_reads: Arc::new(Recent::new(TimeDelta::minutes(1))),
                streams: Streams::default(),
                turn_tasks: TaskTracker::new(),
                export_permits,
                hashes_names: AtomicBool::new(false),
                shutdown,
            }),
        })
    }
}

impl std::ops::Deref for App {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.inner
    }
}
