//! What the agent answered to an erased person, in conversations of others, is erased with what they said there:
//! copies, tools, thoughts and turns that were under way included. The conversation goes on.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::types::Uuid;

use crate::support::conversations::uuid_of_session;
use crate::support::data::erasure::{first_pass, mentions, settle};
use crate::support::servers::model::Step;
use crate::support::{Fields, Scene, eventually};

const ADA: &str = "telegram:ada";
const BOB: &str = "telegram:bob";
const SECRET: &str = "canary of ada";

fn in_thread(identity: &str, text: &str) -> Value {
    let chat = json!({"type": "thread", "id": "C", "thread_id": "1"});
    json!({"identity": identity, "chat": chat, "text": text})
}

async fn says(b: &Scene, identity: &str, text: &str) -> Value {
    b.send(in_thread(identity, text)).await.expect(200)
}

async fn execute(b: &Scene, sql: &'static str, session: &str) {
    sqlx::query(sql)
        .bind(b.tenant.uuid())
        .bind(uuid_of_session(session))
        .bind(SECRET)
        .execute(&mut b.world.superuser().await)
        .await
        .unwrap();
}

/// As if the answer to Ada had been thought about, and had called a tool.
const WITH_TOOLS: &str = "with answer as (
       update messages
          set extra = json_build_object('reasoning_content', $3),
              tool_calls = json_build_array(json_build_object('id', 'call_1', 'type', 'function',
                'function', json_build_object('name', 'look', 'arguments', $3)))
        where tenant_id = $1 and session_id = $2 and role = 'assistant' and content::text like '%' || $3 || '%'
    returning turn_id
     ), place as (
       update sessions set next_seq = next_seq + 1
        where tenant_id = $1 and id = $2 returning next_seq - 1 as seq
     )
     insert into messages (tenant_id, session_id, seq, role, kind, content, tool_call_id, token_count, turn_id,
                           created_at)
     select $1, $2, seq, 'tool', 'normal', to_json($3), 'call_1', 1, turn_id, now()
       from answer, place";

/// A copy that was being made while the first look went on.
const LATE_COPY: &str = "insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, turn_id,
                           copied_session, copied_seq, created_at)
     select tenant_id, session_id, 1000, role, kind, to_json($3), 1, turn_id, session_id, seq, now()
       from messages
      where tenant_id = $1 and session_id = $2 and role = 'assistant' and content::text like '%erased%'
      order by seq
      limit 1";

async fn canaries(b: &Scene) -> BTreeMap<String, i64> {
    mentions(&b.world, &b.tenant, &[SECRET.to_owned(), ADA.to_owned()]).await
}

