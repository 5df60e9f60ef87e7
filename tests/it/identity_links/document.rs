//! `/v1/identity-links`: who is who, from the document that tenants have already.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::Fields;
use crate::support::data::directory::{DRY, Directory, PATH, changes, links, pointers};
use crate::support::people::sign_in;

#[tokio::test(flavor = "multi_thread")]
async fn everyone_who_is_listed_under_a_name_has_one_key_and_one_session() {
    let directory = Directory::with_nodes(2).await;
    let document = json!({
        "session": {
            "dmScope": "per-channel-peer",
            "identityLinks": {"alice": ["feishu:ou_x", "telegram:123", "webui:default", "irc@net:Al"]},
        },
        "platform_toolsets": {"telegram": ["web_search", "no_mcp"]},
    });
    let answer = directory.put_document(document.clone()).await.expect(200);
    assert_eq!(answer["applied"], true);
    assert_eq!(answer["dm_scope"], "per-channel-peer");
    assert_eq!(answer["settings"], json!(["toolsets"]));
    let unused =
        json!([{"pointer": "/platform_toolsets", "detail": "is stored, and not used yet"}]);
    assert_eq!(answer["warnings"], unused);
    let expected = [
        "create_user alice",
        "add alice feishu:ou_x",
        "add alice telegram:123",
        "add alice webui:default",
        "add alice irc@net:al",
    ];
    assert_eq!(changes(&answer), expected);
    let user_id = &answer["changes"][0]["user_id"];
    let key = json!(format!("agent:main:user:{}", user_id.as_str().unwrap()));
    let first = directory.dm("telegram:123").await;
    for identity in ["feishu:ou_x", "telegram:123", "webui:default", "irc@net:AL"] {
        let resolved = directory.dm(identity).await;
        assert_eq!(resolved["session_key"], key, "{identity}");
        assert_eq!(resolved["session_id"], first["session_id"]);
        assert_eq!(&resolved["user_id"], user_id);
    }
    let fifth = directory.dm("telegram:124").await;
    assert_eq!(fifth["session_key"], "agent:main:telegram:dm:124");
    assert_ne!(fifth["session_id"], first["session_id"]);
    let named = directory
        .world
        .get(&directory.tenant.key, "/v1/users?external_id=alice")
        .await;
    let named = named.expect(200)["data"][0].clone();
    assert_eq!((&named["id"], &named["linked"]), (user_id, &json!(true)));
    let agent = directory.get("/v1/agents/main").await;
    assert_eq!(agent["toolsets"], document["platform_toolsets"]);
    // It comes back as it was written, and putting that changes nothing.
    let stored = directory.get(PATH).await;
    assert_eq!(stored, document);
    let before = directory.audit_actions().await;
    let other = directory.world.tenant("Other").await;
    for same in [stored, document] {
        let again = directory.put_document(same).await.expect(200);
        assert_eq!(
            (&again["changes"], &again["settings"]),
            (&json!([]), &json!([]))
        );
    }
    assert_eq!(directory.audit_actions().await, before);
    assert_eq!(
        directory.world.get(&other.key, PATH).await.expect(200)["session"]["identityLinks"],
        json!({})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn existing_users_are_merged_whole_and_keep_everything() {
    let directory = Directory::with_nodes(2).await;
    let ada = sign_in(&directory.world, &directory.tenant, "ada").await;
    let eve = sign_in(&directory.world, &directory.tenant, "eve").await;
    let first = directory.write("telegram:5", "from the train").await;
    directory.link("slack@T1:U1", "slack@T1:U2").await;
    let second = directory.write("slack@T1:U2", "from work").await;
    directory.world.clock.advance(Duration::from_secs(60));
    let last = directory
        .world
        .write_dm(&ada.token, "web:ada", "from the desk")
        .await;
    let names = json!({"ada": ["telegram:5", "slack@T1:U1", "web:ada", "sms:+49 1"], "eve": ["web:eve", "irc:eve"]});
    let shown = directory
        .world
        .put(&directory.tenant.key, DRY, links(names.clone()))
        .await
        .expect(200);
    assert_eq!(
        (&shown["applied"], &shown["dry_run"]),
        (&json!(false), &json!(true))
    );
    assert_eq!(directory.names().await, json!({}));
    assert_eq!(
        directory.dm("telegram:5").await["session_id"],
        first["session_id"]
    );
    let done = directory.put(names.clone()).await;
    assert_eq!(
        shown["changes"], done["changes"],
        "a dry run says what is then done"
    );
    let mut sorted = changes(&done);
    sorted.sort_unstable();
    let expected = [
        "add ada sms:+491",
        "add eve irc:eve",
        "merge ada slack@T1:U1 <",
        "merge ada slack@T1:U2 <",
        "merge ada web:ada <",
        "name_user ada",
        "name_user eve",
    ];
    assert_eq!(sorted, expected);
    // One slot, going on with what was said last; all of it listed; old ids and keys answer.
    let shared = directory.dm("telegram:5").await;
    assert_eq!(shared["user_id"], first["user_id"]);
    assert_eq!(shared["session_id"], last["session_id"]);
    for old in [&first, &second, &last] {
        let slot = directory.slot(&old["session_key"]).await;
        assert_eq!(slot["session_key"], shared["session_key"]);
        let id = old.text("user_id");
        let user = directory.get(&format!("/v1/users/{id}")).await;
        assert_eq!(
            (&user["id"], &user["external_id"]),
            (&first["user_id"], &json!("ada"))
        );
    }
    let path = format!("/v1/sessions?session_key={}", shared.text("session_key"));
    assert_eq!(directory.world.walk(&ada.token, &path).await.len(), 3);
    let me = directory
        .world
        .get(&eve.token, "/v1/users/me")
        .await
        .expect(200);
    assert_eq!(
        (&me["id"], &me["external_id"]),
        (&json!(eve.user_id), &json!("eve"))
    );
    // The companion that nobody listed came along and is not part of the document.
    let expected = json!({"ada": ["telegram:5", "slack@T1:U1", "web:ada", "sms:+49 1"], "eve": ["web:eve", "irc:eve"]});
    let mut found = directory.names().await;
    for names in found.as_object_mut().unwrap().values_mut() {
        names.as_array_mut().unwrap().sort_by_key(Value::to_string);
    }
    let mut wanted = expected.clone();
    for names in wanted.as_object_mut().unwrap().values_mut() {
        names.as_array_mut().unwrap().sort_by_key(Value::to_string);
    }
    assert_eq!(found, wanted);
    assert_eq!(changes(&directory.put(names).await), Vec::<String>::new());
    // Without the companion's friend, both go, and go on being one.
    let removed = directory
        .put(json!({"ada": ["telegram:5", "web:ada", "sms:+491"], "eve": ["web:eve", "irc:eve"]}))
        .await;
    assert_eq!(
        changes(&removed),
        ["remove ada slack@T1:U1", "remove ada slack@T1:U2"]
    );
    let apart = directory.dm("slack@T1:U1").await;
    assert_ne!(apart["user_id"], first["user_id"]);
    assert_eq!(
        directory.user_of("slack@T1:U2").await["id"],
        apart["user_id"]
    );
    assert_eq!(
        apart["session_id"], second["session_id"],
        "what only they said went along"
    );
    assert_eq!(directory.world.walk(&ada.token, &path).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_that_is_added_to_an_active_user_shares_their_slot() {
    let directory = Directory::new().await;
    let before = directory.write("telegram:5", "hello").await;
    assert_eq!(before["linked"], false);
    directory
        .put(json!({"ann": ["telegram:5", "irc:ann"]}))
        .await;
    for identity in ["telegram:5", "irc:ann"] {
        let resolved = directory.dm(identity).await;
        assert_eq!(resolved["session_id"], before["session_id"], "{identity}");
        assert_eq!(resolved["user_id"], before["user_id"]);
        assert_eq!(
            resolved["session_key"],
            directory.slot(&before["session_key"]).await["session_key"]
        );
    }
    // A name with one account links nobody.
    directory
        .put(json!({"ann": ["telegram:5", "irc:ann"], "bob": ["irc:bob"]}))
        .await;
    let bob = directory.dm("irc:bob").await;
    assert_eq!(bob["session_key"], "agent:main:irc:dm:bob");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_removes_only_what_an_import_linked() {
    let directory = Directory::new().await;
    directory
        .put(json!({"ann": ["telegram:1", "irc:ann"], "bob": ["irc:bob"]}))
        .await;
    let ann = directory.user_of("telegram:1").await["id"].clone();
    directory.link("telegram:1", "discord:1").await;
    let session = directory.write("irc:ann", "mine").await;
    // One of the import's own goes, with what only it said; the code's stays.
    let answer = directory
        .put(json!({"ann": ["telegram:1"], "bob": ["irc:bob"]}))
        .await;
    assert_eq!(changes(&answer), ["remove ann irc:ann"]);
    let parted = directory.dm("irc:ann").await;
    assert_ne!(parted["user_id"], ann);
    assert_eq!(parted["session_id"], session["session_id"]);
    assert_eq!(directory.user_of("discord:1").await["id"], ann);
    assert_eq!(
        directory.names().await,
        json!({"ann": ["telegram:1"], "bob": ["irc:bob"]})
    );
    // The names go; a single account stays with its person.
    let answer = directory.put(json!({})).await;
    let mut sorted = changes(&answer);
    sorted.sort_unstable();
    let expected = [
        "remove ann telegram:1",
        "unname_user ann",
        "unname_user bob",
    ];
    assert_eq!(sorted, expected);
    assert_eq!(directory.user_of("discord:1").await["id"], ann);
    assert_eq!(
        directory.user_of("irc:bob").await["external_id"],
        Value::Null
    );
    assert_eq!(directory.names().await, json!({}));
    assert_eq!(
        changes(&directory.put(json!({})).await),
        Vec::<String>::new()
    );
    // What says nothing about anyone changes nothing about anyone.
    directory.put(json!({"bob": ["irc:bob", "web:bob"]})).await;
    for silent in [
        json!({}),
        json!({"session": {"dmScope": "per-peer", "identityLinks": null}}),
    ] {
        let answer = directory.put_document(silent).await.expect(200);
        assert_eq!(answer["changes"], json!([]));
        assert_eq!(
            directory.names().await,
            json!({"bob": ["irc:bob", "web:bob"]})
        );
    }
    let own = directory.get("/v1/tenant").await;
    assert_eq!(own["dm_scope"], "per-peer");
}

#[tokio::test(flavor = "multi_thread")]
async fn links_that_users_made_stay_when_the_document_drops_them() {
    let directory = Directory::new().await;
    let linked = directory.link("telegram:1", "discord:1").await;
    directory
        .put(json!({"ann": ["telegram:1", "discord:1", "irc:ann"]}))
        .await;
    let answer = directory.put(json!({"ann": ["telegram:1"]})).await;
    assert_eq!(changes(&answer), ["remove ann irc:ann"]);
    assert_eq!(
        pointers(&answer, "warnings"),
        ["/session/identityLinks/ann"]
    );
    directory.put(json!({})).await;
    for identity in ["telegram:1", "discord:1"] {
        let user = directory.user_of(identity).await;
        assert_eq!(
            (&user["id"], &user["external_id"]),
            (&linked["user_id"], &Value::Null)
        );
    }
    // And a document cannot tear them apart.
    let torn = links(json!({"ann": ["telegram:1"], "bob": ["discord:1"]}));
    let reply = directory.put_document(torn).await;
    let expected = [
        "/session/identityLinks/ann/0",
        "/session/identityLinks/bob/0",
    ];
    assert_eq!(
        pointers(&reply.expect_problem(422, "invalid_value"), "errors"),
        expected
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_moves_between_names_in_one_document() {
    let directory = Directory::new().await;
    directory
        .put(json!({"ann": ["irc:a", "web:x"], "bob": ["irc:b"]}))
        .await;
    let ann = directory.user_of("irc:a").await["id"].clone();
    let bob = directory.user_of("irc:b").await["id"].clone();
    let said = directory.write("web:x", "only here").await;
    let moved = json!({"ann": ["irc:a"], "bob": ["irc:b", "web:x"]});
    let answer = directory.put(moved.clone()).await;
    assert_eq!(changes(&answer), ["remove ann web:x", "add bob web:x <"]);
    assert_eq!(answer["changes"][1]["user_id"], bob);
    assert_eq!(answer["changes"][1]["from_user_id"], ann);
    let there = directory.dm("web:x").await;
    assert_eq!(
        (&there["user_id"], &there["session_id"]),
        (&bob, &said["session_id"])
    );
    assert_eq!(directory.names().await, moved);
    assert_eq!(changes(&directory.put(moved).await), Vec::<String>::new());
    // Back, to someone new, and both at once.
    directory
        .put(json!({"ann": ["irc:b"], "bob": ["irc:a"], "eve": ["web:x"]}))
        .await;
    assert_eq!(directory.user_of("irc:b").await["id"], ann);
    assert_eq!(directory.user_of("irc:a").await["id"], bob);
    let eve = directory.user_of("web:x").await;
    assert_eq!(
        (&eve["external_id"], &eve["linked"]),
        (&json!("eve"), &json!(false))
    );
    // A person keeps everything when only the name changes.
    let answer = directory
        .put(json!({"ann": ["irc:b"], "bob": ["irc:a"], "zoe": ["web:x"]}))
        .await;
    assert_eq!(changes(&answer), ["unname_user eve", "name_user zoe"]);
    assert_eq!(answer["changes"][1]["user_id"], eve["id"]);
    let expected = json!({"ann": ["irc:b"], "bob": ["irc:a"], "zoe": ["web:x"]});
    assert_eq!(directory.names().await, expected);
}
