//! Expiry beside those who use what it is about to delete.

use std::time::Duration;

use chrono::TimeDelta;
use sqlx::Connection;
use throughline::dev::service_caller;
use throughline::store::tenant::expiry::{Expiring, delete, find_oldest};

use crate::support::{Tenant, World, eventually};

async fn run(world: &World, tenant: &Tenant, sql: &str) {
    let sql = sql.replace("TENANT", &tenant.uuid().to_string());
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
}

async fn count(world: &World, table: &str) -> i64 {
    let sql = format!("select count(*) from {table}");
    sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
}

/// Deletes what is older than a month.
async fn expire(world: &World, tenant: &Tenant, what: Expiring) -> u64 {
    let caller = service_caller(tenant.id.parse().unwrap());
    let mut tx = caller.begin(&world.app().db).await.unwrap();
    let before = world.clock.now() - TimeDelta::days(30);
    let done = delete(&mut tx, what, before, 100).await.unwrap();
    tx.commit().await.unwrap();
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_used_again_while_expiry_waits_is_kept() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    run(
        &world,
        &tenant,
        "insert into users (tenant_id, id, created_at) values ('TENANT', 'TENANT', now());
         insert into identities (tenant_id, id, user_id, platform, external_id, raw, linked_at, created_at)
         values ('TENANT', 'TENANT', 'TENANT', 'telegram', '5', '5', now(), now());
         insert into inbound_receipts (tenant_id, platform, scope, chat_ref, identity_id, message_id, created_at)
         values ('TENANT', 'telegram', '', 'dm:5', 'TENANT', '1', now() - interval '40 days');
         insert into chats (tenant_id, platform, scope, chat_ref, next_seq)
         values ('TENANT', 'telegram', '', 'dm:5', 2);
         insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, payload, state, visible_at,
                                 created_at, ended_at)
         values ('TENANT', 'TENANT', 'telegram', '', 'dm:5', 1, 'notice', '{}', 'dead', now(), now(),
                 now() - interval '40 days')",
    )
    .await;
    for (what, table, used) in [
        (
            Expiring::Receipts,
            "inbound_receipts",
            "update inbound_receipts set created_at = now()",
        ),
        (
            Expiring::Deliveries,
            "deliveries",
            "update deliveries set state = 'pending', ended_at = null",
        ),
    ] {
        let mut superuser = world.superuser().await;
        let mut using = superuser.begin().await.unwrap();
        sqlx::query(used).execute(&mut *using).await.unwrap();
        let release = async {
            eventually("expiry waits", Duration::from_secs(4), async || {
                let waiting = "pg_stat_activity
                    where datname = current_database() and wait_event_type = 'Lock'";
                count(&world, waiting).await > 0
            })
            .await;
            using.commit().await.unwrap();
        };
        let (deleted, ()) = tokio::join!(expire(&world, &tenant, what), release);
        assert_eq!((deleted, count(&world, table).await), (0, 1), "{what:?}");
    }
}

/// An import asks how it brought accounts where they are, however long ago that was.
#[tokio::test(flavor = "multi_thread")]
async fn moves_that_imports_depend_on_are_kept() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    run(
        &world,
        &tenant,
        "insert into users (tenant_id, id, created_at)
         select 'TENANT', md5(n::text)::uuid, now() from generate_series(1, 2) n;
         insert into identities (tenant_id, id, user_id, platform, external_id, raw, linked_at, created_at)
         select 'TENANT', md5(n::text)::uuid, md5(n::text)::uuid, 'telegram', n::text, n::text, now(), now()
           from generate_series(1, 2) n;
         insert into identity_moves (tenant_id, id, identity_id, from_user, to_user, kind, reason, created_at)
         select 'TENANT', gen_random_uuid(), md5(n)::uuid, md5('1')::uuid, md5('2')::uuid, kind, n || ' ' || kind,
                now() - interval '400 days' + at * interval '1 hour'
           from (values ('1', 'unlink', 1), ('1', 'import', 2), ('1', 'code', 3), ('1', 'unlink', 4),
                        ('2', 'code', 5), ('2', 'unlink', 6)) as m (n, kind, at)",
    )
    .await;
    assert_eq!(expire(&world, &tenant, Expiring::IdentityMoves).await, 4);
    let kept: Vec<String> =
        sqlx::query_scalar("select reason from identity_moves order by created_at")
            .fetch_all(&mut world.superuser().await)
            .await
            .unwrap();
    assert_eq!(kept, ["1 import", "1 unlink"]);
    let caller = service_caller(tenant.id.parse().unwrap());
    let mut tx = caller.begin(&world.app().db).await.unwrap();
    find_oldest(&mut tx, Expiring::IdentityMoves).await.unwrap();
}
