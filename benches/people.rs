//! People to resolve, in the demo tenant of `dev`: each with an account on Telegram, its key, and a
//! session in which something was said. Ids are made from numbers.

use sqlx::{AssertSqlSafe, PgConnection};
use throughline::domain::chat::Chat;
use throughline::domain::session_key::{possible_keys, user_key_prefix};
use throughline::store::resolve::RESOLVE;
use uuid::Uuid;

use crate::database;
use crate::dev::Dev;
use crate::pgbench::{Pgbench, with_values};

/// The account with this number.
pub fn identity(number: u64) -> String {
    format!("telegram:{number}")
}

/// The transaction of one resolve, of an account chosen at random.
pub fn script(pgbench: &Pgbench, people: u32) -> anyhow::Result<String> {
    // The keys that the service asks for, with pgbench's variable for the number.
    let sample = identity(0).parse()?;
    let keys = possible_keys("main", &sample, &Chat::DM);
    let keys: Vec<String> = keys
        .iter()
        .map(|key| match key.strip_suffix('0') {
            Some(start) => format!("{} || (:number)::text", literal(start)),
            None => literal(key),
        })
        .collect();
    let values = [
        &format!("'{}'::uuid", pgbench.tenant),
        "'telegram'",
        "''",
        "(:number)::text",
        "'main'",
        &format!("array[{}]", keys.join(", ")),
        &literal(&user_key_prefix("main")),
        &format!("'{}'::uuid", Uuid::nil()),
    ];
    let statement = with_values(RESOLVE, &values);
    let choose = format!("\\set number random(1, {people})\n");
    Ok(choose + &pgbench.transaction(&statement))
}

/// pgbench takes a colon for the beginning of a variable, also within quotes.
fn literal(key: &str) -> String {
    format!("E'{}'", key.replace(':', "\\x3a"))
}

pub struct Seed {
    connection: PgConnection,
    tenant: Uuid,
    planted: u32,
}

impl Seed {
    pub async fn new(dev: &Dev) -> anyhow::Result<Self> {
        Ok(Self {
            connection: database::superuser(dev).await?,
            tenant: database::tenant_id(dev)?.as_uuid(),
            planted: 0,
        })
    }

    /// Adds people until there are so many.
    pub async fn grow_to(&mut self, people: u32) -> anyhow::Result<()> {
        let (tenant, from) = (self.tenant, self.planted + 1);
        let id = |kind: u8| {
            format!("('00000000-0000-700{kind}-8000-' || lpad(to_hex(n), 12, '0'))::uuid")
        };
        let (user, account, slot, session) = (id(1), id(2), id(3), id(4));
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
                                last_person_at, created_at)
             select '{tenant}', {slot}, 'dm', 'agent:main:telegram:dm:' || n, {user}, {account}, 'main', {session},
                    now(), now()
               from numbers;
             insert into slot_names (tenant_id, namespace, key, slot_id, home_slot_id)
             select '{tenant}', '{nil}', 'agent:main:telegram:dm:' || n, {slot}, {slot} from numbers;
             insert into conversations (tenant_id, id, slot_id, namespace, user_id, agent, tip_session_id, created_at)
             select '{tenant}', {session}, {slot}, '{nil}', {user}, 'main', {session}, now() from numbers;
             insert into sessions (tenant_id, id, conversation_id, depth, state, next_seq, message_count, created_at,
                                   last_active_at, last_person_at)
             select '{tenant}', {session}, {session}, 0, 'open', 3, 2, now(), now(), now() from numbers;
             insert into slot_conversations (tenant_id, slot_id, conversation_id)
             select '{tenant}', {slot}, {session} from numbers;
             insert into identity_presence (tenant_id, identity_id, last_seen_at, slot_id)
             select '{tenant}', {account}, now() + interval '1 day', {slot} from numbers;
             commit;
             vacuum analyze;
             checkpoint"
        );
        for statement in sql.split(';') {
            sqlx::raw_sql(AssertSqlSafe(statement.to_owned()))
                .execute(&mut self.connection)
                .await?;
        }
        self.planted = people;
        Ok(())
    }
}
