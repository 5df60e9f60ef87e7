//! The audit: an entry for each change, in one chain a tenant that cannot be forked, changed or shortened
//! unnoticed.

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use throughline::audit::verify::{Verdict, verify};

use crate::support::data::audit::{entries, key_id, operator_tx, summaries, verify_command};
use crate::support::servers::cluster::cluster;
use crate::support::servers::process::throughline;
use crate::support::world::{OPERATOR_KEY, SECRET_KEY, node_environment};
use crate::support::{Fields, Reply, Tenant, World};

#[tokio::test(flavor = "multi_thread")]
async fn every_change_is_an_entry_with_ids_and_no_text() {
    let world = World::new().await;
    let tenant = world.tenant("canary-tenant").await;
    let body =
        json!({"name": "canary-key", "scopes": ["bridge", "read"], "platforms": ["canaryirc"]});
    let made = world
        .post(&tenant.key, "/v1/api-keys", body)
        .await
        .expect(201);
    let made = made.text("id");
    let path = format!("/v1/api-keys/{made}");
    world.delete(&tenant.key, &path).await.expect(204);
    for change in ["suspend", "resume"] {
        let path = format!("/v1/tenants/{}/{change}", tenant.id);
        world.post(OPERATOR_KEY, &path, json!({})).await.expect(200);
    }
    crate::support::eventually("resumed", std::time::Duration::from_secs(2), async || {
        world.get(&tenant.key, "/v1/tenant").await.status == 200
    })
    .await;
    let entries = entries(&world, &tenant).await;
    let first_key = key_id(&tenant);
    let operator = entries[0].text("actor");
    assert!(operator.starts_with("operator:"), "{operator}");
    assert_eq!(
        summaries(&entries),
        [
            (operator, "tenant.create", tenant.id.as_str()),
            (operator, "api_key.create", first_key.as_str()),
            (first_key.as_str(), "api_key.create", made),
            (first_key.as_str(), "api_key.revoke", made),
            (operator, "tenant.suspend", tenant.id.as_str()),
            (operator, "tenant.resume", tenant.id.as_str()),
        ]
    );
    assert_eq!(entries[2]["detail"], json!({"scopes": ["bridge", "read"]}));
    for (place, entry) in entries.iter().enumerate() {
        assert_eq!(entry["seq"], place + 1);
        assert_eq!(entry.text("hash").len(), 64);
    }
    let last = entries.last().unwrap();
    let head = world.get(&tenant.key, "/v1/audit/head").await.expect(200);
    let expected = json!({"seq": last["seq"], "hash": last["hash"], "at": last["at"]});
    assert_eq!(head, expected);
    let dump: String = sqlx::query_scalar("select string_agg(a::text, ' ') from audit a")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    assert!(!dump.contains("canary"), "{dump}");
    let (whole, lines) = verify_command(&world, &[], SECRET_KEY);
    assert!(whole, "{lines}");
    assert!(
        lines.contains(&format!("{} 6 entries, ok\n", tenant.id)),
        "{lines}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_changes_nothing_adds_no_entry() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let (id, _) = world.api_key(&tenant, "read").await;
    for _ in 0..3 {
        let path = format!("/v1/api-keys/{id}");
        world.delete(&tenant.key, &path).await.expect(204);
        let request = world
            .request(Method::POST, "/v1/api-keys", &tenant.key)
            .header("idempotency-key", "once")
            .json(&json!({"name": "once", "scopes": ["read"]}));
        Reply::of(request).await.expect(201);
        let refused = json!({"name": "refused", "scopes": []});
        world
            .post(&tenant.key, "/v1/api-keys", refused)
            .await
            .expect(422);
        let path = format!("/v1/tenants/{}/resume", tenant.id);
        world.post(OPERATOR_KEY, &path, json!({})).await.expect(200);
    }
    let entries = entries(&world, &tenant).await;
    let actions: Vec<&str> = summaries(&entries)
        .into_iter()
        .map(|(_, action, _)| action)
        .collect();
    let [create, key] = ["tenant.create", "api_key.create"];
    assert_eq!(actions, [create, key, key, "api_key.revoke", key]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_made_on_the_command_line_is_the_local_operators_doing() {
    let world = World::new().await;
    let output = throughline(&["tenant", "create", "Acme"])
        .envs(node_environment(&world.database, cluster().redis_url()))
        .output()
        .unwrap();
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    let tenant = Tenant {
        id: made.id(),
        key: made.text("api_key").to_owned(),
    };
    let entries = entries(&world, &tenant).await;
    let expected = [
        ("operator:local", "tenant.create", tenant.id.clone()),
        ("operator:local", "api_key.create", key_id(&tenant)),
    ];
    let expected: Vec<_> = expected
        .iter()
        .map(|(a, b, c)| (*a, *b, c.as_str()))
        .collect();
    assert_eq!(summaries(&entries), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_is_paged_newest_first_and_filtered() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for _ in 0..3 {
        world.api_key(&tenant, "chat").await;
    }
    let seqs = |page: &Value| -> Vec<i64> {
        let rows = page.list().iter();
        rows.map(|row| row.number("seq")).collect()
    };
    let get = async |path: &str| world.get(&tenant.key, path).await;
    let first = get("/v1/audit?limit=3").await.expect(200);
    assert_eq!(seqs(&first), [5, 4, 3]);
    let cursor = first.text("next_cursor");
    let second = get(&format!("/v1/audit?limit=3&cursor={cursor}"))
        .await
        .expect(200);
    assert_eq!(seqs(&second), [2, 1]);
    assert!(second["next_cursor"].is_null());

    let made = get("/v1/audit?action=api_key.create&limit=2")
        .await
        .expect(200);
    assert_eq!(seqs(&made), [5, 4]);
    let own = get(&format!("/v1/audit?actor={}", key_id(&tenant)))
        .await
        .expect(200);
    assert_eq!(seqs(&own), [5, 4, 3]);
    let both = "/v1/audit?action=tenant.create&actor=nobody";
    assert_eq!(seqs(&get(both).await.expect(200)), Vec::<i64>::new());

    let other_filter = format!("/v1/audit?action=api_key.create&cursor={cursor}");
    get(&other_filter)
        .await
        .expect_problem(400, "invalid_cursor");
    let problem = get("/v1/audit?action=nonsense")
        .await
        .expect_problem(400, "invalid_request");
    assert_eq!(problem["errors"][0]["pointer"], "/query/action");
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_writers_on_two_nodes_make_one_chain_that_is_whole_at_any_time() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "racer", "scopes": ["chat"]});
    let client = reqwest::Client::new();
    let writers = (0..32).map(|n| {
        let request = client
            .post(world.url_on(n % 2, "/v1/api-keys"))
            .bearer_auth(&tenant.key)
            .json(&body);
        Reply::of(request)
    });
    let watching = async {
        loop {
            let mut tx = operator_tx(world.app(), &tenant).await;
            let verdict = verify(&world.app().keyring, &mut tx).await.unwrap();
            tx.commit().await.unwrap();
            match verdict {
                Verdict::Whole { entries: 34 } => return,
                Verdict::Whole { .. } => {}
                Verdict::Broken(flaw) => panic!("{flaw:?}"),
            }
        }
    };
    let (replies, ()) = tokio::join!(join_all(writers), watching);
    let mut made: Vec<String> = replies.iter().map(|reply| reply.expect(201).id()).collect();
    let entries = entries(&world, &tenant).await;
    let seqs: Vec<i64> = entries.iter().map(|row| row.number("seq")).collect();
    assert_eq!(seqs, (1..=34).collect::<Vec<_>>());
    let mut targets: Vec<_> = entries[2..]
        .iter()
        .map(|row| row["target"].clone())
        .collect();
    targets.sort_by_key(ToString::to_string);
    made.sort();
    assert_eq!(targets, made);
}

/// Bridge keys hold the tenant's row, revocations hold a key's; both then want the head.
#[tokio::test(flavor = "multi_thread")]
async fn changes_that_hold_other_locks_wait_for_the_head_without_a_deadlock() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let mut doomed = Vec::new();
    for _ in 0..16 {
        doomed.push(world.api_key(&tenant, "chat").await.0);
    }
    let makes = (0..16).map(|_| world.api_key(&tenant, "bridge"));
    let revokes = doomed.iter().map(async |id| {
        let path = format!("/v1/api-keys/{id}");
        world.delete(&tenant.key, &path).await.expect(204)
    });
    let suspensions = (0..4).map(async |n| {
        let change = ["resume", "suspend"][n % 2];
        let path = format!("/v1/tenants/{}/{change}", world.tenant("other").await.id);
        world.post(OPERATOR_KEY, &path, json!({})).await.expect(200)
    });
    tokio::join!(join_all(makes), join_all(revokes), join_all(suspensions));
    assert_eq!(entries(&world, &tenant).await.len(), 2 + 16 + 16 + 16);
    let (whole, lines) = verify_command(&world, &[], SECRET_KEY);
    assert!(whole, "{lines}");
}

/// Each entry is written after the one before: a client that polls must not make a queue of them.
#[tokio::test(flavor = "multi_thread")]
async fn reading_a_conversation_again_is_one_entry_a_minute() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = crate::support::people::sign_in(&world, &tenant, "ada").await;
    let session = world.session(&ada.token, json!({})).await;
    let path = format!("/v1/sessions/{}/messages", session.text("id"));
    let entries = async || {
        let read = world.walk(&tenant.key, "/v1/audit?action=conversation.read");
        read.await.len()
    };
    for _ in 0..5 {
        world.get(&tenant.key, &path).await.expect(200);
    }
    assert_eq!(entries().await, 1);
    let (_, other) = world.api_key(&tenant, "admin").await;
    world.get(&other, &path).await.expect(200);
    assert_eq!(entries().await, 2);
    world.clock.advance(std::time::Duration::from_secs(60));
    world.get(&tenant.key, &path).await.expect(200);
    assert_eq!(entries().await, 3);
}
