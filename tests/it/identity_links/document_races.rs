//! Documents of identity links that are put at the same time, or are large.

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::Reply;
use crate::support::data::directory::{Directory, PATH, changes, links};

#[tokio::test(flavor = "multi_thread")]
async fn many_imports_at_once_run_one_after_the_other() {
    let directory = Directory::with_nodes(2).await;
    for n in 0..4 {
        directory.write(&format!("telegram:{n}"), "hello").await;
    }
    let documents: Vec<Value> = (0..4)
        .map(|n| {
            let own = format!("irc:{n}");
            json!({"ann": ["telegram:0", "telegram:1", own], "bob": ["telegram:2", "telegram:3"]})
        })
        .collect();
    let puts = documents.iter().enumerate().map(|(n, document)| {
        let url = directory.world.url_on(n % 2, PATH);
        let request = directory
            .world
            .client
            .put(url)
            .bearer_auth(&directory.tenant.key);
        Reply::of(request.json(&links(document.clone())))
    });
    for reply in join_all(puts).await {
        reply.expect(200);
    }
    let found = directory.names().await;
    assert!(documents.contains(&found), "{found}");
    // One of four names of Ann's is hers; each of the others has a person of its own.
    let users = directory.walk("/v1/users").await;
    assert_eq!(users.len(), 2 + 3);
    let named: Vec<&Value> = users
        .iter()
        .filter(|user| user["external_id"].is_string())
        .collect();
    assert_eq!(named.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_and_users_who_link_and_write_meanwhile_do_not_meet_halfway() {
    let directory = Directory::with_nodes(2).await;
    let key = directory
        .world
        .bridge_key(&directory.tenant, &["telegram", "irc"])
        .await;
    for n in 0..8 {
        directory
            .world
            .write_dm(&key, &format!("telegram:{n}"), "hello")
            .await;
    }
    let people: serde_json::Map<String, Value> = (0..8)
        .map(|n| {
            (
                format!("p{n}"),
                json!([format!("telegram:{n}"), format!("irc:{n}")]),
            )
        })
        .collect();
    let put_again = async || {
        loop {
            let reply = directory.put_document(links(json!(people))).await;
            if ![429, 503].contains(&reply.status) {
                return reply.expect(200);
            }
        }
    };
    let speak = async |n: usize| {
        for identity in [format!("irc:{n}"), format!("telegram:{n}")] {
            let url = directory.world.url_on(n % 2, "/v1/resolve");
            let request = directory.world.client.post(url).bearer_auth(&key);
            let request = request.json(&json!({ "identity": identity }));
            let reply = Reply::of(request).await;
            assert!([200, 429, 503].contains(&reply.status), "{}", reply.body);
        }
    };
    let speakers = join_all((0..8).map(speak));
    let (_, _, _) = tokio::join!(put_again(), speakers, put_again());
    for n in 0..8 {
        let telegram = directory.world.dm(&key, &format!("telegram:{n}")).await;
        let irc = directory.world.dm(&key, &format!("irc:{n}")).await;
        assert_eq!(telegram["session_id"], irc["session_id"]);
    }
    assert_eq!(directory.walk("/v1/users").await.len(), 8);
    assert_eq!(changes(&put_again().await), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_document_is_applied_at_once_and_again_without_a_trace() {
    let directory = Directory::new().await;
    for n in 0..3 {
        directory.write(&format!("telegram:{n}"), "hello").await;
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
    let answer = directory.put(json!(people)).await;
    assert_eq!(changes(&answer).len(), 4 * 2000 - 3);
    assert_eq!(directory.names().await, json!(people));
    let before = directory.audit_actions().await;
    let imports = before
        .iter()
        .filter(|action| **action == "identity_links.put");
    assert_eq!(imports.count(), 1);
    let again = directory.put(json!(people)).await;
    assert_eq!(again["changes"], json!([]));
    assert_eq!(directory.audit_actions().await, before);
    let moves: i64 = sqlx::query_scalar("select count(*) from identity_moves")
        .fetch_one(&mut directory.world.superuser().await)
        .await
        .unwrap();
    assert_eq!(moves, 3 * 2000 - 3, "one for each account that was made");
    // Taken back whole: each account that an import added has a person of its own, whoever spoke keeps
    // theirs.
    let spoke = directory.user_of("telegram:1").await["id"].clone();
    let heard = directory.write("web:1", "hello").await;
    let gone = directory.put(json!({})).await;
    let removed = changes(&gone);
    let removed = removed.iter().filter(|one| one.starts_with("remove "));
    assert_eq!(removed.count(), 2 * 2000);
    assert_eq!(directory.user_of("telegram:1").await["id"], spoke);
    let apart = directory.dm("web:1").await;
    assert_ne!(apart["user_id"], spoke);
    assert_eq!(apart["session_key"], "agent:main:web:dm:1");
    assert_ne!(
        apart["session_id"], heard["session_id"],
        "both had spoken there"
    );
    assert_ne!(
        directory.user_of("irc:u5").await["id"],
        directory.user_of("web:5").await["id"]
    );
    assert_eq!(directory.names().await, json!({}));
    // And some of it put again as it was.
    let some: serde_json::Map<String, Value> = people.into_iter().take(10).collect();
    let again = directory.put(json!(some)).await;
    assert_eq!(changes(&again).len(), 10 + 2 * 10);
    assert_eq!(directory.names().await, json!(some));
}
