//! Chains: any id leads to the tip at any depth, compression makes one child however many ask, and it can
//! be taken back.

use serde_json::{Value, json};
use sqlx::types::Uuid;
use sqlx::{Connection, PgConnection};
use throughline::ids::SessionId;
use throughline::store::conversation::tips::TIP_BY_ID;

use crate::support::conversations::{assistant_message, user_message};
use crate::support::servers::cluster::cluster;
use crate::support::{Fields, Tenant, World};

/// A chain of `links` sessions, written by SQL: the ids, oldest first.
async fn seed_chain(world: &World, tenant: &Tenant, links: usize) -> Vec<SessionId> {
    let ids: Vec<SessionId> = (0..links).map(|_| SessionId::generate()).collect();
    let uuids: Vec<Uuid> = ids.iter().map(SessionId::as_uuid).collect();
    let mut superuser = world.superuser().await;
    let mut tx = superuser.begin().await.unwrap();
    sqlx::query(
        "insert into conversations (tenant_id, id, namespace, agent, tip_session_id, created_at)
         values ($1, $2, '00000000-0000-0000-0000-000000000000', 'main', $3, now())",
    )
    .bind(tenant.uuid())
    .bind(uuids[0])
    .bind(uuids[links - 1])
    .execute(&mut *tx)
    .await
    .unwrap();
    sqlx::query(
        "insert into sessions (tenant_id, id, conversation_id, depth, chain_parent_id, edge, state, end_reason,
                               created_at, last_active_at, last_user_at, ended_at)
         select $1, l.id, $3, l.place - 1, lag(l.id) over (order by l.place),
                case when l.place > 1 then 'compression' end,
                case when l.place < $4 then 'ended' else 'open' end,
                case when l.place < $4 then 'compression' end,
                now(), now(), now(), case when l.place < $4 then now() end
           from unnest($2::uuid[]) with ordinality as l (id, place)",
    )
    .bind(tenant.uuid())
    .bind(&uuids)
    .bind(uuids[0])
    .bind(links as i64)
    .execute(&mut *tx)
    .await
    .unwrap();
    tx.commit().await.unwrap();
    ids
}

/// Buffers that the tip query touches while it runs, as the service's own role.
async fn buffers(world: &World, tenant: &Tenant, id: SessionId) -> i64 {
    let url = cluster().service_url(&world.database);
    let mut service = PgConnection::connect(&url).await.unwrap();
    let mut tx = service.begin().await.unwrap();
    let enter = format!("set local app.tenant_id = '{}'", tenant.uuid());
    sqlx::raw_sql(sqlx::AssertSqlSafe(enter))
        .execute(&mut *tx)
        .await
        .unwrap();
    let sql = format!("explain (analyze, buffers, format json) {TIP_BY_ID}");
    let mut touched = 0;
    // The first look also fills caches.
    for _ in 0..2 {
        let plan: Value = sqlx::query_scalar(sqlx::AssertSqlSafe(sql.clone()))
            .bind(tenant.uuid())
            .bind(id)
            .bind(Uuid::nil())
            .bind(None::<Uuid>)
            .bind(world.clock.now())
            .fetch_one(&mut *tx)
            .await
            .unwrap();
        let top = &plan[0]["Plan"];
        touched = top.number("Shared Hit Blocks") + top.number("Shared Read Blocks");
    }
    touched
}

