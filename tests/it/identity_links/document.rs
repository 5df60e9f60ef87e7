//! `/v1/identity-links`: who is who, from the document that tenants have already.

use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::people::{as_bridge, person};
use crate::support::{Fields, Reply, Tenant, World};

const PATH: &str = "/v1/identity-links";
const DRY: &str = "/v1/identity-links?dry_run=true";

fn links(links: Value) -> Value {
    json!({"session": {"identityLinks": links}})
}

async fn put(world: &World, tenant: &Tenant, names: Value) -> Value {
    let reply = world.put(&tenant.key, PATH, links(names)).await;
    reply.expect(200)
}

async fn put_yaml(world: &World, tenant: &Tenant, content_type: &str, text: &str) -> Reply {
    let request = world.request(Method::PUT, PATH, &tenant.key);
    let request = request.header("content-type", content_type);
    Reply::of(request.body(text.to_owned())).await
}

async fn current(world: &World, tenant: &Tenant) -> Value {
    let document = world.get(&tenant.key, PATH).await.expect(200);
    document["session"]["identityLinks"].clone()
}

/// `action name identity`, with `<` where it came from someone.
fn told(answer: &Value) -> Vec<String> {
    let shown = |change: &Value| {
        let words = ["action", "name", "identity"].map(|member| change[member].as_str());
        let mut words: Vec<&str> = words.into_iter().flatten().collect();
        if change["from_user_id"].is_string() {
            words.push("<");
        }
        words.join(" ")
    };
    let changes = answer.items("changes");
    changes.iter().map(shown).collect()
}

fn pointers(problem: &Value, member: &str) -> Vec<String> {
    let found = problem.items(member);
    let mut found: Vec<String> = found
        .iter()
        .map(|one| one.text("pointer").to_owned())
        .collect();
    found.sort_unstable();
    found
}

async fn user_of(world: &World, tenant: &Tenant, identity: &str) -> Value {
    let path = format!("/v1/users?identity={}", identity.replace('@', "%40"));
    world.get(&tenant.key, &path).await.expect(200)["data"][0].clone()
}

async fn audited(world: &World, tenant: &Tenant) -> Vec<Value> {
    let entries = world.walk(&tenant.key, "/v1/audit").await;
    entries
        .iter()
        .map(|entry| entry["action"].clone())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn everyone_who_is_listed_under_a_name_has_one_key_and_one_session() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let document = json!({
        "session": {
            "dmScope": "per-channel-peer",
            "identityLinks": {"alice": ["feishu:ou_x", "telegram:123", "webui:default", "irc@net:Al"]},
        },
        "platform_toolsets": {"telegram": ["web_search", "no_mcp"]},
    });
    let answer = world
        .put(&tenant.key, PATH, document.clone())
        .await
        .expect(200);
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
    assert_eq!(told(&answer), expected);
    let user_id = &answer["changes"][0]["user_id"];
    let key = json!(format!("agent:main:user:{}", user_id.as_str().unwrap()));
    let first = world.dm(&tenant.key, "telegram:123").await;
    for identity in ["feishu:ou_x", "telegram:123", "webui:default", "irc@net:AL"] {
        let resolved = world.dm(&tenant.key, identity).await;
        assert_eq!(resolved["session_key"], key, "{identity}");
        assert_eq!(resolved["session_id"], first["session_id"]);
        assert_eq!(&resolved["user_id"], user_id);
    }
    let fifth = world.dm(&tenant.key, "telegram:124").await;
    assert_eq!(fifth["session_key"], "agent:main:telegram:dm:124");
    assert_ne!(fifth["session_id"], first["session_id"]);
    let named = world.get(&tenant.key, "/v1/users?external_id=alice").await;
    let named = named.expect(200)["data"][0].clone();
    assert_eq!((&named["id"], &named["linked"]), (user_id, &json!(true)));
    let agent = world.get(&tenant.key, "/v1/agents/main").await.expect(200);
    assert_eq!(agent["toolsets"], document["platform_toolsets"]);
    // It comes back as it was written, and putting that changes nothing.
    let stored = world.get(&tenant.key, PATH).await.expect(200);
    assert_eq!(stored, document);
    let before = audited(&world, &tenant).await;
    let other = world.tenant("Other").await;
    for same in [stored, document] {
        let again = world.put(&tenant.key, PATH, same).await.expect(200);
        assert_eq!(
            (&again["changes"], &again["settings"]),
            (&json!([]), &json!([]))
        );
    }
    assert_eq!(audited(&world, &tenant).await, before);
    assert_eq!(current(&world, &other).await, json!({}));
}

