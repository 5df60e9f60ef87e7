//! What background statements read: as much as they change, however much else a tenant has.

use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use throughline::store::bridge::deliveries::END;
use throughline::store::bridge::delivery_leases::{LEASE, LOCK_DUE};
use throughline::store::conversation::conversations::Part;
use throughline::store::db::idempotency;
use throughline::store::identity_links::merges;
use throughline::store::people::{erased_people, erased_summaries};
use throughline::store::tenant::expiry::Expiring;

use crate::support::data::bulk::{MANY, fill};
use crate::support::servers::cluster::cluster;
use crate::support::{Fields, Tenant, World};

/// Buffers of a plan, with those of each `with … update`: the top knows of them only if another part reads what they
/// return, and then they count twice.
fn blocks(top: &Value) -> i64 {
    let of = |node: &Value| node.number("Shared Hit Blocks") + node.number("Shared Read Blocks");
    let parts = top["Plans"].as_array().cloned().unwrap_or_default();
    let writes = parts.iter().filter(|part| {
        let name = part["Subplan Name"].as_str().unwrap_or_default();
        name.starts_with("CTE") && part["Node Type"] == "ModifyTable"
    });
    of(top) + writes.map(of).sum::<i64>()
}

/// Buffers that a statement touches, as the service's own role in the tenant; it is rolled back. `$1` is the
/// tenant, the others are given.
async fn buffers(world: &World, tenant: &Tenant, sql: &str, values: &[&str]) -> i64 {
    let url = cluster().service_url(&world.database);
    let mut service = PgConnection::connect(&url).await.unwrap();
    let mut tx = service.begin().await.unwrap();
    let enter = format!("set local app.tenant_id = '{}'", tenant.uuid());
    sqlx::raw_sql(AssertSqlSafe(enter))
        .execute(&mut *tx)
        .await
        .unwrap();
    let mut sql = sql.to_owned();
    for (place, value) in values.iter().enumerate().rev() {
        sql = sql.replace(&format!("${}", place + 2), value);
    }
    sql = sql.replace("$1", &format!("'{}'::uuid", tenant.uuid()));
    let sql = format!("explain (analyze, buffers, format json) {sql}");
    let mut touched = 0;
    // The first also fills caches of the connection, which count. All of it is undone.
    for _ in 0..2 {
        sqlx::raw_sql("savepoint one")
            .execute(&mut *tx)
            .await
            .unwrap();
        let plan: Value = sqlx::query_scalar(AssertSqlSafe(sql.clone()))
            .fetch_one(&mut *tx)
            .await
            .unwrap();
        sqlx::raw_sql("rollback to savepoint one")
            .execute(&mut *tx)
            .await
            .unwrap();
        touched = blocks(&plan[0]["Plan"]);
    }
    touched
}

#[tokio::test(flavor = "multi_thread")]
async fn background_statements_read_what_they_change() {
    const OLD: usize = 10;
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let session = world.session(&tenant.key, serde_json::json!({})).await;
    let conversation = crate::support::conversations::uuid_of_session(session.text("id"));
    fill(&world, &tenant, OLD).await;
    let conversations = format!("array['{conversation}']::uuid[]");
    let user = "md5('u777')::uuid";
    let other = "md5('u778')::uuid";
    let identity = "md5('i777')::uuid";
    let [_, move_usage, delete_usage] = merges::MOVE_BELONGINGS;
    let chats = ["'telegram'", "''", "'dm:1000'", "10", "interval '60 s'"];
    let due = |platform: &str| format!("array['{platform}']");
    let mut measured: Vec<(String, i64, i64)> = Vec::new();
    for what in [
        Expiring::Events,
        Expiring::Receipts,
        Expiring::Deliveries,
        Expiring::Codes,
        Expiring::CodeAttempts,
        Expiring::PendingLinks,
        Expiring::IdentityMoves,
        Expiring::Answers,
        Expiring::AnswerSecrets,
    ] {
        let values = ["now() - interval '400 days'", "1000"];
        let touched = buffers(&world, &tenant, what.delete_sql(), &values).await;
        // Each of the ten is written anew, with an entry in every index.
        let most = if what == Expiring::AnswerSecrets {
            250
        } else {
            120
        };
        measured.push((format!("{what:?}"), touched, most));
    }
    for (name, part) in [
        ("events", Part::Events),
        ("turns", Part::Turns),
        ("messages", Part::Messages),
    ] {
        let touched = buffers(&world, &tenant, part.delete_sql(), &[&conversations, "10"]).await;
        measured.push((format!("erase {name}"), touched, 400));
    }
    for (name, sql, values, most) in [
        (
            "lock due, a quiet platform",
            LOCK_DUE,
            vec!["false".to_owned(), due("slack"), due(""), "50".to_owned()],
            50,
        ),
        (
            "lock due, one platform",
            LOCK_DUE,
            vec![
                "false".to_owned(),
                due("telegram"),
                "array[null]".to_owned(),
                "50".to_owned(),
            ],
            400,
        ),
        (
            "lock due, all",
            LOCK_DUE,
            vec![
                "true".to_owned(),
                "array[]".to_owned(),
                "array[]".to_owned(),
                "50".to_owned(),
            ],
            600,
        ),
        ("lease", LEASE, chats.map(str::to_owned).to_vec(), 100),
        (
            "move usage",
            move_usage,
            vec![user.to_owned(), other.to_owned()],
            100,
        ),
        (
            "delete usage",
            delete_usage,
            vec![user.to_owned(), other.to_owned()],
            100,
        ),
        (
            "fold usage",
            erased_people::FOLD_USAGE,
            vec![format!("array[{user}]"), "1000".to_owned()],
            100,
        ),
        (
            "messages of an erased identity",
            erased_people::BLANK_MESSAGES,
            vec![identity.to_owned(), "1000".to_owned(), "'x'".to_owned()],
            100,
        ),
        (
            "summaries of an erased identity",
            erased_summaries::LIST_KNOWN,
            vec![identity.to_owned(), "1000".to_owned()],
            20,
        ),
        (
            "events of an erased identity",
            erased_people::DELETE_EVENTS,
            vec![identity.to_owned(), "1000".to_owned(), "100".to_owned()],
            100,
        ),
        (
            "turns of an erased identity",
            erased_people::LIST_TURNS,
            vec![identity.to_owned(), "100".to_owned()],
            100,
        ),
        (
            "blanked turns of an erased user",
            erased_people::LIST_BLANKED_TURNS,
            vec![user.to_owned(), "100".to_owned()],
            100,
        ),
        (
            "messages of turns of an erased identity",
            erased_people::BLANK_TURN_MESSAGES,
            vec![format!("array[{user}]"), "'x'".to_owned()],
            100,
        ),
        (
            "blanking turns of an erased identity",
            erased_people::BLANK_TURNS,
            vec![format!("array[{user}]"), user.to_owned()],
            100,
        ),
        (
            "answers to keys",
            idempotency::LIST_WITHOUT_USER,
            vec!["''", "''", "''", "200"]
                .into_iter()
                .map(str::to_owned)
                .collect(),
            100,
        ),
        (
            "answers of a user",
            idempotency::DELETE_OF_USER,
            vec![
                "array['key_177']".to_owned(),
                "array['telegram:77']".to_owned(),
                "1000".to_owned(),
            ],
            100,
        ),
    ] {
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        measured.push((
            name.to_owned(),
            buffers(&world, &tenant, sql, &values).await,
            most,
        ));
    }
    let over: Vec<_> = measured
        .iter()
        .filter(|(_, touched, most)| touched > most)
        .collect();
    assert!(over.is_empty(), "{over:?} of {measured:?}");
}

