//! Erasing users while others speak, export and wait; and only in one tenant.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DurationRound, TimeDelta};
use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;
use sqlx::AssertSqlSafe;
use throughline::dev::service_caller;
use throughline::ids::UserId;
use throughline::jobs;
use throughline::store::db::idempotency::RequestName;
use throughline::store::people::erased_people::{claim_due, update_progress};

use crate::support::conversations::user_message;
use crate::support::data::catalog::{copy_rows, disable_row_level_security, dump_people};
use crate::support::data::erasure::{count, erase, mentions, settle};
use crate::support::data::whole_user::{SECRET, TELEGRAM, whole_user};
use crate::support::people::as_bridge;
use crate::support::{Fields, Reply, World, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_writes_while_being_erased_is_refused_or_new() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let bridge = world.bridge_key(&tenant, &["telegram"]).await;
    world.write_dm(&bridge, TELEGRAM, "hello").await;
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
                    let body = json!({"messages": [user_message(&format!("{n} {round}"))]});
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
                    json!({"messages": [user_message("k")]}),
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
    let whole = whole_user(&world, &a).await;
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
async fn a_long_erasure_of_one_user_does_not_delay_others() {
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
    let caller = service_caller(tenant.id.parse().unwrap());
    let mut tx = caller.begin(&world.app().db).await.unwrap();
    let mut taken = Vec::new();
    for run in 0..4 {
        let now = erased_at + second * run;
        let due = claim_due(&mut tx, erased_at - TimeDelta::hours(1), now).await;
        let due = due.unwrap().unwrap();
        let name = RequestName {
            principal: "key_1".to_owned(),
            route: "r".to_owned(),
            key: run.to_string(),
        };
        let user_id = due.erasure.user_id;
        update_progress(&mut tx, user_id, &name).await.unwrap();
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
