//! Two tenants whose turns, events and messages have equal ids never meet: with row-level security, and with
//! the predicates of the statements alone. What bridges do is in `tenancy_bridges`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::chat::{answer, id_of_turn};
use crate::support::conversations::user_message;
use crate::support::data::twins::{Twins, only_ours};
use crate::support::servers::model::{Step, echo_of};
use crate::support::sse::{self, Sse, SseEvent};
use crate::support::{Fields, Reply, eventually};

const EVENTS: &str = "/v1/sessions/s-1/events";

#[tokio::test(flavor = "multi_thread")]
async fn turns_with_equal_ids_never_meet() {
    equal_turns(Twins::new(true).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_with_equal_ids_never_meet_even_without_row_level_security() {
    equal_turns(Twins::new(false).await).await;
}

async fn equal_turns(mut twins: Twins) {
    chat_and_read(&twins).await;
    show_what_fits(&twins).await;
    go_on_with_the_next(&twins).await;
    bring_tool_results(&twins).await;
    hand_over(&mut twins).await;
    // Last, because nobody releases a model whose answer was stopped.
    cancel(&twins).await;
    delete(&twins).await;
    for asked in twins.chat.model.requests() {
        only_ours(&asked.to_string());
    }
}

fn told(events: &[SseEvent]) {
    only_ours(&format!("{events:?}"));
}

/// Reads on until so many turns were completed.
async fn completed(stream: &mut Sse, times: usize) -> Vec<SseEvent> {
    let mut read = Vec::new();
    for _ in 0..times {
        read.extend(stream.until("turn.completed").await);
    }
    told(&read);
    read
}

async fn chat_and_read(twins: &Twins) {
    let chat = &twins.chat;
    assert_eq!(
        answer(&chat.say(0, "s-1", "ours one").await),
        echo_of("ours one")
    );
    let keyed = || {
        let body = json!({"messages": [user_message("ours two")], "stream": true});
        Sse::open(
            chat.completion_request(0, "s-1", body)
                .header("idempotency-key", "k-1"),
        )
    };
    let mut two = keyed().await;
    assert_eq!(sse::text_of(&two.rest().await), echo_of("ours two"));
    // One more conversation, so that more turns run next door than we may have.
    let elsewhere = json!({"identity": "telegram:1", "text": "ours"});
    twins.send(elsewhere).await.expect(200);
    let theirs = twins.mirror("").await;
    let mut from_the_beginning = chat.events(0, EVENTS, Some(0)).await;
    let mut from_now_on = chat.events(0, EVENTS, None).await;
    let mut three = chat.open(0, "s-1", "ours three").await;
    assert_eq!(sse::text_of(&three.rest().await), echo_of("ours three"));
    let id = three.header("x-throughline-turn-id");
    assert_eq!(completed(&mut from_the_beginning, 3).await[0].id, Some(1));
    let new = completed(&mut from_now_on, 1).await;
    assert_eq!(new[0].json()["turn_id"], id);
    twins.unchanged(&theirs, "chat").await;

    let again = chat.message_request(1, "s-1", "ours three");
    let again = Reply::of(again.header("x-stainless-retry-count", "1")).await;
    assert_eq!(answer(&again), echo_of("ours three"));
    assert_eq!(again.header("x-throughline-turn-id"), id);
    twins.unchanged(&theirs, "a client's own retry").await;
    // Where the agent speaks with us, a person does next door.
    let theirs = twins
        .mirror("update messages set role = 'user' where tenant_id = $theirs;")
        .await;
    let mut again = keyed().await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(sse::text_of(&again.rest().await), echo_of("ours two"));
    twins.unchanged(&theirs, "a retry by key").await;

    let theirs = twins.mirror("").await;
    let turns = chat.turns("s-1").await;
    assert_eq!(turns.len(), 3);
    for (turn, text) in turns.iter().zip(["ours one", "ours two", "ours three"]) {
        only_ours(&turn.to_string());
        let turn = id_of_turn(turn);
        let shown = chat.turn(&turn).await;
        only_ours(&shown.to_string());
        assert_eq!(shown["message"]["content"], echo_of(text));
        let path = format!("/v1/turns/{turn}/events");
        let events = chat.events(1, &path, None).await.rest().await;
        told(&events);
        assert_eq!(events[0].name, "turn.started");
        assert_eq!(events[events.len() - 1].name, "turn.completed");
    }
    twins.unchanged(&theirs, "reading").await;
}

/// What the model is shown of a session that may be too long is counted in our messages: theirs are longer.
async fn show_what_fits(twins: &Twins) {
    let chat = &twins.chat;
    answer(&chat.say(0, "s-long", "ours one").await);
    let longer = "update messages set token_count = 1000000 where tenant_id = $theirs;
                  update sessions set token_count = 1000000000;";
    let theirs = twins.mirror(longer).await;
    answer(&chat.say(0, "s-long", "ours two").await);
    let asked = chat.model.requests().pop().unwrap();
    let shown = asked.items("messages").len();
    assert_eq!(shown, 3, "{asked}");
    twins.unchanged(&theirs, "a long session").await;
}

/// A turn that runs until the model is released, and one that waits for it; `before` were accepted earlier.
async fn run_and_queue(twins: &Twins, session: &str, before: usize) -> (Sse, Queued, [String; 2]) {
    let chat = &twins.chat;
    chat.model.push(Step::held("ours half ", "ours whole"));
    let mut running = chat.open(0, session, "ours runs").await;
    running.reads("ours half ").await;
    let other = chat.world.nodes.len() - 1;
    let queued = tokio::spawn(Reply::of(chat.message_request(
        other,
        session,
        "ours waits",
    )));
    let turns = chat.wait_for_turns(session, before + 2).await;
    let ids = [&turns[before], &turns[before + 1]].map(id_of_turn);
    (running, queued, ids)
}

type Queued = tokio::task::JoinHandle<Reply>;

async fn go_on_with_the_next(twins: &Twins) {
    let chat = &twins.chat;
    let (mut running, queued, [turn, _]) = run_and_queue(twins, "s-1", 3).await;
    let theirs = twins.mirror("").await;
    let mut watching = chat.events(1, EVENTS, None).await;
    let first = watching.next().await.unwrap();
    assert_eq!(
        (first.name.as_str(), &first.json()["turn_id"]),
        ("turn.started", &json!(turn))
    );
    let lease = async || {
        twins
            .number(
                "select (extract(epoch from max(lease_until)) * 1000)::bigint from turns where tenant_id = $1",
            )
            .await
    };
    let before = lease().await;
    eventually("it is renewed", Duration::from_secs(10), async || {
        lease().await > before
    })
    .await;
    twins.unchanged(&theirs, "renewing").await;
    chat.model.release();
    assert_eq!(sse::text_of(&running.rest().await), "ours whole");
    assert_eq!(answer(&queued.await.unwrap()), echo_of("ours waits"));
    completed(&mut watching, 2).await;
    twins.unchanged(&theirs, "going on with the next").await;
}

async fn bring_tool_results(twins: &Twins) {
    let chat = &twins.chat;
    let call = |id: &str| (id.to_owned(), "look".to_owned());
    chat.model.push(Step::CallTools(vec![call("a"), call("b")]));
    let look = json!({"name": "look", "parameters": {"type": "object"}});
    let tools = json!([{"type": "function", "function": look}]);
    let ask = async |messages: Value| {
        let body = json!({"messages": messages, "tools": tools});
        Reply::of(chat.completion_request(0, "s-2", body)).await
    };
    let waiting = ask(json!([user_message("ours looks")])).await.expect(200);
    assert_eq!(waiting["choices"][0]["finish_reason"], "tool_calls");
    let theirs = twins.mirror("").await;
    let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "ours"});
    let brought = ask(json!([result("a"), result("b")])).await;
    assert_eq!(answer(&brought), echo_of("ours looks"));
    twins.unchanged(&theirs, "bringing results").await;
}

