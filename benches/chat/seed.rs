//! The sessions of the bench, in the demo tenant of `dev`. Ids are computed from numbers, so that every side
//! knows them, and each client has its own sessions, so that no client waits for another.

use anyhow::ensure;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use throughline::ids::SessionId;
use uuid::Uuid;

use crate::AGENT;
use crate::database;
use crate::dev::Dev;

/// Two hundred characters that neither JSON nor SQL escapes.
pub const TEXT: &str = "It is a truth universally acknowledged that a single conversation in possession of \
                        a good fortune of platforms must be in want of a service which finds its end \
                        however often that was moved away from it";
/// The distance between the first numbers of two sizes of sessions.
const SIZE_STRIDE: u64 = 0x100_0000;

/// Sessions with a number of messages at the start. A turn adds two; there are so many sessions that their
/// length stays about the same.
#[derive(Debug, Clone, Copy)]
pub struct Sessions {
    pub messages: u64,
    /// A multiple of every number of clients.
    pub count: u64,
}

impl Sessions {
    fn first(&self) -> u64 {
        SIZE_STRIDE * self.messages
    }

    /// One of a client's own sessions, chosen with a random number.
    pub fn choose(&self, client: u64, clients: u64, random: u64) -> SessionId {
        let index = client + clients * (random % (self.count / clients));
        let number = u128::from(self.first() + index);
        SessionId::from_uuid(Uuid::from_u128((0x7000 << 64) | (0x8000 << 48) | number))
    }

    /// The same choice in a script of pgbench: sets `number`.
    pub fn choose_sql(&self, clients: u32) -> String {
        let first = self.first();
        let last = self.count / u64::from(clients) - 1;
        format!("\\set number {first} + :client_id + {clients} * random(0, {last})\n")
    }
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

/// Statistics of all turns.
pub struct Turns {
    pub of_service: i64,
    /// Writes per turn of the service, each of them a commit.
    pub writes: f64,
}

impl Seed {
    pub async fn new(dev: &Dev) -> anyhow::Result<Self> {
        Ok(Self {
            connection: database::superuser(dev).await?,
            tenant: format!("'{}'::uuid", database::tenant_id(dev)?.as_uuid()),
        })
    }

    pub async fn plant(&mut self, all: &[Sessions]) -> anyhow::Result<()> {
        for sessions in all {
            // In one transaction: a conversation and its tip reference each other.
            let statements = self.statements(*sessions).join(";\n");
            self.run(&format!("begin;\n{statements};\ncommit")).await?;
        }
        for statement in ["vacuum analyze", "checkpoint"] {
            self.run(statement).await?;
        }
        Ok(())
    }

    /// Fails unless every turn is completed, with a user's message and an answer.
    pub async fn turns(&mut self, by: &str) -> anyhow::Result<Turns> {
        let sql = format!(
            "select count(*), count(*) filter (where state <> 'completed'),
                    count(*) filter (where principal <> '{by}'),
                    coalesce(avg(version) filter (where principal <> '{by}'), 0)::float8,
                    (select count(*) from messages where tenant_id = {tenant} and turn_id is not null)
               from turns
              where tenant_id = {tenant}",
            tenant = self.tenant
        );
        let (all, bad, of_service, writes, messages): (i64, i64, i64, f64, i64) =
            sqlx::query_as(AssertSqlSafe(sql))
                .fetch_one(&mut self.connection)
                .await?;
        ensure!(bad == 0, "{bad} of {all} turns are not completed");
        ensure!(messages == 2 * all, "{all} turns left {messages} messages");
        Ok(Turns { of_service, writes })
    }

    /// The mean number of messages of these sessions.
    pub async fn mean_length(&mut self, sessions: Sessions) -> anyhow::Result<f64> {
        let sql = format!(
            "select avg(message_count)::float8
               from sessions
              where tenant_id = {}
                and id between {} and {}",
            self.tenant,
            session_sql(&sessions.first().to_string()),
            session_sql(&(sessions.first() + sessions.count - 1).to_string())
        );
        Ok(sqlx::query_scalar(AssertSqlSafe(sql))
            .fetch_one(&mut self.connection)
            .await?)
    }

    pub async fn close(self) -> anyhow::Result<()> {
        Ok(self.connection.close().await?)
    }

    async fn run(&mut self, sql: &str) -> anyhow::Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut self.connection)
            .await?;
        Ok(())
    }

    fn statements(&self, sessions: Sessions) -> [String; 3] {
        let tenant = &self.tenant;
        let messages = sessions.messages;
        let numbers = format!(
            "generate_series({}, {})",
            sessions.first(),
            sessions.first() + sessions.count - 1
        );
        let id = session_sql("n");
        [
            format!(
                "insert into conversations (tenant_id, id, namespace, agent, tip_session_id, created_at)
                 select {tenant}, {id}, '{nil}', '{AGENT}', {id}, now()
                   from {numbers} n",
                nil = Uuid::nil()
            ),
            format!(
                "insert into sessions (tenant_id, id, conversation_id, depth, state, next_seq, message_count,
                                       token_count, created_at, last_active_at, last_user_at)
                 select {tenant}, {id}, {id}, 0, 'open', {messages} + 1, {messages}, {messages} * 54, now(), now(),
                        now()
                   from {numbers} n"
            ),
            format!(
                "insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, created_at)
                 select {tenant}, {id}, m, case when m % 2 = 1 then 'user' else 'assistant' end, 'normal',
                        to_json('{TEXT}'::text), 54, now()
                   from {numbers} n, generate_series(1, {messages}) m"
            ),
        ]
    }
}
