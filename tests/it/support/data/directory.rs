//! A tenant and its document of identity links.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Fields, Reply, Tenant, World};

pub const PATH: &str = "/v1/identity-links";
pub const DRY: &str = "/v1/identity-links?dry_run=true";

pub struct Directory {
    pub world: World,
    pub tenant: Tenant,
}

impl Directory {
    pub async fn new() -> Self {
        Self::with_nodes(1).await
    }

    pub async fn with_nodes(count: usize) -> Self {
        let world = World::with_nodes(count).await;
        let tenant = world.tenant("Acme").await;
        Self { world, tenant }
    }

    /// Puts a document that has these names and nothing else.
    pub async fn put(&self, names: Value) -> Value {
        self.put_document(links(names)).await.expect(200)
    }

    pub async fn put_document(&self, document: Value) -> Reply {
        self.world.put(&self.tenant.key, PATH, document).await
    }

    pub async fn put_yaml(&self, content_type: &str, text: &str) -> Reply {
        let request = self.world.request(Method::PUT, PATH, &self.tenant.key);
        let request = request.header("content-type", content_type);
        Reply::of(request.body(text.to_owned())).await
    }

    /// The names that are stored.
    pub async fn names(&self) -> Value {
        self.get(PATH).await["session"]["identityLinks"].clone()
    }

    pub async fn get(&self, path: &str) -> Value {
        self.world.get(&self.tenant.key, path).await.expect(200)
    }

    pub async fn walk(&self, path: &str) -> Vec<Value> {
        self.world.walk(&self.tenant.key, path).await
    }

    pub async fn user_of(&self, identity: &str) -> Value {
        let path = format!("/v1/users?identity={}", identity.replace('@', "%40"));
        self.get(&path).await["data"][0].clone()
    }

    /// Where a direct message of `identity` goes.
    pub async fn dm(&self, identity: &str) -> Value {
        self.world.dm(&self.tenant.key, identity).await
    }

    /// Writes a direct message and answers where it went.
    pub async fn write(&self, identity: &str, text: &str) -> Value {
        self.world.write_dm(&self.tenant.key, identity, text).await
    }

    /// Links two identities by a code.
    pub async fn link(&self, first: &str, second: &str) -> Value {
        self.world.link(&self.tenant.key, first, second).await
    }

    pub async fn slot(&self, session_key: &Value) -> Value {
        self.world.slot(&self.tenant.key, session_key).await
    }

    pub async fn audit_actions(&self) -> Vec<Value> {
        let entries = self.walk("/v1/audit").await;
        let action = |entry: &Value| entry["action"].clone();
        entries.iter().map(action).collect()
    }
}

pub fn links(names: Value) -> Value {
    json!({"session": {"identityLinks": names}})
}

/// `action name identity` of each change, with `<` where the identity had another user.
pub fn changes(answer: &Value) -> Vec<String> {
    let summary = |change: &Value| {
        let words = ["action", "name", "identity"].map(|member| change[member].as_str());
        let mut words: Vec<&str> = words.into_iter().flatten().collect();
        if change["from_user_id"].is_string() {
            words.push("<");
        }
        words.join(" ")
    };
    answer.items("changes").iter().map(summary).collect()
}

pub fn pointers(problem: &Value, member: &str) -> Vec<String> {
    let items = problem.items(member).iter();
    let mut pointers: Vec<String> = items.map(|one| one.text("pointer").to_owned()).collect();
    pointers.sort_unstable();
    pointers
}
