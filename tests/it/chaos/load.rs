//! Clients at work: writers that number their messages, and compressors, each against a random node and
//! by a random id of the chain. They remember what they were told.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::Dice;
use super::history::{History, Outcome, Sent};
use crate::support::conversations::{assistant_message, user_message};
use crate::support::servers::nodes::Nodes;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply};

const CONVERSATIONS: usize = 4;
/// For each writer its conversation. Where few write, a compression can be taken back now and then.
const WRITERS: [usize; 8] = [0, 0, 0, 1, 1, 1, 2, 3];
/// Of the writers, those that never ask again what became of a message.
const FORGETFUL: [usize; 2] = [3, 7];
const COMPRESSORS: usize = 2;
/// How many messages a compression keeps.
pub const KEEP_LAST: usize = 2;

/// What all clients share.
pub struct Load {
    pub nodes: Nodes,
    pub key: String,
    conversations: Vec<Conversation>,
    stopping: AtomicBool,
    /// Counts events, so that one can be said to come before another.
    events: AtomicU64,
    acknowledged: AtomicUsize,
    faults: Mutex<Vec<String>>,
    /// For each node.
    traffic: Vec<Traffic>,
}

struct Conversation {
    id: String,
    /// Every id that a client was given, the newest last.
    learnt: Mutex<Vec<String>>,
}

#[derive(Default)]
pub struct Traffic {
    pub appends: AtomicUsize,
    pub compressions: AtomicUsize,
    /// Calls that ended without an answer.
    pub failures: AtomicUsize,
    /// Answers that it cannot right now, from a node that lived.
    pub unavailable: AtomicUsize,
}

/// What compressors did.
#[derive(Debug, Default)]
pub struct Tally {
    pub compressed: usize,
    pub already_compressed: usize,
    pub undone: usize,
    pub refused: usize,
    pub unknown: usize,
}

enum WriteAck {
    Answer(Reply),
    NotSent,
    Nothing,
}

pub struct Running {
    pub load: Arc<Load>,
    begun: Vec<Sent>,
    writers: JoinSet<Vec<Sent>>,
    compressors: JoinSet<Tally>,
}

/// Makes the conversations and sets everyone to work.
pub async fn start(nodes: Nodes, dice: &mut Dice) -> Running {
    let post = async |path: &str, key: &str, body: Value| {
        let request = nodes.client.post(nodes.url_on(0, path)).bearer_auth(key);
        Reply::of(request.json(&body)).await.expect(201)
    };
    let tenant = post("/v1/tenants", OPERATOR_KEY, json!({"name": "Acme"})).await;
    let key = tenant.text("api_key").to_owned();
    let mut conversations = Vec::new();
    let mut begun = Vec::new();
    for number in 0..CONVERSATIONS {
        let texts = [format!("rules-{number}"), format!("begin-{number}")];
        let messages = json!([{"role": "system", "content": texts[0]}, user_message(&texts[1])]);
        let id = post("/v1/sessions", &key, json!({"messages": messages}))
            .await
            .id();
        begun.push(Sent::first(&texts[0], &id, 1));
        begun.push(Sent::first(&texts[1], &id, 2));
        conversations.push(Conversation {
            learnt: Mutex::new(vec![id.clone()]),
            id,
        });
    }
    let load = Arc::new(Load {
        traffic: (0..nodes.count()).map(|_| Traffic::default()).collect(),
        nodes,
        key,
        conversations,
        stopping: AtomicBool::new(false),
        events: AtomicU64::new(1),
        acknowledged: AtomicUsize::new(0),
        faults: Mutex::new(Vec::new()),
    });
    let mut running = Running {
        load: load.clone(),
        begun,
        writers: JoinSet::new(),
        compressors: JoinSet::new(),
    };
    for number in 0..WRITERS.len() {
        let writer = write(load.clone(), number, dice.split());
        running.writers.spawn(writer);
    }
    for number in 0..COMPRESSORS {
        let compressor = compress(load.clone(), number, dice.split());
        running.compressors.spawn(compressor);
    }
    running
}

