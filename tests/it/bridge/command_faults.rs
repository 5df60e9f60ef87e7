//! Commands that are refused, or that wait for something else: what they leave behind.

use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::servers::model::Step;
use crate::support::{Fields, Reply, Scene};

/// The texts that the model saw last.
fn seen(b: &Scene) -> Vec<String> {
    let requests = b.model.requests();
    let messages = requests[requests.len() - 1]["messages"].clone();
    let text = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
    messages.as_array().unwrap().iter().map(text).collect()
}

async fn compress(b: &Scene, session: &str) -> Reply {
    let body = json!({"summary": "they counted", "keep_last": 4});
    b.world.compress(&b.tenant.key, session, body).await
}

async fn counted(b: &Scene, texts: &[&str]) -> String {
    let mut session = String::new();
    for text in texts {
        let body = json!({"identity": "telegram:5", "text": text});
        let said = b.send(body).await.expect(200);
        session = said.text("session_id").to_owned();
    }
    session
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undo_that_waited_for_a_compression_undoes_what_the_model_sees() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let session = counted(&b, &["one", "two", "three"]).await;
    let mut superuser = b.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    sqlx::query("select 1 from conversations for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let undo = async {
        b.world.waiting(1).await;
        let undo = b.send(json!({"identity": "telegram:5", "text": "/undo"}));
        let release = async {
            b.world.waiting(2).await;
            held.commit().await.unwrap();
        };
        tokio::join!(undo, release).0
    };
    let (compressed, undone) = tokio::join!(compress(&b, &session), undo);
    compressed.expect(201);
    let undone = undone.expect(200)["reply"]["text"].clone();
    assert!(undone.as_str().unwrap().contains("taken back"), "{undone}");
    b.reply_to("telegram:5", "four").await;
    let seen = seen(&b).join("\n");
    assert!(seen.contains("two"), "{seen}");
    assert!(!seen.contains("three"), "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_said_before_a_compression_can_be_undone_after_it() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let session = counted(&b, &["one", "two", "three"]).await;
    let compressed = compress(&b, &session).await.expect(201);
    assert!(
        b.reply_to("telegram:5", "/undo")
            .await
            .contains("taken back")
    );
    // Undoing the compression does not bring it back either.
    let child = compressed.text("session_id");
    let path = format!("/v1/sessions/{child}/uncompress");
    b.world
        .post(&b.tenant.key, &path, json!({}))
        .await
        .expect(200);
    b.reply_to("telegram:5", "four").await;
    let shown = seen(&b).join("\n");
    assert!(shown.contains("two") && !shown.contains("three"), "{shown}");
    compress(&b, &session).await.expect(201);
    b.reply_to("telegram:5", "/undo 2").await;
    b.reply_to("telegram:5", "five").await;
    let shown = seen(&b).join("\n");
    assert!(!shown.contains("two") && !shown.contains("four"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_branch_the_newest_is_undone_first_and_the_trunk_keeps_it() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let trunk = counted(&b, &["one", "two", "three"]).await;
    b.reply_to("telegram:5", "/branch Copy").await;
    b.reply_to("telegram:5", "four").await;
    assert!(b.reply_to("telegram:5", "/undo 2").await.contains("last 2"));
    b.reply_to("telegram:5", "five").await;
    let shown = seen(&b).join("\n");
    assert!(shown.contains("two"), "{shown}");
    assert!(
        !shown.contains("three") && !shown.contains("four"),
        "{shown}"
    );
    let path = format!("/v1/sessions/{trunk}/messages?limit=200");
    let kept = b.world.get(&b.tenant.key, &path).await.expect(200);
    let all = kept.list();
    assert!(all.iter().all(|one| one["undone_at"].is_null()), "{kept}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_confirmation_that_is_refused_leaves_the_code_good() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    for who in ["telegram:5", "discord:5", "slack:5"] {
        b.reply_to(who, "hello").await;
    }
    let shown = b.reply_to("telegram:5", "/link").await;
    let code = shown.split_whitespace().last().unwrap().to_owned();
    let preview = b.reply_to("discord:5", &format!("/link {code}")).await;
    assert!(preview.contains("/link yes"), "{preview}");
    let user = async |who: &str| b.world.dm(&b.bridge_key, who).await["user_id"].clone();
    let into = user("telegram:5").await;
    let from = user("discord:5").await;
    let path = format!("/v1/users/{}/merge", into.as_str().unwrap());
    let body = json!({"from_user_id": from, "reason": "the same person"});
    b.world.post(&b.tenant.key, &path, body).await.expect(200);
    let refused = b
        .send(json!({"identity": "discord:5", "text": "/link yes"}))
        .await
        .expect(200);
    assert_eq!(refused["notices"][0]["code"], "already_linked", "{refused}");
    let preview = b.reply_to("slack:5", &format!("/link {code}")).await;
    assert!(preview.contains("/link yes"), "{preview}");
    let linked = b.reply_to("slack:5", "/link yes").await;
    assert!(linked.contains("one person"), "{linked}");
}
