//! Ada on Telegram and on the web, as two users that are not linked.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::conversations::user_message;
use crate::support::people::{User, as_bridge, sign_in};
use crate::support::{Fields, Reply, Tenant, World};

/// Both have written; the web session is the newer one.
pub struct TwoPlatforms {
    pub world: World,
    pub tenant: Tenant,
    pub bridge_key: String,
    pub ada: User,
    pub telegram: Value,
    pub web: Value,
}

impl TwoPlatforms {
    pub async fn new() -> Self {
        let world = World::with_nodes(2).await;
        let tenant = world.tenant("Acme").await;
        let bridge_key = world.bridge_key(&tenant, &["telegram"]).await;
        let ada = sign_in(&world, &tenant, "ada").await;
        let telegram = world
            .write_dm(&bridge_key, "telegram:5", "from the train")
            .await;
        world.clock.advance(Duration::from_secs(60));
        let web = world.resolve(&ada.token, json!({})).await.expect(200);
        let session = web.text("session_id");
        let messages = json!([user_message("from the desk")]);
        let appended = world.append(&ada.token, session, messages).await;
        appended.expect(201);
        Self {
            world,
            tenant,
            bridge_key,
            ada,
            telegram,
            web,
        }
    }

    /// The web identity redeems a code of Telegram.
    pub async fn link(&self) -> Value {
        let code = self.world.mint(&self.bridge_key, "telegram:5").await;
        let redeemed = self.world.redeem(&self.ada.token, &code, "web:ada").await;
        redeemed.expect(200)
    }

    /// The id of the web identity, once they are linked.
    pub async fn web_id(&self, linked: &Value) -> String {
        let user = &linked["user_id"];
        let world = &self.world;
        world.identity_id(&self.tenant.key, user, "web:ada").await
    }

    /// An admin unlinks an identity.
    pub async fn unlink(&self, id: &str) -> Reply {
        let path = format!("/v1/identities/{id}");
        self.world.delete(&self.tenant.key, &path).await
    }

    /// An admin undoes an unlinking.
    pub async fn undo(&self, id: &str) -> Reply {
        let path = format!("/v1/identities/{id}/undo-unlink");
        self.world.post(&self.tenant.key, &path, json!({})).await
    }

    pub async fn on_telegram(&self, method: Method, path: &str) -> Reply {
        let request = (method, path);
        as_bridge(&self.world, &self.bridge_key, "telegram:5", request, None).await
    }

    pub async fn on_web(&self, path: &str) -> Reply {
        self.world.get(&self.ada.token, path).await
    }

    /// Where a direct message from Telegram goes.
    pub async fn dm_on_telegram(&self) -> Value {
        self.world.dm(&self.bridge_key, "telegram:5").await
    }

    pub async fn dm_on_web(&self) -> Value {
        let resolved = self.world.resolve(&self.ada.token, json!({})).await;
        resolved.expect(200)
    }

    pub async fn user_on_web(&self) -> Value {
        self.on_web("/v1/users/me").await.expect(200)
    }

    pub async fn slot(&self, session_key: &Value) -> Value {
        self.world.slot(&self.tenant.key, session_key).await
    }

    pub async fn set_linked_sessions(&self, linked_sessions: &str) {
        let agent = json!({"upstream": {"kind": "demo"}, "linked_sessions": linked_sessions});
        let put = self.world.put(&self.tenant.key, "/v1/agents/main", agent);
        put.await.expect(200);
    }
}
