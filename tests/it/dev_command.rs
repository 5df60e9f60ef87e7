//! `throughline dev` as a newcomer runs it: it starts everything, keeps its data, and leaves nothing
//! behind, not even when it is killed.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::cluster::scratch_dir;
use crate::support::process::{Process, processes_mentioning, throughline, wait_for_ready_file};
use crate::support::{Reply, eventually};

struct Dev {
    process: Process,
    ready: Value,
    dir: PathBuf,
}

impl Dev {
    fn start(dir: &Path) -> Self {
        let file = dir.join("ready.json");
        // One that a killed `dev` left must not be taken for the new one's.
        let _ = std::fs::remove_file(&file);
        let mut command = throughline(&["dev", "--port", "0"]);
        command
            .arg("--data-dir")
            .arg(dir)
            .arg("--ready-file")
            .arg(&file);
        command.env("THROUGHLINE_LOG", "warn");
        let mut process = Process::start(&mut command);
        let ready = wait_for_ready_file(&mut process, &file);
        Self {
            process,
            ready,
            dir: dir.to_owned(),
        }
    }

    fn text(&self, member: &str) -> &str {
        self.ready[member].as_str().unwrap()
    }

    async fn tenant(&self) -> Value {
        let url = format!("{}/v1/tenant", self.text("url"));
        let request = reqwest::Client::new()
            .get(url)
            .bearer_auth(self.text("api_key"));
        Reply::of(request).await.expect(200)
    }

    /// Whatever still runs on the data directory.
    fn left_behind(dir: &Path) -> Vec<String> {
        processes_mentioning(&dir.display().to_string())
    }
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
    let metrics = Reply::of(reqwest::Client::new().get(dev.text("metrics_url"))).await;
    assert_eq!(metrics.status, 200);
    assert!(
        metrics
            .text
            .contains("http_server_request_duration_seconds"),
        "{}",
        metrics.text
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
    drop(dev);

    let again = Dev::start(&dir);
    assert_eq!(again.tenant().await, tenant, "the data was kept");
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
