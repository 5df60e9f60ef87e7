//! An erased person is gone, at once and from every table; whoever adds a table has to say what becomes of
//! a person's data in it.

use crate::support::Fields;
use crate::support::data::erasure::count;
use crate::support::data::erasure::first_pass;
use crate::support::data::erasure::mentions;
use crate::support::data::erasure::settle;
use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DurationRound, TimeDelta};
use deadpool_redis::redis;
use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgConnection};
use throughline::auth::ServiceCaller;
use throughline::ids::{IdentityId, UserId};
use throughline::jobs;
use throughline::store::db::idempotency::RequestName;
use throughline::store::people::erased_people::{take_due, update_opened};

use crate::support::conversations::{said, uuid_of_session};
use crate::support::data::catalog::{copy_rows, disable_row_level_security, dump_people};
use crate::support::data::whole_person::{
    IRC, PARTED, SECRET, TELEGRAM, Whole, make_by_admin, plant_usage, retryable, whole_person,
};
use crate::support::people::as_bridge;
use crate::support::servers::cluster::cluster;
use crate::support::{Reply, Tenant, World, eventually};

/// Tables with a person's data: what erasing makes of it, and where it is in an export.
const PERSON_TABLES: [(&str, &str, &str); 25] = [
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
        "removed with the conversation; elsewhere blanked by erase_people",
        "conversations, messages_elsewhere",
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

/// What names a person, or something a person wrote, wherever it is a column.
const PERSON_COLUMNS: [&str; 24] = [
    "actor",
    "chat_ref",
    "claimed_by",
    "consumed_by",
    "display_name",
    "external_id",
    "from_user",
    "identity",
    "identity_id",
    "identity_ids",
    "merged_ids",
    "minted_by",
    "namespace",
    "old_id",
    "origin_identity_id",
    "participant",
    "principal",
    "profile",
    "raw",
    "sender",
    "speaker",
    "subject",
    "to_user",
    "user_id",
];

/// Tables that name a person, or lead to one by foreign keys.
async fn tables_of_people(superuser: &mut PgConnection) -> Vec<String> {
    sqlx::query_scalar(
        "with recursive led as (
           select 'users'::regclass::oid as id
            union
           select 'identities'::regclass::oid
            union
           select k.conrelid
             from led l
             join pg_constraint k on k.confrelid = l.id and k.contype = 'f'
         )
         select distinct c.relname::text
           from pg_class c
          where c.relnamespace = 'public'::regnamespace
            and c.relkind in ('r', 'p')
            and (c.oid in (select id from led)
                 or exists (select 1
                              from pg_attribute a
                             where a.attrelid = c.oid
                               and a.attnum > 0
                               and not a.attisdropped
                               and a.attname = any ($1)))
          order by 1",
    )
    .bind(PERSON_COLUMNS.as_slice())
    .fetch_all(superuser)
    .await
    .unwrap()
}

