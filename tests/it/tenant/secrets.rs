//! Rotating `SECRET_KEY`: what a node says when it starts, `throughline secrets status` and `reseal`.

use std::time::Duration;

use serde_json::{Value, json};
use throughline::agent_runtime::key_context;
use throughline::app::App;
use throughline::crypto::Keyring;
use throughline::server::Node;

use crate::support::servers::cluster::{cluster, scratch_dir};
use crate::support::servers::process::{Process, throughline};
use crate::support::world::{SECRET_KEY, node_config, node_environment};
use crate::support::{Fields, Reply, Tenant, World, eventually, tokens};

const NEW_KEY: &str = "another-secret-key-of-the-tests-0123456789";
const ISSUER_SECRET: &str = "a secret of the tests, 32 bytes or more";

fn id_of(key: &str) -> String {
    hex::encode(Keyring::new(&[key.into()]).unwrap().first_id())
}

/// A tenant with an agent's key, an issuer's secret and the answer of a command.
async fn furnished(world: &World) -> (Tenant, String) {
    let tenant = world.tenant("Acme").await;
    let agent = json!({
        "upstream": {"kind": "openai", "base_url": "https://model.example/v1", "model": "m", "api_key": "sk-1"},
    });
    world
        .put(&tenant.key, "/v1/agents/gpt", agent)
        .await
        .expect(201);
    let issuer = json!({
        "issuer": "https://id.example", "platform": "web", "algorithm": "HS256", "secret": ISSUER_SECRET,
    });
    world
        .put(&tenant.key, "/v1/issuers/id", issuer)
        .await
        .expect(201);
    let (_, bridge) = world.api_key(&tenant, "bridge").await;
    let url = world.url("/v1/inbound");
    help(&url, &bridge).await.expect(200);
    (tenant, bridge)
}

async fn help(url: &str, bridge: &str) -> Reply {
    let body = json!({"identity": "telegram:1", "text": "/help", "message_id": "m1"});
    Reply::of(
        reqwest::Client::new()
            .post(url)
            .bearer_auth(bridge)
            .json(&body),
    )
    .await
}

/// `throughline secrets …` with these keys: whether it was content, and what it printed.
fn secrets(world: &World, command: &str, keys: &str) -> (bool, String) {
    let output = throughline(&["secrets", command])
        .envs(node_environment(&world.database, cluster().redis_url()))
        .env("THROUGHLINE_SECRET_KEY", keys)
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    (output.status.success(), printed)
}

/// The places that `printed` names for a key.
fn places(printed: &str, key: &str) -> Vec<String> {
    let begin = format!("key {}", id_of(key));
    let lines = printed
        .lines()
        .skip_while(|line| !line.starts_with(&begin))
        .skip(1);
    lines
        .take_while(|line| line.starts_with("  "))
        .map(|line| line.split_whitespace().next().unwrap().to_owned())
        .collect()
}

