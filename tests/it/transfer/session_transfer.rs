//! A conversation that is exported and imported again is the same conversation.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::conversations::{assistant_message, user_message};
use crate::support::transfer::{exported, imported, lasting, originals, weather};
use crate::support::{Fields, World};

fn what_was_said(message: &Value) -> Value {
    let members = [
        "role",
        "kind",
        "content",
        "tool_calls",
        "tool_call_id",
        "token_count",
    ];
    members
        .iter()
        .map(|member| message[*member].clone())
        .collect()
}

/// A chain of three links, with a fourth that was taken back. Answers the first id.
async fn weathered(world: &World, key: &str) -> String {
    let body = json!({"title": "Weather", "messages": weather()});
    let id = world.session(key, body).await.id();
    let compress = async |summary: &str, keep: u32| {
        let body = json!({"summary": summary, "keep_last": keep});
        world.compress(key, &id, body).await.expect(201)
    };
    compress("They saw a cloud.", 3).await;
    world
        .append(
            key,
            &id,
            json!([user_message("And now?"), assistant_message("Rain.")]),
        )
        .await
        .expect(201);
    compress("taken back", 1).await;
    world
        .post(key, &format!("/v1/sessions/{id}/uncompress"), json!({}))
        .await
        .expect(200);
    compress("They saw a cloud, and rain.", 5).await;
    world
        .append(key, &id, json!([user_message("Good night")]))
        .await
        .expect(201);
    id
}

