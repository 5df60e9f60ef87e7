//! Real `throughline serve` processes on one database, to be killed and started again. A node keeps its
//! address, as one behind a name does.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use sqlx::{ConnectOptions, PgConnection};

use crate::support::servers::cluster::cluster;
use crate::support::servers::process::{Process, throughline};
use crate::support::world::node_environment;
use crate::support::{Reply, eventually};

/// Long, because the machine may be busy with everything else.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Nodes {
    pub database: String,
    pub client: reqwest::Client,
    options: NodesOptions,
    nodes: Vec<ServedNode>,
}

/// What a test may want otherwise.
#[derive(Default)]
pub struct NodesOptions {
    pub count: usize,
    /// Whether tenants' URLs may lead to servers of the test.
    pub private_upstreams: bool,
    /// How long a turn is a node's own without a sign of life, and how long a node may take to end.
    pub turn_lease: Option<Duration>,
    pub grace: Option<Duration>,
    /// How long it goes on serving before that.
    pub drain: Option<Duration>,
    /// A migrated database of the test's own server, as the service and as its superuser.
    pub database: Option<(String, sqlx::postgres::PgConnectOptions)>,
    pub redis_url: Option<String>,
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
        Self::with(NodesOptions {
            count,
            ..NodesOptions::default()
        })
        .await
    }

    pub async fn with(options: NodesOptions) -> Self {
        let count = options.count;
        let nodes = Self {
            database: match &options.database {
                Some(_) => String::new(),
                None => cluster().new_database().await,
            },
            options,
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
        self.end(node, Signal::SIGKILL);
    }

    /// Ends the process as an orderly system does, and answers how long that took.
    pub async fn terminate(self: &Arc<Self>, node: usize) -> Duration {
        let nodes = self.clone();
        let began = Instant::now();
        let ending = tokio::task::spawn_blocking(move || nodes.end(node, Signal::SIGTERM));
        ending.await.unwrap();
        began.elapsed()
    }

    fn end(&self, node: usize, signal: Signal) {
        let served = &self.nodes[node];
        let mut process = served.process.lock().unwrap().take().unwrap();
        served.changes.fetch_add(1, Ordering::SeqCst);
        process.signal(signal);
        process.wait(PATIENCE);
    }

    /// Sends a signal that does not end it: SIGSTOP, SIGCONT.
    pub fn signal(&self, node: usize, signal: Signal) {
        let process = self.nodes[node].process.lock().unwrap();
        process.as_ref().unwrap().signal(signal);
    }

    /// Starts a dead node again and waits until it is ready.
    pub async fn revive(&self, node: usize) {
        let served = &self.nodes[node];
        let mut command = throughline(&["serve"]);
        let options = &self.options;
        let redis_url = options.redis_url.as_deref();
        let redis_url = redis_url.unwrap_or_else(|| cluster().redis_url());
        command
            .envs(node_environment(&self.database, redis_url))
            .env("THROUGHLINE_LISTEN", format!("127.0.0.1:{}", served.port))
            .env("THROUGHLINE_LOG", "error");
        if options.private_upstreams {
            command.env("THROUGHLINE_ALLOW_PRIVATE_UPSTREAMS", "true");
        }
        for (name, time) in [
            ("THROUGHLINE_TURN_LEASE_MS", options.turn_lease),
            ("THROUGHLINE_SHUTDOWN_GRACE_MS", options.grace),
            ("THROUGHLINE_DRAIN_MS", options.drain),
        ] {
            if let Some(time) = time {
                command.env(name, time.as_millis().to_string());
            }
        }
        if let Some((url, _)) = &options.database {
            command.env("THROUGHLINE_DATABASE_URL", url);
        }
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
        match &self.options.database {
            Some((_, superuser)) => superuser.connect().await.unwrap(),
            None => cluster().superuser(&self.database).await,
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        cluster().assert_no_deadlock(&self.database);
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