#[tokio::test(flavor = "multi_thread")]
async fn people_who_are_there_are_joined_whole_and_keep_everything() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let ada = person(&world, &tenant, "ada").await;
    let eve = person(&world, &tenant, "eve").await;
    let first = world.say(&tenant.key, "telegram:5", "from the train").await;
    world.link(&tenant.key, "slack@T1:U1", "slack@T1:U2").await;
    let second = world.say(&tenant.key, "slack@T1:U2", "from work").await;
    world.clock.advance(Duration::from_secs(60));
    let last = world.say(&ada.token, "web:ada", "from the desk").await;
    let names = json!({"ada": ["telegram:5", "slack@T1:U1", "web:ada", "sms:+49 1"], "eve": ["web:eve", "irc:eve"]});
    let shown = world
        .put(&tenant.key, DRY, links(names.clone()))
        .await
        .expect(200);
    assert_eq!(
        (&shown["applied"], &shown["dry_run"]),
        (&json!(false), &json!(true))
    );
    assert_eq!(current(&world, &tenant).await, json!({}));
    assert_eq!(
        world.dm(&tenant.key, "telegram:5").await["session_id"],
        first["session_id"]
    );
    let done = put(&world, &tenant, names.clone()).await;
    assert_eq!(
        shown["changes"], done["changes"],
        "a dry run says what is then done"
    );
    let mut changes = told(&done);
    changes.sort_unstable();
    let expected = [
        "add ada sms:+491",
        "add eve irc:eve",
        "merge ada slack@T1:U1 <",
        "merge ada slack@T1:U2 <",
        "merge ada web:ada <",
        "name_user ada",
        "name_user eve",
    ];
    assert_eq!(changes, expected);
    // One slot, going on with what was said last; all of it listed; old ids and keys answer.
    let shared = world.dm(&tenant.key, "telegram:5").await;
    assert_eq!(shared["user_id"], first["user_id"]);
    assert_eq!(shared["session_id"], last["session_id"]);
    for old in [&first, &second, &last] {
        let slot = world.slot(&tenant.key, &old["session_key"]).await;
        assert_eq!(slot["session_key"], shared["session_key"]);
        let id = old.text("user_id");
        let user = world
            .get(&tenant.key, &format!("/v1/users/{id}"))
            .await
            .expect(200);
        assert_eq!(
            (&user["id"], &user["external_id"]),
            (&first["user_id"], &json!("ada"))
        );
    }
    let path = format!("/v1/sessions?session_key={}", shared.text("session_key"));
    assert_eq!(world.walk(&ada.token, &path).await.len(), 3);
    let me = world.get(&eve.token, "/v1/users/me").await.expect(200);
    assert_eq!(
        (&me["id"], &me["external_id"]),
        (&json!(eve.user_id), &json!("eve"))
    );
    // The companion that nobody listed came along and is not part of the document.
    let expected = json!({"ada": ["telegram:5", "slack@T1:U1", "web:ada", "sms:+49 1"], "eve": ["web:eve", "irc:eve"]});
    let mut found = current(&world, &tenant).await;
    for names in found.as_object_mut().unwrap().values_mut() {
        names.as_array_mut().unwrap().sort_by_key(Value::to_string);
    }
    let mut sorted = expected.clone();
    for names in sorted.as_object_mut().unwrap().values_mut() {
        names.as_array_mut().unwrap().sort_by_key(Value::to_string);
    }
    assert_eq!(found, sorted);
    assert_eq!(
        told(&put(&world, &tenant, names).await),
        Vec::<String>::new()
    );
    // Without the companion's friend, both go, and go on being one.
    let removed = put(
        &world,
        &tenant,
        json!({"ada": ["telegram:5", "web:ada", "sms:+491"], "eve": ["web:eve", "irc:eve"]}),
    )
    .await;
    assert_eq!(
        told(&removed),
        ["remove ada slack@T1:U1", "remove ada slack@T1:U2"]
    );
    let apart = world.dm(&tenant.key, "slack@T1:U1").await;
    assert_ne!(apart["user_id"], first["user_id"]);
    assert_eq!(
        user_of(&world, &tenant, "slack@T1:U2").await["id"],
        apart["user_id"]
    );
    assert_eq!(
        apart["session_id"], second["session_id"],
        "what only they said went along"
    );
    assert_eq!(world.walk(&ada.token, &path).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_that_is_added_to_someone_who_spoke_shares_their_slot() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let before = world.say(&tenant.key, "telegram:5", "hello").await;
    assert_eq!(before["linked"], false);
    put(&world, &tenant, json!({"ann": ["telegram:5", "irc:ann"]})).await;
    for identity in ["telegram:5", "irc:ann"] {
        let resolved = world.dm(&tenant.key, identity).await;
        assert_eq!(resolved["session_id"], before["session_id"], "{identity}");
        assert_eq!(resolved["user_id"], before["user_id"]);
        assert_eq!(
            resolved["session_key"],
            world.slot(&tenant.key, &before["session_key"]).await["session_key"]
        );
    }
    // A name with one account links nobody.
    put(
        &world,
        &tenant,
        json!({"ann": ["telegram:5", "irc:ann"], "bob": ["irc:bob"]}),
    )
    .await;
    let bob = world.dm(&tenant.key, "irc:bob").await;
    assert_eq!(bob["session_key"], "agent:main:irc:dm:bob");
}

