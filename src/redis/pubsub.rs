//! Publish and subscribe between nodes, over Redis: one channel for each topic, and one for each node.

use deadpool_redis::Connection;
use deadpool_redis::redis::aio::{PubSubSink, PubSubStream};
use deadpool_redis::redis::{Client, Msg, RedisResult, pipe};
use futures_util::StreamExt;
use tokio::time::error::Elapsed;

use super::{Redis, WAIT};
use crate::error::{Error, Result};
use crate::ids::BootId;
use crate::notification::{Notification, Topic};

const CONVERSATION: &str = "throughline:conversation:";
const DELIVERIES: &str = "throughline:deliveries:";
const NODE: &str = "throughline:node:";
/// Topics per subscribe command.
const BATCH: usize = 1000;

fn channel(topic: Topic) -> String {
    match topic {
        Topic::Conversation(id) => format!("{CONVERSATION}{id}"),
        Topic::Deliveries(id) => format!("{DELIVERIES}{id}"),
    }
}

fn topic_of(channel: &str) -> Option<Topic> {
    if let Some(id) = channel.strip_prefix(CONVERSATION) {
        return id.parse().ok().map(Topic::Conversation);
    }
    let id = channel.strip_prefix(DELIVERIES)?;
    id.parse().ok().map(Topic::Deliveries)
}

/// Keeps its connection: one from the pool is first asked, each time, whether it still lives.
pub struct Publisher {
    redis: Redis,
    node: BootId,
    connection: Option<Connection>,
}

impl Publisher {
    pub fn new(redis: Redis, node: BootId) -> Self {
        Self {
            redis,
            node,
            connection: None,
        }
    }

    pub async fn publish(&mut self, notifications: &[Notification]) -> Result<()> {
        let mut all = pipe();
        for notification in notifications {
            let (channel, payload) = match notification {
                Notification::Changed(topic) => (channel(*topic), self.node.to_string()),
                Notification::Turn(node, turn) => (format!("{NODE}{node}"), turn.to_string()),
            };
            all.publish(channel, payload).ignore();
        }
        let open = self.connection.take();
        let pool = &self.redis.pool;
        let publishing = async {
            let mut connection = match open {
                Some(connection) => connection,
                None => pool.get().await.map_err(anyhow::Error::from)?,
            };
            let published = all.query_async::<()>(&mut connection).await;
            published.map_err(anyhow::Error::from)?;
            Ok::<Connection, anyhow::Error>(connection)
        };
        match tokio::time::timeout(WAIT, publishing).await {
            Ok(Ok(connection)) => {
                self.connection = Some(connection);
                Ok(())
            }
            Ok(Err(cause)) => Err(Error::unavailable("Redis", cause)),
            Err(late) => Err(Error::unavailable("Redis", late)),
        }
    }
}

impl Redis {
    /// A connection of its own, on which notifications arrive: those to `node`, and those that are subscribed to.
    pub async fn listen(&self, node: BootId) -> Result<(Subscriptions, PubSub)> {
        let opening = async {
            let client = Client::open(self.url()).map_err(anyhow::Error::from)?;
            let pubsub = client
                .get_async_pubsub()
                .await
                .map_err(anyhow::Error::from)?;
            let (mut sink, stream) = pubsub.split();
            sink.subscribe(format!("{NODE}{node}"))
                .await
                .map_err(anyhow::Error::from)?;
            Ok::<_, anyhow::Error>((Subscriptions { sink, node }, PubSub { stream, node }))
        };
        match tokio::time::timeout(WAIT, opening).await {
            Ok(Ok(both)) => Ok(both),
            Ok(Err(cause)) => Err(Error::unavailable("Redis", cause)),
            Err(late) => Err(Error::unavailable("Redis", late)),
        }
    }
}

pub struct Subscriptions {
    sink: PubSubSink,
    node: BootId,
}

impl Subscriptions {
    /// Subscribes to these topics, or unsubscribes.
    pub async fn change(&mut self, topics: &[Topic], wanted: bool) -> Result<()> {
        for topics in topics.chunks(BATCH) {
            let channels: Vec<String> = topics.iter().map(|topic| channel(*topic)).collect();
            let changed = if wanted {
                tokio::time::timeout(WAIT, self.sink.subscribe(channels)).await
            } else {
                tokio::time::timeout(WAIT, self.sink.unsubscribe(channels)).await
            };
            answered(changed)?;
        }
        Ok(())
    }

    /// Whether Redis answers on this connection. It repeats a subscription that exists already.
    pub async fn ping(&mut self) -> Result<()> {
        let own = format!("{NODE}{}", self.node);
        answered(tokio::time::timeout(WAIT, self.sink.subscribe(own)).await)
    }
}

fn answered(answer: std::result::Result<RedisResult<()>, Elapsed>) -> Result<()> {
    match answer {
        Ok(answer) => answer.map_err(|error| Error::unavailable("Redis", error)),
        Err(late) => Err(Error::unavailable("Redis", late)),
    }
}

pub struct PubSub {
    stream: PubSubStream,
    node: BootId,
}

impl PubSub {
    /// The next notification; `None` when the connection has ended.
    pub async fn next(&mut self) -> Option<Notification> {
        loop {
            let message = self.stream.next().await?;
            if let Some(notification) = self.read(&message) {
                return Some(notification);
            }
        }
    }

    fn read(&self, message: &Msg) -> Option<Notification> {
        let payload: String = message.get_payload().ok()?;
        match topic_of(message.get_channel_name()) {
            // Subscribers of this node were woken when it published.
            Some(_) if payload == self.node.to_string() => None,
            Some(topic) => Some(Notification::Changed(topic)),
            None => Some(Notification::Turn(self.node, payload.parse().ok()?)),
        }
    }
}