impl Running {
    /// Lets everyone finish what they are at, and gives what they remember.
    pub async fn stop(self) -> (Arc<Load>, History, Vec<Tally>) {
        self.load.stopping.store(true, Ordering::SeqCst);
        let tallies = self.compressors.join_all().await;
        let mut sent = self.begun;
        sent.extend(self.writers.join_all().await.into_iter().flatten());
        let learnt = self.load.conversations.iter().flat_map(|conversation| {
            let learnt = conversation.learnt.lock().unwrap().clone();
            let id = conversation.id.clone();
            learnt.into_iter().map(move |learnt| (id.clone(), learnt))
        });
        let history = History {
            sent,
            learnt: learnt.collect(),
            faults: std::mem::take(&mut *self.load.faults.lock().unwrap()),
        };
        (self.load, history, tallies)
    }
}

impl Load {
    pub fn acknowledged(&self) -> usize {
        self.acknowledged.load(Ordering::SeqCst)
    }

    pub fn traffic(&self, node: usize) -> &Traffic {
        &self.traffic[node]
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Until so many are acknowledged, or everyone is to stop.
    async fn wait_for(&self, acknowledged: usize) {
        while !self.is_stopping() && self.acknowledged() < acknowledged {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn event(&self) -> u64 {
        self.events.fetch_add(1, Ordering::SeqCst)
    }

    fn fault(&self, what: String) {
        self.faults.lock().unwrap().push(what);
    }

    fn post(&self, node: usize, id: &str, what: &str) -> reqwest::RequestBuilder {
        let path = format!("/v1/sessions/{id}/{what}");
        let request = self.nodes.client.post(self.nodes.url_on(node, &path));
        request.bearer_auth(&self.key)
    }

    /// Sends a request of which `busy` counts those under way. A node may only fail when it was killed; but
    /// on a busy machine it may find itself too busy.
    async fn ask(
        &self,
        node: usize,
        busy: &AtomicUsize,
        request: reqwest::RequestBuilder,
    ) -> WriteAck {
        let before = self.nodes.changes(node);
        busy.fetch_add(1, Ordering::SeqCst);
        let reply = Reply::try_of(request).await;
        busy.fetch_sub(1, Ordering::SeqCst);
        let lived = before.is_multiple_of(2) && self.nodes.changes(node) == before;
        let traffic = &self.traffic[node];
        match reply {
            Ok(reply) if reply.status < 500 && reply.code() != "busy" => WriteAck::Answer(reply),
            Ok(reply) => {
                if ![429, 503].contains(&reply.status) {
                    self.fault(format!("node {node} answered {}", reply.body));
                } else if lived {
                    traffic.unavailable.fetch_add(1, Ordering::SeqCst);
                }
                WriteAck::Nothing
            }
            Err(error) => {
                if lived {
                    self.fault(format!("node {node} lived and failed: {error:?}"));
                }
                traffic.failures.fetch_add(1, Ordering::SeqCst);
                if error.is_connect() {
                    WriteAck::NotSent
                } else {
                    WriteAck::Nothing
                }
            }
        }
    }
}

impl Conversation {
    fn learn(&self, id: &Value) {
        let id = id.as_str().unwrap().to_owned();
        let mut learnt = self.learnt.lock().unwrap();
        if learnt.last() != Some(&id) {
            learnt.retain(|known| *known != id);
            learnt.push(id);
        }
    }

    /// The first id, the newest, or any.
    fn some_id(&self, dice: &mut Dice) -> String {
        let learnt = self.learnt.lock().unwrap();
        match dice.below(3) {
            0 => self.id.clone(),
            1 => learnt[learnt.len() - 1].clone(),
            _ => dice.pick(&learnt).clone(),
        }
    }
}

/// Appends one message after the other to one conversation. One that stays without an answer is sent
/// again under its key, to any node, until there is one; a forgetful writer leaves it at that.
async fn write(load: Arc<Load>, number: usize, mut dice: Dice) -> Vec<Sent> {
    let conversation = &load.conversations[WRITERS[number]];
    let forgetful = FORGETFUL.contains(&number);
    let mut written = Vec::new();
    let mut last_seen = 0;
    while !load.is_stopping() {
        let text = format!("w{number}-{}", written.len());
        let id = conversation.some_id(&mut dice);
        let message = if dice.one_in(2) {
            user_message(&text)
        } else {
            assistant_message(&text)
        };
        // Often out of date, as others write here too: what is refused must not be there.
        let expected = dice.one_in(5).then_some(last_seen);
        let mut sent = Sent::new(text, &conversation.id, load.event());
        loop {
            let node = dice.below(load.nodes.count());
            let mut request = load
                .post(node, &id, "messages")
                .json(&json!({"messages": [message]}));
            if !forgetful {
                request = request.header("idempotency-key", &sent.text);
            }
            if let Some(expected) = expected {
                request = request.header("if-match", format!("\"{expected}\""));
            }
            let busy = &load.traffic[node].appends;
            match load.ask(node, busy, request).await {
                WriteAck::Answer(reply) if reply.status == 201 => {
                    let body = reply.expect(201);
                    let seq = body.number("/messages/0/seq");
                    conversation.learn(&body["session_id"]);
                    load.acknowledged.fetch_add(1, Ordering::SeqCst);
                    last_seen = seq;
                    sent.replayed = reply.headers.contains_key("idempotency-replayed");
                    sent.outcome = Outcome::Acknowledged {
                        session_id: body.text("session_id").to_owned(),
                        seq,
                    };
                    break;
                }
                WriteAck::Answer(reply) => {
                    if reply.status != 412 || expected.is_none() {
                        load.fault(format!("{} was answered {}", sent.text, reply.body));
                    }
                    sent.outcome = Outcome::Refused;
                    break;
                }
                WriteAck::NotSent => {}
                WriteAck::Nothing => {
                    sent.doubts += 1;
                    if forgetful {
                        break;
                    }
                }
            }
        }
        sent.settled_at = load.event();
        written.push(sent);
    }
    written
}

/// Compresses some conversation whenever something was said, and now and then takes it back at once.
async fn compress(load: Arc<Load>, number: usize, mut dice: Dice) -> Tally {
    let mut tally = Tally::default();
    for count in 0.. {
        load.wait_for(load.acknowledged() + dice.below(20)).await;
        if load.is_stopping() {
            break;
        }
        let conversation = dice.pick(&load.conversations);
        let summary = format!("summary-{number}-{count}");
        let body = json!({"summary": summary, "keep_last": KEEP_LAST});
        let node = dice.below(load.nodes.count());
        let id = conversation.some_id(&mut dice);
        let request = load.post(node, &id, "compress").json(&body);
        let busy = &load.traffic[node].compressions;
        let heard = load.ask(node, busy, request).await;
        if let Some(reply) = tally.settle(&load, heard) {
            let body = reply.expect(reply.status);
            conversation.learn(&body["parent_id"]);
            conversation.learn(&body["session_id"]);
            match reply.status {
                201 => tally.compressed += 1,
                _ => tally.already_compressed += 1,
            }
        }
        if dice.one_in(2) {
            let node = dice.below(load.nodes.count());
            let id = conversation.some_id(&mut dice);
            let busy = &load.traffic[node].compressions;
            let heard = load
                .ask(node, busy, load.post(node, &id, "uncompress"))
                .await;
            if let Some(reply) = tally.settle(&load, heard) {
                conversation.learn(&reply.expect(200)["id"]);
                tally.undone += 1;
            }
        }
    }
    tally
}

impl Tally {
    /// The answer, if it is a yes.
    fn settle(&mut self, load: &Load, heard: WriteAck) -> Option<Reply> {
        match heard {
            WriteAck::Answer(reply) if matches!(reply.status, 200 | 201) => return Some(reply),
            WriteAck::Answer(reply) if matches!(reply.status, 409 | 422) => self.refused += 1,
            WriteAck::Answer(reply) => {
                load.fault(format!("a compressor was answered {}", reply.body));
            }
            WriteAck::Nothing => self.unknown += 1,
            WriteAck::NotSent => {}
        }
        None
    }
}
