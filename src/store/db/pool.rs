//! The connections to Postgres. One that goes back has ended what it did, which Postgres has acknowledged: no
//! open transaction, no setting of a tenant and no half-read answer ever reaches its next user.
//!
//! Ours and not sqlx's, because that asks Postgres once more, in a task of its own, each time that a connection goes
//! back; a short read takes half again as long by it. And not deadpool: as one pool for all threads, and as a pool for
//! each worker's runtime that closes another's idle connection when there are too many, it stood in for `idle` below,
//! with the queue and the begin around it. pgbench over HTTP, `cargo bench --bench resolve`, 16 clients, 10,000 and
//! 100,000 users: ours 1.66 to 1.73 and 1.65 to 1.67 (two runs), one pool 1.85 and 1.81, a pool for each worker 1.89
//! and 1.77; alike with 1 and 64 clients and in `--bench sessions`. `--bench chat -- short sessions`, one pool: on
//! average 1.50 for 1.36. On one connection used by two threads each answer wakes both; and deadpool's own semaphore is
//! paid beside the fair queue, which it cannot replace: that one shares among tenants.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, ConnectOptions};
use tokio::runtime::{Handle, Id};
use tokio::time::{sleep, timeout, timeout_at};

use super::limited::Limited;
use crate::error::{Error, Result};
use crate::fair_queue::{FairQueue, Holder, Permit, Refusal, Size};
use crate::ids::TenantId;
use crate::retry::Backoff;
use crate::telemetry;

/// A request that waits longer for a connection is better answered with an error.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(3);
/// Requests of one tenant that wait, for each connection of the pool.
const WAITING_PER_CONNECTION: usize = 32;
const MAX_LIFETIME: Duration = Duration::from_secs(30 * 60);
const MAX_IDLE: Duration = Duration::from_secs(10 * 60);
/// Longer than any statement may take: an abandoned one is waited for, so that Postgres never works on
/// more of them than we may have connections.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(20);
/// Between attempts to connect to a server that is starting: doubled each time.
const FIRST_RECONNECT: Duration = Duration::from_millis(50);
const LAST_RECONNECT: Duration = Duration::from_millis(800);
/// See `Open::refreshed`.
const FIRST_REPLAN: Duration = Duration::from_secs(1);
/// For what runs outside a tenant's transaction; those set their own. And how soon Postgres ends the connections of
/// a node whose host has vanished, with the locks they hold.
const LIMITS: &str = "set statement_timeout = '15s'; set lock_timeout = '5s'; set tcp_keepalives_idle = 30; \
     set tcp_keepalives_interval = 10; set tcp_keepalives_count = 3; set tcp_user_timeout = '30s'";

/// Postgres answers the commit of a transaction that has failed with a rollback, which is no error. Another
/// statement is one.
const COMMIT: &str = "select; commit";

const ROLLBACK: &str = "rollback";

const CANNOT_CONNECT_NOW: &str = "57P03";
const TOO_MANY_CONNECTIONS: &str = "53300";

#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    options: PgConnectOptions,
    size: u32,
    /// A place for each connection that is in use or being opened. Who has one opens a connection only when
    /// none is idle, so there are never more than `size`.
    queue: FairQueue,
    /// The one that was used last is at the end and is used first.
    idle: Mutex<Vec<Idle>>,
    dropped_transactions: AtomicU64,
}

/// How soon a transaction of a tenant needs its connection.
#[derive(Debug, Clone, Copy)]
pub enum Urgency {
    /// A request may be told to come again.
    Request,
    /// A turn that was accepted must keep its lease, and an open stream must know its rights.
    Turn,
}

struct Open {
    connection: PgConnection,
    since: Instant,
    /// When Postgres last dropped the plans of its statements.
    planned_since: Instant,
    /// Whose thread hears of answers first. Others can use the connection, but are woken through it.
    runtime: Id,
}

impl Open {
    /// `first`, before which plans are dropped that are older than half the connection. Postgres keeps the plan of
    /// a statement until a table is analysed: one that was made while a table had few rows reads all of them when
    /// there are many.
    fn refreshed<'a>(&mut self, first: &'a str) -> Cow<'a, str> {
        let now = Instant::now();
        let age = now - self.planned_since;
        if age < FIRST_REPLAN.max(self.planned_since - self.since) {
            return Cow::Borrowed(first);
        }
        self.planned_since = now;
        Cow::Owned(format!("discard plans; {first}"))
    }
}

struct Idle {
    open: Open,
    since: Instant,
}