#[tokio::test(flavor = "multi_thread")]
async fn yaml_says_the_same_as_json() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let text = "# who is who\nsession:\n  dmScope: per-account-channel-peer\n  identityLinks:\n    alice:\n      \
                - telegram:123\n      - 'irc@net:Al'\n    no: [web:1]\nplatform_toolsets:\n  telegram: [web]\n";
    for (content_type, changes) in [
        ("application/yaml; charset=utf-8", 5),
        ("application/x-yaml", 0),
        ("text/yaml", 0),
        ("text/x-yaml", 0),
    ] {
        let answer = put_yaml(&world, &tenant, content_type, text)
            .await
            .expect(200);
        assert_eq!(told(&answer).len(), changes, "{content_type}");
    }
    let expected = json!({
        "session": {
            "dmScope": "per-channel-peer",
            "identityLinks": {"alice": ["telegram:123", "irc@net:Al"], "no": ["web:1"]},
        },
        "platform_toolsets": {"telegram": ["web"]},
    });
    assert_eq!(world.get(&tenant.key, PATH).await.expect(200), expected);
    let again = world
        .put(&tenant.key, PATH, expected.clone())
        .await
        .expect(200);
    assert_eq!(told(&again), Vec::<String>::new());
    let mut laughs = String::from("a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]\n");
    for n in 1..30 {
        laughs.push_str(&format!(
            "a{n}: &a{n} [{}]\n",
            format!("*a{}, ", n - 1).repeat(10)
        ));
    }
    for (text, status, code) in [
        (laughs.as_str(), 400, "invalid_yaml"),
        ("session: [", 400, "invalid_yaml"),
        ("a: 1\na: 2\n", 400, "invalid_yaml"),
        ("", 422, "invalid_value"),
        ("- x", 422, "invalid_value"),
        (&" ".repeat(1024 * 1024 + 1), 413, "payload_too_large"),
    ] {
        let reply = put_yaml(&world, &tenant, "application/yaml", text).await;
        reply.expect_problem(status, code);
    }
    let reply = put_yaml(&world, &tenant, "text/plain", "{}").await;
    reply.expect_problem(415, "unsupported_media_type");
    let reply = put_yaml(&world, &tenant, "application/json", "{").await;
    reply.expect_problem(400, "invalid_json");
    let wrong = put_yaml(
        &world,
        &tenant,
        "text/yaml",
        "session:\n  identityLinks:\n    a: [123, telegram: 5]\n",
    )
    .await;
    let wrong = wrong.expect_problem(422, "invalid_value");
    let expected_pointers = ["/session/identityLinks/a/0", "/session/identityLinks/a/1"];
    assert_eq!(pointers(&wrong, "errors"), expected_pointers);
    assert_eq!(world.get(&tenant.key, PATH).await.expect(200), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_removes_only_what_an_import_linked() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    put(
        &world,
        &tenant,
        json!({"ann": ["telegram:1", "irc:ann"], "bob": ["irc:bob"]}),
    )
    .await;
    let ann = user_of(&world, &tenant, "telegram:1").await["id"].clone();
    world.link(&tenant.key, "telegram:1", "discord:1").await;
    let session = world.say(&tenant.key, "irc:ann", "mine").await;
    // One of the import's own goes, with what only it said; the code's stays.
    let answer = put(
        &world,
        &tenant,
        json!({"ann": ["telegram:1"], "bob": ["irc:bob"]}),
    )
    .await;
    assert_eq!(told(&answer), ["remove ann irc:ann"]);
    let parted = world.dm(&tenant.key, "irc:ann").await;
    assert_ne!(parted["user_id"], ann);
    assert_eq!(parted["session_id"], session["session_id"]);
    assert_eq!(user_of(&world, &tenant, "discord:1").await["id"], ann);
    assert_eq!(
        current(&world, &tenant).await,
        json!({"ann": ["telegram:1"], "bob": ["irc:bob"]})
    );
    // The names go; a single account stays with its person.
    let answer = put(&world, &tenant, json!({})).await;
    let mut changes = told(&answer);
    changes.sort_unstable();
    let expected = [
        "remove ann telegram:1",
        "unname_user ann",
        "unname_user bob",
    ];
    assert_eq!(changes, expected);
    assert_eq!(user_of(&world, &tenant, "discord:1").await["id"], ann);
    assert_eq!(
        user_of(&world, &tenant, "irc:bob").await["external_id"],
        Value::Null
    );
    assert_eq!(current(&world, &tenant).await, json!({}));
    assert_eq!(
        told(&put(&world, &tenant, json!({})).await),
        Vec::<String>::new()
    );
    // What says nothing about anyone changes nothing about anyone.
    put(&world, &tenant, json!({"bob": ["irc:bob", "web:bob"]})).await;
    for silent in [
        json!({}),
        json!({"session": {"dmScope": "per-peer", "identityLinks": null}}),
    ] {
        let answer = world.put(&tenant.key, PATH, silent).await.expect(200);
        assert_eq!(answer["changes"], json!([]));
        assert_eq!(
            current(&world, &tenant).await,
            json!({"bob": ["irc:bob", "web:bob"]})
        );
    }
    let own = world.get(&tenant.key, "/v1/tenant").await.expect(200);
    assert_eq!(own["dm_scope"], "per-peer");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_people_linked_themselves_stays_linked_when_the_document_forgets_it() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let linked = world.link(&tenant.key, "telegram:1", "discord:1").await;
    put(
        &world,
        &tenant,
        json!({"ann": ["telegram:1", "discord:1", "irc:ann"]}),
    )
    .await;
    let answer = put(&world, &tenant, json!({"ann": ["telegram:1"]})).await;
    assert_eq!(told(&answer), ["remove ann irc:ann"]);
    assert_eq!(
        pointers(&answer, "warnings"),
        ["/session/identityLinks/ann"]
    );
    put(&world, &tenant, json!({})).await;
    for identity in ["telegram:1", "discord:1"] {
        let user = user_of(&world, &tenant, identity).await;
        assert_eq!(
            (&user["id"], &user["external_id"]),
            (&linked["user_id"], &Value::Null)
        );
    }
    // And a document cannot tear them apart.
    let torn = links(json!({"ann": ["telegram:1"], "bob": ["discord:1"]}));
    let reply = world.put(&tenant.key, PATH, torn).await;
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
async fn an_account_moves_between_names_in_one_document() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    put(
        &world,
        &tenant,
        json!({"ann": ["irc:a", "web:x"], "bob": ["irc:b"]}),
    )
    .await;
    let ann = user_of(&world, &tenant, "irc:a").await["id"].clone();
    let bob = user_of(&world, &tenant, "irc:b").await["id"].clone();
    let said = world.say(&tenant.key, "web:x", "only here").await;
    let moved = json!({"ann": ["irc:a"], "bob": ["irc:b", "web:x"]});
    let answer = put(&world, &tenant, moved.clone()).await;
    assert_eq!(told(&answer), ["remove ann web:x", "add bob web:x <"]);
    assert_eq!(answer["changes"][1]["user_id"], bob);
    assert_eq!(answer["changes"][1]["from_user_id"], ann);
    let there = world.dm(&tenant.key, "web:x").await;
    assert_eq!(
        (&there["user_id"], &there["session_id"]),
        (&bob, &said["session_id"])
    );
    assert_eq!(current(&world, &tenant).await, moved);
    assert_eq!(
        told(&put(&world, &tenant, moved).await),
        Vec::<String>::new()
    );
    // Back, to someone new, and both at once.
    put(
        &world,
        &tenant,
        json!({"ann": ["irc:b"], "bob": ["irc:a"], "eve": ["web:x"]}),
    )
    .await;
    assert_eq!(user_of(&world, &tenant, "irc:b").await["id"], ann);
    assert_eq!(user_of(&world, &tenant, "irc:a").await["id"], bob);
    let eve = user_of(&world, &tenant, "web:x").await;
    assert_eq!(
        (&eve["external_id"], &eve["linked"]),
        (&json!("eve"), &json!(false))
    );
    // A person keeps everything when only the name changes.
    let answer = put(
        &world,
        &tenant,
        json!({"ann": ["irc:b"], "bob": ["irc:a"], "zoe": ["web:x"]}),
    )
    .await;
    assert_eq!(told(&answer), ["unname_user eve", "name_user zoe"]);
    assert_eq!(answer["changes"][1]["user_id"], eve["id"]);
    let expected = json!({"ann": ["irc:b"], "bob": ["irc:a"], "zoe": ["web:x"]});
    assert_eq!(current(&world, &tenant).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_has_its_place_and_nothing_is_applied() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    put(&world, &tenant, json!({"ann": ["irc:ann"]})).await;
    let made = json!({"external_id": "named", "identities": ["irc:named"]});
    world.post(&tenant.key, "/v1/users", made).await.expect(201);
    let many = |count: usize| (0..count).map(|n| format!("web:{n}")).collect::<Vec<_>>();
    let good = |names: Value| json!({"session": {"dmScope": "per-peer", "identityLinks": names}});
    for (document, expected) in [
        (
            good(json!({"new": ["irc:new"], "a": ["123"], "b": ["telegram:1", ":5"]})),
            vec!["/session/identityLinks/a/0", "/session/identityLinks/b/1"],
        ),
        (
            good(json!({"a/b": ["irc:Bob"], "c~d": ["web:1", "irc:bob"]})),
            vec![
                "/session/identityLinks/a~1b/0",
                "/session/identityLinks/c~0d/1",
            ],
        ),
        (
            good(json!({"": ["irc:1"]})),
            vec!["/session/identityLinks/"],
        ),
        (
            good(json!({"x".repeat(257): []})),
            vec![&*format!("/session/identityLinks/{}", "x".repeat(257)).leak()],
        ),
        (
            good(json!({"a\u{7}": []})),
            vec!["/session/identityLinks/a\u{7}"],
        ),
        (
            good(json!({"a": many(101)})),
            vec!["/session/identityLinks/a"],
        ),
        (
            good(json!({"named": many(100)})),
            vec!["/session/identityLinks/named"],
        ),
        (
            good(json!({"a": ["irc:1", "irc:named"]})),
            vec!["/session/identityLinks/a/1"],
        ),
        (
            json!({"session": {"dmScope": "per-sender", "identityLinks": {"a": ["irc:1"]}}}),
            vec!["/session/dmScope"],
        ),
        (
            json!({"session": {"identityLinks": {"a": ["irc:1"]}}, "platform_toolsets": {"dm": [], "irc": [""]}}),
            vec!["/platform_toolsets/dm", "/platform_toolsets/irc/0"],
        ),
        (
            json!({"session": {"dmScope": 5, "identityLinks": {"a": "irc:1", "b": [1]}}, "platform_toolsets": []}),
            vec![
                "/platform_toolsets",
                "/session/dmScope",
                "/session/identityLinks/a",
                "/session/identityLinks/b/0",
            ],
        ),
        (json!([]), vec![""]),
    ] {
        for path in [PATH, DRY] {
            let reply = world.put(&tenant.key, path, document.clone()).await;
            let problem = reply.expect_problem(422, "invalid_value");
            assert_eq!(pointers(&problem, "errors"), expected, "{document}");
        }
    }
    assert_eq!(current(&world, &tenant).await, json!({"ann": ["irc:ann"]}));
    assert_eq!(world.walk(&tenant.key, "/v1/users").await.len(), 2);
    let own = world.get(&tenant.key, "/v1/tenant").await.expect(200);
    assert_eq!(own["dm_scope"], "per-channel-peer");
    let reply = world
        .put(&tenant.key, "/v1/identity-links?dry=1", json!({}))
        .await;
    reply.expect_problem(400, "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_known_is_a_warning() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let document = json!({
        "session": {
            "scope": "per-sender",
            "identityLinks": {"telegram:5": ["irc:Ann", "irc:ann"]},
        },
        "agents": {"list": [{"id": "main"}]},
        "a/b": null,
    });
    let answer = world.put(&tenant.key, PATH, document).await.expect(200);
    let expected = [
        "/agents",
        "/a~1b",
        "/session/identityLinks/telegram:5",
        "/session/identityLinks/telegram:5/1",
        "/session/scope",
    ];
    assert_eq!(pointers(&answer, "warnings"), expected);
    assert_eq!(
        told(&answer),
        ["create_user telegram:5", "add telegram:5 irc:ann"]
    );
    assert_eq!(
        current(&world, &tenant).await,
        json!({"telegram:5": ["irc:Ann"]})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn many_imports_at_once_run_one_after_the_other() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    for n in 0..4 {
        world
            .say(&tenant.key, &format!("telegram:{n}"), "hello")
            .await;
    }
    let documents: Vec<Value> = (0..4)
        .map(|n| {
            let own = format!("irc:{n}");
            json!({"ann": ["telegram:0", "telegram:1", own], "bob": ["telegram:2", "telegram:3"]})
        })
        .collect();
    let puts = documents.iter().enumerate().map(|(n, document)| {
        let url = world.url_on(n % 2, PATH);
        let request = world.client.put(url).bearer_auth(&tenant.key);
        Reply::of(request.json(&links(document.clone())))
    });
    for reply in join_all(puts).await {
        reply.expect(200);
    }
    let found = current(&world, &tenant).await;
    assert!(documents.contains(&found), "{found}");
    // One of four names of Ann's is hers; each of the others has a person of its own.
    let users = world.walk(&tenant.key, "/v1/users").await;
    assert_eq!(users.len(), 2 + 3);
    let named: Vec<&Value> = users
        .iter()
        .filter(|user| user["external_id"].is_string())
        .collect();
    assert_eq!(named.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_and_people_who_link_and_speak_meanwhile_do_not_meet_halfway() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let key = world.bridge_key(&tenant, &["telegram", "irc"]).await;
    for n in 0..8 {
        world.say(&key, &format!("telegram:{n}"), "hello").await;
    }
    let people: serde_json::Map<String, Value> = (0..8)
        .map(|n| {
            (
                format!("p{n}"),
                json!([format!("telegram:{n}"), format!("irc:{n}")]),
            )
        })
        .collect();
    let put = async || {
        loop {
            let reply = world.put(&tenant.key, PATH, links(json!(people))).await;
            if ![429, 503].contains(&reply.status) {
                return reply.expect(200);
            }
        }
    };
    let speak = async |n: usize| {
        for identity in [format!("irc:{n}"), format!("telegram:{n}")] {
            let url = world.url_on(n % 2, "/v1/resolve");
            let request = world.client.post(url).bearer_auth(&key);
            let request = request.json(&json!({ "identity": identity }));
            let reply = Reply::of(request).await;
            assert!([200, 429, 503].contains(&reply.status), "{}", reply.body);
        }
    };
    let speakers = join_all((0..8).map(speak));
    let (_, _, _) = tokio::join!(put(), speakers, put());
    for n in 0..8 {
        let telegram = world.dm(&key, &format!("telegram:{n}")).await;
        let irc = world.dm(&key, &format!("irc:{n}")).await;
        assert_eq!(telegram["session_id"], irc["session_id"]);
    }
    assert_eq!(world.walk(&tenant.key, "/v1/users").await.len(), 8);
    assert_eq!(told(&put().await), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_admin_imports() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = person(&world, &tenant, "ada").await;
    put(&world, &tenant, json!({"ada": ["web:ada"]})).await;
    let document = links(json!({"eve": ["web:ada"]}));
    for scope in ["bridge", "chat", "read"] {
        let (_, key) = world.api_key(&tenant, scope).await;
        let reply = as_bridge(
            &world,
            &key,
            "telegram:1",
            (Method::PUT, PATH),
            Some(document.clone()),
        )
        .await;
        assert_eq!(reply.status, 403, "{scope}: {}", reply.body);
        let read = world.get(&key, PATH).await;
        assert_eq!(read.status, if scope == "read" { 200 } else { 403 });
    }
    for reply in [
        world.put(&ada.token, PATH, document.clone()).await,
        world.get(&ada.token, PATH).await,
    ] {
        reply.expect_problem(404, "not_found");
    }
    assert_eq!(current(&world, &tenant).await, json!({"ada": ["web:ada"]}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_document_is_applied_at_once_and_again_without_a_trace() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for n in 0..3 {
        world
            .say(&tenant.key, &format!("telegram:{n}"), "hello")
            .await;
    }
    let people: serde_json::Map<String, Value> = (0..2000)
        .map(|n| {
            let accounts = [
                format!("telegram:{n}"),
                format!("irc:u{n}"),
                format!("web:{n}"),
            ];
            (format!("user{n:04}"), json!(accounts))
        })
        .collect();
    let answer = put(&world, &tenant, json!(people)).await;
    assert_eq!(told(&answer).len(), 4 * 2000 - 3);
    assert_eq!(current(&world, &tenant).await, json!(people));
    let before = audited(&world, &tenant).await;
    let imports = before
        .iter()
        .filter(|action| **action == "identity_links.put");
    assert_eq!(imports.count(), 1);
    let again = put(&world, &tenant, json!(people)).await;
    assert_eq!(again["changes"], json!([]));
    assert_eq!(audited(&world, &tenant).await, before);
    let moves: i64 = sqlx::query_scalar("select count(*) from identity_moves")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    assert_eq!(moves, 3 * 2000 - 3, "one for each account that was made");
    // Taken back whole: each account that an import added has a person of its own, whoever spoke keeps
    // theirs.
    let spoke = user_of(&world, &tenant, "telegram:1").await["id"].clone();
    let heard = world.say(&tenant.key, "web:1", "hello").await;
    let gone = put(&world, &tenant, json!({})).await;
    let removed = told(&gone);
    let removed = removed.iter().filter(|one| one.starts_with("remove "));
    assert_eq!(removed.count(), 2 * 2000);
    assert_eq!(user_of(&world, &tenant, "telegram:1").await["id"], spoke);
    let apart = world.dm(&tenant.key, "web:1").await;
    assert_ne!(apart["user_id"], spoke);
    assert_eq!(apart["session_key"], "agent:main:web:dm:1");
    assert_ne!(
        apart["session_id"], heard["session_id"],
        "both had spoken there"
    );
    assert_ne!(
        user_of(&world, &tenant, "irc:u5").await["id"],
        user_of(&world, &tenant, "web:5").await["id"]
    );
    assert_eq!(current(&world, &tenant).await, json!({}));
    // And some of it put again as it was.
    let some: serde_json::Map<String, Value> = people.into_iter().take(10).collect();
    let again = put(&world, &tenant, json!(some)).await;
    assert_eq!(told(&again).len(), 10 + 2 * 10);
    assert_eq!(current(&world, &tenant).await, json!(some));
}