/// As if the turn that runs had called two tools, whose results it has not stored yet.
const CALLED: &str = r#"
    with stepped as (
      update turns set steps = steps + 1 where tenant_id = $1 and state = 'running'
      returning id, start_session_id as session_id, steps - 1 as step
    ), place as (
      update sessions s set next_seq = next_seq + 1, message_count = message_count + 1
        from stepped where s.tenant_id = $1 and s.id = stepped.session_id
      returning s.id, s.next_seq - 1 as seq
    ), called as (
      insert into messages (tenant_id, session_id, seq, role, kind, tool_calls, token_count, turn_id, step, created_at)
      select $1, place.id, place.seq, 'assistant', 'normal',
             (select json_agg(json_build_object('id', c, 'type', 'function', 'function',
                                                json_build_object('name', 'look', 'arguments', '{}')))
                from unnest(array['a', 'b']) as c),
             1, stepped.id, stepped.step, now()
        from place, stepped
      returning 1)
    select count(*) from called"#;

/// A node ends and gives its turn back, and another takes it.
async fn hand_over(twins: &mut Twins) {
    let chat = &twins.chat;
    chat.model.push(Step::held("ours half ", "ours never"));
    chat.model.push(Step::say("ours at last"));
    let mut stream = chat.open(1, "s-1", "ours is lost").await;
    stream.reads("ours half ").await;
    let turn = stream.header("x-throughline-turn-id");
    assert_eq!(twins.number(CALLED).await, 1);
    // Theirs are there to be taken over too; but nobody does that in conversations that are no more. One of their
    // calls has its result, the other is another.
    let theirs = twins
        .mirror(
            "insert into messages (tenant_id, session_id, seq, role, kind, content, tool_call_id, token_count, turn_id,
                                   step, created_at)
             select $theirs, m.session_id, m.seq + 1, 'tool', 'normal', '\"theirs\"', 'a', 1, m.turn_id, m.step + 1, now()
               from messages m
              where m.tenant_id = $theirs and m.tool_calls is not null
                and not exists (select 1 from messages l
                                 where l.tenant_id = $theirs and l.session_id = m.session_id and l.seq > m.seq);
             update messages set tool_calls = replace(tool_calls::text, '\"b\"', '\"theirs\"')::json
              where tenant_id = $theirs;
             update turns set lease_until = now() - interval '1 day' where tenant_id = $theirs and state = 'running';
             update conversations set deleted_at = now() where tenant_id = $theirs;",
        )
        .await;
    let node = twins.chat.world.nodes.pop().unwrap();
    let ending = tokio::spawn(node.stop());
    let taken = twins.chat.reaches(&turn, "completed").await;
    assert_eq!(
        (&taken["attempt"], &taken["message"]["content"]),
        (&json!(2), &json!("ours at last"))
    );
    told(&stream.rest().await);
    ending.await.unwrap();
    let asked = twins.chat.model.requests().pop().unwrap();
    let asked = asked.items("messages");
    let results = asked.iter().filter(|one| one["role"] == "tool");
    let results: Vec<&Value> = results.map(|one| &one["tool_call_id"]).collect();
    assert_eq!(results, ["a", "b"]);
    twins
        .unchanged(&theirs, "giving back and taking over")
        .await;
}

async fn cancel(twins: &Twins) {
    let chat = &twins.chat;
    let (mut running, queued, [first, second]) = run_and_queue(twins, "s-3", 0).await;
    let theirs = twins.mirror("").await;
    let cancelled = chat.cancel(0, &second).await;
    only_ours(&cancelled.body);
    assert_eq!(cancelled.expect(202)["state"], "cancelled");
    queued
        .await
        .unwrap()
        .expect_openai_error(409, "turn_stopped");
    twins.unchanged(&theirs, "cancelling what waits").await;
    only_ours(&chat.cancel(0, &first).await.body);
    chat.reaches(&first, "cancelled").await;
    told(&running.rest().await);
    twins.unchanged(&theirs, "cancelling what runs").await;
}

async fn delete(twins: &Twins) {
    let chat = &twins.chat;
    let (_running, queued, _) = run_and_queue(twins, "s-4", 0).await;
    let theirs = twins.mirror("").await;
    let deleted = chat.world.delete(&chat.key, "/v1/sessions/s-4").await;
    deleted.expect(204);
    let queued = queued.await.unwrap();
    assert!(queued.status >= 400, "{queued:?}");
    twins.unchanged(&theirs, "deleting").await;
}
