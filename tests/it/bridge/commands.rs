//! Commands in chats: naming, listing, undoing, stopping and linking; in groups they show nothing private.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::servers::model::Step;
use crate::support::{Fields, Scene};

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
    assert_eq!(unknown, crate::support::servers::model::echo_of("/dance"));
    assert_eq!(
        b.reply_to(who, "//new").await,
        crate::support::servers::model::echo_of("/new")
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
async fn undone_messages_keep_their_place_and_are_shown_to_no_model() {
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
            &json!(crate::support::servers::model::echo_of("one")),
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
        crate::support::servers::model::echo_of("four")
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
async fn linking_in_chat_shows_who_would_be_merged_and_waits_for_a_yes() {
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
async fn in_a_group_nothing_private_is_shown_and_each_acts_on_their_own() {
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