/// Fails with what to do.
fn check_listed(found: &[String]) -> Result<(), String> {
    let listed = |table: &String| PERSON_TABLES.iter().any(|(name, _, _)| name == table);
    match found.iter().find(|table| !listed(table)) {
        None => Ok(()),
        Some(table) => Err(format!(
            "the table {table} can hold a person's data: let people::erase remove it and people::export \
             write it, fill it in support::whole_person, and say so in PERSON_TABLES"
        )),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_adds_a_table_with_a_persons_data_says_what_becomes_of_it() {
    let database = cluster().new_database().await;
    let mut superuser = cluster().superuser(&database).await;
    let found = tables_of_people(&mut superuser).await;
    check_listed(&found).unwrap();
    for (table, _, _) in PERSON_TABLES {
        assert!(found.contains(&table.to_owned()), "{table} is no more");
    }
    for made in [
        "create table notes (tenant_id uuid not null, id uuid, user_id uuid, primary key (tenant_id, id))",
        "create table notes (tenant_id uuid not null, session_id uuid, primary key (tenant_id, session_id),
           foreign key (tenant_id, session_id) references sessions (tenant_id, id))",
    ] {
        sqlx::raw_sql(made).execute(&mut superuser).await.unwrap();
        let unlisted = check_listed(&tables_of_people(&mut superuser).await).unwrap_err();
        assert!(unlisted.contains("the table notes"), "{unlisted}");
        sqlx::raw_sql("drop table notes")
            .execute(&mut superuser)
            .await
            .unwrap();
    }
}

async fn erase(world: &World, key: &str, user: &str) -> Reply {
    world.delete(key, &format!("/v1/users/{user}")).await
}

async fn limits_in_redis(user: &str) -> Vec<String> {
    let client = redis::Client::open(cluster().redis_url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::cmd("KEYS")
        .arg(format!("throughline:limits:*{user}*"))
        .query_async(&mut connection)
        .await
        .unwrap()
}

/// Everything that once led to the person is as if it had never been.
async fn expect_gone(world: &World, tenant: &Tenant, whole: &Whole) {
    let key = &tenant.key;
    for user in [&whole.ada.user_id].into_iter().chain(&whole.merged) {
        for path in ["", "/identities", "/presence", "/home-channels", "/export"] {
            let reply = world.get(key, &format!("/v1/users/{user}{path}")).await;
            reply.expect_problem(404, "not_found");
        }
        erase(world, key, user)
            .await
            .expect_problem(404, "not_found");
        let narrowed = world
            .get(key, &format!("/v1/sessions?user_id={user}"))
            .await;
        assert_eq!(narrowed.expect(200)["data"], json!([]));
    }
    for identity in &whole.identities {
        let path = format!("/v1/identities/{identity}");
        world
            .delete(key, &path)
            .await
            .expect_problem(404, "not_found");
    }
    for session in whole
        .sessions
        .iter()
        .map(String::as_str)
        .chain(["adas-own"])
    {
        for path in ["", "/messages", "/export", "/tip", "/grants"] {
            let reply = world
                .get(key, &format!("/v1/sessions/{session}{path}"))
                .await;
            reply.expect_problem(404, "session_not_found");
        }
        let reply = world.append(key, session, json!([said("late")])).await;
        reply.expect_problem(404, "session_not_found");
    }
    for session_key in &whole.session_keys {
        let path = format!("/v1/session-keys?session_key={session_key}");
        let reply = world.get(key, &path).await;
        reply.expect_problem(404, "session_key_not_found");
    }
}

async fn transcript(world: &World, tenant: &Tenant, session: &str) -> Vec<Value> {
    let path = format!("/v1/sessions/{session}/messages?scope=conversation");
    world.walk(&tenant.key, &path).await
}

fn contents(messages: &[Value]) -> Vec<&str> {
    messages
        .iter()
        .map(|message| message.text("content"))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_erased_person_is_in_no_table_any_more() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let whole = whole_person(&world, &tenant).await;
    seed_thread(&world, &tenant, &whole, 1500).await;
    let words = whole.words();
    let before = mentions(&world, &tenant, &words).await;
    for (table, _, _) in PERSON_TABLES {
        let there = before.contains_key(table) || table == "erased_people";
        assert!(
            there,
            "{table} has nothing of Ada's: fill it in whole_person"
        );
    }
    let used = "select sum(requests)::bigint from usage_hourly where agent = 'main'";
    let used_before = count(&world, used).await;
    assert!(!limits_in_redis(&whole.ada.user_id).await.is_empty());

    let erased = erase(&world, &tenant.key, &whole.merged[0])
        .await
        .expect(202);
    assert_eq!(erased["user_id"], json!(whole.ada.user_id));
    assert_eq!(erased["identities"], 2);
    assert!(limits_in_redis(&whole.ada.user_id).await.is_empty());
    expect_gone(&world, &tenant, &whole).await;
    assert!(
        mentions(&world, &tenant, &words)
            .await
            .contains_key("erased_people")
    );
    first_pass(&world, &whole.identities).await;
    write_late(&world, &tenant, &whole).await;
    settle(&world).await;
    let left = mentions(&world, &tenant, &words).await;
    let tables: Vec<&str> = left.keys().map(String::as_str).collect();
    assert_eq!(tables, ["audit"], "{left:?}");
    assert_eq!(count(&world, used).await, used_before + 3, "sums stay");

    // Others have lost nothing.
    let thread = transcript(&world, &tenant, &whole.thread).await;
    let expected = whole.in_thread + 1500;
    let blank = |message: &&Value| message["content"] == "[erased]";
    let (blanked, answers): (Vec<&Value>, Vec<&Value>) = thread
        .iter()
        .filter(blank)
        .partition(|message| message["role"] == "user");
    assert_eq!(answers.len(), 1, "what the agent said to her is erased too");
    assert_eq!(blanked.len(), expected);
    for message in blanked {
        assert_eq!(
            (&message["identity"], &message["platform"], &message["role"]),
            (&Value::Null, &Value::Null, &json!("user"))
        );
    }
    for kept in ["of Bob", PARTED, "they met"] {
        assert!(contents(&thread).contains(&kept), "{kept}");
    }
    let tip = format!("/v1/sessions/{}/messages", whole.thread);
    let copies = world.walk(&tenant.key, &tip).await;
    assert!(copies.iter().any(|one| !one["copied_from"].is_null()));
    assert!(!contents(&copies).contains(&SECRET));
    let bobs = transcript(&world, &tenant, &whole.guest_in).await;
    assert_eq!(contents(&bobs), ["come in", "[erased]", "[erased]"]);
    let stayed = world.dm(&whole.bridge, IRC).await;
    assert_eq!(stayed["identity_id"], json!(whole.parted));
    let entries = world.walk(&tenant.key, "/v1/audit").await;
    let erasures: Vec<&Value> = entries
        .iter()
        .filter(|entry| entry["action"] == "user.erase")
        .collect();
    assert_eq!(erasures.len(), 1);
    assert_eq!(erasures[0]["target"], json!(whole.ada.user_id));
    someone_new(&world, &tenant, &whole).await;
}

/// More than a job looks at in one transaction.
async fn seed_thread(world: &World, tenant: &Tenant, whole: &Whole, count: i64) {
    sqlx::query(
        "with place as (
           update sessions s
              set next_seq = next_seq + $4, message_count = message_count + $4
             from conversations c
            where c.tenant_id = $1 and c.id = $2 and s.tenant_id = $1 and s.id = c.tip_session_id
        returning s.id, s.next_seq - $4 as first
         )
         insert into messages (tenant_id, session_id, seq, role, kind, content, identity_id, platform,
                               token_count, created_at, extra)
         select $1, id, first + n, 'user', 'normal', to_json($5::text), $3, 'telegram', 1, now(),
                json_build_object('name', $5::text)
           from place, generate_series(0, $4 - 1) n",
    )
    .bind(tenant.uuid())
    .bind(uuid_of_session(&whole.thread))
    .bind(whole.identities[0].parse::<IdentityId>().unwrap())
    .bind(count)
    .bind(SECRET)
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
}

/// What requests could write that were under way when the person was erased.
async fn write_late(world: &World, tenant: &Tenant, whole: &Whole) {
    sqlx::query(
        "with place as (
           update sessions set next_seq = next_seq + 1 where tenant_id = $1 and id = $2 returning next_seq - 1 as seq
         )
         insert into messages (tenant_id, session_id, seq, role, kind, content, identity_id, platform,
                               token_count, created_at)
         select $1, $2, seq, 'user', 'normal', to_json($4::text), $3, 'web', 1, now()
           from place",
    )
    .bind(tenant.uuid())
    .bind(uuid_of_session(&whole.guest_in))
    .bind(whole.identities[0].parse::<IdentityId>().unwrap())
    .bind(SECRET)
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    plant_usage(world, tenant, &whole.ada.user_id).await;
    for principal in [
        format!("key_x/{TELEGRAM}"),
        format!("key_x/{}", whole.merged[0]),
        format!("{}/web:ada-to-erase", whole.identities[0]),
    ] {
        sqlx::query(
            "insert into idempotency (tenant_id, principal, route, key, request_hash, created_at, caller, acted_for)
             values ($1, $2, 'r', 'k', decode(repeat('00', 32), 'hex'), now(), split_part($2, '/', 1),
                     split_part($2, '/', 2))",
        )
        .bind(tenant.uuid())
        .bind(principal)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    }
}

