//! Real `throughline serve` processes on one database, to be killed and started again. A node keeps its
//! address, as one behind a name does.

use std::net::TcpListener;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use sqlx::PgConnection;

use super::cluster::cluster;
use super::process::{Process, throughline};
use super::world::node_environment;
use super::{Reply, eventually};

/// Long, because the machine may be busy with everything else.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Nodes {
    pub database: String,
    pub client: reqwest::Client,
    nodes: Vec<ServedNode>,
}

struct ServedNode {
    port: u16,
    process: Mutex<Option<Process>>,
    /// Counts its ends and its beginnings: odd while it is dead.
    changes: AtomicU64,
}

impl Nodes {
    /// So many nodes on a new database, ready to serve.
    pub async fn start(count: usize) -> Self {
        let nodes = Self {
            database: cluster().new_database().await,
            client: reqwest::Client::builder()
                .timeout(PATIENCE)
                .build()
                .unwrap(),
            nodes: (0..count).map(|_| ServedNode::dead()).collect(),
        };
        futures_util::future::join_all((0..count).map(|node| nodes.revive(node))).await;
        nodes
    }

    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    pub fn url_on(&self, node: usize, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.nodes[node].port)
    }

    /// Ends the process with SIGKILL. It does not get to finish anything.
    pub fn kill(&self, node: usize) {
        let served = &self.nodes[node];
        let mut process = served.process.lock().unwrap().take().unwrap();
        served.changes.fetch_add(1, Ordering::SeqCst);
        process.signal(Signal::SIGKILL);
        process.wait(PATIENCE);
    }

    /// Starts a dead node again and waits until it is ready.
    pub async fn revive(&self, node: usize) {
        let served = &self.nodes[node];
        let mut command = throughline(&["serve"]);
        command
            .envs(node_environment(&self.database, cluster().redis_url()))
            .env("THROUGHLINE_LISTEN", format!("127.0.0.1:{}", served.port))
            .env("THROUGHLINE_LOG", "error");
        *served.process.lock().unwrap() = Some(Process::start(&mut command));
        eventually("a started node is ready", PATIENCE, async || {
            let ready = Reply::try_of(self.client.get(self.url_on(node, "/readyz"))).await;
            ready.is_ok_and(|reply| reply.status == 200)
        })
        .await;
        served.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Changes whenever the node dies or is ready again. As long as it is the same even number, the node
    /// has no excuse.
    pub fn changes(&self, node: usize) -> u64 {
        self.nodes[node].changes.load(Ordering::SeqCst)
    }

    pub async fn superuser(&self) -> PgConnection {
        cluster().superuser(&self.database).await
    }
}

impl ServedNode {
    fn dead() -> Self {
        Self {
            port: kept_port(),
            process: Mutex::new(None),
            changes: AtomicU64::new(1),
        }
    }
}

/// A port below those that the system gives by itself, so that nobody gets it while its node is dead.
fn kept_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16 % 12_000;
    loop {
        let port = 20_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
