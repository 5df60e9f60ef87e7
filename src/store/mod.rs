//! Postgres, and the only room with SQL. Tenant rows are reached through a `TenantTx` alone, and a
//! `TenantTx` is opened by `auth` for a caller. The store knows no policy: it reads and writes rows.

use std::str::FromStr;
use std::sync::Arc;

use anyhow::Context;
use secrecy::{ExposeSecret, SecretString};
use sqlx::AssertSqlSafe;
use sqlx::postgres::PgConnectOptions;

use crate::error::{Code, Error, Result};
use crate::ids::{BootId, SessionId, TenantId, TurnId};
use crate::notification::{Notification, Notifier, Topic};
use crate::store::db::limited::Limited;
use crate::store::db::outages::Outages;
use crate::store::db::pool::{Lease, Pool};
use crate::store::people::presence;
use db::{migrate, roles};

pub use crate::store::db::pool::Urgency;

/// The oldest server whose views and policies we rely on.
const MIN_SERVER_VERSION: i32 = 150_000;

const LOCK_TIMEOUT: &str = "5s";
/// Where many requests of a tenant are under way: each that waits for a row holds a connection.
const CROWDED_LOCK_TIMEOUT: &str = "1s";

/// The connection pool. Only this room sees the pool itself.
#[derive(Clone)]
pub struct Db {
    pool: Pool,
    /// When it did not answer.
    pub outages: Arc<Outages>,
    notifier: Notifier,
}

impl Db {
    /// Opens the first connection, refuses a role or schema the service must not run with.
    pub async fn connect(url: &SecretString, connections: u32) -> anyhow::Result<Self> {
        let options = connect_options(url, "DATABASE_URL")?;
        let pool = Pool::new(options, connections);
        let mut connection = pool
            .acquire()
            .await
            .context("cannot connect to Postgres (THROUGHLINE_DATABASE_URL)")?;
        let version: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int")
            .fetch_one(&mut *connection)
            .await?;
        anyhow::ensure!(
            version >= MIN_SERVER_VERSION,
            "Postgres 15 or newer is needed"
        );
        roles::refuse_unsafe_role(&mut connection).await?;
        migrate::refuse_old_schema(&mut connection).await?;
        drop(connection);
        Ok(Self {
            pool,
            outages: Arc::default(),
            notifier: Arc::new(|_| ()),
        })
    }

    /// Publishes through `notifier` what transactions notify others of; until then nobody is notified.
    pub fn with_notifier(self, notifier: Notifier) -> Self {
        Self { notifier, ..self }
    }

    /// Begins a transaction in which only rows of `tenant_id` exist. For `auth`, which has a caller
    /// to justify it; the architecture test holds that nobody else calls it.
    pub async fn begin_tenant(&self, tenant_id: TenantId, urgency: Urgency) -> Result<TenantTx> {
        // One round trip. A parsed uuid has only hex digits and dashes.
        let begin = |is_crowded: bool| {
            let lock_timeout = if is_crowded {
                CROWDED_LOCK_TIMEOUT
            } else {
                LOCK_TIMEOUT
            };
            format!(
                "begin; set local app.tenant_id = '{}'; set local statement_timeout = '15s'; \
                 set local lock_timeout = '{lock_timeout}'; set local idle_in_transaction_session_timeout = '30s'",
                tenant_id.as_uuid()
            )
        };
        let lease = self.pool.begin(tenant_id, urgency, begin).await?;
        Ok(TenantTx {
            lease,
            tenant_id,
            seen: None,
            notifier: self.notifier.clone(),
            notifications: Vec::new(),
            after_commit: Vec::new(),
            mark: (0, 0),
        })
    }

    /// How many transactions ended without `commit` or `end`, and so by a rollback.
    pub fn dropped_transactions(&self) -> u64 {
        self.pool.dropped_transactions()
    }

    /// Whether Postgres answers.
    pub async fn ping(&self) -> Result<()> {
        self.connection().await?;
        Ok(())
    }

    /// For a statement outside a tenant's transaction; Postgres answered on it just now.
    async fn connection(&self) -> Result<Lease> {
        Ok(self.pool.acquire().await?)
    }

    pub async fn close(&self) {
        self.pool.close().await;
    }
}

/// A transaction of one tenant; rolled back unless committed.
pub struct TenantTx {
    lease: Lease,
    tenant_id: TenantId,
    /// An identity that spoke; written by `commit`.
    seen: Option<presence::PresenceUpdate>,
    notifier: Notifier,
    /// Published by `commit`; collected by the store functions that write what they are about.
    notifications: Vec<Notification>,
    after_commit: Vec<Box<dyn FnOnce() + Send>>,
    /// How many of both there were at the mark.
    mark: (usize, usize),
}

impl TenantTx {
    pub fn tenant_id(&self) -> TenantId {
        self.tenant_id
    }

    /// Commits, and then notifies. Presence is written first, as the last statement: a transaction that waits for
    /// nothing afterwards has no place in the lock order.
    pub async fn commit(mut self) -> Result<()> {
        if let Some(seen) = self.seen.take() {
            presence::write(&mut self, &seen).await?;
        }
        self.lease.commit().await?;
        for notification in self.notifications {
            (self.notifier)(notification);
        }
        self.after_commit.into_iter().for_each(|then| then());
        Ok(())
    }

