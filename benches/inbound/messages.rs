//! Messages of people on a platform: each client brings one, waits until the bridge has the answer in hand,
//! acknowledges it, and brings the next.

use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::json;
use tokio::time::timeout;

use crate::AGENT;
use crate::bridge::Waiting;
use crate::connection::{Connection, PATIENCE, post};
use crate::figures::{Part, Times};
use crate::load;
use crate::node::Node;
use crate::people::identity;
use crate::random::next;
use crate::seed::TEXT;

pub struct Messages<'a> {
    pub node: &'a Node,
    pub waiting: &'a Waiting,
    pub people: u32,
    pub clients: u32,
    pub times: Times,
}

/// How long one message took.
struct Brought {
    call: Duration,
    delivery: Duration,
    written: Duration,
}

/// What all of them came to in one round.
pub struct Taken {
    /// Until the call was answered.
    pub call: Part,
    /// From the call until the bridge had the answer in hand.
    pub delivery: Part,
    /// The same from when the answer was written.
    pub written: Part,
    /// Microseconds of the node for each message.
    pub cpu: f64,
    /// Messages, also before and after what was measured.
    pub done: usize,
    /// Deliveries in each answer to a consumer.
    pub batch: f64,
}

impl Messages<'_> {
    pub async fn run(&self) -> anyhow::Result<Taken> {
        self.waiting.take_answers();
        let pid = self.node.pid();
        let clients = u64::from(self.clients);
        let people = u64::from(self.people);
        let loaded = load::run(self.clients, pid, self.times, |client, mut done| {
            let waiting = self.waiting.clone();
            let key = self.node.key.clone();
            let address = self.node.address;
            async move {
                let mut connection = Connection::open(address).await?;
                let mut random = client + 1;
                loop {
                    random = next(random);
                    let number = 1 + client + clients * (random % (people / clients));
                    if !done.put(bring(&mut connection, &waiting, &key, number).await?) {
                        return Ok(done);
                    }
                }
            }
        });
        let loaded = loaded.await?;
        Ok(Taken {
            call: loaded.part(|brought: &Brought| brought.call)?,
            delivery: loaded.part(|brought| brought.delivery)?,
            written: loaded.part(|brought| brought.written)?,
            cpu: loaded.cpu(),
            done: loaded.count(),
            batch: loaded.count() as f64 / self.waiting.take_answers() as f64,
        })
    }
}

async fn bring(
    connection: &mut Connection,
    waiting: &Waiting,
    key: &str,
    number: u64,
) -> anyhow::Result<Brought> {
    let (message_id, arrived) = waiting.next_message();
    let body = json!({
        "identity": identity(number), "chat": {"type": "dm"}, "text": TEXT, "message_id": message_id,
        "agent": AGENT, "wait": false,
    });
    let request = post("/v1/inbound", key, "", &body.to_string());
    let began = Instant::now();
    connection.ask_whole(&request).await?;
    let call = began.elapsed();
    let arrived = timeout(PATIENCE, arrived).await;
    let arrived = arrived.context("there is no answer")??;
    let path = format!("/v1/deliveries/{}/ack", arrived.delivery.id);
    let body = json!({ "lease": arrived.delivery.lease });
    let ack = post(&path, key, "", &body.to_string());
    connection.ask_whole(&ack).await?;
    Ok(Brought {
        call,
        delivery: arrived.at - began,
        written: arrived.written,
    })
}
