//! Scene with a user token that names no session: it goes to the user's own session, unless it asks for none. And
//! what says that an answer is stateless.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::people::User;
use crate::support::servers::model::Step;
use crate::support::{Fields, Reply, Scene};

const STATELESS: &str = "x-throughline-stateless";
const IDENTITY: &str = "x-throughline-identity";
const SESSION: &str = "x-hermes-session-id";

async fn user_chat(steps: impl IntoIterator<Item = Step>) -> (Scene, User) {
    let chat = Scene::with_prompt(steps).await;
    let ada = chat.sign_in("ada").await;
    (chat, ada)
}

async fn ask(chat: &Scene, key: &str, headers: &[(&str, &str)], members: Value) -> Reply {
    let mut body = json!({"model": "main", "messages": [{"role": "user", "content": "hi"}]});
    for (member, value) in members.as_object().unwrap() {
        body[member] = value.clone();
    }
    let mut request = chat
        .world
        .request(Method::POST, "/v1/chat/completions", key);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    Reply::of(request.json(&body)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_token_without_a_session_writes_to_its_users_own_session() {
    let (chat, ada) = user_chat([Step::say("one"), Step::say("two"), Step::say("three")]).await;
    let plain = ask(&chat, &ada.token, &[], json!({})).await;
    let session = plain.header(SESSION).to_owned();
    assert!(!plain.headers.contains_key(STATELESS));
    let plain = plain.expect(200);
    assert_eq!(plain["hermes"]["session_key"], "agent:main:web:dm:ada");
    let me = ask(&chat, &ada.token, &[], json!({"user": "me"})).await;
    assert_eq!(me.header(SESSION), session);
    let header = ask(&chat, &ada.token, &[(IDENTITY, "me")], json!({})).await;
    assert_eq!(header.header(SESSION), session);
    let asked = chat.model.requests().pop().unwrap();
    assert_eq!(asked.items("messages").len(), 6);
    // A label that names nobody changes nothing.
    chat.model.push(Step::say("four"));
    let label = ask(&chat, &ada.token, &[], json!({"user": "label"})).await;
    assert_eq!(label.header(SESSION), session);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_token_may_ask_for_no_session() {
    let (chat, ada) = user_chat([Step::say("one"), Step::say("two"), Step::say("three")]).await;
    for members in [
        json!({"store": false}),
        json!({"store": false, "stream": true}),
    ] {
        let reply = ask(&chat, &ada.token, &[], members).await;
        assert_eq!(reply.header(STATELESS), "true");
        assert!(!reply.headers.contains_key(SESSION));
    }
    let listed = chat.world.get(&ada.token, "/v1/sessions").await.expect(200);
    assert_eq!(listed["data"], json!([]));
    // It is no way out of a session that is named.
    let named = ask(
        &chat,
        &ada.token,
        &[(SESSION, "mine")],
        json!({"store": false}),
    )
    .await;
    assert_eq!(named.header(SESSION), "mine");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stateless_answer_to_a_key_says_so() {
    let (chat, _) = user_chat([Step::say("one"), Step::say("two"), Step::say("three")]).await;
    for stream in [false, true] {
        let reply = ask(&chat, &chat.key, &[], json!({"stream": stream})).await;
        assert_eq!(reply.header(STATELESS), "true");
    }
    let named = ask(&chat, &chat.key, &[(SESSION, "mine")], json!({})).await;
    named.expect(200);
    assert!(!named.headers.contains_key(STATELESS));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_names_me_in_the_header_is_refused() {
    let (chat, _) = user_chat([]).await;
    let (_, bridge) = chat.world.api_key(&chat.tenant, "bridge").await;
    for key in [&chat.key, &chat.tenant.key, &bridge] {
        let reply = ask(&chat, key, &[(IDENTITY, "me")], json!({})).await;
        let error = reply.expect_openai_error(400, "invalid_request");
        let message = error.text("message");
        assert!(message.contains("X-Throughline-Identity"), "{message}");
        let models = chat.world.request(Method::GET, "/v1/models", key);
        let reply = Reply::of(models.header(IDENTITY, "me")).await;
        reply.expect_openai_error(400, "invalid_request");
    }
    assert_eq!(chat.model.requests(), Vec::<Value>::new());
    let world = &chat.world;
    for (method, path) in [
        (Method::GET, "/v1/session-keys"),
        (Method::GET, "/v1/sessions/mine"),
        (Method::DELETE, "/v1/sessions/mine"),
        (Method::GET, "/v1/sessions/mine/grants"),
        (
            Method::DELETE,
            "/v1/identities/idn_00000000000000000000000000000000",
        ),
        (
            Method::GET,
            "/v1/users/usr_00000000000000000000000000000000/home-channels",
        ),
    ] {
        for key in [&chat.tenant.key, &bridge] {
            let request = world.request(method.clone(), path, key);
            let reply = Reply::of(request.header(IDENTITY, "me")).await;
            let problem = reply.expect_problem(400, "invalid_request");
            let pointer = &problem["errors"][0]["pointer"];
            assert_eq!(pointer, "/header/X-Throughline-Identity", "{path}");
        }
    }
    // In a body it is a value that breaks a rule.
    let body = json!({"user": "me"});
    let made = world.post(&chat.tenant.key, "/v1/sessions", body).await;
    made.expect_problem(422, "invalid_value");
}

#[tokio::test(flavor = "multi_thread")]
async fn me_in_the_header_is_the_tokens_user_on_other_endpoints_too() {
    let (chat, ada) = user_chat([Step::say("one"), Step::say("two")]).await;
    ask(&chat, &ada.token, &[], json!({})).await.expect(200);
    let get = |path: &str| {
        let request = chat.world.request(Method::GET, path, &ada.token);
        request.header(IDENTITY, "me")
    };
    let listed = Reply::of(get("/v1/sessions")).await.expect(200);
    assert_eq!(listed.list().len(), 1);
    let inbound = chat
        .world
        .request(Method::POST, "/v1/inbound", &ada.token)
        .header(IDENTITY, "me")
        .json(&json!({"text": "hello"}));
    let answer = Reply::of(inbound).await.expect(200);
    assert_eq!(answer["session_key"], "agent:main:web:dm:ada");
    let refused = chat
        .world
        .request(Method::POST, "/v1/inbound", &chat.tenant.key)
        .header(IDENTITY, "me")
        .json(&json!({"text": "hello"}));
    Reply::of(refused)
        .await
        .expect_problem(400, "invalid_request");
}
