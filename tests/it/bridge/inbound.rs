//! What bridges bring in: taken once, answered once, by HTTP or by a delivery; in groups nothing private.

use crate::support::Fields;
use crate::support::Scene;
use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::servers::model::Step;

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
        let bring = |n: usize| {
            let id = format!("of {text}");
            b.send_on(
                n % 2,
                json!({"identity": "telegram:5", "text": text, "message_id": id}),
            )
        };
        let answers: Vec<Value> = join_all((0..20).map(bring))
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
    let bring = |n: usize| {
        let body = json!({
            "identity": "telegram:5", "text": format!("number {n}"), "message_id": n.to_string(), "wait": false,
        });
        b.send_until_accepted(n % 2, body)
    };
    let taken = join_all((0..40).map(bring)).await;
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
async fn who_lost_the_connection_brings_the_message_again_and_has_the_answer() {
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
async fn who_waits_too_long_is_answered_by_one_delivery() {
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
async fn a_failure_is_told_and_a_changed_message_replaces_what_waits() {
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
async fn commands_move_name_and_list_the_sessions_of_a_chat() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let who = "telegram:5";
    b.reply_to(who, "about tea").await;
    assert!(b.reply_to(who, "/title Tea").await.contains("Tea"));
    assert!(b.reply_to(who, "/new Trip").await.contains("Trip"));
    b.reply_to(who, "about trains").await;
    let listed = b.reply_to(who, "/sessions").await;
    assert!(
        listed.contains("1. Trip") && listed.contains("2. Tea"),
        "{listed}"
    );
    assert!(
        b.reply_to(who, "/resume tea")
            .await
            .contains("Tea: 2 messages")
    );
    let asked = b
        .send(json!({"identity": who, "text": "more tea"}))
        .await
        .expect(200);
    let said = b.messages(&asked["session_id"]).await;
    assert_eq!(said[0]["content"], "about tea");
    assert!(
        b.reply_to(who, "/resume 9")
            .await
            .contains("no such session")
    );
    assert!(b.reply_to(who, "/branch Copy").await.contains("copy"));
    let branch = b
        .send(json!({"identity": who, "text": "/status"}))
        .await
        .expect(200);
    assert_ne!(branch["conversation_id"], asked["conversation_id"]);
    assert!(b.reply_to(who, "/help").await.contains("/undo"));
    for later in ["/compress", "/handoff slack", "/continue", "/save"] {
        assert!(
            b.reply_to(who, later).await.contains("not available yet"),
            "{later}"
        );
    }
    let unknown = b.reply_to(who, "/dance").await;
    assert_eq!(unknown, crate::support::servers::model::echo("/dance"));
    assert_eq!(
        b.reply_to(who, "//new").await,
        crate::support::servers::model::echo("/new")
    );
    // Nobody else's session can be gone on with.
    b.reply_to("telegram:6", "mine").await;
    let id = asked.text("session_id");
    assert!(
        b.reply_to("telegram:6", &format!("/resume {id}"))
            .await
            .contains("no such session")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_undone_keeps_its_place_and_is_shown_to_no_model() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let who = "telegram:5";
    for text in ["one", "two", "three"] {
        b.reply_to(who, text).await;
    }
    assert!(b.reply_to(who, "/undo 2").await.contains("last 2"));
    let asked = b
        .send(json!({"identity": who, "text": "four"}))
        .await
        .expect(200);
    let shown = b.model.requests().last().unwrap()["messages"].clone();
    let shown: Vec<&Value> = shown
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["content"])
        .collect();
    assert_eq!(
        shown,
        [
            &json!("one"),
            &json!(crate::support::servers::model::echo("one")),
            &json!("four")
        ]
    );
    let said = b.messages(&asked["session_id"]).await;
    let seqs: Vec<i64> = said.iter().map(|one| one.number("seq")).collect();
    assert_eq!(seqs, (1..=8).collect::<Vec<i64>>());
    let undone = said
        .iter()
        .filter(|one| !one["undone_at"].is_null())
        .count();
    assert_eq!(undone, 4);
    assert_eq!(
        b.reply_to(who, "/retry").await,
        crate::support::servers::model::echo("four")
    );
    let said = b.messages(&asked["session_id"]).await;
    assert_eq!(said.len(), 10);
    assert!(
        b.reply_to("telegram:6", "/undo")
            .await
            .contains("nothing to take back")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_ends_what_is_written_and_what_waits() {
    let b = Scene::bridge([Step::SayHeld {
        first: "half ".to_owned(),
        rest: "whole".to_owned(),
    }])
    .await;
    b.model.otherwise(Step::echo());
    b.queue("telegram:5", "long").await;
    let queued = b.queue("telegram:5", "waits").await;
    crate::support::eventually("the model is asked", Duration::from_secs(20), async || {
        !b.model.requests().is_empty()
    })
    .await;
    assert_eq!(b.reply_to("telegram:5", "/stop").await, "Stopped.");
    let path = format!("/v1/turns/{}", queued.text("turn_id"));
    crate::support::eventually("both have ended", Duration::from_secs(20), async || {
        let path = format!("/v1/sessions/{}/turns", queued.text("session_id"));
        let turns = b.world.get(&b.tenant.key, &path).await.expect(200);
        let ended = |turn: &Value| turn["state"] == "cancelled";
        turns.list().iter().all(ended)
    })
    .await;
    let turn = b.world.get(&b.tenant.key, &path).await.expect(200);
    assert_eq!(turn["reason"], "cancelled");
    assert_eq!(
        b.reply_to("telegram:5", "/stop").await,
        "There is nothing to stop."
    );
    assert_eq!(b.fetch(0, "wait=1").await, Vec::<Value>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn linking_in_chat_shows_who_would_be_joined_and_waits_for_a_yes() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    b.reply_to("telegram:5", "hello from telegram").await;
    b.reply_to("discord:5", "hello from discord").await;
    let shown = b.reply_to("telegram:5", "/link").await;
    let code = shown.split_whitespace().last().unwrap().to_owned();
    assert!(
        b.reply_to("discord:5", "/link yes")
            .await
            .contains("nothing to confirm")
    );
    assert!(
        b.reply_to("discord:5", "/link AAAABBBB")
            .await
            .contains("not good")
    );
    let preview = b.reply_to("discord:5", &format!("/link {code}")).await;
    assert!(
        preview.contains("telegram:5") && preview.contains("/link yes"),
        "{preview}"
    );
    let apart = b.world.dm(&b.bridge_key, "discord:5").await;
    assert_eq!(apart["linked"], false);
    assert_eq!(
        b.reply_to("discord:5", "/link yes").await,
        "Done: your accounts are one person now. We go on with what was said last on discord; \
         the other conversation is in /sessions."
    );
    let sessions = b.reply_to("telegram:5", "/sessions").await;
    assert!(
        sessions.contains("1. untitled") && sessions.contains("2. untitled"),
        "{sessions}"
    );
    let one = b.world.dm(&b.bridge_key, "telegram:5").await;
    let two = b.world.dm(&b.bridge_key, "discord:5").await;
    assert_eq!(one["user_id"], two["user_id"]);
    assert_eq!(one["session_id"], two["session_id"]);
    assert!(
        b.reply_to("discord:5", "/unlink")
            .await
            .contains("on its own")
    );
    let parted = b.world.dm(&b.bridge_key, "discord:5").await;
    assert_ne!(parted["user_id"], one["user_id"]);
    // A confirmation that comes too late confirms nothing.
    let shown = b.reply_to("telegram:5", "/link").await;
    let code = shown.split_whitespace().last().unwrap().to_owned();
    b.reply_to("discord:5", &format!("/link {code}")).await;
    b.world.clock.advance(Duration::from_secs(121));
    assert!(
        b.reply_to("discord:5", "/link yes")
            .await
            .contains("nothing to confirm")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_group_nothing_private_is_told_and_each_acts_on_their_own() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    // Ada is linked and has titled things of her own.
    b.world.link(&b.bridge_key, "telegram:1", "discord:1").await;
    b.reply_to("telegram:1", "/new Secret plans").await;
    b.reply_to("telegram:1", "my secret words").await;
    let private = b.reply_to("telegram:1", "/link").await;
    let code = private.split_whitespace().last().unwrap().to_owned();
    let group = json!({"type": "thread", "id": "C", "thread_id": "9"});
    let speak = async |who: &str, text: &str| {
        let body = json!({"identity": who, "chat": group, "text": text, "display_name": "Someone"});
        b.send(body).await.expect(200)
    };
    let mut told = String::new();
    for who in ["telegram:1", "telegram:2", "telegram:3"] {
        speak(who, &format!("I am {who}")).await;
        for command in [
            "/sessions",
            "/status",
            "/resume Secret plans",
            "/title",
            "/help",
            "/continue",
        ] {
            told += &speak(who, command).await.to_string();
        }
        for command in ["/link", "/unlink", "/sethome", "/handoff slack"] {
            let answer = speak(who, command).await;
            assert_eq!(
                answer["notices"][0]["code"], "private_chat_required",
                "{command}"
            );
            assert_eq!(answer["offer"], Value::Null);
            told += &answer.to_string();
        }
    }
    told += &speak("telegram:2", &format!("/link {code}"))
        .await
        .to_string();
    for private in ["Secret", "secret", &code] {
        assert!(!told.contains(private), "{private}: {told}");
    }
    // The code was seen: it is void.
    assert!(
        b.reply_to("telegram:3", &format!("/link {code}"))
            .await
            .contains("not good")
    );
    // Each takes back their own last message.
    let thread = speak("telegram:1", "from one").await;
    speak("telegram:2", "from two").await;
    speak("telegram:1", "/undo").await;
    let undone: Vec<Value> = b
        .messages(&thread["session_id"])
        .await
        .into_iter()
        .filter(|one| !one["undone_at"].is_null() && one["role"] == "user")
        .collect();
    assert_eq!(undone.len(), 1);
    assert_eq!(undone[0]["content"], "[Someone] from one");
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
