//! Clients that talk to agents: each sends one message after the other, as a stream or whole, and sends it
//! again under its key until it knows what became of it. Others watch, and come back whenever the stream
//! breaks or they feel like it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use throughline::ids::TurnId;
use tokio::task::JoinSet;

use super::Dice;
use super::turn_history::{
    Conversation, Disposition, EndedTurn, Line, ReceivedEvent, ReceivedEvents, SentMessage,
    TurnHistory, TurnsState,
};
use crate::support::chat::{agent_on, with_model};
use crate::support::conversations::{user_message, walk};
use crate::support::servers::model::{Model, Step};
use crate::support::servers::nodes::Nodes;
use crate::support::sse::{self, Sse, SseEvent};
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, eventually};

pub const CONVERSATIONS: usize = 50;
/// In some conversations two talk.
const SPEAKERS: usize = 60;
const WATCHERS: usize = 8;
const PAUSE: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(60);
/// Words come this far apart, so that answers are under way when something breaks.
const WORDS: Duration = Duration::from_millis(15);

pub struct Load {
    pub nodes: Nodes,
    key: String,
    _model: Model,
    stopping: AtomicBool,
    events: AtomicU64,
    faults: Mutex<Vec<String>>,
    /// For each node: answers, and calls that ended without one.
    pub answered: Vec<AtomicUsize>,
    pub failures: Vec<AtomicUsize>,
    /// For each conversation the last event there is, once nothing happens any more.
    last_events: Mutex<Option<HashMap<String, i64>>>,
}

pub struct Running {
    pub load: Arc<Load>,
    speakers: JoinSet<Vec<SentMessage>>,
    watchers: JoinSet<ReceivedEvents>,
}

enum WriteAck {
    Answer {
        turn: String,
        answer: String,
    },
    /// There will be no answer.
    Over {
        turn: String,
    },
    Refused(String),
    Nothing,
}

pub async fn start(nodes: Nodes, dice: &mut Dice) -> Running {
    let model = Model::start([]).await;
    model.otherwise(Step::Echo(WORDS));
    let tenant = nodes.client.post(nodes.url_on(0, "/v1/tenants"));
    let tenant = tenant
        .bearer_auth(OPERATOR_KEY)
        .json(&json!({"name": "Acme"}));
    let tenant = Reply::of(tenant).await.expect(201);
    let key = tenant.text("api_key").to_owned();
    let put = nodes.client.put(nodes.url_on(0, "/v1/agents/main"));
    let put = put.bearer_auth(&key).json(&agent_on(&model, json!({})));
    Reply::of(put).await.expect(200);
    let counters = || (0..nodes.count()).map(|_| AtomicUsize::new(0)).collect();
    let load = Arc::new(Load {
        answered: counters(),
        failures: counters(),
        nodes,
        key,
        _model: model,
        stopping: AtomicBool::new(false),
        events: AtomicU64::new(1),
        faults: Mutex::default(),
        last_events: Mutex::default(),
    });
    let mut running = Running {
        load: load.clone(),
        speakers: JoinSet::new(),
        watchers: JoinSet::new(),
    };
    for number in 0..SPEAKERS {
        running
            .speakers
            .spawn(speak(load.clone(), number, dice.split()));
    }
    for number in 0..WATCHERS {
        running
            .watchers
            .spawn(watch(load.clone(), number, dice.split()));
    }
    running
}

impl Running {
    /// Lets everyone finish, waits until no turn is active, and gives what was remembered and what is there.
    pub async fn stop(self) -> (Arc<Load>, TurnHistory, TurnsState) {
        let Self {
            load,
            speakers,
            watchers,
        } = self;
        load.stopping.store(true, Ordering::SeqCst);
        let asked = speakers.join_all().await.into_iter().flatten().collect();
        eventually("no turn is left active", PATIENCE, async || {
            load.active().await == 0
        })
        .await;
        let state = load.read().await;
        let last =
            |one: &Conversation| (one.id.clone(), one.events.last().map_or(0, |told| told.id));
        *load.last_events.lock().unwrap() = Some(state.conversations.iter().map(last).collect());
        let seen = watchers.join_all().await;
        let faults = std::mem::take(&mut *load.faults.lock().unwrap());
        let history = TurnHistory {
            asked,
            seen,
            faults,
        };
        (load, history, state)
    }
}

impl Load {
    pub fn acknowledged(&self) -> usize {
        self.answered
            .iter()
            .map(|node| node.load(Ordering::SeqCst))
            .sum()
    }

    pub fn failures_of(&self, node: usize) -> usize {
        self.failures[node].load(Ordering::SeqCst)
    }