/// The chain as every other endpoint shows it, without what an import sets anew.
async fn shown(world: &World, key: &str, id: &str) -> Value {
    let lineage = world.walk(key, &format!("/v1/sessions/{id}/lineage")).await;
    let ids: Vec<String> = lineage.iter().map(Fields::id).collect();
    let place = |id: &Value| ids.iter().position(|link| json!(link) == *id);
    let mut links = Vec::new();
    for link in &lineage {
        let path = format!("/v1/sessions/{}/messages?exact=true", link.id());
        let messages = world.walk(key, &path).await;
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| {
                let from = &message["copied_from"];
                let from = json!([place(&from["session_id"]), from["seq"]]);
                json!([message["seq"], what_was_said(message), from])
            })
            .collect();
        let members = [
            "agent",
            "edge",
            "state",
            "end_reason",
            "title",
            "depth",
            "message_count",
            "token_count",
            "compression",
        ];
        let facts: Vec<&Value> = members.iter().map(|member| &link[*member]).collect();
        let parent = place(&link["parent_id"]);
        links.push(json!({"facts": facts, "parent": parent, "messages": messages}));
    }
    let whole = world
        .walk(
            key,
            &format!("/v1/sessions/{id}/messages?scope=conversation"),
        )
        .await;
    let whole: Vec<Value> = whole.iter().map(what_was_said).collect();
    json!({"links": links, "whole": whole})
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_has_every_original_once_and_every_copy_by_its_place() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = weathered(&world, &tenant.key).await;
    let reply = world
        .get(&tenant.key, &format!("/v1/sessions/{id}/export"))
        .await;
    assert_eq!(reply.header("content-type"), "application/json");
    assert_eq!(
        reply.header("content-disposition"),
        format!("attachment; filename=\"conversation-{id}.json\"")
    );
    let document = reply.expect(200);
    let links = document.items("links");
    assert_eq!(
        (&document["format"], &document["version"]),
        (&json!("throughline.conversation"), &json!(1))
    );
    for (member, value) in [
        ("conversation_id", &*id),
        ("title", "Weather"),
        ("agent", "main"),
    ] {
        assert_eq!(document[member], value);
    }
    let depths: Vec<_> = links.iter().map(|link| link["depth"].clone()).collect();
    assert_eq!(depths, [json!(0), json!(1), json!(2)]);
    assert_eq!(links[0]["compression"], json!(null));
    assert_eq!(links[1]["compression"]["kept"], 5);
    let copy = json!({"seq": 1, "copied_from": {"link": 0, "seq": 1}});
    assert_eq!(links[1]["messages"][0], copy);
    assert_eq!(
        links[2]["messages"][0], copy,
        "a copy of a copy names the original"
    );
    let first = &links[0]["messages"][1];
    let expected = json!({
        "seq": 2, "role": "user", "kind": "normal", "content": weather()[1]["content"], "tool_calls": null,
        "tool_call_id": null, "identity": null, "platform": null, "token_count": first["token_count"],
        "created_at": first["created_at"], "copied_from": null,
    });
    assert_eq!(first, &expected);
    let said: Vec<Value> = originals(&document)
        .into_iter()
        .map(what_was_said)
        .collect();
    assert_eq!(json!(said), shown(&world, &tenant.key, &id).await["whole"]);
    assert!(
        !reply.body.contains("taken back"),
        "an undone link is left out"
    );
    // Whichever id is named.
    let tip = links[2].text("id");
    let by_tip = exported(&world, &tenant.key, tip).await;
    assert_eq!(by_tip["links"], document["links"]);
    assert_eq!(by_tip["signature"], document["signature"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_imported_is_the_same_chain_with_new_ids() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = &tenant.key;
    let id = weathered(&world, key).await;
    let document = exported(&world, key, &id).await;
    world.clock.advance(Duration::from_secs(3600));
    let tip = imported(&world, key, &document).await;
    assert_eq!((&tip["depth"], &tip["state"]), (&json!(2), &json!("open")));
    let copy = tip.text("conversation_id");
    let again = exported(&world, key, copy).await;
    assert_eq!(lasting(&again), lasting(&document));
    let text = again.to_string();
    for link in document.items("links") {
        assert!(!text.contains(link.text("id")), "ids are new");
    }
    assert!(again["created_at"].as_str() > document["exported_at"].as_str());
    assert_eq!(
        shown(&world, key, copy).await,
        shown(&world, key, &id).await
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_imported_chain_goes_on_as_the_original_would() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = &tenant.key;
    let id = world
        .session(key, json!({"messages": weather()}))
        .await
        .id();
    let compress = |keep: u32| json!({"summary": "s", "keep_last": keep});
    world.compress(key, &id, compress(2)).await.expect(201);
    let document = exported(&world, key, &id).await;
    let tip = imported(&world, key, &document).await;
    let copy = tip.text("conversation_id").to_owned();
    for id in [&id, &copy] {
        // Nothing was said since: the same child for who asks late, and the compression can be undone.
        let late = world.compress(key, id, compress(2)).await.expect(200);
        assert_eq!(late["kept"], document["links"][1]["compression"]["kept"]);
        let path = format!("/v1/sessions/{id}/uncompress");
        let parent = world.post(key, &path, json!({})).await.expect(200);
        assert_eq!(
            (&parent["depth"], &parent["state"]),
            (&json!(0), &json!("open"))
        );
        world.compress(key, id, compress(3)).await.expect(201);
        let appended = world
            .append(key, id, json!([user_message("on")]))
            .await
            .expect(201);
        assert_eq!(appended["messages"][0]["seq"], 7);
        world
            .post(key, &path, json!({}))
            .await
            .expect_problem(409, "has_new_messages");
        world.compress(key, id, compress(1)).await.expect(201);
    }
    let mut one = shown(&world, key, &id).await;
    let mut other = shown(&world, key, &copy).await;
    for chain in [&mut one, &mut other] {
        for link in chain["links"].as_array_mut().unwrap() {
            link["facts"][8]["duration_ms"] = json!(null);
        }
    }
    assert_eq!(one, other);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_is_exported_with_what_it_began_with_and_doubles_nothing() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = &tenant.key;
    let id = weathered(&world, key).await;
    let path = format!("/v1/sessions/{id}/branch");
    let branch = world
        .post(key, &path, json!({"title": "Aside"}))
        .await
        .expect(201)
        .id();
    world
        .append(key, &branch, json!([user_message("by the way")]))
        .await
        .expect(201);
    let mut tip = branch.clone();
    for summary in ["first", "second"] {
        let body = json!({"summary": summary, "keep_last": 4});
        let done = world.compress(key, &tip, body).await.expect(201);
        tip = done.text("session_id").to_owned();
    }
    let document = exported(&world, key, &branch).await;
    let links = document.items("links");
    let first = links[0].items("messages");
    assert!(first.iter().all(|message| message["copied_from"].is_null()));
    let said: Vec<Value> = originals(&document)
        .into_iter()
        .map(what_was_said)
        .collect();
    assert_eq!(json!(said), shown(&world, key, &branch).await["whole"]);
    for link in &links[1..] {
        let messages = link.items("messages");
        let copies = messages
            .iter()
            .filter(|message| !message["copied_from"].is_null());
        assert_eq!(copies.clone().count(), messages.len() - 1);
        for copy in copies {
            let seq = copy["copied_from"]["seq"].as_u64().unwrap() as usize;
            assert_eq!(copy["copied_from"]["link"], 0, "{copy}");
            assert_eq!(first[seq - 1]["seq"], seq);
        }
    }
    let tip = imported(&world, key, &document).await;
    assert_eq!(
        (&tip["edge"], &tip["title"]),
        (&json!("compression"), &json!("Aside"))
    );
    let again = exported(&world, key, &tip.id()).await;
    assert_eq!(lasting(&again), lasting(&document));
    // Each link is what a model saw in the original.
    for (ours, theirs) in again.items("links").iter().zip(links) {
        let contents = async |link: &Value| -> Vec<Value> {
            let id = link.text("id");
            let path = format!("/v1/sessions/{id}/messages?exact=true");
            world
                .walk(key, &path)
                .await
                .iter()
                .map(what_was_said)
                .collect()
        };
        assert_eq!(contents(ours).await, contents(theirs).await);
    }
}
