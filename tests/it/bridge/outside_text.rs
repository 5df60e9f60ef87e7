//! Text that cannot be stored as it came: through every way in, it is stored with U+FFFD in its place, and stops
//! nothing.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::support::chat::{answer, line};
use crate::support::servers::model::{Step, echo_of};
use crate::support::sse::text_of;
use crate::support::{Fields, Reply, Scene, eventually, stays};

const PATIENCE: Duration = Duration::from_secs(20);

/// Every control character and every kind of lone surrogate, as the inside of a text in JSON, and what is to
/// become of it.
fn odd() -> (String, String) {
    let controls = (0..=0x1F).chain(0x7F..=0x9F);
    let units = controls.chain([0xD800, 0xDBFF, 0xDC00, 0xDFFF]);
    let mut escaped = String::new();
    let mut expected = String::new();
    for unit in units {
        escaped.push_str(&format!("x\\u{unit:04x}"));
        let kept = char::from_u32(unit).filter(|kept| *kept != '\0');
        expected.extend(['x', kept.unwrap_or('\u{FFFD}')]);
    }
    (escaped, expected)
}

/// A stream of one chunk.
fn raw(delta: &str, finish: &str) -> Step {
    Step::Raw(format!(
        "data: {{\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":\"{finish}\"}}]}}\n\n\
         data: [DONE]\n\n"
    ))
}

