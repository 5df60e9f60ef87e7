//! A changed agent: seen at once on the node that took the change, and one and the same within a turn.

use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::chat::agent_on;
use crate::support::servers::model::Step;
use crate::support::{Reply, Scene};

async fn put(chat: &Scene, model: &str) {
    let mut spec = agent_on(
        &chat.model,
        json!({"system_prompt": format!("you are {model}")}),
    );
    spec["upstream"]["model"] = json!(model);
    let put = chat
        .world
        .put(&chat.tenant.key, "/v1/agents/main", spec)
        .await;
    put.expect(200);
}

/// The model and the prompt of the last request.
fn asked(chat: &Scene) -> (Value, Value) {
    let requests = chat.model.requests();
    let last = &requests[requests.len() - 1];
    (
        last["model"].clone(),
        last["messages"][0]["content"].clone(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_holds_at_once_on_the_node_that_took_it() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::say("fine"));
    for model in ["m-2", "m-3", "m-4"] {
        chat.say(0, "mine", "hi").await.expect(200);
        put(&chat, model).await;
        chat.say(0, "mine", "hi").await.expect(200);
        assert_eq!(
            asked(&chat),
            (json!(model), json!(format!("you are {model}")))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_answered_by_the_agent_that_it_was_accepted_for() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::say("fine"));
    put(&chat, "m-2").await;
    chat.say(0, "mine", "hi").await.expect(200);
    let mut superuser = chat.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    sqlx::query("select 1 from conversations for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let accepted = tokio::spawn(Reply::of(chat.message_request(0, "mine", "and now?")));
    chat.world.waiting(1).await;
    put(&chat, "m-3").await;
    held.commit().await.unwrap();
    accepted.await.unwrap().expect(200);
    assert_eq!(asked(&chat), (json!("m-2"), json!("you are m-2")));
}
