//! What bridges bring in: taken once, answered once, by HTTP or by a delivery; in groups nothing private.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::servers::model::Step;
use crate::support::{Fields, Scene};

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_answered_and_a_repeated_one_gets_the_same_answer() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let body = json!({"identity": "telegram:5", "text": "hello", "message_id": "m1"});
    let first = b.send(body.clone()).await.expect(200);
    assert_eq!(first["duplicate"], false);
    assert_eq!(first["session_key"], "agent:main:telegram:dm:5");
    let again = b.send_on(1, body.clone()).await.expect(200);
    assert_eq!(again["duplicate"], true);
    for member in ["turn_id", "reply", "session_id"] {
        assert_eq!(again[member], first[member], "{member}");
    }
    assert_eq!(b.model.requests().len(), 1);
    assert_eq!(b.fetch(0, "wait=0").await, Vec::<Value>::new());
    // From another sender it is another message; and in another chat.
    let mut other = body.clone();
    other["identity"] = json!("telegram:6");
    assert_eq!(b.send(other).await.expect(200)["duplicate"], false);
    let mut group = body;
    group["chat"] = json!({"type": "group", "id": "9"});
    assert_eq!(b.send(group).await.expect(200)["duplicate"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_equal_messages_on_two_nodes_are_one_turn_or_one_command() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::Echo(Duration::from_millis(5)));
    for text in ["hello", "/new Trip"] {
        let send = |n: usize| {
            let id = format!("of {text}");
            b.send_on(
                n % 2,
                json!({"identity": "telegram:5", "text": text, "message_id": id}),
            )
        };
        let answers: Vec<Value> = join_all((0..20).map(send))
            .await
            .iter()
            .map(|reply| reply.expect(200))
            .collect();
        let fresh = answers
            .iter()
            .filter(|one| one["duplicate"] == false)
            .count();
        assert_eq!(fresh, 1, "{text}");
        let replies: BTreeSet<String> =
            answers.iter().map(|one| one["reply"].to_string()).collect();
        assert_eq!(replies.len(), 1, "{replies:?}");
    }
    assert_eq!(b.model.requests().len(), 1);
    let sessions = b.world.get(&b.tenant.key, "/v1/sessions").await.expect(200);
    assert_eq!(sessions.list().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn forty_messages_at_once_are_answered_in_order_and_delivered_once_each() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let send = |n: usize| {
        let body = json!({
            "identity": "telegram:5", "text": format!("number {n}"), "message_id": n.to_string(), "wait": false,
        });
        b.send_until_accepted(n % 2, body)
    };
    let taken = join_all((0..40).map(send)).await;
    let session = taken[0].expect(202)["session_id"].clone();
    // Two consumers; each third delivery is taken and never ended, as if its consumer had died.
    let delivered = std::sync::Mutex::new(Vec::new());
    let consume = async |node: usize| {
        let mut taken = 0;
        for _ in 0..400 {
            if delivered.lock().unwrap().len() >= 40 {
                return;
            }
            for one in b.fetch(node, "wait=1").await {
                taken += 1;
                if taken % 3 == 0 && one["attempt"] == 1 {
                    b.world.age_deliveries(Duration::from_secs(61)).await;
                    continue;
                }
                if b.ack(&one).await.status == 204 {
                    let text = one.text("text").to_owned();
                    delivered.lock().unwrap().push((one.number("seq"), text));
                }
            }
        }
    };
    futures_util::future::join(consume(0), consume(1)).await;
    let delivered = delivered.into_inner().unwrap();
    let numbers: Vec<i64> = delivered.iter().map(|(seq, _)| *seq).collect();
    assert_eq!(numbers, (1..=40).collect::<Vec<i64>>());
    let said = b.messages(&session).await;
    assert_eq!(said.len(), 80);
    for (place, (_, text)) in delivered.iter().enumerate() {
        assert_eq!(said[2 * place]["role"], "user");
        assert_eq!(&said[2 * place + 1]["content"], text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_lost_the_connection_retries_and_gets_the_answer() {
    let b = Scene::bridge([Step::Hold, Step::Say("late".to_owned())]).await;
    let body = json!({"identity": "telegram:5", "text": "hello", "message_id": "m1"});
    let waiting = b.world.client.post(b.world.url("/v1/inbound"));
    let waiting = waiting
        .bearer_auth(&b.bridge_key)
        .json(&body)
        .timeout(Duration::from_millis(700));
    assert!(waiting.send().await.is_err());
    let again = tokio::join!(b.send_on(1, body), async { b.model.release() }).0;
    let again = again.expect(200);
    assert_eq!(
        (&again["reply"]["text"], &again["duplicate"]),
        (&json!("late"), &json!(true))
    );
    assert_eq!(b.fetch(0, "wait=6").await, Vec::<Value>::new());
}

/// The limit is real time: nothing is moved, so this takes as long as it says.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_past_the_limit_is_answered_by_one_delivery() {
    let b = Scene::bridge([Step::Hold, Step::Say("late".to_owned())]).await;
    let body = json!({"identity": "telegram:5", "text": "hello", "message_id": "m1"});
    let flipped = b.send(body.clone()).await.expect(202);
    assert_eq!(flipped["reply"], Value::Null);
    b.model.release();
    let given = b.fetch(1, "wait=30").await;
    assert_eq!(given.len(), 1);
    assert_eq!(
        (&given[0]["text"], &given[0]["in_reply_to"]),
        (&json!("late"), &json!("m1"))
    );
    b.ack(&given[0]).await.expect(204);
    // Brought again, it is said that the answer is on its way: never both.
    let again = b.send(body).await.expect(202);
    assert_eq!(
        (&again["reply"], &again["duplicate"]),
        (&Value::Null, &json!(true))
    );
    assert_eq!(b.fetch(0, "wait=1").await, Vec::<Value>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_is_a_notice_and_an_edited_message_replaces_the_queued_one() {
    let refuse = Step::Fail {
        status: 400,
        body: json!({"error": {"message": "no"}}),
    };
    let b = Scene::bridge([
        refuse,
        Step::Hold,
        Step::Say("one".to_owned()),
        Step::echo(),
    ])
    .await;
    let failed = b
        .send(json!({"identity": "telegram:5", "text": "x"}))
        .await
        .expect(200);
    assert_eq!(failed["reply"], Value::Null);
    assert_eq!(failed["notices"][0]["code"], "upstream_refused");
    b.queue("telegram:5", "first").await;
    let queued =
        json!({"identity": "telegram:5", "text": "draft", "message_id": "m", "wait": false});
    let queued = b.send(queued).await.expect(202);
    let edit = json!({"identity": "telegram:5", "text": "final", "message_id": "m", "edit": true});
    let edited = b.send(edit).await.expect(202);
    assert_eq!(edited["turn_id"], queued["turn_id"]);
    b.model.release();
    let first = b.fetch(0, "wait=20").await.remove(0);
    b.ack(&first).await.expect(204);
    b.fetch(0, "wait=20").await;
    let said = b.messages(&queued["session_id"]).await;
    assert!(said.iter().any(|one| one["content"] == "final"), "{said:?}");
    assert!(!said.iter().any(|one| one["content"] == "draft"));
    // A change of what was never brought changes nothing, and the message itself is answered.
    let early = json!({"identity": "telegram:7", "text": "later", "message_id": "e", "edit": true});
    assert_eq!(b.send(early).await.expect(202)["turn_id"], Value::Null);
    // Now it is only kept.
    let late =
        json!({"identity": "telegram:5", "text": "too late", "message_id": "m", "edit": true});
    b.send(late).await.expect(202);
    assert_eq!(b.messages(&queued["session_id"]).await.len(), said.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_refused_and_what_was_not_meant_for_the_agent_is_not_answered() {
    let b = Scene::bridge([]).await;
    for (body, status, code) in [
        (
            json!({"identity": "telegram:5", "text": " "}),
            422,
            "invalid_value",
        ),
        (
            json!({"identity": "irc:5", "text": "x"}),
            403,
            "platform_not_allowed",
        ),
        (json!({"text": "x"}), 403, "identity_required"),
        (
            json!({"identity": "telegram:5", "text": "x", "agent": "none"}),
            422,
            "invalid_value",
        ),
        (
            json!({"identity": "telegram:5", "text": "x", "edit": true}),
            422,
            "invalid_value",
        ),
        (
            json!({"identity": "telegram:5", "text": "x", "attachments": [{"url": "x"}]}),
            400,
            "invalid_request",
        ),
        (
            json!({"identity": "telegram:5", "text": "x", "unknown": 1}),
            400,
            "invalid_request",
        ),
        (
            json!({"identity": "telegram:5", "text": "x", "chat": {"type": "group"}}),
            422,
            "invalid_value",
        ),
    ] {
        b.send(body.clone()).await.expect_problem(status, code);
    }
    let overheard = json!({
        "identity": "telegram:5", "chat": {"type": "group", "id": "9"}, "text": "not to you", "mentioned": false,
    });
    let overheard = b.send(overheard).await.expect(202);
    assert_eq!(overheard["turn_id"], Value::Null);
    assert_eq!(b.model.requests().len(), 0);
    let image = json!({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}});
    b.model.otherwise(Step::echo());
    let shown = json!({"identity": "telegram:5", "text": "look", "attachments": [image]});
    b.send(shown).await.expect(200);
    let asked = &b.model.requests()[0]["messages"][0]["content"];
    assert_eq!(asked, &json!([{"type": "text", "text": "look"}, image]));
}
