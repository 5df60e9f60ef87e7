//! The scripted model speaks the protocol that the product will meet.

use serde_json::{Value, json};

use crate::support::Reply;
use crate::support::servers::model::{Model, Step};

async fn ask(model: &Model, body: Value) -> Reply {
    let url = format!("{}/chat/completions", model.base_url);
    Reply::of(reqwest::Client::new().post(url).json(&body)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn it_answers_in_the_order_of_its_script_and_keeps_its_requests() {
    let model = Model::start([
        Step::Say("hello there".to_owned()),
        Step::Fail {
            status: 429,
            body: json!({"error": {"message": "slow down"}}),
        },
        Step::CallTool {
            name: "clock".to_owned(),
            arguments: json!({"zone": "UTC"}),
        },
    ])
    .await;
    let first = ask(&model, json!({"n": 1})).await.expect(200);
    assert_eq!(first["choices"][0]["message"]["content"], "hello there");
    ask(&model, json!({"n": 2})).await.expect(429);
    let third = ask(&model, json!({"n": 3})).await.expect(200);
    assert_eq!(third["choices"][0]["finish_reason"], "tool_calls");
    ask(&model, json!({"n": 4})).await.expect(500);
    model.push(Step::Say("again".to_owned()));
    ask(&model, json!({"n": 5})).await.expect(200);
    let asked: Vec<_> = model.requests().iter().map(|r| r["n"].clone()).collect();
    assert_eq!(asked, [1, 2, 3, 4, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_streams_words_and_can_break_off() {
    let model = Model::start([
        Step::Say("one two three".to_owned()),
        Step::Wait(std::time::Duration::from_millis(1)),
        Step::BreakOff("one two".to_owned()),
    ])
    .await;
    let whole = ask(&model, json!({"stream": true})).await;
    assert_eq!(whole.header("content-type"), "text/event-stream");
    assert_eq!(
        whole.body.matches("\"content\"").count(),
        3,
        "{}",
        whole.body
    );
    assert!(whole.body.ends_with("data: [DONE]\n\n"));
    let url = format!("{}/chat/completions", model.base_url);
    let broken = reqwest::Client::new()
        .post(url)
        .json(&json!({"stream": true}));
    assert!(broken.send().await.unwrap().text().await.is_err());
}
