//! Limits on how often something may be done, held across nodes without a trip to Redis for each time:
//! a node takes chunks of a window's limit from Redis and spends them from memory. While Redis does not
//! answer, a node spends its share: the limit divided by the nodes that live.
//!
//! Windows are fixed and begin at whole minutes or hours of the node's clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::watch;
use tracing::Instrument;

use crate::clock::Clock;
use crate::error::{Code, Error};
use crate::fair_queue::Permit;
use crate::ids::{ApiKeyId, TenantId, UserId};
use crate::redis::Redis;
use crate::redis::limits::LimitWindow;

mod breaker;
mod buckets;
mod open;
mod shares;

use breaker::Breaker;
use buckets::{Buckets, Key, Source, Step};
use open::{OpenCount, OpenCounts};
pub use shares::{MAX_VALUES_COST, Memory, NodeShares, SMALL};

/// How long a request waits for Redis before it counts on its node's share.
const PATIENCE_MS: u32 = 50;
const MINUTE: i64 = 60;
const HOUR: i64 = 3600;

/// What is counted, inside a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bucket {
    Requests,
    KeyRequests(ApiKeyId),
    /// By the acting person.
    UserRequests(UserId),
    Tokens,
    NewIdentities,
}

impl Bucket {
    /// What clients read in `RateLimit`.
    pub const fn policy(&self) -> &'static str {
        match self {
            Self::Requests => "tenant",
            Self::KeyRequests(_) => "key",
            Self::UserRequests(_) => "person",
            Self::Tokens => "tokens",
            Self::NewIdentities => "identities",
        }
    }

    pub const fn window_seconds(&self) -> i64 {
        match self {
            Self::Requests | Self::KeyRequests(_) | Self::UserRequests(_) | Self::Tokens => MINUTE,
            Self::NewIdentities => HOUR,
        }
    }

    /// The number of the window that `now` lies in.
    fn window_at(&self, now: i64) -> i64 {
        now.div_euclid(self.window_seconds())
    }

    fn window_name(&self, tenant_id: TenantId, window: i64) -> String {
        let policy = self.policy();
        match self {
            Self::KeyRequests(id) => format!("{tenant_id}:{policy}:{id}:{window}"),
            Self::UserRequests(id) => format!("{tenant_id}:{policy}:{id}:{window}"),
            Self::Requests | Self::Tokens | Self::NewIdentities => {
                format!("{tenant_id}:{policy}:{window}")
            }
        }
    }
}

/// One limit that something must keep.
#[derive(Debug, Clone, Copy)]
pub struct Demand {
    pub bucket: Bucket,
    pub limit: u32,
    /// How much of it is spent at once.
    pub cost: u32,
}

impl Demand {
    pub const fn one(bucket: Bucket, limit: u32) -> Self {
        Self {
            bucket,
            limit,
            cost: 1,
        }
    }
}

/// Where a limit stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    pub policy: &'static str,
    pub limit: u32,
    pub window_seconds: u32,
    /// As far as this node knows: others may have used some since.
    pub remaining: u32,
    /// Seconds until the window ends.
    pub resets_in: u32,
}

impl Allowance {
    /// The answer of a limit that is used up.
    pub fn refusal(&self) -> Error {
        let detail = format!(
            "the limit \"{}\" is {} in {} seconds; it resets in {} seconds",
            self.policy, self.limit, self.window_seconds, self.resets_in
        );
        Error {
            retry_after: Some(self.resets_in),
            ..Error::new(Code::RateLimited, detail)
        }
    }
}

/// Cheap to clone; clones share what they took.
#[derive(Clone)]
pub struct Limiter {
    inner: Arc<Inner>,
}

/// A stream or a call that is open, with its connections; dropped, it is closed.
pub struct StreamGuard {
    _counted: OpenCount,
    _connections: Permit,
}

struct Inner {
    redis: Redis,
    clock: Clock,
    buckets: Buckets,
    breaker: Breaker,
    live_nodes: AtomicU32,
    streams: OpenCounts,
    calls: OpenCounts,
    shares: NodeShares,
    patience_ms: AtomicU32,
    /// The minute in which a failure of Redis was last logged.
    logged: AtomicI64,
}

impl Limiter {
    pub fn new(redis: Redis, clock: Clock, shares: NodeShares) -> Self {
        Self {
            inner: Arc::new(Inner {
                redis,
                clock,
                buckets: Buckets::new(),
                breaker: Breaker::new(),
                live_nodes: AtomicU32::new(1),
                streams: OpenCounts::default(),
                calls: OpenCounts::default(),
                shares,
                patience_ms: AtomicU32::new(PATIENCE_MS),
                logged: AtomicI64::new(0),
            }),
        }
    }

