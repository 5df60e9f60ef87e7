//! Users in the demo tenant of `dev`: each with an identity on Telegram, its key, and a session with messages.
//! Every identity has a presence within the last minute. Ids are computed from numbers.

use sqlx::{AssertSqlSafe, PgConnection};
use throughline::domain::bridge::chat::Chat;
use throughline::domain::conversation::session_key::{possible_keys, user_key_prefix};
use throughline::store::people::resolve::RESOLVE;
use uuid::Uuid;

use crate::AGENT;
use crate::database;
use crate::dev::Dev;
use crate::pgbench::{Pgbench, quoted, with_values};

/// The identity with this number.
pub fn identity(number: u64) -> String {
    format!("telegram:{number}")
}

/// The kind of a row's id.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    User = 1,
    Identity = 2,
    Slot = 3,
    Session = 4,
}

/// SQL of the id of a row of the user with this number.
pub fn id_sql(kind: Kind, number: &str) -> String {
    let kind = kind as u8;
    format!("('00000000-0000-700{kind}-8000-' || lpad(to_hex({number}::bigint), 12, '0'))::uuid")
}

/// The statement of one resolve in a script of pgbench, for the identity in its variable `number`.
pub fn resolve_sql(pgbench: &Pgbench) -> anyhow::Result<String> {
    let sample = identity(0).parse()?;
    let keys = possible_keys(AGENT, &sample, &Chat::DM);
    let keys: Vec<String> = keys
        .iter()
        .map(|key| match key.strip_suffix('0') {
            Some(start) => format!("{} || (:number)::text", quoted(start)),
            None => quoted(key),
        })
        .collect();
    let values = [
        &format!("'{}'::uuid", pgbench.tenant),
        "'telegram'",
        "''",
        "(:number)::text",
        &quoted(AGENT),
        &format!("array[{}]", keys.join(", ")),
        &quoted(&user_key_prefix(AGENT)),
        &format!("'{}'::uuid", Uuid::nil()),
    ];
    Ok(with_values(RESOLVE, &values))
}

/// Seeds users through the superuser's connection, which bypasses row-level security.
pub struct UserSeed {
    connection: PgConnection,
    tenant: Uuid,
    seeded: u32,
}

impl UserSeed {
    pub async fn new(dev: &Dev) -> anyhow::Result<Self> {
        Ok(Self {
            connection: database::superuser(dev).await?,
            tenant: database::tenant_id(dev)?.as_uuid(),
            seeded: 0,
        })
    }

    /// Adds users until there are this many.
    pub async fn grow_to(&mut self, people: u32) -> anyhow::Result<()> {
        let tenant = self.tenant;
        let from = self.seeded + 1;
        let [user, account, slot, session] =
            [Kind::User, Kind::Identity, Kind::Slot, Kind::Session].map(|kind| id_sql(kind, "n"));
        let key = format!("'agent:{AGENT}:telegram:dm:' || n");
        let nil = Uuid::nil();
        let sql = format!(
            "begin;
             set local session_replication_role = replica;
             create temp table numbers on commit drop as
               select n from generate_series({from}, {people}) n order by random();
             insert into users (tenant_id, id, created_at)
             select '{tenant}', {user}, now() from numbers;
             insert into identities (tenant_id, id, user_id, platform, external_id, raw, linked_at, created_at)
             select '{tenant}', {account}, {user}, 'telegram', n::text, n::text, now(), now() from numbers;
             insert into slots (tenant_id, id, kind, key, user_id, identity_id, agent, conversation_id,
                                last_user_at, created_at)
             select '{tenant}', {slot}, 'dm', {key}, {user}, {account}, '{AGENT}', {session},
                    now(), now()
               from numbers;
             insert into slot_names (tenant_id, namespace, key, slot_id, home_slot_id)
             select '{tenant}', '{nil}', {key}, {slot}, {slot} from numbers;
             insert into conversations (tenant_id, id, slot_id, namespace, user_id, agent, tip_session_id, created_at)
             select '{tenant}', {session}, {slot}, '{nil}', {user}, '{AGENT}', {session}, now() from numbers;
             insert into sessions (tenant_id, id, conversation_id, depth, state, next_seq, message_count, created_at,
                                   last_active_at, last_user_at)
             select '{tenant}', {session}, {session}, 0, 'open', 3, 2, now(), now(), now() from numbers;
             insert into slot_conversations (tenant_id, slot_id, conversation_id)
             select '{tenant}', {slot}, {session} from numbers;
             insert into identity_presence (tenant_id, identity_id, last_seen_at, slot_id)
             select '{tenant}', {account}, now() + interval '1 day', {slot} from numbers;
             commit;
             vacuum analyze;
             checkpoint"
        );
        self.run(&sql).await?;
        self.seeded = people;
        Ok(())
    }

    /// Adds this number of messages to the session of each user.
    #[allow(dead_code, reason = "the resolve bench reads no messages")]
    pub async fn add_messages(&mut self, messages: u32, text: &str) -> anyhow::Result<()> {
        let tenant = self.tenant;
        let people = self.seeded;
        let session = id_sql(Kind::Session, "n");
        let sql = format!(
            "begin;
             insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, created_at)
             select '{tenant}', {session}, m, case when m % 2 = 1 then 'user' else 'assistant' end, 'normal',
                    to_json('{text}'::text), 54, now()
               from generate_series(1, {people}) n, generate_series(1, {messages}) m;
             update sessions
                set next_seq = {messages} + 1, message_count = {messages}, token_count = {messages} * 54
              where tenant_id = '{tenant}';
             commit;
             vacuum analyze;
             checkpoint"
        );
        self.run(&sql).await
    }

    /// Runs the statements one after the other.
    async fn run(&mut self, sql: &str) -> anyhow::Result<()> {
        for statement in sql.split(';') {
            sqlx::raw_sql(AssertSqlSafe(statement.to_owned()))
                .execute(&mut self.connection)
                .await?;
        }
        Ok(())
    }
}