    /// Ends a transaction that has only read. One that is dropped costs a rollback in a task of its own, and its
    /// connection until then.
    pub async fn end(self) -> Result<()> {
        debug_assert!(self.seen.is_none() && self.notifications.is_empty());
        Ok(self.lease.commit().await?)
    }

    /// Notifies the subscribers of a conversation, once this is committed.
    fn notify_conversation(&mut self, conversation_id: SessionId) {
        self.notify(Notification::Changed(Topic::Conversation(conversation_id)));
    }

    /// Notifies the bridges that wait for deliveries of the tenant.
    fn notify_deliveries(&mut self) {
        self.notify(Notification::Changed(Topic::Deliveries(self.tenant_id)));
    }

    /// Notifies the node that runs a turn.
    fn notify_turn(&mut self, node: BootId, turn_id: TurnId) {
        self.notify(Notification::Turn(node, turn_id));
    }

    fn notify(&mut self, notification: Notification) {
        if self.notifications.last() != Some(&notification) {
            self.notifications.push(notification);
        }
    }

    /// Done once what `self` wrote is committed, and never otherwise.
    pub fn after_commit(&mut self, then: impl FnOnce() + Send + 'static) {
        self.after_commit.push(Box::new(then));
    }

    /// Notes that an identity spoke, for `commit` to write.
    pub fn note_presence(&mut self, seen: presence::PresenceUpdate) {
        self.seen = Some(seen);
    }

    /// Undoes what was written, when a condition that was checked on the way did not hold.
    pub async fn roll_back(self) -> Result<()> {
        Ok(self.lease.roll_back().await?)
    }

    /// Goes on inside `tenant_id`, in the same transaction. The operator makes a tenant and its first
    /// key together; a tenant's own transaction never leaves its tenant.
    pub async fn operator_enter(&mut self, tenant_id: TenantId) -> Result<()> {
        let statement = format!("set local app.tenant_id = '{}'", tenant_id.as_uuid());
        sqlx::raw_sql(AssertSqlSafe(statement))
            .execute(self.connection())
            .await?;
        self.tenant_id = tenant_id;
        Ok(())
    }

    /// Marks where `roll_back_to_mark` goes back to.
    pub async fn mark(&mut self) -> Result<()> {
        self.mark = (self.notifications.len(), self.after_commit.len());
        sqlx::raw_sql("savepoint mark")
            .execute(self.connection())
            .await?;
        Ok(())
    }

    /// Undoes what was done since `mark`, and releases the locks that were taken since.
    pub async fn roll_back_to_mark(&mut self) -> Result<()> {
        let (notifications, after_commit) = self.mark;
        self.notifications.truncate(notifications);
        self.after_commit.truncate(after_commit);
        sqlx::raw_sql("rollback to savepoint mark")
            .execute(self.connection())
            .await?;
        Ok(())
    }

    fn connection(&mut self) -> Limited<'_> {
        self.lease.limited()
    }
}

/// Parses a URL without ever quoting it: it holds a password.
fn connect_options(url: &SecretString, variable: &str) -> anyhow::Result<PgConnectOptions> {
    PgConnectOptions::from_str(url.expose_secret())
        .map(|options| options.application_name("throughline"))
        .map_err(|_| anyhow::anyhow!("THROUGHLINE_{variable} is not a Postgres URL"))
}

const QUERY_CANCELED: &str = "57014";
/// Someone whom a row was to refer to was merged away or erased in that moment: the next try finds who
/// they became.
const FOREIGN_KEY: &str = "23503";
/// Two requests made the same thing: the next try finds it.
const UNIQUE: &str = "23505";
/// Other requests held a row for longer than this one may wait.
const LOCK_NOT_AVAILABLE: &str = "55P03";
/// Serialization failure, deadlock, server shutting down or starting.
const PASSING: [&str; 5] = ["40001", "40P01", "57P01", "57P02", "57P03"];
/// Text that Postgres cannot hold (NUL, broken UTF-8): bad input that an extractor should have refused.
const UNSTORABLE_TEXT: [&str; 2] = ["22021", "22P05"];

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        let state = error
            .as_database_error()
            .and_then(|database| database.code())
            .map(|code| code.into_owned());
        match (&error, state.as_deref()) {
            (sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed, _) => {
                Error::unavailable("the database", error)
            }
            (_, Some(QUERY_CANCELED)) => Error {
                cause: Some(error.into()),
                ..Error::new(Code::Timeout, "the database took too long")
            },
            (_, Some(LOCK_NOT_AVAILABLE)) => Error {
                cause: Some(error.into()),
                ..Error::busy("other requests hold locks that this one needs")
            },
            (_, Some(code)) if PASSING.contains(&code) => Error::unavailable("the database", error),
            (_, Some(FOREIGN_KEY)) => Error {
                cause: Some(error.into()),
                ..Error::new(
                    Code::Unavailable,
                    "a referenced row was merged or deleted at the same time",
                )
            },
            (_, Some(code)) if UNSTORABLE_TEXT.contains(&code) => Error::new(
                Code::InvalidRequest,
                "a text contains characters that cannot be stored",
            ),
            (_, Some(UNIQUE)) => Error {
                cause: Some(error.into()),
                ..Error::new(
                    Code::Conflict,
                    "the same resource was created at the same time",
                )
            },
            _ => Error::internal(error),
        }
    }
}
pub mod bridge;
pub mod conversation;
pub mod db;
pub mod identity_links;
pub mod people;
pub mod tenant;
pub mod turn;