async fn node_with(world: &World, keys: &[&str]) -> Node {
    let mut config = node_config(&world.database, cluster().redis_url());
    config.secret_keys = keys.iter().map(|key| (*key).into()).collect();
    let app = App::build(config, world.clock.clone()).await.unwrap();
    Node::start(app, None).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_what_needs_which_key_and_which_can_be_dropped() {
    let world = World::new().await;
    furnished(&world).await;
    let all = [
        "agents",
        "issuers",
        "audit_heads",
        "receipts",
        "audit_entries",
    ];
    let (content, printed) = secrets(&world, "status", &format!("{SECRET_KEY},{NEW_KEY}"));
    assert!(content, "{printed}");
    assert_eq!(places(&printed, SECRET_KEY), all);
    assert_eq!(places(&printed, NEW_KEY), ["nothing"]);
    assert!(printed.contains("it can be dropped"), "{printed}");
    for secret in [SECRET_KEY, NEW_KEY, "sk-1", ISSUER_SECRET] {
        assert!(!printed.contains(secret));
    }
    let (content, printed) = secrets(&world, "status", NEW_KEY);
    assert!(!content, "{printed}");
    assert_eq!(places(&printed, SECRET_KEY), all);
    assert!(printed.contains(&format!("key {}  MISSING", id_of(SECRET_KEY))));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_resealing_only_short_lived_things_and_audit_entries_need_the_old_key() {
    let world = World::new().await;
    let (tenant, bridge) = furnished(&world).await;
    let both = format!("{NEW_KEY},{SECRET_KEY}");
    let (content, printed) = secrets(&world, "reseal", &both);
    assert!(content, "{printed}");
    assert_eq!(places(&printed, SECRET_KEY), ["audit_entries"]);
    let moved = ["agents", "issuers", "audit_heads", "receipts"];
    assert_eq!(places(&printed, NEW_KEY)[..4], moved);
    assert!(printed.contains("audit verify"), "{printed}");
    // Again there is nothing to do.
    let (content, again) = secrets(&world, "reseal", &both);
    assert!(
        content && again.contains("agents                  0 resealed"),
        "{again}"
    );
    let verified = throughline(&["audit", "verify"])
        .envs(node_environment(&world.database, cluster().redis_url()))
        .env("THROUGHLINE_SECRET_KEY", &both)
        .status()
        .unwrap();
    assert!(verified.success(), "the chains are as whole as before");
    // With the new key alone everything that was moved works.
    let node = node_with(&world, &[NEW_KEY]).await;
    let url = |path: &str| format!("http://{}{path}", node.address);
    let exp = world.clock.now().timestamp() + 600;
    let claims = json!({"iss": "https://id.example", "aud": tenant.id, "sub": "a", "exp": exp});
    let token = tokens::hs256(&claims, ISSUER_SECRET);
    let asked = world.client.get(url("/v1/whoami")).bearer_auth(token);
    Reply::of(asked).await.expect(200);
    help(&url("/v1/inbound"), &bridge).await.expect(200);
    let body = json!({"name": "x", "scopes": ["chat"]});
    let made = world
        .client
        .post(url("/v1/api-keys"))
        .bearer_auth(&tenant.key);
    Reply::of(made.json(&body)).await.expect(201);
    let sealed: Vec<u8> = sqlx::query_scalar("select api_key_enc from agents where name = 'gpt'")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    let context = key_context(tenant.id.parse().unwrap(), "gpt");
    assert_eq!(node.app.keyring.open(&context, &sealed).unwrap(), b"sk-1");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resealing_loses_to_a_key_that_is_put_at_the_same_moment() {
    let world = World::new().await;
    furnished(&world).await;
    let mut putting = world.superuser().await;
    for sql in [
        "begin",
        "update agents set api_key_enc = '\\x0100000000aa' where name = 'gpt'",
    ] {
        sqlx::query(sql).execute(&mut putting).await.unwrap();
    }
    let keys = format!("{NEW_KEY},{SECRET_KEY}");
    std::thread::scope(|scope| {
        let resealing = scope.spawn(|| secrets(&world, "reseal", &keys));
        tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async {
                world.waiting(1).await;
                sqlx::query("commit").execute(&mut putting).await.unwrap();
            });
        });
        let (_, printed) = resealing.join().unwrap();
        assert!(
            printed.contains("agents                  0 resealed"),
            "{printed}"
        );
    });
    let stored: String =
        sqlx::query_scalar("select encode(api_key_enc, 'hex') from agents where name = 'gpt'")
            .fetch_one(&mut putting)
            .await
            .unwrap();
    assert_eq!(stored, "0100000000aa");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_key_opens_nothing_says_so_in_one_line_when_it_starts() {
    let world = World::new().await;
    furnished(&world).await;
    let dir = scratch_dir("wrong-secret-key");
    std::fs::create_dir_all(&dir).unwrap();
    let log = dir.join("log");
    let mut command = throughline(&["serve"]);
    command
        .envs(node_environment(&world.database, cluster().redis_url()))
        .env("THROUGHLINE_SECRET_KEY", NEW_KEY);
    let _process = Process::start_logged(&mut command, &log);
    let warnings = || -> Vec<Value> {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let lines = text
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["level"] == "WARN").collect()
    };
    eventually("it has warned", Duration::from_secs(10), async || {
        !warnings().is_empty()
    })
    .await;
    let warning = &warnings()[0];
    assert_eq!(warning["missing_keys"], id_of(SECRET_KEY));
    assert_eq!(
        warning["needed_by"],
        "agents 1, issuers 1, audit_heads 2, audit_entries 2"
    );
    let message = warning.text("message");
    assert!(
        message.contains("THROUGHLINE_SECRET_KEY lacks keys"),
        "{message}"
    );
}
