//! A world for one test: a database of its own, one or more nodes on it, and a clock they share.

use std::net::SocketAddr;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::PgConnection;
use sqlx::types::Uuid;
use throughline::app::App;
use throughline::clock::Clock;
use throughline::config::{Config, PrivateUpstreams};
use throughline::ids::TenantId;
use throughline::server::Node;

use crate::support::servers::cluster::cluster;
use crate::support::{Fields, Reply};

pub const OPERATOR_KEY: &str = "operator-key-of-the-tests-0123456789";
pub const SECRET_KEY: &str = "secret-key-of-the-tests-0123456789ab";

pub struct World {
    pub database: String,
    pub clock: Clock,
    pub nodes: Vec<Node>,
    pub client: reqwest::Client,
}

/// What a test may want otherwise.
pub struct WorldOptions {
    pub nodes: usize,
    pub redis_url: String,
    /// A database that is there already, instead of a new one.
    pub database: Option<String>,
    /// Whether tenants' URLs may lead to servers of the test.
    pub private_upstreams: bool,
    /// Where the service's own pages are.
    pub public_url: Option<String>,
    /// How long a node serves on after it was told to end.
    pub drain: Duration,
}

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            nodes: 1,
            redis_url: cluster().redis_url().to_owned(),
            database: None,
            private_upstreams: false,
            public_url: None,
            drain: Duration::ZERO,
        }
    }
}

/// A tenant and the text of its first admin key.
pub struct Tenant {
    pub id: String,
    pub key: String,
}

impl Tenant {
    pub fn uuid(&self) -> Uuid {
        self.id.parse::<TenantId>().unwrap().as_uuid()
    }
}

impl World {
    pub async fn new() -> Self {
        Self::with_nodes(1).await
    }

    pub async fn with_nodes(count: usize) -> Self {
        Self::with_redis(count, cluster().redis_url()).await
    }

    /// On a Redis of the test's own, so that it may be stopped.
    pub async fn with_redis(count: usize, redis_url: &str) -> Self {
        Self::with(WorldOptions {
            nodes: count,
            redis_url: redis_url.to_owned(),
            ..WorldOptions::default()
        })
        .await
    }

    pub async fn with(options: WorldOptions) -> Self {
        let database = match options.database {
            Some(database) => database,
            None => cluster().new_database().await,
        };
        let clock = Clock::system();
        let mut nodes = Vec::new();
        for _ in 0..options.nodes {
            let mut config = node_config(&database, &options.redis_url);
            if options.private_upstreams {
                config.allow_private_upstreams = PrivateUpstreams::Allowed;
            }
            config.public_url = options.public_url.as_ref().map(|url| url.parse().unwrap());
            config.drain = options.drain;
            let app = App::build(config, clock.clone()).await.unwrap();
            nodes.push(Node::start(app, None).await.unwrap());
        }
        Self {
            database,
            clock,
            nodes,
            client: reqwest::Client::new(),
        }
    }

    pub fn app(&self) -> &App {
        &self.nodes[0].app
    }

    pub fn address(&self) -> SocketAddr {
        self.nodes[0].address
    }

    pub fn url(&self, path: &str) -> String {
        self.url_on(0, path)
    }

    pub fn url_on(&self, node: usize, path: &str) -> String {
        format!("http://{}{path}", self.nodes[node].address)
    }

    /// A request to the first node, to be changed before it is sent.
    pub fn request(&self, method: Method, path: &str, key: &str) -> reqwest::RequestBuilder {
        self.client.request(method, self.url(path)).bearer_auth(key)
    }

    pub async fn get(&self, key: &str, path: &str) -> Reply {
        self.get_on(0, key, path).await
    }

    pub async fn get_on(&self, node: usize, key: &str, path: &str) -> Reply {
        Reply::of(self.client.get(self.url_on(node, path)).bearer_auth(key)).await
    }

    pub async fn post(&self, key: &str, path: &str, body: Value) -> Reply {
        Reply::of(self.request(Method::POST, path, key).json(&body)).await
    }

    pub async fn put(&self, key: &str, path: &str, body: Value) -> Reply {
        Reply::of(self.request(Method::PUT, path, key).json(&body)).await
    }

    pub async fn delete(&self, key: &str, path: &str) -> Reply {
        Reply::of(self.request(Method::DELETE, path, key)).await
    }

    pub async fn tenant(&self, name: &str) -> Tenant {
        let made = self
            .post(OPERATOR_KEY, "/v1/tenants", json!({ "name": name }))
            .await
            .expect(201);
        Tenant {
            id: made.id(),
            key: made.text("api_key").to_owned(),
        }
    }

    /// A key of `tenant` with one scope: its id and text.
    pub async fn api_key(&self, tenant: &Tenant, scope: &str) -> (String, String) {
        let platforms = if scope == "bridge" {
            json!(["telegram"])
        } else {
            json!([])
        };
        let body = json!({"name": scope, "scopes": [scope], "platforms": platforms});
        let made = self
            .post(&tenant.key, "/v1/api-keys", body)
            .await
            .expect(201);
        let text = |member: &str| made.text(member).to_owned();
        (text("id"), text("key"))
    }

    /// Moves the clock to the beginning of the next window of `length`, so that none ends within a test.
    pub fn start_window(&self, length: Duration) {
        let length_ms = length.as_millis() as i64;
        let into = self.clock.now().timestamp_millis().rem_euclid(length_ms);
        self.clock
            .advance(Duration::from_millis((length_ms - into + 10) as u64));
    }

    /// Lets what nodes have cached of keys, issuers and agents expire.
    pub fn expire_caches(&self) {
        self.clock.advance(Duration::from_secs(1));
    }

    /// Waits until so many statements on this world's database wait for a lock.
    pub async fn waiting(&self, count: i64) {
        let are = async || {
            let waiting: i64 = sqlx::query_scalar(
                "select count(*) from pg_stat_activity
                  where datname = current_database() and wait_event_type = 'Lock'",
            )
            .fetch_one(&mut self.superuser().await)
            .await
            .unwrap();
            waiting == count
        };
        crate::support::eventually("they wait", Duration::from_secs(4), are).await;
    }

    /// Past every policy: to prepare what the API would not, and to see what it does not show.
    pub async fn superuser(&self) -> PgConnection {
        cluster().superuser(&self.database).await
    }
}

impl Drop for World {
    fn drop(&mut self) {
        cluster().assert_no_deadlock(&self.database);
    }
}

/// What `serve` would read, for a node of the tests.
pub fn node_environment(database: &str, redis_url: &str) -> Vec<(String, String)> {
    [
        ("DATABASE_URL", cluster().service_url(database).as_str()),
        ("DATABASE_POOL", "6"),
        ("REDIS_URL", redis_url),
        ("OPERATOR_KEY", OPERATOR_KEY),
        ("SECRET_KEY", SECRET_KEY),
        ("LISTEN", "127.0.0.1:0"),
        ("METRICS_LISTEN", "127.0.0.1:0"),
        ("HTTP_WORKERS", "1"),
        ("DRAIN_MS", "0"),
        ("SHUTDOWN_GRACE_MS", "5000"),
    ]
    .map(|(name, value)| (format!("THROUGHLINE_{name}"), value.to_owned()))
    .to_vec()
}

pub fn node_config(database: &str, redis_url: &str) -> Config {
    let environment = node_environment(database, redis_url);
    Config::from_lookup(&|wanted| {
        let found = environment.iter().find(|(name, _)| name == wanted);
        found.map(|(_, value)| value.clone())
    })
    .unwrap()
}