fn odd_answer() -> Step {
    let (escaped, _) = odd();
    raw(&format!("{{\"content\":\"{escaped}\"}}"), &escaped)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_may_say_anything() {
    let (escaped, expected) = odd();
    let call = format!(
        "{{\"tool_calls\":[{{\"index\":0,\"id\":\"{escaped}\",\"type\":\"function\",\
           \"function\":{{\"name\":\"{escaped}\",\"arguments\":\"{escaped}\"}}}}]}}"
    );
    let chat = Scene::chat([
        odd_answer(),
        odd_answer(),
        raw(&call, "tool_calls"),
        Step::say("after the call"),
    ])
    .await;
    assert_eq!(answer(&chat.say(0, "s", "whole").await), expected);
    let mut stream = chat.open(1, "s", "streamed").await;
    assert_eq!(text_of(&stream.rest().await), expected);
    // Nobody has such a tool: it is answered so, and the model goes on.
    assert_eq!(answer(&chat.say(0, "s", "tools").await), "after the call");
    let transcript = chat.transcript("s").await;
    assert_eq!(transcript[1]["content"], json!(expected));
    let made = &transcript[5]["tool_calls"][0];
    assert_eq!(made["id"], json!(expected));
    assert_eq!(made["function"]["arguments"], json!(expected));
    assert_eq!(transcript[6]["tool_call_id"], json!(expected));
    // What reads every message of a session still can.
    let body = json!({"summary": "odd", "keep_last": 1});
    let path = format!("/v1/sessions/{}/compress", "s");
    chat.world.post(&chat.key, &path, body).await.expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_platform_is_given_whatever_a_model_says() {
    let (_, expected) = odd();
    let b = Scene::bridge([odd_answer(), odd_answer()]).await;
    let waited = json!({"identity": "telegram:1", "text": "x", "wait": true});
    assert_eq!(
        b.send(waited).await.expect(200)["reply"]["text"],
        json!(expected)
    );
    let left = json!({"identity": "telegram:1", "text": "y", "wait": false});
    b.send(left).await.expect(202);
    assert_eq!(delivered(&b).await["text"], json!(expected));
}

/// The next delivery, which is then acknowledged.
async fn delivered(b: &Scene) -> Value {
    let given = b.fetch(0, "wait=20").await;
    let first = given[0].clone();
    b.ack(&first).await.expect(204);
    first
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_bridges_and_imports_may_send_anything() {
    let (escaped, expected) = odd();
    let chat = Scene::chat([Step::Echo(Duration::ZERO), Step::Echo(Duration::ZERO)]).await;
    let world = &chat.world;
    let send = async |key: &str, path: &str, kind: &str, body: String| {
        let request = world.client.post(world.url(path)).bearer_auth(key);
        Reply::of(request.header("content-type", kind).body(body)).await
    };
    let json_type = "application/json";
    // Scene, with a result of a tool.
    let path = "/v1/chat/completions";
    let body = format!(
        "{{\"model\":\"main\",\"messages\":[{{\"role\":\"user\",\"content\":\"{escaped}\"}}]}}"
    );
    let request = world.client.post(world.url(path)).bearer_auth(&chat.key);
    let request = request.header("x-hermes-session-id", "s").body(body);
    let reply = Reply::of(request.header("content-type", json_type)).await;
    assert_eq!(answer(&reply), echo_of(&expected));
    let body = format!(
        "{{\"messages\":[\
           {{\"role\":\"assistant\",\"tool_calls\":[{{\"id\":\"c\",\"type\":\"function\",\
             \"function\":{{\"name\":\"f\",\"arguments\":\"{escaped}\"}}}}]}},\
           {{\"role\":\"tool\",\"tool_call_id\":\"c\",\"content\":\"{escaped}\"}}]}}"
    );
    let admin = &chat.tenant.key;
    let reply = send(admin, "/v1/sessions/s/messages", json_type, body).await;
    reply.expect(201);
    let transcript = chat.transcript("s").await;
    assert_eq!(transcript[0]["content"], json!(expected));
    let arguments = &transcript[2]["tool_calls"][0]["function"]["arguments"];
    assert_eq!(arguments, &json!(expected));
    assert_eq!(transcript[3]["content"], json!(expected));
    // A session from elsewhere.
    let exported = world.get(admin, "/v1/sessions/s/export").await;
    let document = exported.body.replace(
        &json!(echo_of(&expected)).to_string(),
        &format!("\"{escaped}\""),
    );
    assert_ne!(document, exported.body);
    let made = send(admin, "/v1/sessions/import", json_type, document).await;
    let made = made.expect(201).id();
    assert_eq!(chat.transcript(&made).await[1]["content"], json!(expected));
    // A bridge.
    let key = world.bridge_key(&chat.tenant, &["telegram"]).await;
    let body = format!("{{\"identity\":\"telegram:1\",\"wait\":true,\"text\":\"{escaped}\"}}");
    let reply = send(&key, "/v1/inbound", json_type, body).await;
    assert_eq!(
        reply.expect(200)["reply"]["text"],
        json!(echo_of(&expected))
    );
    // Documents of people and their tools, in both spellings: a name that is none is refused, and nothing else.
    for (kind, tool) in [
        (json_type, "t\\u0000"),
        (json_type, "t\\ud800"),
        ("application/yaml", "t\\0"),
    ] {
        let body = format!("{{\"toolsets\": {{\"telegram\": [\"{tool}\"]}}}}");
        let request = world.client.put(world.url("/v1/identity-links"));
        let request = request.bearer_auth(admin).header("content-type", kind);
        let reply = Reply::of(request.body(body)).await;
        assert!([200, 400, 422].contains(&reply.status), "{kind}: {reply:?}");
    }
}

async fn execute(database: &mut PgConnection, sql: &'static str) {
    sqlx::raw_sql(sql).execute(database).await.unwrap();
}

/// More than a sweeper takes at a time, and all of them before the good one.
const POISON: &str = "
  insert into turns
  select (jsonb_populate_record(t, jsonb_build_object(
            'id', gen_random_uuid(), 'turn_no', 1000 + n, 'reply_via', 'waiting',
            -- One that cannot be read, or one of an identity that is no more.
            'reply_to', case n % 2
                        when 0 then '{\"odd\": true}'::jsonb
                        else jsonb_set(t.reply_to::jsonb, '{identity_id}', to_jsonb('idn_01900000000070008000000000000000'::text))
                        end,
            'due_at', now() - interval '1 hour', 'failures', case n when 1 then 7 else 0 end))).*
    from turns t, generate_series(1, 60) n
   where t.turn_no = 1;
  update turns
     set reply_via = 'waiting', due_at = now()
   where turn_no = 2";

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_cannot_be_delivered_hold_up_no_other() {
    let b = Scene::bridge([Step::Echo(Duration::ZERO), Step::Echo(Duration::ZERO)]).await;
    for text in ["one", "two"] {
        let body = json!({"identity": "telegram:1", "text": text, "wait": true});
        b.send(body).await.expect(200);
    }
    let mut database = b.world.superuser().await;
    execute(&mut database, POISON).await;
    assert_eq!(delivered(&b).await["text"], json!(echo_of("two")));
    eventually("each was tried, and one is given up", PATIENCE, async || {
        let tried: (i64, i64) = sqlx::query_as(
            "select count(*) filter (where failures > 0 and (due_at > now() or reply_via = 'failed')),
                    count(*) filter (where reply_via = 'failed' and failures = 8)
               from turns
              where turn_no > 1000",
        )
        .fetch_one(&mut b.world.superuser().await)
        .await
        .unwrap();
        tried == (60, 1)
    })
    .await;
}

/// Turns whose node is gone and whose input cannot be read, each in a conversation of its own; and one that waits
/// in an idle conversation.
const POISON_TURNS: &str = "
  insert into turns
  select (jsonb_populate_record(t, jsonb_build_object(
            'id', gen_random_uuid(), 'turn_no', 1000, 'conversation_id', c.id, 'start_session_id', c.tip_session_id,
            'end_session_id', c.tip_session_id, 'state', 'running', 'input', '{\"odd\": true}'::jsonb,
            'node', gen_random_uuid(), 'lease_until', now() - interval '1 hour', 'ended_at', null))).*
    from conversations c, turns t
   where c.client_id like 'odd-%'
     and t.turn_no = 1;
  update sessions s
     set turn_id = t.id
    from turns t
   where t.turn_no = 1000
     and s.id = t.start_session_id;
  insert into turns
  select (jsonb_populate_record(t, jsonb_build_object(
            'id', gen_random_uuid(), 'turn_no', 2, 'state', 'queued', 'started_at', null, 'ended_at', null,
            'start_session_id', null, 'end_session_id', null, 'steps', 0, 'attempt', 0, 'fence', 0, 'version', 0,
            'due_at', now(), 'input',
            '{\"messages\": [{\"role\": \"user\", \"kind\": \"normal\", \"content\": \"again\"}]}'::jsonb))).*
    from turns t
   where t.turn_no = 1;
  update conversations
     set next_turn_no = 3
   where client_id = 'good'";

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_cannot_be_recovered_hold_up_no_other() {
    let chat = Scene::chat([Step::Echo(Duration::ZERO), Step::Echo(Duration::ZERO)]).await;
    answer(&chat.say(0, "good", "again").await);
    for n in 0..60 {
        let body = json!({"id": format!("odd-{n}"), "messages": []});
        chat.world
            .post(&chat.key, "/v1/sessions", body)
            .await
            .expect(201);
    }
    execute(&mut chat.world.superuser().await, POISON_TURNS).await;
    eventually("the queued turn is answered", PATIENCE, async || {
        chat.lines("good").await
            == [
                line("user", "again"),
                line("assistant", &echo_of("again")),
                line("user", "again"),
                line("assistant", &echo_of("again")),
            ]
    })
    .await;
    eventually("each was tried", PATIENCE, async || {
        let tried: i64 = sqlx::query_scalar(
            "select count(*) from turns where turn_no = 1000 and (failures > 0 or state = 'failed')",
        )
        .fetch_one(&mut chat.world.superuser().await)
        .await
        .unwrap();
        tried == 60
    })
    .await;
}

/// A queue of two, the first of which cannot be read.
const POISON_QUEUE: &str = "
  insert into turns
  select (jsonb_populate_record(t, jsonb_build_object(
            'id', gen_random_uuid(), 'turn_no', 1 + n, 'state', 'queued', 'started_at', null, 'ended_at', null,
            'start_session_id', null, 'end_session_id', null, 'steps', 0, 'attempt', 0, 'fence', 0, 'version', 0,
            'due_at', now(), 'input', case n when 1 then '{\"odd\": true}'::jsonb else t.input::jsonb end))).*
    from turns t, generate_series(1, 2) n
   where t.turn_no = 1;
  update conversations
     set next_turn_no = 4";

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_tried_again_no_sooner_because_more_wait_in_it() {
    let chat = Scene::chat([Step::Echo(Duration::ZERO)]).await;
    answer(&chat.say(0, "s", "hello").await);
    execute(&mut chat.world.superuser().await, POISON_QUEUE).await;
    let turn = async || -> (String, i32) {
        sqlx::query_as("select state, failures from turns where turn_no = 2")
            .fetch_one(&mut chat.world.superuser().await)
            .await
            .unwrap()
    };
    // After one second, two and four: the fourth try is due after seven.
    let six_seconds = Duration::from_secs(6);
    stays("it waits for its next try", six_seconds, async || {
        let (state, failures) = turn().await;
        state == "queued" && failures <= 3
    })
    .await;
    assert!(turn().await.1 >= 1, "it was tried");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_could_not_be_delivered_is_returned_to_a_retry() {
    let b = Scene::bridge([Step::Echo(Duration::ZERO)]).await;
    let body = json!({"identity": "telegram:1", "text": "one", "message_id": "m1", "wait": true});
    b.send(body.clone()).await.expect(200);
    let failed = "update turns set reply_via = 'failed'";
    execute(&mut b.world.superuser().await, failed).await;
    let again = b.send(body).await.expect(200);
    assert_eq!(again["reply"]["text"], json!(echo_of("one")));
}