/// The accounts speak again: for the first time.
async fn someone_new(world: &World, tenant: &Tenant, whole: &Whole) {
    let old = &whole.ada.user_id;
    let token = &crate::support::people::person(world, tenant, "ada-to-erase")
        .await
        .token;
    let me = world.get(token, "/v1/users/me").await.expect(200);
    assert_ne!(me["id"], json!(old));
    assert_eq!(me["display_name"], Value::Null);
    assert_eq!(world.walk(token, "/v1/sessions").await, Vec::<Value>::new());
    world
        .get(token, "/v1/session-keys/adas-key")
        .await
        .expect_problem(404, "session_key_not_found");
    let dm = json!({ "identity": TELEGRAM });
    let fresh = retryable(world, (&whole.bridge, None), "/v1/resolve", "r2", dm).await;
    assert!(fresh.headers.get("idempotency-replayed").is_none());
    let fresh = fresh.expect(200);
    assert_eq!(fresh["created"], true);
    assert!(fresh["user_id"] != json!(old) && fresh["user_id"] != me["id"]);
    let made = make_by_admin(world, tenant).await;
    assert!(made.headers.get("idempotency-replayed").is_none());
    assert!(!whole.merged.contains(&made.expect(201).id()));
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_speaks_while_they_are_erased_is_refused_or_someone_new() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let bridge = world.bridge_key(&tenant, &["telegram"]).await;
    world.say(&bridge, TELEGRAM, "hello").await;
    let speaking = async |n: usize| -> Vec<Reply> {
        let mut replies = Vec::new();
        for round in 0..12 {
            let identity = match (n + round) % 4 {
                0 => "telegram:other",
                _ => TELEGRAM,
            };
            let resolved = world
                .resolve(&bridge, json!({ "identity": identity }))
                .await;
            let said_there = match resolved.status {
                200 => {
                    let session = resolved.expect(200)["session_id"].clone();
                    let path = format!("/v1/sessions/{}/messages", session.as_str().unwrap());
                    let body = json!({"messages": [said(&format!("{n} {round}"))]});
                    let call = (Method::POST, path.as_str());
                    Some(as_bridge(&world, &bridge, identity, call, Some(body)).await)
                }
                _ => None,
            };
            let other = match n % 3 {
                0 => ("/v1/sessions", json!({"session_key": "k"})),
                1 => ("/v1/link-codes", json!({ "identity": identity })),
                _ => (
                    "/v1/session-keys/k/messages",
                    json!({"messages": [said("k")]}),
                ),
            };
            let call = (Method::POST, other.0);
            let other = as_bridge(&world, &bridge, identity, call, Some(other.1)).await;
            replies.extend(said_there);
            replies.extend([resolved, other]);
        }
        replies
    };
    let erasing = async || {
        let mut erased = Vec::new();
        for _ in 0..8 {
            let known = world
                .get(&tenant.key, "/v1/users?limit=200")
                .await
                .expect(200);
            for user in known.list() {
                let id = user.id();
                let reply = erase(&world, &tenant.key, &id).await;
                assert!([202, 404, 503].contains(&reply.status), "{}", reply.body);
                if reply.status == 202 {
                    erased.push(id);
                }
            }
        }
        erased
    };
    let (spoken, erased) =
        futures_util::future::join(join_all((0..6).map(speaking)), erasing()).await;
    let mut statuses = BTreeMap::new();
    for reply in spoken.iter().flatten() {
        let fine = [200, 201, 404, 409, 429, 503].contains(&reply.status);
        assert!(fine, "{}: {}", reply.status, reply.body);
        *statuses.entry(reply.status).or_insert(0) += 1;
    }
    assert!(!erased.is_empty());
    assert!(statuses.contains_key(&201), "{statuses:?}");
    settle(&world).await;
    let ids = erased
        .iter()
        .map(|id| id.parse::<UserId>().unwrap().as_uuid());
    let words: Vec<String> = ids
        .flat_map(|id| [id.to_string(), id.simple().to_string()])
        .collect();
    let left = mentions(&world, &tenant, &words).await;
    let tables: Vec<&str> = left.keys().map(String::as_str).collect();
    assert_eq!(tables, ["audit"], "{left:?}");
    // Nothing that is there was said by an account that is not.
    let orphans = "select count(*)
                     from messages m
                    where identity_id is not null
                      and not exists (select 1 from identities i where i.id = m.identity_id)";
    assert_eq!(count(&world, orphans).await, 0);
}

