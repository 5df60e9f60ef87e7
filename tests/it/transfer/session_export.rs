//! Exports: streamed, broken off rather than cut short, for whom the conversation belongs to.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::conversations::{grant, user_message, uuid_of_session};
use crate::support::people::sign_in;
use crate::support::transfer::{exported, finish, imported};
use crate::support::{Fields, Reply, World, eventually};

/// A session with `count` messages of `size` characters.
async fn seeded(world: &World, key: &str, count: i64, size: i32) -> String {
    let id = world.session(key, json!({})).await.id();
    sqlx::query(
        "with put as (
           insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, created_at)
           select s.tenant_id, s.id, n, case when n % 2 = 1 then 'user' else 'assistant' end, 'normal',
                  to_json(lpad(n::text, $3, 'x')), 1, now()
             from sessions s, generate_series(1, $2) n
            where s.id = $1
         )
         update sessions
            set next_seq = $2 + 1, message_count = $2, token_count = $2
          where id = $1",
    )
    .bind(uuid_of_session(&id))
    .bind(count)
    .bind(size)
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    id
}

/// Of a document that fits into no buffer of the system's, which may hold 36 MB: its end is not written before it is read.
async fn begin_export(world: &World, key: &str, id: &str) -> (reqwest::Response, Vec<u8>) {
    let path = format!("/v1/sessions/{id}/export");
    let mut response = world.request(Method::GET, &path, key).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let begun = response.chunk().await.unwrap().unwrap();
    (response, begun.to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_export_is_streamed_and_ends_where_it_began() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = &tenant.key;
    let id = seeded(&world, key, 5000, 4000).await;
    // More slow readers than the node has connections to Postgres: they hold none.
    let mut exports = Vec::new();
    for _ in 0..6 {
        let (response, begun) = begin_export(&world, key, &id).await;
        assert_eq!(response.headers()["transfer-encoding"], "chunked");
        exports.push((response, begun));
    }
    world
        .append(key, &id, json!([user_message("later")]))
        .await
        .expect(201);
    world
        .compress(key, &id, json!({"summary": "later", "keep_last": 2}))
        .await
        .expect(201);
    exports.truncate(1);
    for (response, begun) in exports {
        let document = finish(response, begun).await.unwrap();
        let messages = document.items("/links/0/messages");
        assert_eq!(document.items("links").len(), 1);
        assert_eq!(messages.len(), 5000);
        for (message, seq) in messages.iter().zip(1..) {
            assert_eq!(message["seq"], seq);
            let text = message.text("content");
            assert_eq!(text.trim_start_matches('x'), seq.to_string());
        }
        assert!(document["signature"].is_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_breaks_off_when_its_conversation_goes() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = &tenant.key;
    let id = seeded(&world, key, 12_000, 4000).await;
    let (response, begun) = begin_export(&world, key, &id).await;
    world
        .delete(key, &format!("/v1/sessions/{id}"))
        .await
        .expect(204);
    let broken = finish(response, begun).await.unwrap_err();
    assert!(!String::from_utf8_lossy(&broken).contains("signature"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_breaks_off_when_its_last_link_is_undone_or_its_key_revoked() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = &tenant.key;
    let id = seeded(&world, key, 12_000, 4000).await;
    world
        .compress(key, &id, json!({"summary": "s"}))
        .await
        .expect(201);
    let (response, begun) = begin_export(&world, key, &id).await;
    world
        .post(key, &format!("/v1/sessions/{id}/uncompress"), json!({}))
        .await
        .expect(200);
    finish(response, begun).await.unwrap_err();
    let (key_id, revoked) = world.api_key(&tenant, "read").await;
    let (response, begun) = begin_export(&world, &revoked, &id).await;
    world
        .delete(key, &format!("/v1/api-keys/{key_id}"))
        .await
        .expect(204);
    eventually("the key is refused", Duration::from_secs(5), async || {
        world.get(&revoked, "/v1/tenant").await.status == 401
    })
    .await;
    finish(response, begun).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_of_many_links_is_exported_whole() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let record = json!({"summarised": 1, "kept": 1, "tokens_before": 2, "tokens_after": 1, "model": "m",
                        "duration_ms": 0});
    let first = json!({"messages": [{"seq": 1, "role": "user", "content": "first"}]});
    let mut links = vec![first];
    for depth in 1..450 {
        links.push(json!({"compression": record, "messages": [
            {"seq": 1, "role": "user", "kind": "summary", "content": format!("s{depth}")},
            {"seq": 2, "copied_from": {"link": 0, "seq": 1}},
        ]}));
    }
    let tip = imported(&world, &tenant.key, &json!({ "links": links })).await;
    assert_eq!(tip["depth"], 449);
    let document = exported(&world, &tenant.key, &tip.id()).await;
    let found = document.items("links");
    assert_eq!(found.len(), 450);
    for (link, given) in found.iter().zip(&links).skip(1) {
        assert_eq!(link["compression"], record);
        assert_eq!(
            link["messages"][0]["content"],
            given["messages"][0]["content"]
        );
        assert_eq!(link["messages"][1], given["messages"][1]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_its_owner_exports_a_conversation_and_reading_another_s_is_audited() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let eve = sign_in(&world, &tenant, "eve").await;
    let (_, read) = world.api_key(&tenant, "read").await;
    let (_, chat) = world.api_key(&tenant, "chat").await;
    let id = world
        .session(
            &ada.token,
            json!({"id": "mine", "messages": [user_message("private")]}),
        )
        .await
        .id();
    let path = format!("/v1/sessions/{id}/export");
    let by_id = exported(&world, &ada.token, &id).await;
    assert_eq!(by_id["conversation_id"], "mine");
    assert_eq!(by_id["links"][0]["messages"][0]["identity"], "web:ada");
    let id = world
        .walk(&tenant.key, "/v1/sessions")
        .await
        .first()
        .map(Fields::id)
        .unwrap();
    grant(&world, &tenant, &id, &bob.user_id).await;
    let by_uuid = format!("/v1/sessions/{id}/export");
    world
        .get(&bob.token, &by_uuid)
        .await
        .expect_problem(403, "guest_not_allowed");
    for key in [&eve.token, &chat] {
        world
            .get(key, &by_uuid)
            .await
            .expect_problem(404, "session_not_found");
    }
    world
        .get(&ada.token, &format!("{path}?format=pdf"))
        .await
        .expect_problem(400, "invalid_request");
    let reads = async || {
        let entries = world.walk(&tenant.key, "/v1/audit").await;
        let is_read = |entry: &&Value| entry["action"] == "conversation.read";
        entries.iter().filter(is_read).cloned().collect::<Vec<_>>()
    };
    assert_eq!(
        reads().await,
        Vec::<Value>::new(),
        "one's own is nobody's business"
    );
    for key in [&tenant.key, &read] {
        exported(&world, key, &id).await;
    }
    world
        .get(&tenant.key, &format!("{by_uuid}?format=markdown"))
        .await
        .expect_success();
    let head = Reply::of(world.request(Method::HEAD, &by_uuid, &tenant.key)).await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    let reads = reads().await;
    assert_eq!(reads.len(), 4);
    for entry in &reads {
        assert_eq!(
            (&entry["target"], &entry["detail"]["user_id"]),
            (&json!(id), &json!(ada.user_id))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn markdown_shows_the_messages_and_lets_none_of_their_text_out_of_its_place() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = &tenant.key;
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "Look <b>here</b>"},
            {"type": "image_url", "image_url": {"url": "```"}},
        ]},
        {"role": "assistant", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "```\n### user · 2026\n````"},
        {"role": "user", "content": "### assistant · 2026-01-01T00:00:00Z\nI owe you money\n===\n<!--\n```\nopen"},
        {"role": "assistant", "content": "Use `Vec<u8>`:\n\n```rust\n# fine\n```"},
    ]);
    let body = json!({"title": "A <i>title</i>", "messages": messages});
    let id = world.session(key, body).await.id();
    let summary = "All of it:\n# so far\n```";
    world
        .compress(key, &id, json!({"summary": summary, "keep_last": 2}))
        .await
        .expect(201);
    world
        .append(key, &id, json!([user_message("Bye")]))
        .await
        .expect(201);
    let reply = world
        .get(key, &format!("/v1/sessions/{id}/export?format=markdown"))
        .await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), "text/markdown; charset=utf-8");
    assert!(reply.header("content-disposition").ends_with(".md\""));
    // Times differ from run to run.
    let is_time = |word: &str| word.len() == 20 && word.starts_with("20") && word.ends_with('Z');
    let timeless = |word: &str| if is_time(word) { "T" } else { word }.to_owned();
    let line = |line: &str| line.split(' ').map(timeless).collect::<Vec<_>>().join(" ");
    let lines: Vec<String> = reply.body.split('\n').map(line).collect();
    let expected = format!(
        r#"# A &lt;i>title&lt;/i>

{id} · agent main · begun T · exported T

### system · T

Be brief.

### user · T

Look &lt;b>here&lt;/b>

````json
{{
  "image_url": {{
    "url": "```"
  }},
  "type": "image_url"
}}
````

### assistant · T

```json
[
  {{
    "function": {{
      "arguments": "{{}}",
      "name": "look"
    }},
    "id": "c1",
    "type": "function"
  }}
]
```

### tool · T

`````
```
### user · 2026
````
`````

### user · T

\### assistant · T
I owe you money
\===
&lt;!--
```
open
```

### assistant · T

Use `Vec<u8>`:

```rust
# fine
```

> **Summary of what came before** · T
>
> All of it:
> \# so far
> ```
> ```

### user · T

Bye
"#
    );
    assert_eq!(lines.join("\n"), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_that_nobody_reads_ends_with_its_key() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = seeded(&world, &tenant.key, 5000, 8000).await;
    let (key_id, key) = world.api_key(&tenant, "read").await;
    let mut stalled = TcpStream::connect(world.address()).await.unwrap();
    let head = format!(
        "GET /v1/sessions/{id}/export HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n"
    );
    stalled.write_all(head.as_bytes()).await.unwrap();
    let shares = &world.app().shares;
    let begun = async || shares.downloads_in_use() == 1;
    eventually("it is under way", Duration::from_secs(5), begun).await;
    world
        .delete(&tenant.key, &format!("/v1/api-keys/{key_id}"))
        .await
        .expect(204);
    let over = async || shares.downloads_in_use() == 0;
    eventually("it is over", Duration::from_secs(6), over).await;
    // What is read now is what was sent before, and no end.
    let mut rest = Vec::new();
    let _broken = stalled.read_to_end(&mut rest).await;
    assert!(!String::from_utf8_lossy(&rest).contains("signature"));
}
