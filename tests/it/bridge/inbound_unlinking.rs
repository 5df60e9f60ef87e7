//! An account that was parted from its person brings again what it said before: the conversation is no longer
//! its own, and neither is what was answered there.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::servers::model::{self, Step};
use crate::support::{Fields, Scene, eventually};

const STAYS: &str = "telegram:5";
const PARTS: &str = "discord:5";

fn message(identity: &str, id: &str, text: &str) -> Value {
    json!({"identity": identity, "text": text, "message_id": id})
}

/// Two accounts of one person, who has said something through the one that stays.
async fn linked(steps: impl IntoIterator<Item = Step>) -> Scene {
    let b = Scene::bridge(steps).await;
    b.model.otherwise(Step::echo());
    b.world.link(&b.bridge_key, STAYS, PARTS).await;
    b.reply_to(STAYS, "/new Secret title").await;
    b
}

/// The answers among what is given out until nothing has come for so many seconds; that accounts were linked and
/// parted is told too.
async fn replies(b: &Scene, seconds: u32) -> Vec<Value> {
    let mut replies = Vec::new();
    loop {
        let given = b.fetch(0, &format!("wait={seconds}")).await;
        if given.is_empty() {
            return replies;
        }
        for one in given {
            b.ack(&one).await.expect(204);
            if one["kind"] != "security" {
                replies.push(one);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlinked_identity_gets_no_answer_from_before() {
    let b = linked([]).await;
    b.reply_to(STAYS, "from who stays").await;
    let said = message(PARTS, "m1", "from who parts");
    let first = b.send(said.clone()).await.expect(200);
    let answer = first.text("/reply/text");
    assert_eq!(answer, model::echo_of("from who parts"));
    let listed = message(PARTS, "m2", "/sessions");
    let list = b.send(listed.clone()).await;
    assert!(list.body.contains("Secret title"), "{}", list.body);
    for body in [&said, &listed] {
        let again = b.send_on(1, body.clone()).await.expect(200);
        assert_eq!(again["duplicate"], true);
    }
    let asked = b.model.requests().len();
    assert!(b.reply_to(PARTS, "/unlink").await.contains("on its own"));

    let words = ["turn_id", "session_id", "conversation_id", "user_id"];
    let words = words.map(|member| first.text(member));
    for (node, wait) in [(0, true), (1, true), (0, false)] {
        let mut body = said.clone();
        body["wait"] = json!(wait);
        let refused = b.send_on(node, body).await;
        refused.expect_problem(404, "session_not_found");
        for word in words.iter().chain([&answer, &"Secret title"]) {
            assert!(!refused.body.contains(word), "{}", refused.body);
        }
    }
    // Of a command it is known that it was done, and not what it told.
    let again = b.send(listed).await;
    assert_eq!(again.expect(202)["duplicate"], true);
    assert!(!again.body.contains("Secret title"), "{}", again.body);
    assert_eq!(b.model.requests().len(), asked);
    assert_eq!(replies(&b, 1).await, Vec::<Value>::new());
    // What it says now is its own; and who stayed has everything.
    let new = b.send(message(PARTS, "m3", "anew")).await.expect(200);
    assert_ne!(new["conversation_id"], first["conversation_id"]);
    assert_ne!(new["user_id"], first["user_id"]);
    let stays = b.send(message(STAYS, "m4", "more")).await.expect(200);
    assert_eq!(stays["conversation_id"], first["conversation_id"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlinked_identity_neither_edits_nor_receives_what_was_under_way() {
    let b = linked([Step::Hold]).await;
    let unwaited = |id: &str, text: &str| {
        let mut body = message(PARTS, id, text);
        body["wait"] = json!(false);
        body
    };
    let stays = json!({"identity": STAYS, "text": "from who stays", "wait": false});
    b.send(stays).await.expect(202);
    let queued = b.send(unwaited("m1", "from who parts")).await.expect(202);
    assert!(b.reply_to(PARTS, "/unlink").await.contains("on its own"));
    let mut edit = message(PARTS, "m1", "changed afterwards");
    edit["edit"] = json!(true);
    b.send(edit).await.expect_problem(404, "session_not_found");
    b.model.release();
    // It is answered where it was accepted, and told to nobody who may not read there.
    let path = format!("/v1/turns/{}", queued.text("turn_id"));
    eventually("it is answered", Duration::from_secs(20), async || {
        let turn = b.world.get(&b.tenant.key, &path).await.expect(200);
        turn["state"] == "completed"
    })
    .await;
    let turn = b.world.get(&b.tenant.key, &path).await.expect(200);
    assert_eq!(turn["message"]["content"], model::echo_of("from who parts"));
    let given = replies(&b, 8).await;
    let told: Vec<&Value> = given.iter().map(|one| &one["identity"]).collect();
    assert_eq!(told, [STAYS]);
}