/// A tenant beside, with equal ids everywhere, and only the statements' predicates between them.
#[tokio::test(flavor = "multi_thread")]
async fn erasing_and_exporting_stay_in_their_tenant_even_without_row_level_security() {
    let world = World::new().await;
    disable_row_level_security(&mut world.superuser().await).await;
    let a = world.tenant("a").await;
    let b = world.tenant("b").await;
    let whole = whole_person(&world, &a).await;
    let export = format!("/v1/users/{}/export", whole.ada.user_id);
    let exported = async || {
        let mut document = world.get(&a.key, &export).await.expect(200);
        document.as_object_mut().unwrap().remove("exported_at");
        for one in document["conversations"].as_array_mut().unwrap() {
            one.as_object_mut().unwrap().remove("exported_at");
        }
        document
    };
    let alone = exported().await;
    let from = a.uuid();
    let to = b.uuid();
    copy_rows(&mut world.superuser().await, from, to).await;
    for table in ["usage_hourly", "idempotency"] {
        let sql = format!(
            "create temporary table copied as select * from {table} where tenant_id = '{from}';
             update copied set tenant_id = '{to}';
             insert into {table} select * from copied on conflict do nothing;
             drop table copied"
        );
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut world.superuser().await)
            .await
            .unwrap();
    }
    assert_eq!(exported().await, alone);
    let of_b = async || {
        let mut all = dump_people(&mut world.superuser().await, to).await;
        for table in ["usage_hourly", "idempotency"] {
            let named = match table {
                "usage_hourly" => "agent = 'main'",
                _ => "true",
            };
            let sql = format!(
                "select coalesce(string_agg(t::text, ' ' order by t::text), '')
                   from {table} t where tenant_id = '{to}' and {named}"
            );
            all += &sqlx::query_scalar::<_, String>(AssertSqlSafe(sql))
                .fetch_one(&mut world.superuser().await)
                .await
                .unwrap();
        }
        all
    };
    let before = of_b().await;
    erase(&world, &a.key, &whole.ada.user_id).await.expect(202);
    eventually("the job has run", Duration::from_secs(20), async || {
        jobs::tick(world.app()).await.unwrap();
        let sql = format!(
            "select count(*) from messages where tenant_id = '{from}' and strpos(content::text, '{SECRET}') > 0"
        );
        count(&world, &sql).await == 0
    })
    .await;
    settle(&world).await;
    assert_eq!(of_b().await, before);
}

