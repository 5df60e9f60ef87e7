//! Conversations over HTTP, in the words of tests.

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::types::Uuid;
use throughline::ids::SessionId;

use crate::support::{Fields, Reply, World};

/// A message of a user.
pub fn user_message(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

pub fn assistant_message(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

pub fn uuid_of_session(id: &str) -> Uuid {
    id.parse::<SessionId>().unwrap().as_uuid()
}

/// Every item of a list, page by page.
pub async fn walk(client: &reqwest::Client, key: &str, url: &str) -> Vec<Value> {
    let mut found = Vec::new();
    let mut cursor = String::new();
    loop {
        let join = if url.contains('?') { '&' } else { '?' };
        let page = Reply::of(client.get(format!("{url}{join}{cursor}")).bearer_auth(key)).await;
        let page = page.expect(200);
        found.extend(page.list().iter().cloned());
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("cursor={next}"),
            None => return found,
        }
    }
}

impl World {
    pub async fn session(&self, key: &str, body: Value) -> Value {
        self.post(key, "/v1/sessions", body).await.expect(201)
    }

    pub async fn append(&self, key: &str, id: &str, messages: Value) -> Reply {
        self.append_on(0, key, id, messages).await
    }

    pub async fn append_on(&self, node: usize, key: &str, id: &str, messages: Value) -> Reply {
        let url = self.url_on(node, &format!("/v1/sessions/{id}/messages"));
        let request = self.client.post(url).bearer_auth(key);
        Reply::of(request.json(&json!({ "messages": messages }))).await
    }

    pub async fn compress(&self, key: &str, id: &str, body: Value) -> Reply {
        self.post(key, &format!("/v1/sessions/{id}/compress"), body)
            .await
    }

    pub async fn patch(&self, key: &str, path: &str, body: Value) -> Reply {
        Reply::of(self.request(Method::PATCH, path, key).json(&body)).await
    }

    pub async fn walk(&self, key: &str, path: &str) -> Vec<Value> {
        walk(&self.client, key, &self.url(path)).await
    }

    pub async fn contents(&self, key: &str, path: &str) -> Vec<String> {
        let text = |message: &Value| message.text("content").to_owned();
        self.walk(key, path).await.iter().map(text).collect()
    }
}

/// What redeeming a continuation code will make.
pub async fn grant(world: &World, tenant: &crate::support::Tenant, session: &str, user: &str) {
    sqlx::query(
        "insert into conversation_grants (tenant_id, conversation_id, user_id, via, created_at, expires_at)
         values ($1, $2, $3, 'continuation', now(), now() + interval '7 days')",
    )
    .bind(tenant.uuid())
    .bind(crate::support::conversations::uuid_of_session(session))
    .bind(user.parse::<throughline::ids::UserId>().unwrap())
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
}

pub async fn append_to_key(world: &World, key: &str, session_key: &str, text: &str) -> Value {
    let path = format!("/v1/session-keys/{session_key}/messages");
    world
        .post(key, &path, json!({"messages": [user_message(text)]}))
        .await
        .expect(201)
}

pub async fn slot_of_key(world: &World, key: &str, session_key: &str) -> Value {
    world
        .get(key, &format!("/v1/session-keys/{session_key}"))
        .await
        .expect(200)
}

pub async fn get_session(world: &World, key: &str, id: &str) -> Value {
    world
        .get(key, &format!("/v1/sessions/{id}"))
        .await
        .expect(200)
}