async fn lines(b: &Scene, session: &str) -> Vec<(String, String)> {
    let path = format!("/v1/sessions/{session}/messages");
    let messages = b.world.walk(&b.tenant.key, &path).await;
    crate::support::chat::lines(&messages)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_to_an_erased_user_are_erased_in_shared_conversations_too() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::Echo(Duration::ZERO));
    let world = &b.world;
    let admin = &b.tenant.key;
    let begun = says(&b, ADA, SECRET).await;
    let thread = begun.text("session_id").to_owned();
    execute(&b, WITH_TOOLS, &thread).await;
    says(&b, BOB, "of bob").await;
    // Copies: in a branch, and in the link that a compression begins.
    let branched = world
        .post(admin, &format!("/v1/sessions/{thread}/branch"), json!({}))
        .await;
    let branch = branched.expect(201).id();
    let compressed = world
        .compress(
            admin,
            &thread,
            json!({"summary": "they met", "keep_last": 5}),
        )
        .await;
    let tip = compressed.expect(201).text("session_id").to_owned();
    // One that runs and has called a tool, and one that waits.
    b.model.push(Step::held("one canary of ada ", "two"));
    let mut running = in_thread(ADA, "canary of ada, running");
    running["wait"] = json!(false);
    b.send(running.clone()).await.expect(202);
    b.model.called(3).await;
    running["text"] = json!("canary of ada, queued");
    b.send(running).await.expect(202);
    let tables = canaries(&b).await;
    for table in ["messages", "turns", "events"] {
        assert!(tables.contains_key(table), "{tables:?}");
    }

    let identity = world.identity_id(admin, &begun["user_id"], ADA).await;
    let path = format!("/v1/users/{}", begun.text("user_id"));
    world.delete(admin, &path).await.expect(202);
    b.model.release();
    first_pass(world, &[identity]).await;
    let gone = async || {
        let left: BTreeMap<String, i64> = canaries(&b).await;
        left.keys()
            .all(|table| ["audit", "erased_people"].contains(&table.as_str()))
    };
    eventually("their answers are erased", Duration::from_secs(20), gone).await;
    execute(&b, LATE_COPY, &thread).await;
    settle(world).await;
    let left = canaries(&b).await;
    assert!(left.keys().all(|table| table == "audit"), "{left:?}");
    let named: i64 =
        sqlx::query_scalar("select count(*) from turns where erased_user_id is not null")
            .fetch_one(&mut world.superuser().await)
            .await
            .unwrap();
    assert_eq!(named, 0);

    // What others said, and what they were answered, is there; and the conversation goes on.
    for session in [&thread, &branch] {
        let lines = lines(&b, session).await;
        let is = |role: &str, text: &str| {
            let line = (role.to_owned(), text.to_owned());
            assert!(lines.contains(&line), "{role} {text}: {lines:?}");
        };
        is("user", "[erased]");
        is("assistant", "[erased]");
        is("tool", "[erased]");
        assert!(
            lines
                .iter()
                .any(|(role, text)| role == "assistant" && text.contains("of bob"))
        );
    }
    says(&b, BOB, "and then").await;
    let asked = b.model.requests().pop().unwrap();
    for message in asked.items("messages") {
        assert_ne!(message["role"], "tool", "{asked}");
        assert_eq!(message["tool_calls"], Value::Null, "{asked}");
    }
    assert!(
        lines(&b, &tip)
            .await
            .iter()
            .any(|(_, text)| text.contains("and then"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_with_many_turns_is_erased_in_batches() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::Echo(Duration::ZERO));
    let begun = says(&b, ADA, "hello").await;
    let thread = begun.text("session_id").to_owned();
    let seed = "with t as (
           insert into turns (tenant_id, id, conversation_id, turn_no, state, agent, principal, request_hash, input, session_info,
                              identity_id, platform, created_at, ended_at)
           select t.tenant_id, gen_random_uuid(), t.conversation_id, 1000 + n, 'completed', t.agent, t.principal,
                  t.request_hash, t.input, t.session_info, t.identity_id, t.platform, now(), now()
             from turns t, generate_series(1, 600) n
            where t.tenant_id = $1 and t.conversation_id = $2
        returning id, turn_no
         )
         insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, turn_id, step, created_at)
         select $1, $2, turn_no, 'assistant', 'normal', to_json($3), 1, id, 1, now()
           from t";
    execute(&b, seed, &thread).await;
    let identity = b
        .world
        .identity_id(&b.tenant.key, &begun["user_id"], ADA)
        .await;
    let path = format!("/v1/users/{}", begun.text("user_id"));
    b.world.delete(&b.tenant.key, &path).await.expect(202);
    first_pass(&b.world, &[identity]).await;
    settle(&b.world).await;
    let blank: i64 = sqlx::query_scalar(
        "select count(*) from messages where session_id = $1 and content::text = '\"[erased]\"'",
    )
    .bind::<Uuid>(uuid_of_session(&thread))
    .fetch_one(&mut b.world.superuser().await)
    .await
    .unwrap();
    assert_eq!(blank, 602);
    let left = canaries(&b).await;
    assert!(left.keys().all(|table| table == "audit"), "{left:?}");
}