/// A look that takes many runs goes on where it stopped, and others who were erased come in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_look_for_one_person_does_not_keep_others_waiting() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let plant =
        "insert into erased_people (tenant_id, user_id, merged_ids, identity_ids, names, erased_at)
                 select $1, md5(n::text)::uuid, '{}', '{}', '{}', $2 - n * interval '1 second'
                   from generate_series(1, 2) n";
    let second = TimeDelta::seconds(1);
    let erased_at = world.clock.now().duration_trunc(second).unwrap();
    sqlx::query(plant)
        .bind(tenant.uuid())
        .bind(erased_at)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    let caller = ServiceCaller::for_tenant(tenant.id.parse().unwrap());
    let mut tx = caller.begin(&world.app().db).await.unwrap();
    let mut taken = Vec::new();
    for run in 0..4 {
        let now = erased_at + second * run;
        let due = take_due(&mut tx, erased_at - TimeDelta::hours(1), now).await;
        let due = due.unwrap().unwrap();
        let name = RequestName {
            principal: "key_1".to_owned(),
            route: "r".to_owned(),
            key: run.to_string(),
        };
        let user_id = due.erasure.user_id;
        update_opened(&mut tx, user_id, &name).await.unwrap();
        let began = (due.began_at - erased_at).num_seconds();
        taken.push((user_id, began, due.opened_to.map(|name| name.key)));
    }
    let first = taken[0].0;
    let second = taken[1].0;
    assert_ne!(first, second);
    assert_eq!(
        taken,
        [
            (first, 0, None),
            (second, 1, None),
            (first, 0, Some("0".to_owned())),
            (second, 1, Some("1".to_owned())),
        ]
    );
}