#[tokio::test(flavor = "multi_thread")]
async fn every_id_of_a_chain_of_ten_thousand_leads_to_its_tip_at_the_cost_of_one() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let short = seed_chain(&world, &tenant, 2).await;
    let long = seed_chain(&world, &tenant, 10_000).await;
    sqlx::raw_sql("vacuum analyze")
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    let tip = long.last().unwrap().to_string();
    for place in [0, 1, 2, 99, 100, 101, 5_000, 9_998, 9_999] {
        let path = format!("/v1/sessions/{}/tip", long[place]);
        let found = world.get(&tenant.key, &path).await.expect(200);
        let expected = json!({
            "requested_id": long[place].to_string(), "session_id": tip,
            "conversation_id": long[0].to_string(), "hops": 9_999 - place,
        });
        assert_eq!(found, expected);
    }
    let shallow = buffers(&world, &tenant, short[0]).await;
    assert!(shallow > 0);
    for place in [0, 5_000, 9_999] {
        assert_eq!(
            buffers(&world, &tenant, long[place]).await,
            shallow,
            "asked at {place}"
        );
    }
    let path = format!("/v1/sessions/{}/lineage?limit=200", long[7]);
    let links = world.walk(&tenant.key, &path).await;
    let listed: Vec<String> = links.iter().map(Fields::id).collect();
    let expected: Vec<String> = long.iter().map(SessionId::to_string).collect();
    assert_eq!(listed, expected);
    assert!(
        links
            .iter()
            .enumerate()
            .all(|(depth, link)| link["depth"] == depth)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hint_that_lags_behind_costs_steps_and_no_wrong_answer() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let chain = seed_chain(&world, &tenant, 5).await;
    sqlx::query("update conversations set tip_session_id = $1")
        .bind(chain[1])
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    for id in &chain {
        let path = format!("/v1/sessions/{id}/tip");
        let found = world.get(&tenant.key, &path).await.expect(200);
        assert_eq!(found["session_id"], chain[4].to_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_is_a_conversation_of_its_own_that_knows_where_it_came_from() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let messages = json!([
        user_message("one"),
        assistant_message("two"),
        user_message("three")
    ]);
    let body = json!({"id": "trunk", "session_key": "k", "title": "Trunk", "messages": messages});
    world.session(&tenant.key, body).await;
    let branch = async |body: Value| {
        world
            .post(&tenant.key, "/v1/sessions/trunk/branch", body)
            .await
    };
    let made = branch(json!({"from_seq": 2, "title": "Twig"}))
        .await
        .expect(201);
    let id = made.id();
    assert_eq!(
        (&made["parent_id"], &made["edge"], &made["depth"]),
        (&json!("trunk"), &json!("branch"), &json!(0))
    );
    assert_eq!(
        (&made["conversation_id"], &made["title"]),
        (&json!(id), &json!("Twig"))
    );
    assert_eq!(
        (&made["session_key"], &made["current"]),
        (&json!("k"), &json!(false))
    );
    assert_eq!(
        (&made["message_count"], &made["state"]),
        (&json!(2), &json!("open"))
    );
    for scope in ["session", "conversation"] {
        let path = format!("/v1/sessions/{id}/messages?scope={scope}");
        assert_eq!(world.contents(&tenant.key, &path).await, ["one", "two"]);
    }
    let appended = world
        .append(&tenant.key, &id, json!([user_message("else")]))
        .await
        .expect(201);
    assert_eq!(appended["messages"][0]["seq"], 3);
    assert_eq!(
        world
            .contents(&tenant.key, "/v1/sessions/trunk/messages")
            .await,
        ["one", "two", "three"]
    );
    let tip = world
        .get(&tenant.key, "/v1/sessions/trunk/tip")
        .await
        .expect(200);
    assert_eq!(
        (&tip["session_id"], &tip["hops"]),
        (&json!("trunk"), &json!(0)),
        "a branch is no part of the chain"
    );
    assert_eq!(branch(json!({})).await.expect(201)["message_count"], 3);
    for seq in [4, 1_000_000] {
        let problem = branch(json!({"from_seq": seq}))
            .await
            .expect_problem(422, "invalid_value");
        assert_eq!(problem["errors"][0]["pointer"], "/from_seq");
    }
    let under_key = world.walk(&tenant.key, "/v1/sessions?session_key=k").await;
    assert_eq!(under_key.len(), 3);
}