    /// Among how many nodes a limit is divided while Redis does not answer.
    pub fn set_live_nodes(&self, count: u32) {
        self.inner.live_nodes.store(count.max(1), Ordering::Relaxed);
    }

    pub fn live_nodes(&self) -> u32 {
        self.inner.live_nodes.load(Ordering::Relaxed)
    }

    /// For tests of exact counts, on machines too busy for the usual patience.
    pub fn set_patience(&self, milliseconds: u32) {
        self.inner
            .patience_ms
            .store(milliseconds, Ordering::Relaxed);
    }

    pub fn forget_history(&self) {
        let now = self.inner.clock.now().timestamp();
        self.inner.buckets.forget_history(now);
    }

    /// Removes from Redis what people who are no more have spent. What cannot be removed now runs out
    /// within two windows.
    pub async fn forget_users(&self, tenant_id: TenantId, people: &[UserId]) {
        let now = self.inner.clock.now().timestamp();
        let windows = |id: &UserId| {
            let bucket = Bucket::UserRequests(*id);
            let current = bucket.window_at(now);
            (current - 2..=current + 1).map(move |window| bucket.window_name(tenant_id, window))
        };
        let names: Vec<String> = people.iter().flat_map(windows).collect();
        if let Err(error) = self.inner.redis.forget_limits(&names).await {
            tracing::warn!(tenant = %tenant_id, error = %error, "rate limit cleanup failed");
        }
    }

    /// Spends from all of `demands`, or from none, and answers the tightest; an error is the one that
    /// refused.
    pub async fn take(
        &self,
        tenant_id: TenantId,
        demands: &[Demand],
    ) -> Result<Option<Allowance>, Allowance> {
        let now = self.inner.clock.now().timestamp();
        let mut tightest: Option<Allowance> = None;
        for (place, demand) in demands.iter().enumerate() {
            match self.inner.take_one(tenant_id, demand, now).await {
                Ok(allowance) => {
                    if tightest.is_none_or(|known| allowance.remaining < known.remaining) {
                        tightest = Some(allowance);
                    }
                }
                Err(refused) => {
                    for Demand { bucket, cost, .. } in &demands[..place] {
                        let key = (tenant_id, *bucket);
                        let window = bucket.window_at(now);
                        self.inner.buckets.give_back(key, window, *cost);
                    }
                    return Err(refused);
                }
            }
        }
        Ok(tightest)
    }
}

impl Limiter {
    /// Whether a model may be asked. Tokens are known only when they were used: a tenant that has none left
    /// waits for the next minute.
    pub async fn check_tokens(&self, tenant_id: TenantId, limit: u32) -> Result<(), Error> {
        let spent = self
            .take(tenant_id, &[Demand::one(Bucket::Tokens, limit)])
            .await;
        spent.map(drop).map_err(|refused| refused.refusal())
    }

    /// Opens a stream, until the answer is dropped.
    pub fn open_stream(&self, tenant_id: TenantId, limit: u32) -> Result<StreamGuard, Error> {
        let counted = self.inner.streams.open(tenant_id, self.node_share(limit));
        self.hold(tenant_id, counted, 1, || {
            let detail = format!("the limit is {limit} streams at one time");
            Error::new(Code::TooManyStreams, detail)
        })
    }

    /// Begins a call of a model outside of sessions, until the answer is dropped.
    pub fn open_call(&self, tenant_id: TenantId, limit: u32) -> Result<StreamGuard, Error> {
        let counted = self.inner.calls.open(tenant_id, self.node_share(limit));
        self.hold(tenant_id, counted, 2, || {
            let detail = format!("the limit is {limit} calls at one time");
            Error::new(Code::TooManyCalls, detail)
        })
    }

    fn hold(
        &self,
        tenant_id: TenantId,
        counted: Option<OpenCount>,
        connections: usize,
        refusal: impl FnOnce() -> Error,
    ) -> Result<StreamGuard, Error> {
        let counted = counted.ok_or_else(|| Error {
            retry_after: Some(1),
            ..refusal()
        })?;
        Ok(StreamGuard {
            _counted: counted,
            _connections: self.inner.shares.connections(tenant_id, connections)?,
        })
    }

    fn node_share(&self, limit: u32) -> u32 {
        u32::try_from(self.inner.share(limit)).unwrap_or(u32::MAX)
    }