    /// Waits until every node has answered a message that it had not answered when this was asked.
    pub async fn answers_everywhere(&self, what: &str, within: Duration) {
        let count = |node: &AtomicUsize| node.load(Ordering::SeqCst);
        let (before, began): (Vec<usize>, _) =
            (self.answered.iter().map(count).collect(), Instant::now());
        eventually(what, within, async || {
            let now = self.answered.iter().map(count);
            now.zip(&before).all(|(now, before)| now > *before)
        })
        .await;
        println!("{what}: within {:?}", began.elapsed());
    }

    fn event(&self) -> u64 {
        self.events.fetch_add(1, Ordering::SeqCst)
    }

    fn fault(&self, what: String) {
        self.faults.lock().unwrap().push(what);
    }

    async fn active(&self) -> i64 {
        sqlx::query_scalar("select count(*) from turns where ended_at is null")
            .fetch_one(&mut self.nodes.superuser().await)
            .await
            .unwrap()
    }

    async fn ask(&self, node: usize, asked: &SentMessage, stream: bool) -> WriteAck {
        let url = self.nodes.url_on(node, "/v1/chat/completions");
        let request = self.nodes.client.post(url).bearer_auth(&self.key);
        let request = request
            .header("x-hermes-session-id", &asked.conversation)
            .header("idempotency-key", asked.text.replace(' ', "-"))
            .json(&with_model(
                json!({"messages": [user_message(&asked.text)], "stream": stream}),
            ));
        let heard = match request.send().await {
            Err(_) => Ok(WriteAck::Nothing),
            Ok(response) if stream && response.status() == 200 => self.hear(response).await,
            Ok(response) => self.read_whole(response).await,
        };
        match heard {
            Ok(WriteAck::Answer { turn, answer }) => {
                self.answered[node].fetch_add(1, Ordering::SeqCst);
                WriteAck::Answer { turn, answer }
            }
            Ok(WriteAck::Nothing) | Err(_) => {
                self.failures[node].fetch_add(1, Ordering::SeqCst);
                WriteAck::Nothing
            }
            Ok(heard) => heard,
        }
    }

    async fn hear(&self, response: reqwest::Response) -> reqwest::Result<WriteAck> {
        let mut stream = Sse::of(response);
        let turn = stream.header("x-throughline-turn-id");
        let mut chunks: Vec<SseEvent> = Vec::new();
        while let Some(chunk) = stream.try_next().await? {
            if chunk.data == "[DONE]" {
                let answer = sse::text_of(&chunks);
                return Ok(WriteAck::Answer { turn, answer });
            }
            chunks.push(chunk);
        }
        let error = chunks.last().map(SseEvent::json).unwrap_or_default();
        Ok(match error["error"]["code"].as_str() {
            // A stream that just ends was broken off.
            None | Some("turn_restarted" | "unavailable") => WriteAck::Nothing,
            Some(_) => WriteAck::Over { turn },
        })
    }

    async fn read_whole(&self, response: reqwest::Response) -> reqwest::Result<WriteAck> {
        let status = response.status().as_u16();
        let head = response.headers().clone();
        let text = response.text().await?;
        let body: Value = serde_json::from_str(&text).unwrap_or_default();
        let turn = || body.text("/hermes/turn_id").to_owned();
        Ok(match (status, body["error"]["code"].as_str()) {
            (200, _) => WriteAck::Answer {
                turn: turn(),
                answer: body.text("/choices/0/message/content").to_owned(),
            },
            (503, _) | (_, Some("busy" | "too_many_turns" | "queue_full")) => WriteAck::Nothing,
            // The name of a turn that has no answer stands in the message.
            (_, Some(_)) if head.contains_key("x-should-retry") => {
                let message = body["error"]["message"].as_str().unwrap_or_default();
                let named = message
                    .strip_prefix("turn ")
                    .and_then(|rest| rest.split(':').next());
                match named {
                    Some(turn) => WriteAck::Over {
                        turn: turn.to_owned(),
                    },
                    None => WriteAck::Refused(text),
                }
            }
            _ => WriteAck::Refused(text),
        })
    }