/// A tenant grows faster than statistics are taken: none of its chats was there when they last were.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_costs_its_chat_while_statistics_are_old() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = tenant.uuid();
    let mut superuser = world.superuser().await;
    let write = format!(
        "alter table chats set (autovacuum_enabled = false);
         alter table chats disable trigger chats_make_due;
         alter table deliveries set (autovacuum_enabled = false);
         create function grow(first int, last int) returns void language sql as $$
           insert into chats (tenant_id, platform, scope, chat_ref, next_seq)
           select '{id}', 'telegram', '', 'dm:' || n, 2 from generate_series(first, last) n;
           insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, payload, state, visible_at,
                                   created_at, lease)
           select '{id}', md5(n::text)::uuid, 'telegram', '', 'dm:' || n, 1, 'notice', '{{}}',
                  case n % 100 when 0 then 'leased' when 1 then 'pending' else 'delivered' end, now(), now(),
                  case when n % 100 = 0 then md5(n::text)::uuid end
             from generate_series(first, last) n;
           update chats set due_at = now() - interval '1 minute' where chat_ref = 'dm:' || last;
         $$;
         select grow(1, 10);
         analyze;
         select grow(11, {MANY});
         update chats set due_at = due_at;
         update chats set due_at = due_at;
         -- Two of the chats are old.
         update chats set ended_seq = 2000 where chat_ref in ('dm:1000', 'dm:1001');
         update deliveries set seq = 2001 where chat_ref in ('dm:1000', 'dm:1001');
         insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, payload, state, visible_at,
                                 created_at, ended_at)
         select '{id}', gen_random_uuid(), 'telegram', '', 'dm:' || c, n, 'notice', '{{}}', 'delivered', now(), now(),
                now()
           from generate_series(1, 2000) n, generate_series(1000, 1001) c"
    );
    sqlx::raw_sql(AssertSqlSafe(write))
        .execute(&mut superuser)
        .await
        .unwrap();
    let delivery = "md5('1000')::uuid";
    let measured = [
        (
            "lock due",
            LOCK_DUE,
            vec!["false", "array['telegram']", "array[null]", "5"],
        ),
        (
            "lease",
            LEASE,
            vec!["'telegram'", "''", "'dm:1001'", "10", "interval '60 s'"],
        ),
        (
            "end",
            END,
            vec![
                "true",
                "array[]",
                "array[]",
                delivery,
                delivery,
                "'delivered'",
                "interval '0'",
                "null::text",
                "null::text",
            ],
        ),
    ];
    let mut over = Vec::new();
    for (name, sql, values) in measured {
        let touched = buffers(&world, &tenant, sql, &values).await;
        if touched > 150 {
            over.push((name, touched));
        }
    }
    assert!(over.is_empty(), "{over:?}");
}
