//! What a document of identity links may not say, in JSON and in YAML, and who may put it.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::data::directory::{DRY, Directory, PATH, changes, links, pointers};
use crate::support::people::{as_bridge, sign_in};

#[tokio::test(flavor = "multi_thread")]
async fn yaml_says_the_same_as_json() {
    let directory = Directory::new().await;
    let text = "# who is who\nsession:\n  dmScope: per-account-channel-peer\n  identityLinks:\n    alice:\n      \
                - telegram:123\n      - 'irc@net:Al'\n    no: [web:1]\nplatform_toolsets:\n  telegram: [web]\n";
    for (content_type, count) in [
        ("application/yaml; charset=utf-8", 5),
        ("application/x-yaml", 0),
        ("text/yaml", 0),
        ("text/x-yaml", 0),
    ] {
        let answer = directory.put_yaml(content_type, text).await.expect(200);
        assert_eq!(changes(&answer).len(), count, "{content_type}");
    }
    let expected = json!({
        "session": {
            "dmScope": "per-channel-peer",
            "identityLinks": {"alice": ["telegram:123", "irc@net:Al"], "no": ["web:1"]},
        },
        "platform_toolsets": {"telegram": ["web"]},
    });
    assert_eq!(directory.get(PATH).await, expected);
    let again = directory.put_document(expected.clone()).await.expect(200);
    assert_eq!(changes(&again), Vec::<String>::new());
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
        let reply = directory.put_yaml("application/yaml", text).await;
        reply.expect_problem(status, code);
    }
    let reply = directory.put_yaml("text/plain", "{}").await;
    reply.expect_problem(415, "unsupported_media_type");
    let reply = directory.put_yaml("application/json", "{").await;
    reply.expect_problem(400, "invalid_json");
    let wrong = directory
        .put_yaml(
            "text/yaml",
            "session:\n  identityLinks:\n    a: [123, telegram: 5]\n",
        )
        .await;
    let wrong = wrong.expect_problem(422, "invalid_value");
    let expected_pointers = ["/session/identityLinks/a/0", "/session/identityLinks/a/1"];
    assert_eq!(pointers(&wrong, "errors"), expected_pointers);
    assert_eq!(directory.get(PATH).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_has_its_place_and_nothing_is_applied() {
    let directory = Directory::new().await;
    directory.put(json!({"ann": ["irc:ann"]})).await;
    let made = json!({"external_id": "named", "identities": ["irc:named"]});
    directory
        .world
        .post(&directory.tenant.key, "/v1/users", made)
        .await
        .expect(201);
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
            let reply = directory
                .world
                .put(&directory.tenant.key, path, document.clone())
                .await;
            let problem = reply.expect_problem(422, "invalid_value");
            assert_eq!(pointers(&problem, "errors"), expected, "{document}");
        }
    }
    assert_eq!(directory.names().await, json!({"ann": ["irc:ann"]}));
    assert_eq!(directory.walk("/v1/users").await.len(), 2);
    let own = directory.get("/v1/tenant").await;
    assert_eq!(own["dm_scope"], "per-channel-peer");
    let reply = directory
        .world
        .put(&directory.tenant.key, "/v1/identity-links?dry=1", json!({}))
        .await;
    reply.expect_problem(400, "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_known_is_a_warning() {
    let directory = Directory::new().await;
    let document = json!({
        "session": {
            "scope": "per-sender",
            "identityLinks": {"telegram:5": ["irc:Ann", "irc:ann"]},
        },
        "agents": {"list": [{"id": "main"}]},
        "a/b": null,
    });
    let answer = directory.put_document(document).await.expect(200);
    let expected = [
        "/agents",
        "/a~1b",
        "/session/identityLinks/telegram:5",
        "/session/identityLinks/telegram:5/1",
        "/session/scope",
    ];
    assert_eq!(pointers(&answer, "warnings"), expected);
    assert_eq!(
        changes(&answer),
        ["create_user telegram:5", "add telegram:5 irc:ann"]
    );
    assert_eq!(directory.names().await, json!({"telegram:5": ["irc:Ann"]}));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_admin_imports() {
    let directory = Directory::new().await;
    let ada = sign_in(&directory.world, &directory.tenant, "ada").await;
    directory.put(json!({"ada": ["web:ada"]})).await;
    let document = links(json!({"eve": ["web:ada"]}));
    for scope in ["bridge", "chat", "read"] {
        let (_, key) = directory.world.api_key(&directory.tenant, scope).await;
        let reply = as_bridge(
            &directory.world,
            &key,
            "telegram:1",
            (Method::PUT, PATH),
            Some(document.clone()),
        )
        .await;
        assert_eq!(reply.status, 403, "{scope}: {}", reply.body);
        let read = directory.world.get(&key, PATH).await;
        assert_eq!(read.status, if scope == "read" { 200 } else { 403 });
    }
    for reply in [
        directory
            .world
            .put(&ada.token, PATH, document.clone())
            .await,
        directory.world.get(&ada.token, PATH).await,
    ] {
        reply.expect_problem(404, "not_found");
    }
    assert_eq!(directory.names().await, json!({"ada": ["web:ada"]}));
}
