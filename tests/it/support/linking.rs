//! People on several platforms, in the words of tests.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::people::as_bridge;
use crate::support::{Fields, Reply, Tenant, World};

impl World {
    /// A key that vouches for `platforms`.
    pub async fn bridge_key(&self, tenant: &Tenant, platforms: &[&str]) -> String {
        let name = platforms.join(" ");
        let body = json!({"name": name, "scopes": ["bridge"], "platforms": platforms});
        let made = self.post(&tenant.key, "/v1/api-keys", body).await;
        made.expect(201).text("key").to_owned()
    }

    pub async fn resolve(&self, key: &str, body: Value) -> Reply {
        self.post(key, "/v1/resolve", body).await
    }

    /// Where a DM of `identity` goes.
    pub async fn dm(&self, key: &str, identity: &str) -> Value {
        let resolved = self.resolve(key, json!({ "identity": identity })).await;
        resolved.expect(200)
    }

    /// Says something in a DM and answers where that went.
    pub async fn write_dm(&self, key: &str, identity: &str, text: &str) -> Value {
        let resolved = self.dm(key, identity).await;
        self.write_in(key, identity, &resolved["session_id"], text)
            .await;
        resolved
    }

    pub async fn write_in(&self, key: &str, identity: &str, session: &Value, text: &str) {
        let path = format!("/v1/sessions/{}/messages", session.as_str().unwrap());
        let body = json!({"messages": [{"role": "user", "content": text}]});
        let said = as_bridge(self, key, identity, (Method::POST, &path), Some(body)).await;
        said.expect(201);
    }

    pub async fn mint(&self, key: &str, identity: &str) -> String {
        let made = self
            .post(key, "/v1/link-codes", json!({ "identity": identity }))
            .await;
        made.expect(201).text("code").to_owned()
    }

    pub async fn redeem(&self, key: &str, code: &str, identity: &str) -> Reply {
        let body = json!({"code": code, "identity": identity});
        self.post(key, "/v1/link-codes/redeem", body).await
    }

    /// Joins two accounts by a code; `first` shows it.
    pub async fn link(&self, key: &str, first: &str, second: &str) -> Value {
        let code = self.mint(key, first).await;
        self.redeem(key, &code, second).await.expect(200)
    }

    /// The slot that `session_key` names for an admin.
    pub async fn slot(&self, key: &str, session_key: &Value) -> Value {
        let session_key = session_key.as_str().unwrap().replace('%', "%25");
        let path = format!("/v1/session-keys?session_key={session_key}");
        self.get(key, &path).await.expect(200)
    }

    /// The id of an account of a person.
    pub async fn identity_id(&self, key: &str, user_id: &Value, identity: &str) -> String {
        let path = format!("/v1/users/{}/identities", user_id.as_str().unwrap());
        let accounts = self.get(key, &path).await.expect(200);
        let accounts = accounts.list().clone();
        let found = accounts.iter().find(|one| one["identity"] == identity);
        found.expect("the account is there").id()
    }
}
