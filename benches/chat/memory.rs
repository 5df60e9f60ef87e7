//! The memory of a node, idle and with many open event streams, and the CPU of the streams.

use std::time::{Duration, Instant};

use crate::connection::{Connection, get};
use crate::dev::Dev;
use crate::machine::{Memory, cpu_of};
use crate::node::Node;
use crate::plan::Plan;
use crate::seed::{Seed, Sessions};

const IDLE: Duration = Duration::from_secs(2);
/// Longer than the interval in which each stream's rights are checked again.
const WATCH_TIME: Duration = Duration::from_secs(7);

pub async fn measure(plan: &Plan, dev: &Dev) -> anyhow::Result<()> {
    let count = if plan.short { 100 } else { 1000 };
    let sessions = Sessions { messages: 2, count };
    let mut seed = Seed::new(dev).await?;
    seed.plant(&[sessions]).await?;
    seed.close().await?;
    // With the default pool of connections.
    let node = Node::start(dev, None).await?;
    tokio::time::sleep(IDLE).await;
    let idle = Memory::of(node.pid())?;
    let mut open = Vec::new();
    for index in 0..count {
        let session = sessions.choose(index, count, 0);
        let request = get(&format!("/v1/sessions/{session}/events"), &node.key);
        let mut connection = Connection::open(node.address).await?;
        connection.send_for_head(&request).await?;
        open.push(connection);
    }
    let began = Instant::now();
    let before = cpu_of(node.pid())?;
    tokio::time::sleep(WATCH_TIME).await;
    let used = (cpu_of(node.pid())? - before).as_secs_f64() / began.elapsed().as_secs_f64();
    let watched = Memory::of(node.pid())?;
    println!("\nmemory, MB                   PSS     RSS");
    println!("  idle                  {:>8.1}{:>8.1}", idle.pss, idle.rss);
    println!(
        "  {count:>5} open streams    {:>8.1}{:>8.1}",
        watched.pss, watched.rss
    );
    println!(
        "  a stream: {:.1} kB, and {:.1} us of CPU a second while it is idle",
        (watched.pss - idle.pss) * 1000.0 / count as f64,
        used * 1e6 / count as f64
    );
    drop(open);
    node.stop()
}