    /// Everything there is, once nothing happens any more.
    async fn read(&self) -> TurnsState {
        let events = self.read_events().await;
        let mut conversations = Vec::new();
        for number in 0..CONVERSATIONS {
            let id = format!("c-{number}");
            let node = number % self.nodes.count();
            let url = |what: &str| self.nodes.url_on(node, &format!("/v1/sessions/{id}{what}"));
            let known = self.nodes.client.get(url("")).bearer_auth(&self.key);
            if Reply::of(known).await.status == 404 {
                continue;
            }
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let messages = walk(&self.nodes.client, &self.key, &url("/messages?limit=200")).await;
            let line = |message: &Value| Line {
                role: text(&message["role"]),
                text: text(&message["content"]),
                turn: text(&message["turn_id"]),
            };
            let turns = walk(&self.nodes.client, &self.key, &url("/turns?limit=200")).await;
            let turn = |turn: &Value| EndedTurn {
                id: text(&turn["id"]),
                state: text(&turn["state"]),
                reason: turn["reason"].as_str().map(str::to_owned),
                attempt: turn.number("attempt"),
            };
            let turns: Vec<EndedTurn> = turns.iter().rev().map(turn).collect();
            let mut events: Vec<ReceivedEvent> = turns
                .iter()
                .flat_map(|turn| events.get(&turn.id).cloned().unwrap_or_default())
                .collect();
            events.sort_by_key(|told| told.id);
            conversations.push(Conversation {
                transcript: messages.iter().map(line).collect(),
                id,
                turns,
                events,
            });
        }
        TurnsState { conversations }
    }

    /// For each turn its events, as a superuser sees them.
    async fn read_events(&self) -> HashMap<String, Vec<ReceivedEvent>> {
        let rows: Vec<(i64, TurnId, i32, String, Option<String>)> = sqlx::query_as(
            "select seq, turn_id, attempt, kind, data ->> 'text' from events order by seq",
        )
        .fetch_all(&mut self.nodes.superuser().await)
        .await
        .unwrap();
        let mut events: HashMap<String, Vec<ReceivedEvent>> = HashMap::new();
        for (id, turn, attempt, name, text) in rows {
            let turn = turn.to_string();
            events.entry(turn.clone()).or_default().push(ReceivedEvent {
                id,
                name,
                turn,
                attempt: attempt.into(),
                text: text.unwrap_or_default(),
            });
        }
        events
    }
}

async fn speak(load: Arc<Load>, number: usize, mut dice: Dice) -> Vec<SentMessage> {
    let mut all = Vec::new();
    while !load.stopping.load(Ordering::SeqCst) {
        let mut asked = SentMessage {
            text: format!("m{number}-{} with some more words", all.len()),
            conversation: format!("c-{}", number % CONVERSATIONS),
            sent_at: load.event(),
            settled_at: u64::MAX,
            became: Disposition::Unknown,
            doubts: 0,
        };
        // Part of what is asked: under its key a message is sent again as it was.
        let stream = dice.one_in(2);
        loop {
            let node = dice.below(load.nodes.count());
            match load.ask(node, &asked, stream).await {
                WriteAck::Answer { turn, answer } => {
                    asked.became = Disposition::Answered { turn, answer }
                }
                WriteAck::Over { turn } => asked.became = Disposition::Ended { turn },
                WriteAck::Refused(text) => {
                    load.fault(format!("{} was answered {text}", asked.text));
                    asked.became = Disposition::Refused;
                }
                WriteAck::Nothing => {
                    asked.doubts += 1;
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            }
            break;
        }
        asked.settled_at = load.event();
        all.push(asked);
    }
    all
}

/// Watches one conversation from its first event to its last.
async fn watch(load: Arc<Load>, number: usize, mut dice: Dice) -> ReceivedEvents {
    let mut seen = ReceivedEvents {
        conversation: format!("c-{number}"),
        events: Vec::new(),
    };
    let path = format!("/v1/sessions/{}/events", seen.conversation);
    let mut give_up: Option<Instant> = None;
    loop {
        let last = seen.events.last().map_or(0, |told| told.id);
        let known = load.last_events.lock().unwrap().clone();
        if let Some(known) = known {
            let until = *give_up.get_or_insert_with(|| Instant::now() + PATIENCE);
            if last >= known.get(&seen.conversation).copied().unwrap_or(0) || Instant::now() > until
            {
                return seen;
            }
        }
        let node = dice.below(load.nodes.count());
        let request = load.nodes.client.get(load.nodes.url_on(node, &path));
        let request = request
            .bearer_auth(&load.key)
            .header("last-event-id", last.to_string());
        match request.send().await {
            Ok(response) if response.status() == 200 => {
                read_some(&mut Sse::of(response), &mut seen, &mut dice).await;
            }
            Ok(_) | Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Reads until the stream ends or is quiet, or for a while.
async fn read_some(stream: &mut Sse, seen: &mut ReceivedEvents, dice: &mut Dice) {
    while !dice.one_in(60) {
        let next = tokio::time::timeout(Duration::from_secs(1), stream.try_next()).await;
        let Ok(Ok(Some(event))) = next else {
            return;
        };
        let Some(id) = event.id else {
            return;
        };
        let body = event.json();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        seen.events.push(ReceivedEvent {
            id,
            name: event.name.clone(),
            turn: text(&body["turn_id"]),
            attempt: body.number("attempt"),
            text: text(&body["data"]["text"]),
        });
    }
}
