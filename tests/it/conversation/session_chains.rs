//! Chains: any id leads to the tip at any depth, compression makes one child however many ask, and it can
//! be taken back.

use crate::support::Fields;
use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};
use sqlx::types::Uuid;
use sqlx::{Connection, PgConnection};
use throughline::ids::SessionId;
use throughline::store::conversation::tips::TIP_BY_ID;

use crate::support::conversations::{answered, said};
use crate::support::servers::cluster::cluster;
use crate::support::{Tenant, World};

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
                               created_at, last_active_at, last_person_at, ended_at)
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
async fn three_hundred_compressions_leave_every_id_good_and_every_message_once() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"id": "long", "messages": [said("message 0")]});
    world.session(&tenant.key, body).await;
    let mut ids = vec!["long".to_owned()];
    for round in 1..=300 {
        // The client goes on with the first id it ever had, now on one node and now on the other.
        let node = round % 2;
        let text = format!("message {round}");
        world
            .append_on(node, &tenant.key, "long", json!([said(&text)]))
            .await
            .expect(201);
        let url = world.url_on(1 - node, "/v1/sessions/long/compress");
        let body = json!({"summary": format!("up to {round}")});
        let request = world.client.post(url).bearer_auth(&tenant.key).json(&body);
        let done = crate::support::Reply::of(request).await.expect(201);
        assert_eq!(done["parent_id"], ids[round - 1]);
        ids.push(done.text("session_id").to_owned());
    }
    for place in (0..=300).step_by(25) {
        let path = format!("/v1/sessions/{}", ids[place]);
        let tip = world.get(&tenant.key, &path).await.expect(200);
        assert_eq!((&tip["id"], &tip["depth"]), (&json!(ids[300]), &json!(300)));
        let exact = world
            .get(&tenant.key, &format!("{path}?exact=true"))
            .await
            .expect(200);
        assert_eq!(
            (&exact["id"], &exact["depth"]),
            (&json!(ids[place]), &json!(place))
        );
    }
    let lineage = world.walk(&tenant.key, "/v1/sessions/long/lineage").await;
    assert_eq!(lineage.iter().map(Fields::id).collect::<Vec<_>>(), ids);
    let all = world
        .walk(
            &tenant.key,
            "/v1/sessions/long/messages?scope=conversation&limit=200",
        )
        .await;
    let of_kind = |kind: &str| -> Vec<String> {
        let matching = all.iter().filter(|message| message["kind"] == kind);
        matching
            .map(|message| message.text("content").to_owned())
            .collect()
    };
    let expected: Vec<String> = (0..=300).map(|round| format!("message {round}")).collect();
    assert_eq!(of_kind("normal"), expected);
    let expected: Vec<String> = (1..=300).map(|round| format!("up to {round}")).collect();
    assert_eq!(of_kind("summary"), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_compressions_at_once_make_one_child() {
    let world = Arc::new(World::with_nodes(2).await);
    let tenant = world.tenant("Acme").await;
    let messages: Vec<Value> = (0..20).map(|n| said(&format!("message {n}"))).collect();
    let id = world
        .session(&tenant.key, json!({ "messages": messages }))
        .await
        .id();
    let mut racers = Vec::new();
    for place in 0..32 {
        let world = world.clone();
        let key = tenant.key.clone();
        let id = id.clone();
        racers.push(tokio::spawn(async move {
            let url = world.url_on(place % 2, &format!("/v1/sessions/{id}/compress"));
            let body = json!({"summary": format!("by racer {place}"), "keep_last": 3});
            let request = world.client.post(url).bearer_auth(&key).json(&body);
            crate::support::Reply::of(request).await
        }));
    }
    let mut children = BTreeSet::new();
    let mut made = 0;
    for racer in racers {
        let reply = racer.await.unwrap();
        made += usize::from(reply.status == 201);
        let done = reply.expect(if reply.status == 201 { 201 } else { 200 });
        assert_eq!(done["parent_id"], id);
        assert_eq!(done["kept"], 3);
        children.insert(done.text("session_id").to_owned());
    }
    assert_eq!((children.len(), made), (1, 1));
    let lineage = world
        .walk(&tenant.key, &format!("/v1/sessions/{id}/lineage"))
        .await;
    assert_eq!(lineage.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compression_keeps_what_it_must_and_tells_what_it_did() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let call =
        json!({"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}});
    let long = "something long that a summary can stand for. ".repeat(20);
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        said(&long), answered(&long),
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        said("and now?"), answered("that is all"),
    ]);
    let id = world
        .session(&tenant.key, json!({ "messages": messages }))
        .await
        .id();
    let before = world
        .get(&tenant.key, &format!("/v1/sessions/{id}"))
        .await
        .expect(200);
    let preview = world
        .compress(
            &tenant.key,
            &id,
            json!({"summary": "they looked", "keep_last": 3, "preview": true}),
        )
        .await
        .expect(200);
    assert_eq!(
        (&preview["session_id"], &preview["parent_id"]),
        (&json!(null), &json!(id))
    );
    let unchanged = world
        .get(&tenant.key, &format!("/v1/sessions/{id}"))
        .await
        .expect(200);
    assert_eq!(unchanged, before, "a preview changes nothing");
    let done = world
        .compress(
            &tenant.key,
            &id,
            json!({"summary": "they looked", "keep_last": 3}),
        )
        .await
        .expect(201);
    for member in [
        "kept",
        "tokens_before",
        "tokens_after",
        "parent_id",
        "conversation_id",
    ] {
        assert_eq!(done[member], preview[member], "{member}");
    }
    assert_eq!(
        (&done["kept"], &done["tokens_before"]),
        (&json!(5), &before["token_count"])
    );
    let child = done.text("session_id");
    let rows = world
        .walk(&tenant.key, &format!("/v1/sessions/{id}/messages"))
        .await;
    let shape: Vec<_> = rows
        .iter()
        .map(|row| {
            (
                row["seq"].clone(),
                row["kind"].clone(),
                row["copied_from"]["seq"].clone(),
            )
        })
        .collect();
    let expected: Vec<_> = [
        (1, "normal", json!(1)),
        (2, "summary", json!(null)),
        (3, "normal", json!(4)),
        (4, "normal", json!(5)),
        (5, "normal", json!(6)),
        (6, "normal", json!(7)),
    ]
    .into_iter()
    .map(|(seq, kind, from)| (json!(seq), json!(kind), from))
    .collect();
    assert_eq!(shape, expected, "the result at the edge draws its call in");
    assert_eq!(
        (
            &rows[2]["tool_calls"][0],
            &rows[0]["copied_from"]["session_id"]
        ),
        (&call, &json!(id))
    );
    let tip = world
        .get(&tenant.key, &format!("/v1/sessions/{id}"))
        .await
        .expect(200);
    assert_eq!(
        (&tip["id"], &tip["parent_id"], &tip["edge"]),
        (&json!(child), &json!(id), &json!("compression"))
    );
    assert_eq!(
        (&tip["message_count"], &tip["token_count"]),
        (&json!(1), &done["tokens_after"])
    );
    let parent = world
        .get(&tenant.key, &format!("/v1/sessions/{id}?exact=true"))
        .await
        .expect(200);
    assert_eq!(
        (&parent["state"], &parent["end_reason"]),
        (&json!("ended"), &json!("compression"))
    );
    let exact = world
        .walk(
            &tenant.key,
            &format!("/v1/sessions/{id}/messages?exact=true"),
        )
        .await;
    assert_eq!(exact.len(), 7, "the old link is as it was");
    let whole = world
        .walk(
            &tenant.key,
            &format!("/v1/sessions/{child}/messages?scope=conversation"),
        )
        .await;
    assert_eq!(whole.len(), 8, "seven originals and one summary");
    let lineage = world
        .walk(&tenant.key, &format!("/v1/sessions/{id}/lineage"))
        .await;
    assert_eq!(lineage[0]["compression"], json!(null));
    let record = &lineage[1]["compression"];
    assert_eq!(
        (&record["summarised"], &record["kept"], &record["model"]),
        (&json!(2), &json!(5), &json!(null))
    );
    assert_eq!(
        (&record["tokens_before"], &record["tokens_after"]),
        (&done["tokens_before"], &done["tokens_after"])
    );
    assert!(record["duration_ms"].is_i64());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compression_that_cannot_be_is_refused_and_changes_nothing() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let empty = world.session(&tenant.key, json!({})).await.id();
    let short = world
        .session(&tenant.key, json!({"messages": [said("hi")]}))
        .await
        .id();
    let huge = "x".repeat(5_000);
    for (id, body, status, code) in [
        (&empty, json!({"summary": "s"}), 422, "nothing_to_compress"),
        (&short, json!({"summary": huge}), 422, "nothing_to_compress"),
        (&short, json!({}), 422, "summary_required"),
        (&short, json!({"focus": "names"}), 422, "summary_required"),
        (
            &short,
            json!({"summary": "s", "focus": "names"}),
            422,
            "invalid_value",
        ),
        (&short, json!({"summary": "  "}), 422, "invalid_value"),
        (
            &short,
            json!({"summary": "s", "keep_last": 1001}),
            422,
            "invalid_value",
        ),
        (&short, json!({"summary": 1}), 400, "invalid_request"),
    ] {
        let reply = world.compress(&tenant.key, id, body).await;
        reply.expect_problem(status, code);
        let shown = world
            .get(&tenant.key, &format!("/v1/sessions/{id}"))
            .await
            .expect(200);
        assert_eq!(
            (&shown["id"], &shown["state"]),
            (&json!(id), &json!("open"))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compression_is_taken_back_while_nothing_was_said_since() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let messages = json!([said("one"), answered("two"), said("three")]);
    let first = world
        .session(&tenant.key, json!({ "messages": messages }))
        .await
        .id();
    let undo = async |id: &str| {
        world
            .post(
                &tenant.key,
                &format!("/v1/sessions/{id}/uncompress"),
                json!({}),
            )
            .await
    };
    let tip = async |id: &str| {
        let path = format!("/v1/sessions/{id}/tip");
        let found = world.get(&tenant.key, &path).await.expect(200);
        found.text("session_id").to_owned()
    };
    undo(&first).await.expect_problem(409, "not_compressed");
    let make_child = async || {
        let done = world
            .compress(&tenant.key, &first, json!({"summary": "s"}))
            .await
            .expect(201);
        done.text("session_id").to_owned()
    };
    let undone = make_child().await;
    assert_eq!(tip(&first).await, undone);
    let back = undo(&undone).await.expect(200);
    assert_eq!(
        (&back["id"], &back["state"], &back["end_reason"]),
        (&json!(first), &json!("open"), &json!(null))
    );
    assert_eq!(
        undo(&undone).await.expect(200),
        back,
        "asking again changes nothing"
    );
    assert_eq!(
        (tip(&first).await, tip(&undone).await),
        (first.clone(), first.clone())
    );
    assert_eq!(
        world
            .contents(&tenant.key, &format!("/v1/sessions/{undone}/messages"))
            .await,
        ["one", "two", "three"]
    );
    let second = make_child().await;
    assert_ne!(second, undone);
    for id in [&first, &undone, &second] {
        assert_eq!(tip(id).await, second);
    }
    world
        .append(&tenant.key, &undone, json!([answered("four")]))
        .await
        .expect(201);
    undo(&second).await.expect_problem(409, "has_new_messages");
    assert_eq!(tip(&undone).await, second);
    let path = format!("/v1/sessions/{undone}");
    let exact = world
        .get(&tenant.key, &format!("{path}?exact=true"))
        .await
        .expect(200);
    assert_eq!(
        (&exact["state"], &exact["end_reason"]),
        (&json!("ended"), &json!("uncompressed"))
    );
    let lineage = world.walk(&tenant.key, &format!("{path}/lineage")).await;
    assert_eq!(
        lineage.iter().map(Fields::id).collect::<Vec<_>>(),
        [first.clone(), second]
    );
    let whole = world
        .contents(&tenant.key, &format!("{path}/messages?scope=conversation"))
        .await;
    assert_eq!(whole, ["one", "two", "three", "s", "four"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn appending_while_others_compress_loses_nothing() {
    let world = Arc::new(World::with_nodes(2).await);
    let tenant = world.tenant("Acme").await;
    let id = world
        .session(&tenant.key, json!({"messages": [said("start")]}))
        .await
        .id();
    let mut tasks = Vec::new();
    for writer in 0..4 {
        let world = world.clone();
        let key = tenant.key.clone();
        let id = id.clone();
        tasks.push(tokio::spawn(async move {
            for n in 0..20 {
                let text = format!("w{writer}-{n}");
                world
                    .append_on(writer % 2, &key, &id, json!([said(&text)]))
                    .await
                    .expect(201);
            }
        }));
    }
    for _ in 0..2 {
        let world = world.clone();
        let key = tenant.key.clone();
        let id = id.clone();
        tasks.push(tokio::spawn(async move {
            for n in 0..10 {
                let done = world
                    .compress(&key, &id, json!({"summary": format!("s{n}")}))
                    .await;
                assert!(done.status == 201 || done.status == 200, "{}", done.body);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let path = format!("/v1/sessions/{id}/messages?scope=conversation&limit=200");
    let all = world.walk(&tenant.key, &path).await;
    let spoken = all.iter().filter(|message| message["kind"] == "normal");
    let texts: Vec<&str> = spoken.map(|message| message.text("content")).collect();
    assert_eq!(texts.len(), 81);
    for writer in 0..4 {
        let mine: Vec<&str> = texts
            .iter()
            .copied()
            .filter(|text| text.starts_with(&format!("w{writer}-")))
            .collect();
        let expected: Vec<String> = (0..20).map(|n| format!("w{writer}-{n}")).collect();
        assert_eq!(mine, expected, "each writer's in order");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_is_a_conversation_of_its_own_that_knows_where_it_came_from() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let messages = json!([said("one"), answered("two"), said("three")]);
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
        .append(&tenant.key, &id, json!([said("else")]))
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
