//! Messages of users on a platform: each client sends one, waits until the bridge receives the answer,
//! acknowledges it, and sends the next.

use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::json;
use tokio::time::timeout;

use crate::AGENT;
use crate::bridge::PendingAnswers;
use crate::connection::{Connection, MAX_WAIT, post};
use crate::figures::{Part, Times};
use crate::load;
use crate::node::Node;
use crate::random::next;
use crate::seed::TEXT;
use crate::users::identity;

pub struct Messages<'a> {
    pub node: &'a Node,
    pub pending: &'a PendingAnswers,
    pub users: u32,
    pub clients: u32,
    pub times: Times,
}

/// The durations of one message.
struct MessageTimes {
    call: Duration,
    delivery: Duration,
    written: Duration,
}

/// The result of one round.
pub struct RoundResult {
    /// From the call to its response.
    pub call: Part,
    /// From the call until the bridge received the answer.
    pub delivery: Part,
    /// From the write of the answer until the bridge received it.
    pub written: Part,
    /// Microseconds of the node for each message.
    pub cpu: f64,
    /// Messages, including those outside of the measured time.
    pub done: usize,
    /// Deliveries per answer to a consumer.
    pub batch: f64,
}

impl Messages<'_> {
    pub async fn run(&self) -> anyhow::Result<RoundResult> {
        self.pending.take_answers();
        let pid = self.node.pid();
        let clients = u64::from(self.clients);
        let users = u64::from(self.users);
        let loaded = load::run(self.clients, pid, self.times, |client, mut done| {
            let pending = self.pending.clone();
            let key = self.node.key.clone();
            let address = self.node.address;
            async move {
                let mut connection = Connection::open(address).await?;
                let mut random = client + 1;
                loop {
                    random = next(random);
                    let number = 1 + client + clients * (random % (users / clients));
                    if !done.put(send(&mut connection, &pending, &key, number).await?) {
                        return Ok(done);
                    }
                }
            }
        });
        let loaded = loaded.await?;
        Ok(RoundResult {
            call: loaded.part(|times: &MessageTimes| times.call)?,
            delivery: loaded.part(|times| times.delivery)?,
            written: loaded.part(|times| times.written)?,
            cpu: loaded.cpu(),
            done: loaded.count(),
            batch: loaded.count() as f64 / self.pending.take_answers() as f64,
        })
    }
}

async fn send(
    connection: &mut Connection,
    pending: &PendingAnswers,
    key: &str,
    number: u64,
) -> anyhow::Result<MessageTimes> {
    let (message_id, received) = pending.next_message();
    let body = json!({
        "identity": identity(number), "chat": {"type": "dm"}, "text": TEXT, "message_id": message_id,
        "agent": AGENT, "wait": false,
    });
    let request = post("/v1/inbound", key, "", &body.to_string());
    let began = Instant::now();
    connection.send_for_body(&request).await?;
    let call = began.elapsed();
    let received = timeout(MAX_WAIT, received).await;
    let received = received.context("no answer in time")??;
    let path = format!("/v1/deliveries/{}/ack", received.delivery.id);
    let body = json!({ "lease": received.delivery.lease });
    let ack = post(&path, key, "", &body.to_string());
    connection.send_for_body(&ack).await?;
    Ok(MessageTimes {
        call,
        delivery: received.at - began,
        written: received.written,
    })
}
