//! What is left of an erased user, and the jobs that take it away.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::AssertSqlSafe;
use sqlx::types::Uuid;
use throughline::ids::IdentityId;
use throughline::jobs;

use crate::support::data::catalog::tenant_tables;
use crate::support::{Reply, Tenant, World, eventually};

/// In which tables of a tenant, and how often, there is any of `words`.
pub async fn mentions(world: &World, tenant: &Tenant, words: &[String]) -> BTreeMap<String, i64> {
    let mut superuser = world.superuser().await;
    let mut found = BTreeMap::new();
    for table in tenant_tables(&mut superuser).await {
        let sql = format!(
            "select count(*)
               from {table} t
              where tenant_id = $1
                and exists (select 1 from unnest($2::text[]) word where strpos(t::text, word) > 0)"
        );
        let count: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(tenant.uuid())
            .bind(words)
            .fetch_one(&mut superuser)
            .await
            .unwrap();
        if count > 0 {
            found.insert(table, count);
        }
    }
    found
}

pub async fn count(world: &World, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
}

/// Runs jobs until nothing of deleted conversations is left, and no message of these accounts.
pub async fn first_pass(world: &World, identities: &[String]) {
    let ids: Vec<Uuid> = identities
        .iter()
        .map(|id| id.parse::<IdentityId>().unwrap().as_uuid())
        .collect();
    eventually("the rows are gone", Duration::from_secs(20), async || {
        jobs::tick(world.app()).await.unwrap();
        let messages: i64 =
            sqlx::query_scalar("select count(*) from messages where identity_id = any ($1)")
                .bind(&ids)
                .fetch_one(&mut world.superuser().await)
                .await
                .unwrap();
        let deleted = "select count(*) from conversations where deleted_at is not null";
        messages == 0 && count(world, deleted).await == 0
    })
    .await;
}

/// Lets everything end that could be under way, and the job look again.
pub async fn settle(world: &World) {
    world.clock.advance(Duration::from_secs(6 * 60));
    eventually("they are forgotten", Duration::from_secs(20), async || {
        jobs::tick(world.app()).await.unwrap();
        count(world, "select count(*) from erased_people").await == 0
    })
    .await;
}

/// Tables with a person's data: what erasing makes of it, and where it is in an export.
pub const PERSON_TABLES: [(&str, &str, &str); 26] = [
    ("users", "deleted at once", "user"),
    ("identities", "deleted at once", "identities"),
    ("user_redirects", "deleted with the user", "merged_user_ids"),
    (
        "identity_moves",
        "deleted at once, others' with this person too",
        "moves",
    ),
    ("identity_presence", "deleted with the identity", "presence"),
    ("home_channels", "deleted at once", "home_channels"),
    ("slots", "deleted at once", "session_keys"),
    (
        "slot_names",
        "deleted with the slot, and by namespace",
        "session_keys",
    ),
    (
        "slot_conversations",
        "deleted with the slot",
        "the conversations themselves",
    ),
    (
        "conversations",
        "marked deleted and made nobody's at once, removed by erase_conversations",
        "conversations",
    ),
    (
        "conversation_grants",
        "those held at once, those given with the conversation",
        "grants",
    ),
    ("sessions", "removed with the conversation", "conversations"),
    (
        "messages",
        "removed with the conversation; elsewhere blanked by erase_people, with every summary of them",
        "conversations, messages_elsewhere; no summary elsewhere: it has words of others",
    ),
    (
        "summary_sources",
        "removed with the message; elsewhere when its summary is blanked by erase_people",
        "not: what was said is in conversations and messages_elsewhere",
    ),
    (
        "turns",
        "stopped at once, removed with the conversation; elsewhere blanked by erase_people",
        "not: what was said is in conversations and messages_elsewhere",
    ),
    (
        "events",
        "removed with the conversation; elsewhere with the turn by erase_people",
        "not: kept a day, and said in conversations",
    ),
    (
        "inbound_receipts",
        "deleted with the identity",
        "not: what was said is in conversations",
    ),
    (
        "pending_links",
        "deleted with the identity",
        "not: a sealed code, for two minutes",
    ),
    ("codes", "deleted at once", "codes, without digests"),
    ("code_attempts", "deleted at once", "not: a counter"),
    ("chats", "the accounts' own deleted at once", "deliveries"),
    (
        "deliveries",
        "deleted with identity and chat; notices to others that name it are blanked",
        "deliveries",
    ),
    (
        "idempotency",
        "by principal at once; keys' own answers that tell of it by erase_people",
        "not: kept a day, sealed",
    ),
    ("usage_hourly", "given to nobody by erase_people", "usage"),
    (
        "erased_people",
        "what is left to look for; removed by erase_people",
        "not: the person is gone",
    ),
    ("audit", "stays: ids only", "not: the tenant's books"),
];

pub async fn erase(world: &World, key: &str, user: &str) -> Reply {
    world.delete(key, &format!("/v1/users/{user}")).await
}