impl Pool {
    pub fn new(options: PgConnectOptions, size: u32) -> Self {
        let shared = Shared {
            options,
            size,
            queue: FairQueue::new(share_of(size as usize)),
            idle: Mutex::new(Vec::new()),
            dropped_transactions: AtomicU64::new(0),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// How many transactions were dropped before they had ended.
    pub fn dropped_transactions(&self) -> u64 {
        self.shared.dropped_transactions.load(Ordering::Relaxed)
    }

    /// A connection for single statements, each its own transaction.
    pub async fn acquire(&self) -> sqlx::Result<Lease> {
        let deadline = tokio::time::Instant::now() + ACQUIRE_TIMEOUT;
        let place = timeout_at(deadline, self.shared.queue.acquire(Holder::Service, 1)).await;
        let place = match place {
            Ok(Ok(place)) => place,
            Ok(Err(Refusal::Closed)) => return Err(sqlx::Error::PoolClosed),
            Ok(Err(Refusal::Full)) | Err(_) => return Err(sqlx::Error::PoolTimedOut),
        };
        let mut lease = self.lease(place, "");
        let ready = timeout_at(deadline, lease.make_ready("")).await;
        ready.unwrap_or(Err(sqlx::Error::PoolTimedOut))?;
        Ok(lease)
    }

    /// A connection on which a statement or several have begun a transaction of a tenant, for its requests or for its
    /// turns. `begin` makes them, and gets whether many requests of the tenant are under way.
    pub async fn begin(
        &self,
        tenant_id: TenantId,
        urgency: Urgency,
        begin: impl FnOnce(bool) -> String,
    ) -> Result<Lease> {
        let deadline = tokio::time::Instant::now() + ACQUIRE_TIMEOUT;
        let queue = &self.shared.queue;
        let holder = match urgency {
            Urgency::Request => Holder::Tenant(tenant_id),
            Urgency::Turn => Holder::TenantTurns(tenant_id),
        };
        let place = match timeout_at(deadline, queue.acquire(holder, 1)).await {
            Ok(Ok(place)) => place,
            Ok(Err(Refusal::Full)) => return Err(crowded()),
            Ok(Err(Refusal::Closed)) => return Err(sqlx::Error::PoolClosed.into()),
            Err(_) if queue.is_crowded(tenant_id) => return Err(crowded()),
            Err(_) => return Err(sqlx::Error::PoolTimedOut.into()),
        };
        let was_late = deadline - tokio::time::Instant::now() < ACQUIRE_TIMEOUT / 2;
        let begin = begin(queue.is_crowded(tenant_id));
        let mut lease = self.lease(place, ROLLBACK);
        let ready = timeout_at(deadline, lease.make_ready(&begin)).await;
        match ready {
            Ok(ready) => ready?,
            // Not for Postgres, but for the tenant's requests before it.
            Err(_) if was_late && queue.is_crowded(tenant_id) => return Err(crowded()),
            Err(_) => return Err(sqlx::Error::PoolTimedOut.into()),
        }
        Ok(lease)
    }

    fn lease(&self, place: Permit, undo: &'static str) -> Lease {
        Lease {
            open: None,
            place: Some(place),
            shared: self.shared.clone(),
            undo,
        }
    }

    /// Nobody gets a connection any more; waits a while for those that are in use. One that comes back later is
    /// closed.
    pub async fn close(&self) {
        self.shared.queue.close();
        let _in_time = timeout(ACQUIRE_TIMEOUT, self.shared.queue.until_empty()).await;
        self.shared.idle().clear();
    }
}

/// Requests of a tenant have three quarters, its turns an eighth more; of a small pool one connection is left to the
/// others nevertheless.
fn share_of(size: usize) -> Size {
    let turns_reserve = (size / 8).max(1).min(size - 1);
    let with_turns = (size - size / 4 + turns_reserve).min(size - 1).max(1);
    Size {
        total: size,
        tenant_max: (with_turns - turns_reserve).max(1),
        turns_reserve,
        tenant_waiting: size * WAITING_PER_CONNECTION,
    }
}

fn crowded() -> Error {
    Error::busy("too many requests of the tenant wait for the database")
}

impl Shared {
    /// One that this runtime opened. Another's only when no more may be opened: every answer on it would wake
    /// two threads.
    fn take_idle(&self) -> Option<Open> {
        let here = Handle::current().id();
        let mut idle = self.idle();
        let own = idle.iter().rposition(|idle| idle.open.runtime == here);
        let in_use = self.queue.in_use();
        match own {
            Some(place) => Some(idle.remove(place).open),
            None if in_use + idle.len() <= self.size as usize => None,
            None => idle.pop().map(|idle| idle.open),
        }
    }

    async fn connect(&self) -> sqlx::Result<Open> {
        let mut backoff = Backoff::new(FIRST_RECONNECT, LAST_RECONNECT);
        loop {
            match self.options.connect().await {
                Ok(mut connection) => {
                    execute(&mut connection, LIMITS).await?;
                    let now = Instant::now();
                    return Ok(Open {
                        connection,
                        since: now,
                        planned_since: now,
                        runtime: Handle::current().id(),
                    });
                }
                Err(error) if is_starting(&error) => {
                    sleep(backoff.next_pause()).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Before the place of `open` is released.
    fn put_idle(&self, open: Open) {
        if self.queue.is_closed() || open.since.elapsed() > MAX_LIFETIME {
            return;
        }
        let mut idle = self.idle();
        idle.push(Idle {
            open,
            since: Instant::now(),
        });
        let kept = |idle: &Idle| idle.since.elapsed() < MAX_IDLE;
        let first = idle.iter().position(kept).unwrap_or_default();
        idle.drain(..first);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection in use. If it is dropped without `commit`, what it did is undone before anyone else gets it.
pub struct Lease {
    /// Always there until `commit` or the end takes it.
    open: Option<Open>,
    place: Option<Permit>,
    shared: Arc<Shared>,
    undo: &'static str,
}

impl Lease {
    /// Takes a connection and does `first` on it. The connection is the lease's from the beginning: if nobody
    /// waits any more, it is kept until Postgres has answered, so that a server that stalls does not collect
    /// backends of clients that are gone.
    async fn make_ready(&mut self, first: &str) -> sqlx::Result<()> {
        while let Some(open) = self.shared.take_idle() {
            let open = self.open.insert(open);
            let first = open.refreshed(first);
            if execute(&mut open.connection, &first).await.is_ok() {
                return Ok(());
            }
            // Postgres was restarted, most likely. What begins a transaction has no effect, so it can be done
            // again on another connection.
            self.open = None;
        }
        let open = self.shared.connect().await?;
        let open = self.open.insert(open);
        let done = execute(&mut open.connection, first).await;
        if done.is_err() {
            self.open = None;
        }
        done
    }

    /// For statements, each of which ends.
    pub fn limited(&mut self) -> Limited<'_> {
        Limited(self)
    }

    pub async fn commit(self) -> sqlx::Result<()> {
        self.end(COMMIT).await
    }

    pub async fn roll_back(self) -> sqlx::Result<()> {
        self.end(ROLLBACK).await
    }

    /// If this fails or is dropped on its way, the connection is closed: nobody knows what state it is in.
    async fn end(mut self, statement: &str) -> sqlx::Result<()> {
        if let Some(mut open) = self.open.take() {
            execute(&mut open.connection, statement).await?;
            self.shared.put_idle(open);
        }
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let open = self.open.take();
        let place = self.place.take();
        let (Some(mut open), Ok(runtime)) = (open, Handle::try_current()) else {
            return;
        };
        let shared = self.shared.clone();
        let undo = self.undo;
        if undo == ROLLBACK {
            self.shared
                .dropped_transactions
                .fetch_add(1, Ordering::Relaxed);
            telemetry::count_dropped_transaction();
        }
        runtime.spawn(async move {
            // First reads to its end what somebody stopped waiting for.
            let undoing = execute(&mut open.connection, undo);
            if let Ok(Ok(())) = timeout(RECOVERY_TIMEOUT, undoing).await {
                shared.put_idle(open);
            }
            drop(place);
        });
    }
}

impl Deref for Lease {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match &self.open {
            Some(open) => &open.connection,
            None => unreachable!("only what ends a lease takes its connection"),
        }
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match &mut self.open {
            Some(open) => &mut open.connection,
            None => unreachable!("only what ends a lease takes its connection"),
        }
    }
}

async fn execute(connection: &mut PgConnection, sql: &str) -> sqlx::Result<()> {
    let sql = AssertSqlSafe(sql.to_owned());
    sqlx::raw_sql(sql).execute(Limited(connection)).await?;
    Ok(())
}

/// Whether this is what a server says that is not there yet, or has not noticed yet who left.
fn is_starting(error: &sqlx::Error) -> bool {
    if let sqlx::Error::Io(error) = error {
        return error.kind() == ErrorKind::ConnectionRefused;
    }
    let state = error.as_database_error().and_then(|error| error.code());
    matches!(
        state.as_deref(),
        Some(CANNOT_CONNECT_NOW | TOO_MANY_CONNECTIONS)
    )
}
