//! `throughline dev` as a newcomer runs it: it starts everything, keeps its data, and leaves nothing
//! behind, not even when it is killed.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::support::servers::cluster::scratch_dir;
use crate::support::servers::model::{Model, Step};
use crate::support::servers::process::{
    Process, pids_mentioning, processes_mentioning, redis_pid, throughline, wait_for_ready_file,
};
use crate::support::{Fields, Reply, eventually};

const LIMIT: Duration = Duration::from_secs(60);

struct Dev {
    process: Process,
    ready: Value,
    dir: PathBuf,
}

impl Dev {
    fn start(dir: &Path) -> Self {
        Self::start_with(dir, &[])
    }

    fn start_with(dir: &Path, variables: &[(&str, &str)]) -> Self {
        let file = dir.join("ready.json");
        // One that a killed `dev` left must not be taken for the new one's.
        let _ = std::fs::remove_file(&file);
        let mut command = throughline(&["dev", "--port", "0"]);
        command.arg("--data-dir").arg(dir);
        command.envs(variables.iter().copied());
        let mut process = Process::start_logged(&mut command, &dir.join("dev.log"));
        let ready = wait_for_ready_file(&mut process, &file);
        Self {
            process,
            ready,
            dir: dir.to_owned(),
        }
    }

    fn text(&self, member: &str) -> &str {
        self.ready.text(member)
    }

    /// What it has printed and logged since it was started.
    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("dev.log")).unwrap()
    }

    fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        let url = format!("{}{path}", self.text("url"));
        let request = reqwest::Client::new().request(method, url);
        request.bearer_auth(self.text("api_key"))
    }

    async fn tenant(&self) -> Value {
        let request = self.request(reqwest::Method::GET, "/v1/tenant");
        Reply::of(request).await.expect(200)
    }

    async fn put_agent(&self, name: &str, base_url: &str) -> Reply {
        let upstream = json!({"kind": "openai", "model": "llama3", "base_url": base_url});
        let path = format!("/v1/agents/{name}");
        let request = self.request(reqwest::Method::PUT, &path);
        Reply::of(request.json(&json!({"upstream": upstream}))).await
    }

    /// Without a session.
    async fn ask(&self, agent: &str) -> Reply {
        let messages = json!([{"role": "user", "content": "canary-text"}]);
        let request = self.request(reqwest::Method::POST, "/v1/chat/completions");
        Reply::of(request.json(&json!({"model": agent, "messages": messages}))).await
    }

    /// In a conversation.
    async fn say(&self, agent: &str, text: &str) -> Reply {
        let body = json!({"identity": "telegram:42", "text": text, "agent": agent});
        let request = self.request(reqwest::Method::POST, "/v1/inbound");
        Reply::of(request.json(&body)).await
    }

    fn redis_pid(&self) -> Option<i32> {
        redis_pid(self.text("redis_url"))
    }

    fn postgres_pid(&self) -> Option<i32> {
        let file = self.dir.join("servers/postgres/postmaster.pid");
        let text = std::fs::read_to_string(file).ok()?;
        text.lines().next()?.trim().parse().ok()
    }

    async fn until_redis_is_another_than(&self, before: i32) {
        let is_back = async || self.redis_pid().is_some_and(|now| now != before);
        eventually("Redis is back on its port", LIMIT, is_back).await;
    }

    /// Whatever still runs on the data directory.
    fn left_behind(dir: &Path) -> Vec<String> {
        processes_mentioning(&dir.display().to_string())
    }
}

