//! A balancer as small as they come: TCP, one node for each connection, in turn. All that it knows of a node is
//! what `/readyz` said at the last look. It tries nothing again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::support::eventually;

pub struct Balancer {
    pub address: SocketAddr,
    nodes: Arc<Vec<Behind>>,
    _tasks: JoinSet<()>,
}

struct Behind {
    url: String,
    address: String,
    ready: AtomicBool,
}

impl Balancer {
    /// `nodes` are the nodes' base URLs; each is looked at once in `interval`.
    pub async fn start(nodes: Vec<String>, interval: Duration) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let behind = nodes.into_iter().map(|url| Behind {
            address: url.trim_start_matches("http://").to_owned(),
            url,
            ready: AtomicBool::new(false),
        });
        let nodes: Arc<Vec<Behind>> = Arc::new(behind.collect());
        let mut tasks = JoinSet::new();
        for node in 0..nodes.len() {
            tasks.spawn(look(nodes.clone(), node, interval));
        }
        tasks.spawn(serve(listener, nodes.clone()));
        Self {
            address,
            nodes,
            _tasks: tasks,
        }
    }

    /// Waits until it has seen that a node is ready.
    pub async fn wait_until_ready(&self, node: usize) {
        let seen = async || self.nodes[node].ready.load(Ordering::SeqCst);
        eventually("the balancer sees it", Duration::from_secs(20), seen).await;
    }
}

async fn look(nodes: Arc<Vec<Behind>>, node: usize, interval: Duration) {
    // Each look on a connection of its own, as balancers do.
    let client = reqwest::Client::builder()
        .pool_max_idle_per_host(0)
        .timeout(interval)
        .build()
        .unwrap();
    let node = &nodes[node];
    let mut looks = tokio::time::interval(interval);
    loop {
        looks.tick().await;
        let ready = client.get(format!("{}/readyz", node.url)).send().await;
        let ready = ready.is_ok_and(|answer| answer.status() == 200);
        node.ready.store(ready, Ordering::SeqCst);
    }
}

async fn serve(listener: TcpListener, nodes: Arc<Vec<Behind>>) {
    let next = AtomicUsize::new(0);
    let mut connections = JoinSet::new();
    loop {
        let (mut client, _) = listener.accept().await.unwrap();
        while connections.try_join_next().is_some() {}
        let first = next.fetch_add(1, Ordering::SeqCst);
        let count = nodes.len();
        let mut order = (0..count).map(|step| &nodes[(first + step) % count]);
        let Some(node) = order.find(|node| node.ready.load(Ordering::SeqCst)) else {
            continue;
        };
        let address = node.address.clone();
        connections.spawn(async move {
            if let Ok(mut node) = TcpStream::connect(address).await {
                drop(client.set_nodelay(true));
                drop(node.set_nodelay(true));
                drop(copy_bidirectional(&mut client, &mut node).await);
            }
        });
    }
}
