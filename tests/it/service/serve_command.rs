//! `throughline serve`, `migrate` and `tenant create` as an operator runs them.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::support::data::catalog;
use crate::support::servers::cluster::cluster;
use crate::support::servers::process::throughline;
use crate::support::world::{OPERATOR_KEY, World, node_environment};
use crate::support::{Fields, Reply, eventually, retry};

fn serve(database: &str) -> Command {
    let mut command = throughline(&["serve"]);
    command.envs(node_environment(database, cluster().redis_url()));
    command
}

/// The one line a command that cannot work leaves.
fn complaint(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    text.trim().to_owned()
}

/// A running `serve`, its log, and where it listens.
struct Served {
    child: std::process::Child,
    address: String,
    log: std::sync::mpsc::Receiver<String>,
}

impl Served {
    fn start(database: &str) -> Self {
        Self::start_with(database, &[])
    }

    fn start_with(database: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = serve(database)
            .envs(variables.iter().copied())
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, log) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line))
        });
        let mut served = Self {
            child,
            address: String::new(),
            log,
        };
        loop {
            let line = served.log.recv_timeout(Duration::from_secs(20)).unwrap();
            let entry: Value = serde_json::from_str(&line).expect("logs are JSON off a terminal");
            if entry["message"] == "serving" {
                served.address = entry.text("address").to_owned();
                return served;
            }
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Ends it with SIGTERM and gives the rest of the log.
    fn terminate(mut self) -> String {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
        self.log.iter().collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_or_missing_variable_stops_the_start_with_one_clear_line() {
    let database = cluster().new_database().await;
    for (name, value) in [
        ("THROUGHLINE_DATABASE_URL", ""),
        ("THROUGHLINE_SECRET_KEY", "short"),
        ("THROUGHLINE_OPERATOR_KEY", ""),
        ("THROUGHLINE_LISTEN", "8080"),
        ("THROUGHLINE_LOG_FORMAT", "loud"),
    ] {
        let line = complaint(serve(&database).env(name, value));
        assert!(
            line.starts_with(&format!("throughline: {name}: ")),
            "{line}"
        );
        assert_eq!(line.lines().count(), 1, "{line}");
    }
    let refused = "postgres://throughline:secret-password@127.0.0.1:1/nothing";
    let line = complaint(serve(&database).env("THROUGHLINE_DATABASE_URL", refused));
    assert!(line.contains("cannot connect to Postgres"), "{line}");
    assert!(!line.contains("secret-password"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_refuses_a_role_that_policies_do_not_bind() {
    let database = cluster().new_database().await;
    let cluster = cluster();
    cluster
        .admin_sql(
            "create role bypassing login password 'pw' bypassrls in role throughline_service;
             create role stranger login password 'pw'",
        )
        .await;
    for (url, why) in [
        (cluster.superuser_url(&database), "is a superuser"),
        (
            cluster.url_as("bypassing", "pw", &database),
            "bypasses row-level security",
        ),
        (cluster.owner_url(&database), "owns the tables"),
        (
            cluster.url_as("stranger", "pw", &database),
            "is not a member of throughline_service",
        ),
    ] {
        let line = complaint(serve(&database).env("THROUGHLINE_DATABASE_URL", url));
        assert!(line.contains(why), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_refuses_an_old_schema_and_migrate_mends_it() {
    let database = cluster().new_empty_database().await;
    let line = complaint(&mut serve(&database));
    assert!(line.contains("run `throughline migrate`"), "{line}");
    let migrate = || {
        throughline(&["migrate"])
            .env("THROUGHLINE_DATABASE_URL", cluster().service_url(&database))
            .env(
                "THROUGHLINE_MIGRATE_DATABASE_URL",
                cluster().owner_url(&database),
            )
            .output()
            .unwrap()
    };
    let first = String::from_utf8(migrate().stdout).unwrap();
    assert!(!first.starts_with("0 "), "{first}");
    let second = String::from_utf8(migrate().stdout).unwrap();
    assert_eq!(second, "0 migrations applied\n");
    let mut superuser = cluster().superuser(&database).await;
    assert_eq!(
        catalog::violations(&mut superuser).await,
        Vec::<String>::new()
    );
    Served::start(&database).terminate();
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_migrations_at_once_apply_each_migration_once() {
    let database = cluster().new_empty_database().await;
    let config = cluster().migrate_config(&database);
    let runs = (0..8).map(|_| throughline::store::db::migrate::run(&config));
    let applied = futures_util::future::try_join_all(runs).await.unwrap();
    assert_eq!(
        applied.iter().filter(|count| **count > 0).count(),
        1,
        "{applied:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_may_not_create_roles_gets_the_sql() {
    cluster()
        .admin_sql("create role plain_owner login password 'pw'")
        .await;
    let database = cluster().new_empty_database().await;
    let service = cluster().url_as("a_new_login", "secret-password", &database);
    let output = throughline(&["migrate"])
        .env("THROUGHLINE_DATABASE_URL", service)
        .env(
            "THROUGHLINE_MIGRATE_DATABASE_URL",
            cluster().url_as("plain_owner", "pw", &database),
        )
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(text.contains("create role \"a_new_login\" login"), "{text}");
    assert!(
        text.contains("grant throughline_service to \"a_new_login\";"),
        "{text}"
    );
    assert!(!text.contains("secret-password"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_create_prints_a_tenant_whose_key_works() {
    let world = World::new().await;
    let output = throughline(&["tenant", "create", "Acme"])
        .envs(node_environment(&world.database, cluster().redis_url()))
        .output()
        .unwrap();
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    let own = world
        .get(made.text("api_key"), "/v1/tenant")
        .await
        .expect(200);
    assert_eq!(own["id"], made["id"]);
    let mut empty = throughline(&["tenant", "create", ""]);
    empty.envs(node_environment(&world.database, cluster().redis_url()));
    assert_eq!(
        complaint(&mut empty),
        "throughline: the name must not be empty"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_have_what_is_needed_and_no_secret_and_no_text() {
    let database = cluster().new_database().await;
    let served = Served::start(&database);
    let client = reqwest::Client::new();
    let post = |path: &str, key: &str, body: Value| {
        Reply::of(client.post(served.url(path)).bearer_auth(key).json(&body))
    };
    let made = post("/v1/tenants", OPERATOR_KEY, json!({"name": "canary-name"})).await;
    let made = made.expect(201);
    let key = made.text("api_key").to_owned();
    let body = serde_json::json!({"name": "canary-text", "scopes": ["canary-scope"]});
    post("/v1/api-keys?canary-query=1", &key, body)
        .await
        .expect(400);
    Reply::of(client.get(served.url("/canary-path")))
        .await
        .expect(404);
    Reply::of(client.get(served.url("/readyz")))
        .await
        .expect(200);
    let log = served.terminate();
    let entries: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of_route = |route: &str| entries.iter().find(|entry| entry["route"] == route);
    let entry = of_route("/v1/api-keys").unwrap();
    assert_eq!(entry["code"], "invalid_request");
    assert_eq!(of_route("/v1/tenants").unwrap()["code"], Value::Null);
    assert_eq!(of_route("/readyz"), None, "probes are not logged");
    assert_eq!(entry["tenant"], made["id"]);
    assert_eq!(
        (&entry["status"], &entry["method"]),
        (&400.into(), &"POST".into())
    );
    assert!(entry["duration_ms"].is_number() && entry["request_id"].is_string());
    for secret in [key.as_str(), OPERATOR_KEY, "canary-", "a-password-for"] {
        assert!(!log.contains(secret), "the log has {secret}");
    }
}

/// One failed call without a session, and one in a session.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_logged_for_a_request_or_a_turn_can_be_found_by_its_id() {
    let database = cluster().new_database().await;
    let served = Served::start_with(
        &database,
        &[("THROUGHLINE_ALLOW_PRIVATE_UPSTREAMS", "true")],
    );
    let client = reqwest::Client::new();
    let send = async |method: reqwest::Method, path: &str, key: &str, body: Value| {
        let request = client.request(method, served.url(path)).bearer_auth(key);
        let request = request.header("x-request-id", format!("trace-of{path}"));
        Reply::of(request.json(&body)).await
    };
    let post = reqwest::Method::POST;
    let made = send(
        post.clone(),
        "/v1/tenants",
        OPERATOR_KEY,
        json!({"name": "Acme"}),
    )
    .await;
    let made = made.expect(201);
    let key = made["api_key"].as_str().unwrap();
    let port = throughline::dev::servers::free_port().unwrap();
    let upstream =
        json!({"kind": "openai", "model": "m", "base_url": format!("http://127.0.0.1:{port}/v1")});
    let agent = json!({ "upstream": upstream });
    let put = send(reqwest::Method::PUT, "/v1/agents/down", key, agent).await;
    put.expect(201);
    let messages = json!([{"role": "user", "content": "canary-text"}]);
    let chat = json!({"model": "down", "messages": messages});
    let refused = send(post.clone(), "/v1/chat/completions", key, chat).await;
    refused.expect_openai_error(502, "upstream_failed");
    let told =
        json!({"identity": "telegram:42", "text": "canary-text", "agent": "down", "wait": true});
    let told = send(post, "/v1/inbound", key, told).await.expect(200);

    let log = served.terminate();
    let entries: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let request = |id: &str| {
        let line = |entry: &&Value| entry["message"] == "request" && entry["request_id"] == id;
        entries.iter().find(line).unwrap()
    };
    let failed: Vec<&Value> = entries
        .iter()
        .filter(|entry| entry["message"] == "model call failed")
        .collect();
    assert_eq!(failed.len(), 2, "{log}");
    for entry in &failed {
        assert_eq!(entry["tenant"], made["id"], "{entry}");
    }
    let chat = request("trace-of/v1/chat/completions");
    for member in ["request_id", "tenant", "route", "method"] {
        assert_eq!(failed[0][member], chat[member], "{member}: {log}");
    }
    assert_eq!(chat["tenant"], made["id"]);
    assert_eq!(request("trace-of/v1/inbound")["route"], "/v1/inbound");
    assert_eq!(failed[1]["turn"], told["turn_id"], "{log}");
    for secret in [key, OPERATOR_KEY, "canary-", "telegram:42"] {
        assert!(!log.contains(secret), "the log has {secret}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_lets_a_running_request_finish() {
    let database = cluster().new_database().await;
    let mut served = Served::start(&database);
    let client = reqwest::Client::new();
    let make = client
        .post(served.url("/v1/tenants"))
        .bearer_auth(OPERATOR_KEY)
        .json(&json!({"name": "Acme"}));
    // Held by a lock until after SIGTERM.
    let mut superuser = cluster().superuser(&database).await;
    use sqlx::Connection;
    let mut lock = superuser.begin().await.unwrap();
    sqlx::query("lock table tenants in exclusive mode")
        .execute(&mut *lock)
        .await
        .unwrap();
    let running = tokio::spawn(Reply::of(make));
    let mut watcher = cluster().superuser(&database).await;
    let pause = Duration::from_millis(10);
    retry("it waits for the lock", Duration::from_secs(20), pause, async || {
        let waiting: bool = sqlx::query_scalar(
            "select exists (select 1 from pg_stat_activity where datname = $1 and wait_event_type = 'Lock')",
        )
        .bind(&database)
        .fetch_one(&mut watcher)
        .await
        .unwrap();
        waiting.then_some(())
    })
    .await;
    kill(Pid::from_raw(served.child.id() as i32), Signal::SIGTERM).unwrap();
    while served
        .log
        .recv_timeout(Duration::from_secs(5))
        .is_ok_and(|line| !line.contains("shutting down"))
    {}
    lock.rollback().await.unwrap();
    running.await.unwrap().expect(201);
    assert!(served.child.wait().unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_the_drain() {
    let database = cluster().new_database().await;
    let mut served = Served::start_with(&database, &[("THROUGHLINE_DRAIN_MS", "60000")]);
    let signal = || kill(Pid::from_raw(served.child.id() as i32), Signal::SIGTERM).unwrap();
    signal();
    let client = reqwest::Client::new();
    let drains = async || Reply::of(client.get(served.url("/readyz"))).await.status == 503;
    eventually("it drains", Duration::from_secs(5), drains).await;
    signal();
    let began = Instant::now();
    assert!(served.child.wait().unwrap().success());
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[tokio::test(flavor = "multi_thread")]
async fn operator_endpoints_can_have_a_listener_of_their_own() {
    let database = cluster().new_database().await;
    let port = throughline::dev::servers::free_port().unwrap();
    let mut config = crate::support::world::node_config(&database, cluster().redis_url());
    config.operator_listen = Some(([127, 0, 0, 1], port).into());
    let app = throughline::app::App::build(config, throughline::clock::Clock::system())
        .await
        .unwrap();
    let node = throughline::server::Node::start(app, None).await.unwrap();
    let ask = async |address: String| {
        let request = reqwest::Client::new().get(format!("http://{address}/v1/tenants"));
        Reply::of(request.bearer_auth(OPERATOR_KEY)).await
    };
    ask(node.address.to_string())
        .await
        .expect_problem(404, "not_found");
    ask(format!("127.0.0.1:{port}")).await.expect(200);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_http_of_anybody_is_no_error_of_ours() {
    let database = cluster().new_database().await;
    let served = Served::start(&database);
    for garbage in [
        "GET / HTTP/9.9\r\n\r\n",
        "\u{16}\u{3}\u{1}",
        "GET /\u{0} HTTP/1.1\r\n\r\n",
        "POST /v1/tenants HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nbad header\r\n\r\n",
    ] {
        let mut stream = std::net::TcpStream::connect(&served.address).unwrap();
        std::io::Write::write_all(&mut stream, garbage.as_bytes()).unwrap();
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = std::io::Read::read_to_end(&mut stream, &mut Vec::new());
    }
    let log = served.terminate();
    for line in log.lines() {
        let entry: Value = serde_json::from_str(line).unwrap();
        assert!(
            entry["level"] != "ERROR" && entry["level"] != "WARN",
            "{line}"
        );
    }
}
