//! Nothing of one tenant is ever visible to another: by the catalog, by raw SQL, and over HTTP with
//! each of the two locks alone.

use reqwest::Method;
use secrecy::ExposeSecret;
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use throughline::domain::tenant::api_key::{digest, key_text};
use throughline::ids::ApiKeyId;

use crate::support::data::catalog::{tenant_tables, violations};
use crate::support::data::every_table::{create_key, fill_every_table};
use crate::support::servers::cluster::cluster;
use crate::support::{Fields, Reply, Tenant, World};

async fn execute(connection: &mut PgConnection, sql: &str) -> Result<u64, sqlx::Error> {
    let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(connection)
        .await?;
    Ok(done.rows_affected())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schema_keeps_every_rule() {
    let database = cluster().new_database().await;
    let mut superuser = cluster().superuser(&database).await;
    assert_eq!(violations(&mut superuser).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_break_a_rule_is_noticed() {
    let database = cluster().new_database().await;
    let mut superuser = cluster().superuser(&database).await;
    for broken in [
        "drop policy tenant_isolation on api_keys",
        "alter policy tenant_isolation on api_keys using (true)",
        "alter policy tenant_isolation on api_keys with check (true)",
        "create policy extra on api_keys using (true)",
        "alter table api_keys no force row level security",
        "alter table api_keys disable row level security",
        "alter table idempotency alter tenant_id drop not null",
        "alter table api_keys drop constraint api_keys_pkey",
        "create unique index on api_keys (digest)",
        "create table notes (id uuid primary key, text text)",
        "create table notes (tenant_id uuid not null, id uuid, primary key (tenant_id, id))",
        "create table notes (tenant_id uuid not null, id uuid, primary key (tenant_id, id));
         select install_tenant_policy('notes');
         alter table notes add constraint notes_tenant_fkey foreign key (id) references tenants (id)",
        "create view all_keys as select id from api_keys",
        "create materialized view all_keys as select id from api_keys",
        "grant truncate on api_keys to throughline_service",
        "grant update (actor) on audit to throughline_service",
        "grant delete on audit to throughline_service",
        "grant select on api_keys to public",
        "grant select on api_keys to throughline",
        "create function peek() returns bigint language sql security definer
           set search_path = pg_catalog, public as 'select count(*) from api_keys';
         revoke execute on function peek from public",
        "grant execute on function find_api_key to public",
        "alter function find_api_key reset search_path",
        "alter function find_api_key owner to postgres",
        "alter table tenants add check (name <> '')",
        "create table notes (tenant_id uuid not null, id uuid, primary key (tenant_id, id));
         select install_tenant_policy('notes')",
        "delete from tenant_erasure_order where table_name = 'users'",
        "insert into tenant_erasure_order (position, table_name) values (0, 'jobs')",
        "update tenant_erasure_order set position = -1 where table_name = 'users'",
    ] {
        let mut tx = superuser.begin().await.unwrap();
        // A primary key that loses NOT NULL must lose the key first; what fails to break breaks nothing.
        let sql = match broken {
            "alter table idempotency alter tenant_id drop not null" => {
                "alter table idempotency drop constraint idempotency_pkey, alter tenant_id drop not null"
            }
            sql => sql,
        };
        execute(&mut tx, sql).await.unwrap();
        assert_ne!(violations(&mut tx).await, Vec::<String>::new(), "unnoticed: {broken}");
        tx.rollback().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_table_is_erased_with_its_tenant_after_one_line() {
    let database = cluster().new_database().await;
    let mut superuser = cluster().superuser(&database).await;
    let migration = "set role throughline_owner;
         create table notes (tenant_id uuid not null, user_id uuid not null,
           constraint notes_pkey primary key (tenant_id, user_id),
           constraint notes_user_fkey foreign key (tenant_id, user_id) references users (tenant_id, id));
         select install_tenant_policy('notes');
         select install_tenant_erase('notes', 'users');
         reset role;";
    execute(&mut superuser, migration).await.unwrap();
    assert_eq!(violations(&mut superuser).await, Vec::<String>::new());
    let around: Vec<String> = sqlx::query_scalar(
        "select table_name from tenant_erasure_order
          where table_name in ('identities', 'notes', 'users', 'audit_heads') order by position",
    )
    .fetch_all(&mut superuser)
    .await
    .unwrap();
    assert_eq!(around, ["identities", "notes", "users", "audit_heads"]);
    let nowhere = "select install_tenant_erase('notes', 'jobs')";
    assert!(execute(&mut superuser, nowhere).await.is_err());
    let tenant = "01890000-0000-7000-8000-000000000001";
    let rows = format!(
        "insert into tenants (id, name, state, created_at, updated_at)
         values ('{tenant}', 'Acme', 'deleting', now(), now());
         insert into users (tenant_id, id, created_at) values ('{tenant}', '{tenant}', now());
         insert into notes (tenant_id, user_id) values ('{tenant}', '{tenant}')"
    );
    execute(&mut superuser, &rows).await.unwrap();
    let url = cluster().service_url(&database);
    let mut service = PgConnection::connect(&url).await.unwrap();
    for left in [1, 1, 0] {
        let erase = format!("select erase_tenant('{tenant}', 10)");
        let erased: i32 = sqlx::query_scalar(AssertSqlSafe(erase))
            .fetch_one(&mut service)
            .await
            .unwrap();
        assert_eq!(erased, left);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_tenant_the_service_role_sees_and_writes_nothing() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    fill_every_table(&world, &tenant).await;
    let mut superuser = world.superuser().await;
    let url = cluster().service_url(&world.database);
    let mut service = PgConnection::connect(&url).await.unwrap();
    let tenant_uuid = tenant.uuid();
    for table in tenant_tables(&mut superuser).await {
        let count = |table: &str| AssertSqlSafe(format!("select count(*) from {table}"));
        let there: i64 = sqlx::query_scalar(count(&table))
            .fetch_one(&mut superuser)
            .await
            .unwrap();
        assert!(there > 0, "{table} is empty: fill it in fill_every_table");
        let seen: i64 = sqlx::query_scalar(count(&table))
            .fetch_one(&mut service)
            .await
            .unwrap();
        assert_eq!(seen, 0, "{table} shows rows");
        for sql in [
            format!("update {table} set tenant_id = tenant_id"),
            format!("delete from {table}"),
        ] {
            // Refused outright, or it finds no row.
            assert_eq!(execute(&mut service, &sql).await.unwrap_or(0), 0, "{sql}");
        }
        let insert = format!("insert into {table} (tenant_id) values ('{tenant_uuid}')");
        assert!(
            execute(&mut service, &insert).await.is_err(),
            "{table} takes a row"
        );
        let truncate = format!("truncate {table}");
        assert!(
            execute(&mut service, &truncate).await.is_err(),
            "{table} can be emptied"
        );
        let after: i64 = sqlx::query_scalar(count(&table))
            .fetch_one(&mut superuser)
            .await
            .unwrap();
        assert_eq!(after, there, "{table} lost rows");
    }
    assert!(
        execute(&mut service, "select digest from api_keys")
            .await
            .is_err()
    );
    assert!(
        execute(&mut service, "set role throughline_owner")
            .await
            .is_err()
    );
    assert!(
        execute(&mut service, "set role throughline_definer")
            .await
            .is_err()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn inside_a_tenant_a_row_of_another_cannot_be_written() {
    let world = World::new().await;
    let own = world.tenant("own").await;
    let other = world.tenant("other").await;
    let url = cluster().service_url(&world.database);
    let mut service = PgConnection::connect(&url).await.unwrap();
    let mut tx = service.begin().await.unwrap();
    let enter = format!("set local app.tenant_id = '{}'", own.uuid());
    execute(&mut tx, &enter).await.unwrap();
    let insert = format!(
        "insert into idempotency (tenant_id, principal, route, key, request_hash, created_at)
         values ('{}', 'p', 'r', 'k', decode(repeat('00', 32), 'hex'), now())",
        other.uuid()
    );
    let refused = execute(&mut tx, &insert).await.unwrap_err();
    let code = refused
        .as_database_error()
        .unwrap()
        .code()
        .unwrap()
        .into_owned();
    assert_eq!(code, "42501");
    tx.rollback().await.unwrap();
    let seen: i64 = sqlx::query_scalar("select count(*) from api_keys")
        .fetch_one(&mut service)
        .await
        .unwrap();
    assert_eq!(seen, 0, "the setting does not outlive its transaction");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tenants_with_equal_ids_never_meet() {
    let world = World::new().await;
    two_tenants_with_equal_ids(&world).await;
}

/// With the policies off, only the predicates in the statements are left: dropping one fails here.
#[tokio::test(flavor = "multi_thread")]
async fn two_tenants_with_equal_ids_never_meet_even_without_row_level_security() {
    let world = World::new().await;
    let mut superuser = world.superuser().await;
    for table in tenant_tables(&mut superuser).await {
        let sql =
            format!("alter table {table} disable row level security, no force row level security");
        execute(&mut superuser, &sql).await.unwrap();
    }
    two_tenants_with_equal_ids(&world).await;
}

async fn two_tenants_with_equal_ids(world: &World) {
    let a = world.tenant("tenant a").await;
    let b = world.tenant("tenant b").await;
    // Equal ids: an admin key each, and a key each to be revoked.
    let admin_id = ApiKeyId::generate();
    let victim_id = ApiKeyId::generate();
    let a_key = plant_key(world, &a, admin_id, "canary-a").await;
    let b_key = plant_key(world, &b, admin_id, "canary-b").await;
    plant_key(world, &a, victim_id, "canary-a victim").await;
    let b_victim = plant_key(world, &b, victim_id, "canary-b victim").await;

    // The same Idempotency-Key, the same principal, the same body: two requests, not one.
    let made_a = create_key(world, &a_key, "same").await;
    let made_b = create_key(world, &b_key, "same").await;
    assert!(made_b.headers.get("idempotency-replayed").is_none());
    assert_ne!(made_a.expect(201)["id"], made_b.expect(201)["id"]);
    assert_eq!(
        create_key(world, &a_key, "same").await.expect(201),
        made_a.expect(201)
    );
    assert_eq!(
        create_key(world, &b_key, "same").await.expect(201),
        made_b.expect(201)
    );

    for (key, foreign) in [(&a_key, "canary-b"), (&b_key, "canary-a")] {
        let listed = world.get(key, "/v1/api-keys?limit=200").await;
        assert!(!listed.body.contains(foreign), "{}", listed.body);
        assert_eq!(listed.expect(200).list().len(), 4);
    }
    let page = world.get(&a_key, "/v1/api-keys?limit=1").await.expect(200);
    let stolen = format!("/v1/api-keys?limit=1&cursor={}", page.text("next_cursor"));
    world
        .get(&b_key, &stolen)
        .await
        .expect_problem(400, "invalid_cursor");

    world
        .delete(&a_key, &format!("/v1/api-keys/{victim_id}"))
        .await
        .expect(204);
    world.get(&b_victim, "/v1/tenant").await.expect(200);
    let uses: Vec<(String, bool)> = sqlx::query_as(
        "select name, revoked_at is not null from api_keys where id = $1 order by name",
    )
    .bind(victim_id)
    .fetch_all(&mut world.superuser().await)
    .await
    .unwrap();
    let expected = [
        ("canary-a victim".to_owned(), true),
        ("canary-b victim".to_owned(), false),
    ];
    assert_eq!(uses, expected);

    named_things_never_meet(world, (&a, &a_key), (&b, &b_key)).await;

    // Both chains have the same numbers; each tenant sees its own, and its own head.
    for (key, own, foreign) in [(&a_key, &made_a, &made_b), (&b_key, &made_b, &made_a)] {
        let listed = world.get(key, "/v1/audit?limit=200").await;
        let entries = listed.list();
        let head = world.get(key, "/v1/audit/head").await.expect(200);
        assert_eq!(head["hash"], entries[0]["hash"]);
        assert_eq!(head["seq"], entries.len());
        let id = |reply: &Reply| reply.expect(201).id();
        assert!(listed.body.contains(&id(own)), "{}", listed.body);
        assert!(!listed.body.contains(&id(foreign)), "{}", listed.body);
    }

    for (tenant, count) in [(&a, 1_000_000), (&b, 2_000_000)] {
        sqlx::query(
            "insert into usage_hourly (tenant_id, hour, agent, user_id, model, source, requests,
                                       turns, input_tokens, output_tokens)
             values ($1, date_trunc('hour', now()), 'planted', $1, '', 'api', $2, 0, 0, 0)",
        )
        .bind(tenant.uuid())
        .bind(count)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    }
    for (key, count) in [(&a_key, 1), (&b_key, 2)] {
        let usage = world
            .get(key, "/v1/usage?group_by=source")
            .await
            .expect(200);
        let requests = usage.number("/data/0/requests");
        assert_eq!(requests / 1_000_000, count, "{usage}");
    }

    // Background work of one tenant leaves the other's alone: only a's job is due.
    sqlx::query("update idempotency set created_at = now() - interval '2 days'")
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    sqlx::query("update jobs set run_at = now() - interval '1 minute' where tenant_id = $1")
        .bind(a.uuid())
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    let left = async || -> Vec<sqlx::types::Uuid> {
        sqlx::query_scalar("select tenant_id from idempotency order by tenant_id")
            .fetch_all(&mut world.superuser().await)
            .await
            .unwrap()
    };
    crate::support::eventually(
        "a's job has run",
        std::time::Duration::from_secs(5),
        async || {
            throughline::jobs::tick(world.app()).await.unwrap();
            !left().await.contains(&a.uuid())
        },
    )
    .await;
    assert_eq!(left().await, [b.uuid()]);
}

/// Agents and issuers of the same name, people with the same id.
async fn named_things_never_meet(world: &World, a: (&Tenant, &str), b: (&Tenant, &str)) {
    let secret = "a secret of thirty-two bytes or more";
    let person = throughline::ids::UserId::generate();
    for ((tenant, key), mark) in [(a, "canary-a"), (b, "canary-b")] {
        let agent = json!({"upstream": {"kind": "demo"}, "system_prompt": mark});
        world.put(key, "/v1/agents/same", agent).await.expect(201);
        let issuer = json!({
            "issuer": "same", "audience": mark, "platform": "web", "algorithm": "HS256", "secret": secret,
        });
        world.put(key, "/v1/issuers/same", issuer).await.expect(201);
        sqlx::query("insert into users (tenant_id, id, display_name, created_at) values ($1, $2, $3, now())")
            .bind(tenant.uuid())
            .bind(person)
            .bind(mark)
            .execute(&mut world.superuser().await)
            .await
            .unwrap();
    }
    let tokens = [(a.0, "canary-a"), (b.0, "canary-b")].map(|(tenant, mark)| {
        let expires = world.clock.now().timestamp() + 60;
        let claims =
            json!({"iss": "same", "aud": [tenant.id, mark], "sub": "same", "exp": expires});
        crate::support::tokens::hs256(&claims, secret)
    });
    let in_a = world.get(&tokens[0], "/v1/users/me").await.expect(200);
    let in_b = world.get(&tokens[1], "/v1/users/me").await.expect(200);
    assert_ne!(in_a["id"], in_b["id"]);
    let foreign = format!("/v1/users/{}", in_b.text("id"));
    world
        .get(a.1, &foreign)
        .await
        .expect_problem(404, "not_found");
    let everything = async |key: &str| {
        let mut text = String::new();
        for path in [
            "/v1/agents",
            "/v1/agents/same",
            "/v1/issuers",
            "/v1/issuers/same",
            "/v1/tenant",
        ] {
            text += &world.get(key, path).await.body;
        }
        text + &world.get(key, &format!("/v1/users/{person}")).await.body
    };
    for ((_, key), own, other) in [(a, "canary-a", "canary-b"), (b, "canary-b", "canary-a")] {
        let text = everything(key).await;
        assert!(text.contains(own) && !text.contains(other), "{text}");
    }
    let of_b = everything(b.1).await;
    let changed = json!({"upstream": {"kind": "demo"}, "system_prompt": "changed"});
    world.put(a.1, "/v1/agents/same", changed).await.expect(200);
    world.delete(a.1, "/v1/agents/same").await.expect(204);
    world.delete(a.1, "/v1/issuers/same").await.expect(204);
    let patch = world
        .request(Method::PATCH, "/v1/tenant", a.1)
        .json(&json!({"name": "changed"}));
    Reply::of(patch).await.expect(200);
    assert_eq!(
        everything(b.1).await,
        of_b,
        "what one tenant does changes nothing of the other"
    );
    let vouch = json!({"name": "x", "scopes": ["bridge"], "platforms": ["web"]});
    world
        .post(a.1, "/v1/api-keys", vouch.clone())
        .await
        .expect(201);
    world
        .post(b.1, "/v1/api-keys", vouch)
        .await
        .expect_problem(409, "platform_taken");
    let issuer = json!({"issuer": "i", "platform": "irc", "algorithm": "HS256", "secret": secret});
    let bridge = json!({"name": "x", "scopes": ["bridge"], "platforms": ["irc"]});
    world.post(b.1, "/v1/api-keys", bridge).await.expect(201);
    world.put(a.1, "/v1/issuers/irc", issuer).await.expect(201);
}

/// An admin key with a chosen id, as no API would make it.
async fn plant_key(world: &World, tenant: &Tenant, id: ApiKeyId, name: &str) -> String {
    let text = key_text(tenant.id.parse().unwrap(), id, [name.len() as u8; 24]);
    sqlx::query(
        "insert into api_keys (tenant_id, id, digest, name, scopes, platforms, created_at)
         values ($1, $2, $3, $4, array['admin'], '{}', now())",
    )
    .bind(tenant.uuid())
    .bind(id)
    .bind(digest(&text).as_slice())
    .bind(name)
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    text.expose_secret().to_owned()
}