fn kill_at_once(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dev_keeps_its_tenant_refuses_a_twin_and_leaves_nothing_behind() {
    let dir = scratch_dir("dev");
    std::fs::create_dir_all(&dir).unwrap();
    let mut dev = Dev::start(&dir);
    let tenant = dev.tenant().await;
    assert_eq!(tenant["id"], dev.ready["tenant_id"]);
    let mode = std::fs::metadata(dir.join("ready.json"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    says_each_request_in_one_short_line(&dev).await;
    let metrics = Reply::of(reqwest::Client::new().get(dev.text("metrics_url"))).await;
    assert_eq!(metrics.status, 200);
    assert!(
        metrics
            .body
            .contains("http_server_request_duration_seconds"),
        "{}",
        metrics.body
    );

    let twin = throughline(&["dev", "--port", "0"])
        .arg("--data-dir")
        .arg(&dir)
        .output()
        .unwrap();
    let complaint = String::from_utf8(twin.stderr).unwrap();
    assert!(!twin.status.success());
    assert!(
        complaint.contains("another `throughline dev` is running"),
        "{complaint}"
    );
    dev.tenant().await;

    joins_as_a_second_node(&dev).await;

    dev.process.signal(Signal::SIGTERM);
    assert!(dev.process.wait(Duration::from_secs(30)).success());
    assert_eq!(Dev::left_behind(&dir), Vec::<String>::new());
    let goodbye = format!("Stopped. Data is kept in {}.\n", dir.display());
    assert!(dev.log().ends_with(&goodbye), "{}", dev.log());
    assert!(!dir.join("ready.json").exists());
    drop(dev);

    let again = Dev::start(&dir);
    assert_eq!(again.tenant().await, tenant, "the data was kept");
    let log = again.log();
    assert!(!log.contains("already exists"), "{log}");
    again.process.signal(Signal::SIGKILL);
    eventually(
        "nothing is left after SIGKILL",
        Duration::from_secs(20),
        async || {
            Dev::left_behind(&again.dir)
                .iter()
                .all(|line| line.is_empty())
        },
    )
    .await;
    drop(again);

    // At once after a kill, while the old servers may still be stopping.
    let third = Dev::start(&dir);
    third.process.signal(Signal::SIGKILL);
    drop(third);
    let mut fourth = Dev::start(&dir);
    assert_eq!(fourth.tenant().await, tenant);
    fourth.process.signal(Signal::SIGINT);
    assert!(fourth.process.wait(Duration::from_secs(30)).success());
    std::fs::remove_dir_all(&dir).unwrap();
}

async fn says_each_request_in_one_short_line(dev: &Dev) {
    for (path, status) in [("/readyz", 200), ("/healthz", 200), ("/canary-path", 404)] {
        let reply = Reply::of(dev.request(reqwest::Method::GET, path)).await;
        reply.expect(status);
    }
    let log = dev.log();
    let lines: Vec<&str> = log
        .lines()
        .filter(|line| line.starts_with("GET "))
        .collect();
    let (fine, failed) = match lines.as_slice() {
        [fine, failed] => (*fine, *failed),
        lines => panic!("{lines:?}"),
    };
    assert!(
        fine.starts_with("GET /v1/tenant 200 ") && fine.ends_with("ms"),
        "{fine}"
    );
    assert!(
        failed.starts_with("GET unmatched 404 ") && failed.ends_with("ms code=not_found"),
        "{failed}"
    );
    assert!(!log.contains('\u{1b}'), "{log}");
}

#[test]
fn dev_reports_that_its_port_is_in_use_before_it_starts_anything() {
    let dir = scratch_dir("dev-port");
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let output = throughline(&["dev", "--port", &port.to_string()])
        .arg("--data-dir")
        .arg(&dir)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let complaint = String::from_utf8(output.stderr).unwrap();
    let expected = format!("throughline: port {port} is taken: make dev ARGS=\"--port 9000\"\n");
    assert_eq!(complaint, expected);
    assert!(!dir.join("servers").exists() && !dir.join("dev.json").exists());
    std::fs::remove_dir_all(&dir).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dev_starts_a_dead_server_again_and_gives_up_only_when_it_does_not_stay_up() {
    let dir = scratch_dir("dev-restart");
    std::fs::create_dir_all(&dir).unwrap();
    let mut dev = Dev::start(&dir);
    let tenant = dev.tenant().await;
    dev.say("main", "one").await.expect(200);

    let redis = dev.redis_pid().unwrap();
    kill_at_once(redis);
    dev.say("main", "two").await.expect(200);
    dev.until_redis_is_another_than(redis).await;
    let log = dev.log();
    assert!(
        log.contains("server ended; restarting server=Redis"),
        "{log}"
    );
    assert!(!log.contains("restarting server=Postgres"), "{log}");

    let postgres = dev.postgres_pid().unwrap();
    kill_at_once(postgres);
    let is_back = async || {
        let reply = dev.say("main", "three").await;
        reply.status == 200 && dev.postgres_pid().is_some_and(|now| now != postgres)
    };
    eventually("Postgres is back and chat works", LIMIT, is_back).await;
    let log = dev.log();
    assert!(
        log.contains("server ended; restarting server=Postgres"),
        "{log}"
    );
    assert_eq!(dev.tenant().await, tenant, "the data was kept");
    let answer = dev.say("main", "four").await.expect(200);
    let text = answer.text("/reply/text");
    assert!(!text.contains("your message 1 here"), "{text}");

    // A killed guard leaves no second Redis.
    let redis = dev.redis_pid().unwrap();
    let lock = format!("{}/servers/redis.lock", dir.display());
    let guards = pids_mentioning(&lock);
    assert_eq!(guards.len(), 1, "{guards:?}");
    kill_at_once(guards[0]);
    dev.until_redis_is_another_than(redis).await;

    // What cannot be started any more.
    let log_file = dir.join("servers/redis.log");
    std::fs::remove_file(&log_file).unwrap();
    std::fs::create_dir(&log_file).unwrap();
    kill_at_once(dev.redis_pid().unwrap());
    assert_eq!(dev.process.wait(LIMIT).code(), Some(1));
    let log = dev.log();
    assert!(log.contains("throughline: Redis does not stay up"), "{log}");
    assert!(!log.contains("Stopped."), "{log}");
    assert!(!dir.join("ready.json").exists());
    assert_eq!(Dev::left_behind(&dir), Vec::<String>::new());
    drop(dev);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dev_calls_a_model_next_door_and_logs_why_one_does_not_answer() {
    let dir = scratch_dir("dev-model");
    std::fs::create_dir_all(&dir).unwrap();
    let mut dev = Dev::start(&dir);
    assert!(
        dev.log().contains("ALLOW_PRIVATE_UPSTREAMS=true"),
        "{}",
        dev.log()
    );
    let model = Model::start([Step::say("from next door")]).await;
    dev.put_agent("local", &model.base_url).await.expect(201);
    let answer = dev.ask("local").await.expect(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "from next door");
    for member in ["url", "metrics_url", "database_url", "redis_url"] {
        let port = reqwest::Url::parse(dev.text(member)).unwrap().port();
        let url = format!("http://127.0.0.1:{}/v1", port.unwrap());
        let problem = dev
            .put_agent("own", &url)
            .await
            .expect_problem(422, "invalid_value");
        let detail = problem.text("detail");
        assert!(detail.contains("a port of this service"), "{detail}");
    }

    let port = throughline::dev::servers::free_port().unwrap();
    let nobody = format!("http://127.0.0.1:{port}/v1");
    dev.put_agent("down", &nobody).await.expect(201);
    dev.ask("down")
        .await
        .expect_openai_error(502, "upstream_failed");
    dev.say("down", "canary-text").await.expect(200);
    let reply = dev.ask("down").await;
    let error = reply.expect_openai_error(502, "upstream_failed");
    let message = error.text("message");
    assert!(message.contains("it is called again in "), "{message}");
    assert!(reply.header("retry-after").parse::<u32>().is_ok());
    let log = dev.log();
    let failed: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("model call failed"))
        .collect();
    assert_eq!(failed.len(), 3, "{log}");
    for line in &failed {
        assert!(
            line.contains("WARN") && line.contains("agent=down"),
            "{line}"
        );
        assert!(
            line.contains(&format!("tenant={}", dev.text("tenant_id"))),
            "{line}"
        );
        assert!(line.contains(&format!("host=127.0.0.1:{port} ")), "{line}");
    }
    assert!(failed[0].contains("request_id=") && failed[0].contains("reason=refused"));
    assert!(failed[1].contains("turn=trn_"), "{}", failed[1]);
    assert!(failed[2].contains("reason=breaker open"), "{}", failed[2]);
    for secret in ["canary-text", nobody.as_str()] {
        assert!(!log.contains(secret), "the log has {secret}");
    }
    dev.process.signal(Signal::SIGTERM);
    assert!(dev.process.wait(LIMIT).success());
    drop(dev);

    let strict = [("THROUGHLINE_ALLOW_PRIVATE_UPSTREAMS", "false")];
    let mut dev = Dev::start_with(&dir, &strict);
    let reply = dev.put_agent("local", &model.base_url).await;
    let problem = reply.expect_problem(422, "invalid_value");
    let detail = problem.text("detail");
    assert!(detail.contains("Ask its operator to allow it"), "{detail}");
    dev.process.signal(Signal::SIGTERM);
    assert!(dev.process.wait(LIMIT).success());
    std::fs::remove_dir_all(&dir).unwrap();
}

/// The ready file's `env` is all that another node needs, but its own listen addresses.
async fn joins_as_a_second_node(dev: &Dev) {
    let port = throughline::dev::servers::free_port().unwrap();
    let mut command = throughline(&["serve"]);
    for (name, value) in dev.ready["env"].as_object().unwrap() {
        command.env(name, value.as_str().unwrap());
    }
    command
        .env("THROUGHLINE_LISTEN", format!("127.0.0.1:{port}"))
        .env("THROUGHLINE_METRICS_LISTEN", "127.0.0.1:0")
        .env("THROUGHLINE_LOG", "warn");
    let _second = Process::start(&mut command);
    let url = format!("http://127.0.0.1:{port}/v1/tenant");
    eventually(
        "the second node serves the tenant",
        Duration::from_secs(20),
        async || {
            let request = reqwest::Client::new()
                .get(&url)
                .bearer_auth(dev.text("api_key"));
            request
                .send()
                .await
                .is_ok_and(|reply| reply.status() == 200)
        },
    )
    .await;
}
