//! Compression: one child however many ask, what it keeps, and undoing it.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::support::conversations::{assistant_message, user_message};
use crate::support::{Fields, World};

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_compressions_leave_every_id_good_and_every_message_once() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"id": "long", "messages": [user_message("message 0")]});
    world.session(&tenant.key, body).await;
    let mut ids = vec!["long".to_owned()];
    for round in 1..=300 {
        // The client goes on with the first id it ever had, now on one node and now on the other.
        let node = round % 2;
        let text = format!("message {round}");
        world
            .append_on(node, &tenant.key, "long", json!([user_message(&text)]))
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
    let messages: Vec<Value> = (0..20)
        .map(|n| user_message(&format!("message {n}")))
        .collect();
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
async fn a_compression_keeps_what_it_must_and_reports_what_it_did() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let call =
        json!({"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}});
    let long = "something long that a summary can stand for. ".repeat(20);
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        user_message(&long), assistant_message(&long),
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        user_message("and now?"), assistant_message("that is all"),
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
        .session(&tenant.key, json!({"messages": [user_message("hi")]}))
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
async fn a_compression_is_undone_while_no_message_followed() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let messages = json!([
        user_message("one"),
        assistant_message("two"),
        user_message("three")
    ]);
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
        .append(&tenant.key, &undone, json!([assistant_message("four")]))
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
        .session(&tenant.key, json!({"messages": [user_message("start")]}))
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
                    .append_on(writer % 2, &key, &id, json!([user_message(&text)]))
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