    /// Takes tokens that a model has used, as far as the tenant's window has them.
    pub fn charge_tokens(&self, tenant_id: TenantId, limit: u32, tokens: i64) {
        let limiter = self.clone();
        let mut left = u32::try_from(tokens).unwrap_or(u32::MAX).min(limit);
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        if self.inner.has_tokens(tenant_id, limit, left) {
            return;
        }
        let charging = async move {
            while left > 0 {
                let demand = Demand {
                    bucket: Bucket::Tokens,
                    limit,
                    cost: left,
                };
                match limiter.take(tenant_id, &[demand]).await {
                    Ok(_) => return,
                    // There is not as much: then whatever there is.
                    Err(_) => left /= 2,
                }
            }
        };
        runtime.spawn(charging.in_current_span());
    }
}

impl Inner {
    async fn take_one(
        self: &Arc<Self>,
        tenant_id: TenantId,
        demand: &Demand,
        now: i64,
    ) -> Result<Allowance, Allowance> {
        let key = (tenant_id, demand.bucket);
        let window = demand.bucket.window_at(now);
        let share = self.share(demand.limit);
        let may_ask = || self.breaker.lets_through();
        let mut source = Source::RedisIf(&may_ask);
        let mut waited_since = None;
        loop {
            let mut asked = match self.buckets.step(key, window, demand, share, &source) {
                Step::Granted { remaining } => return Ok(allowance(demand, now, remaining)),
                Step::Refused => return Err(allowance(demand, now, 0)),
                Step::Wait(asked) => asked,
                Step::Ask {
                    amount,
                    done,
                    asked,
                } => {
                    self.clone().ask(key, window, demand.limit, amount, done);
                    asked
                }
            };
            let since = *waited_since.get_or_insert_with(Instant::now);
            let left = self.patience().saturating_sub(since.elapsed());
            if tokio::time::timeout(left, asked.changed()).await.is_err() {
                self.note_failure("no answer in time");
                source = Source::Share;
            }
        }
    }

    /// Asks Redis for a chunk. On a task of its own: the grant is kept if it comes too late for who
    /// asked, or if they went away.
    fn ask(
        self: Arc<Self>,
        key: Key,
        window: i64,
        limit: u32,
        amount: u64,
        done: watch::Sender<()>,
    ) {
        let asking = async move {
            let (tenant_id, bucket) = key;
            let name = LimitWindow {
                name: bucket.window_name(tenant_id, window),
                limit,
                kept_seconds: 2 * bucket.window_seconds(),
            };
            let began = Instant::now();
            let grant = match self.redis.claim_from_limit(&name, amount).await {
                Ok(grant) => {
                    // A late answer is good, and yet nobody shall wait for the next.
                    if began.elapsed() < self.patience() {
                        self.breaker.close();
                    }
                    Some(grant)
                }
                Err(error) => {
                    let cause = error.cause.map(|cause| format!("{cause:#}"));
                    self.note_failure(cause.as_deref().unwrap_or("no answer"));
                    None
                }
            };
            self.buckets.settle(key, window, limit, amount, grant);
            drop(done);
        };
        tokio::spawn(asking.in_current_span());
    }

    /// Takes tokens from what this node has of them, without asking anybody. False if it has not as many.
    fn has_tokens(&self, tenant_id: TenantId, limit: u32, cost: u32) -> bool {
        let demand = Demand {
            bucket: Bucket::Tokens,
            limit,
            cost,
        };
        let window = Bucket::Tokens.window_at(self.clock.now().timestamp());
        let key = (tenant_id, Bucket::Tokens);
        self.buckets.take_held(key, window, &demand)
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(self.patience_ms.load(Ordering::Relaxed).into())
    }

    fn share(&self, limit: u32) -> u64 {
        let nodes = self.live_nodes.load(Ordering::Relaxed);
        u64::from((limit / nodes).max(limit.min(1)))
    }

    fn note_failure(&self, cause: &str) {
        self.breaker.open();
        let minute = self.clock.now().timestamp() / MINUTE;
        if self.logged.swap(minute, Ordering::Relaxed) != minute {
            let nodes = self.live_nodes.load(Ordering::Relaxed);
            tracing::warn!(
                nodes,
                cause,
                "Redis unavailable; enforcing local shares of limits"
            );
        }
    }
}

fn allowance(demand: &Demand, now: i64, remaining: u32) -> Allowance {
    let window = demand.bucket.window_seconds();
    let seconds = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
    Allowance {
        policy: demand.bucket.policy(),
        limit: demand.limit,
        window_seconds: seconds(window),
        remaining,
        resets_in: seconds(window - now.rem_euclid(window)),
    }
}
