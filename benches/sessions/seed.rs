//! The rows of the bench, in the demo tenant of `dev`. Ids are computed from numbers, so that every side
//! knows them.

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use throughline::ids::SessionId;
use uuid::Uuid;

use crate::DEPTHS;
use crate::database;
use crate::dev::Dev;

/// Messages in the long session.
pub const LONG_SESSION: i64 = 1_000_000;
/// Sessions to append to, numbered from 1, with some messages each.
pub const SHORT_SESSIONS: u64 = 1_000;
const SHORT_SESSION: i64 = 100;
const LONG: u64 = 0x10_0000;
const CHAINS: u64 = 0x100_0000;

/// The same as `bench_id` below.
fn session(number: u64) -> SessionId {
    SessionId::from_uuid(Uuid::from_u128(
        (0x7000 << 64) | (0x8000 << 48) | u128::from(number),
    ))
}

pub fn long_session() -> SessionId {
    session(LONG)
}

pub fn short_session(number: u64) -> SessionId {
    session(number)
}

/// The first link of the chain with `depth` compressions. The numbers of chains leave room for their links.
pub fn first_link(depth: u32) -> SessionId {
    session(CHAINS * u64::from(depth))
}

pub fn last_link(depth: u32) -> SessionId {
    session(CHAINS * u64::from(depth) + u64::from(depth))
}

/// SQL of the id of the session with this number.
pub fn session_sql(number: &str) -> String {
    format!("('00000000-0000-7000-8000-' || lpad(to_hex({number}::bigint), 12, '0'))::uuid")
}

/// The superuser's connection, which bypasses row-level security.
pub struct Seed {
    connection: PgConnection,
    tenant: String,
}

impl Seed {
    pub async fn plant(dev: &Dev) -> anyhow::Result<Self> {
        let mut seed = Self {
            connection: database::superuser(dev).await?,
            tenant: format!("'{}'::uuid", database::tenant_id(dev)?.as_uuid()),
        };
        let id = session_sql("n");
        seed.run(&format!(
            "create function pg_temp.bench_id(n bigint) returns uuid language sql immutable as $$ select {id} $$"
        ))
        .await?;
        for statement in seed.statements() {
            seed.run(&statement).await?;
        }
        Ok(seed)
    }

    /// The number of messages that were appended since.
    pub async fn appended(mut self) -> anyhow::Result<i64> {
        let sql = format!(
            "select count(*) from messages where tenant_id = {} and session_id <> '{}'",
            self.tenant,
            long_session().as_uuid()
        );
        let all: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .fetch_one(&mut self.connection)
            .await?;
        self.connection.close().await?;
        Ok(all - SHORT_SESSION * SHORT_SESSIONS as i64)
    }

    async fn run(&mut self, sql: &str) -> anyhow::Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut self.connection)
            .await?;
        Ok(())
    }

    fn statements(&self) -> Vec<String> {
        let mut statements = vec!["begin".to_owned()];
        for depth in DEPTHS {
            statements.extend(self.chain(CHAINS * u64::from(depth), depth, 0));
        }
        for number in 1..=SHORT_SESSIONS {
            statements.extend(self.chain(number, 0, SHORT_SESSION));
        }
        statements.extend(self.chain(LONG, 0, LONG_SESSION));
        statements.extend(["commit", "vacuum analyze", "checkpoint"].map(str::to_owned));
        statements
    }

    /// A conversation whose tip, after `depth` compressions, has `messages` messages.
    fn chain(&self, first: u64, depth: u32, messages: i64) -> [String; 3] {
        let tenant = &self.tenant;
        [
            format!(
                "insert into conversations (tenant_id, id, namespace, agent, tip_session_id, created_at)
                 select {tenant}, pg_temp.bench_id({first}), '{nil}', 'main', pg_temp.bench_id({first} + {depth}), now()",
                nil = Uuid::nil()
            ),
            format!(
                "insert into sessions (tenant_id, id, conversation_id, depth, chain_parent_id, edge, state, end_reason,
                                       ended_at, next_seq, message_count, token_count, created_at, last_active_at,
                                       last_user_at)
                 select {tenant}, pg_temp.bench_id({first} + d), pg_temp.bench_id({first}), d,
                        case when d > 0 then pg_temp.bench_id({first} + d - 1) end,
                        case when d > 0 then 'compression' end,
                        case when d < {depth} then 'ended' else 'open' end,
                        case when d < {depth} then 'compression' end,
                        case when d < {depth} then now() end,
                        {messages} + 1, {messages}, {messages} * 54, now(), now(), now()
                   from generate_series(0, {depth}) d"
            ),
            format!(
                "insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, created_at)
                 select {tenant}, pg_temp.bench_id({first} + {depth}), n,
                        case when n % 2 = 1 then 'user' else 'assistant' end, 'normal',
                        to_json(rpad('message ' || n || ' ', 200, 'of some two hundred bytes ')), 54, now()
                   from generate_series(1, {messages}) n"
            ),
        ]
    }
}
