//! Turns whose client or whose model's server misbehaves: nothing that was said is lost, nothing is asked
//! twice, and no key of a provider is ever shown.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::chat::{UPSTREAM_KEY, answer, id_of_turn, line};
use crate::support::servers::model::{Step, echo_of};
use crate::support::sse::text_of;
use crate::support::{Reply, Scene, eventually};

const NONE: Duration = Duration::ZERO;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_does_not_stop_its_turn() {
    let chat = Scene::chat([Step::held("one ", "two"), Step::Hold, Step::say("three")]).await;
    let mut stream = chat.open(0, "s-1", "hi").await;
    stream.reads("one ").await;
    let turn = stream.header("x-throughline-turn-id");
    drop(stream);
    chat.model.release();
    let ended = chat.reaches(&turn, "completed").await;
    assert_eq!(ended["message"]["content"], "one two");
    let whole = tokio::spawn(Reply::of(chat.message_request(1, "s-1", "again")));
    let turns = chat.wait_for_turns("s-1", 2).await;
    whole.abort();
    assert!(whole.await.unwrap_err().is_cancelled());
    chat.model.release();
    let ended = chat.reaches(&id_of_turn(&turns[1]), "completed").await;
    assert_eq!(ended["message"]["content"], "three");
    assert_eq!(ended["attempt"], 1);
    assert_eq!(chat.model.requests().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_slowly_does_not_stop_its_turn_and_misses_nothing() {
    // More than the connection and this node's patience hold, and as much as a message may.
    let long: String = (0..36_000)
        .map(|number| format!("word-{number:020} "))
        .collect();
    let chat = Scene::chat([Step::Say(long.clone()), Step::Echo(NONE)]).await;
    let mut stream = chat.open(0, "s-1", "hi").await;
    let turn = stream.header("x-throughline-turn-id");
    eventually("it ends", Duration::from_secs(60), async || {
        // The other node has its hands free.
        let path = format!("/v1/turns/{turn}");
        let turn = chat.world.get_on(1, &chat.key, &path).await;
        turn.expect(200)["state"] == "completed"
    })
    .await;
    assert_eq!(answer(&chat.say(1, "s-1", "next").await), echo_of("next"));
    let chunks = stream.rest().await;
    let heard = text_of(&chunks);
    assert_eq!(heard.len(), long.len(), "{:?}", chunks[chunks.len() - 1]);
    assert!(heard == long);
    assert_eq!(chunks[chunks.len() - 1].data, "[DONE]");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_fails_before_its_first_token_is_retried() {
    let steps = [
        Step::fail(500),
        Step::Echo(NONE),
        Step::fail(429),
        Step::Echo(NONE),
    ];
    let chat = Scene::chat(steps).await;
    assert_eq!(answer(&chat.say(0, "s-1", "one").await), echo_of("one"));
    assert_eq!(chat.model.requests().len(), 2);
    assert_eq!(answer(&chat.say(0, "s-1", "two").await), echo_of("two"));
    assert_eq!(chat.model.requests().len(), 4);
    assert_eq!(chat.lines("s-1").await.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_always_asks_to_wait_fails_the_turn() {
    let chat = Scene::chat([
        Step::fail(429),
        Step::fail(429),
        Step::fail(429),
        Step::Echo(NONE),
    ])
    .await;
    let refused = chat.say(0, "s-1", "one").await;
    refused.expect_openai_error(429, "upstream_busy");
    // The turn has ended: asking again with the same key would not change it.
    assert_eq!(refused.header("x-should-retry"), "false");
    let turns = chat.turns("s-1").await;
    assert_eq!(turns[0]["state"], "failed");
    assert_eq!(turns[0]["reason"], "upstream_busy");
    assert_eq!(answer(&chat.say(1, "s-1", "two").await), echo_of("two"));
    let lines = chat.lines("s-1").await;
    assert_eq!(lines[..2], [line("user", "one"), line("user", "two")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_breaks_off_fails_the_turn_which_keeps_what_was_said() {
    let broken = || Step::BreakOff("one two ".to_owned());
    let chat = Scene::chat([broken(), broken()]).await;
    let mut stream = chat.open(0, "s-1", "hi").await;
    let chunks = stream.rest().await;
    assert_eq!(text_of(&chunks), "one two ");
    assert_eq!(
        chunks[chunks.len() - 1].json()["error"]["code"],
        "upstream_failed"
    );
    chat.say(1, "s-2", "hi")
        .await
        .expect_openai_error(502, "upstream_failed");
    for session in ["s-1", "s-2"] {
        let turn = &chat.turns(session).await[0];
        assert_eq!(
            (&turn["state"], &turn["reason"]),
            (&json!("failed"), &json!("upstream_failed"))
        );
        let expected = [line("user", "hi"), line("assistant", "one two ")];
        assert_eq!(chat.lines(session).await, expected);
    }
    assert_eq!(chat.model.requests().len(), 2, "nothing is asked twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_talks_nonsense_fails_the_turn() {
    let nonsense = [
        "data: nonsense\n\n",
        "data: {\"object\": \"error\"}\n\n",
        "data: {\"error\": {\"message\": \"overloaded\"}}\n\n",
        "<html>hello</html>",
        "",
    ];
    let chat = Scene::chat(nonsense.map(|text| Step::Raw(text.to_owned()))).await;
    for place in 0..nonsense.len() {
        let session = format!("s-{place}");
        let refused = chat.say(place % 2, &session, "hi").await;
        refused.expect_openai_error(502, "upstream_failed");
        assert_eq!(chat.turns(&session).await[0]["state"], "failed");
        assert_eq!(chat.lines(&session).await, [line("user", "hi")]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_never_stops_talking_is_cut_off() {
    let chat = Scene::chat([Step::Endless, Step::Echo(NONE)]).await;
    chat.say(0, "s-1", "hi")
        .await
        .expect_openai_error(502, "upstream_failed");
    let turn = &chat.turns("s-1").await[0];
    assert_eq!(turn["state"], "failed");
    let kept = &chat.lines("s-1").await[1].1;
    assert!(
        kept.starts_with("on on ") && kept.len() <= 1024 * 1024,
        "{}",
        kept.len()
    );
    assert_eq!(answer(&chat.say(0, "s-1", "next").await), echo_of("next"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_cancelled_while_its_server_hangs() {
    let chat = Scene::chat([Step::Hold, Step::Echo(NONE), Step::Echo(NONE)]).await;
    let asked = tokio::spawn(Reply::of(chat.message_request(0, "s-1", "hi")));
    let turns = chat.wait_for_turns("s-1", 1).await;
    let began = Instant::now();
    chat.cancel(1, &id_of_turn(&turns[0])).await.expect(202);
    asked
        .await
        .unwrap()
        .expect_openai_error(409, "turn_stopped");
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(chat.lines("s-1").await, [line("user", "hi")]);
    chat.model.release();
    assert_eq!(answer(&chat.say(0, "s-1", "next").await), echo_of("next"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_of_a_provider_is_never_shown() {
    let told = |status: u16| Step::Fail {
        status,
        body: json!({"error": {"message": format!("Incorrect API key: {UPSTREAM_KEY}.")}}),
    };
    let raw = format!("data: {{\"error\": {{\"message\": \"{UPSTREAM_KEY}\"}}}}\n\n");
    let chat = Scene::chat([told(400), told(401), told(404), Step::Raw(raw)]).await;
    let mut shown: Vec<String> = Vec::new();
    for place in 0..4 {
        let session = format!("s-{place}");
        let reply = match place % 2 {
            0 => chat.say(0, &session, "hi").await,
            _ => {
                let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
                Reply::of(chat.completion_request(0, &session, body)).await
            }
        };
        shown.push(format!("{reply:?}"));
        let turn = id_of_turn(&chat.turns(&session).await[0]);
        let ended: Value = chat.turn(&turn).await;
        assert_eq!(ended["state"], "failed");
        shown.push(ended.to_string());
        let path = format!("/v1/turns/{turn}/events");
        shown.push(format!(
            "{:?}",
            chat.events(1, &path, None).await.rest().await
        ));
    }
    for text in shown {
        assert!(!text.contains("sk-canary"), "{text}");
    }
}
