//! Publish and subscribe between nodes: that something happened in a conversation, or that a node should look at a turn.
//! A poke says only where to look; a lost one delays, and a forged one makes somebody look in vain.

use deadpool_redis::Connection;
use deadpool_redis::redis::aio::{PubSubSink, PubSubStream};
use deadpool_redis::redis::{Client, Msg, RedisResult, pipe};
use futures_util::StreamExt;
use tokio::time::error::Elapsed;

use super::{Redis, WAIT};
use crate::error::{Error, Result};
use crate::ids::{BootId, SessionId, TenantId, TurnId};

const CONVERSATION: &str = "throughline:conversation:";
const DELIVERIES: &str = "throughline:deliveries:";
const NODE: &str = "throughline:node:";
/// Topics that are subscribed to with one command.
const AT_ONCE: usize = 1000;

/// Where news are watched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Topic {
    Conversation(SessionId),
    Deliveries(TenantId),
}

impl Topic {
    fn channel(self) -> String {
        match self {
            Self::Conversation(id) => format!("{CONVERSATION}{id}"),
            Self::Deliveries(id) => format!("{DELIVERIES}{id}"),
        }
    }

    fn of_channel(channel: &str) -> Option<Self> {
        if let Some(id) = channel.strip_prefix(CONVERSATION) {
            return id.parse().ok().map(Self::Conversation);
        }
        let id = channel.strip_prefix(DELIVERIES)?;
        id.parse().ok().map(Self::Deliveries)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Notification {
    /// There is something new.
    News(Topic),
    /// The node that runs it should look at this turn.
    Turn(BootId, TurnId),
}

/// Tells pokes. Keeps its connection: one from the pool is asked first, each time, whether it still lives.
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

    pub async fn publish(&mut self, pokes: &[Notification]) -> Result<()> {
        let mut all = pipe();
        for notify in pokes {
            let (channel, payload) = match notify {
                Notification::News(topic) => (topic.channel(), self.node.to_string()),
                Notification::Turn(node, turn) => (format!("{NODE}{node}"), turn.to_string()),
            };
            all.publish(channel, payload).ignore();
        }
        let kept = self.connection.take();
        let pool = &self.redis.pool;
        let asking = async {
            let mut connection = match kept {
                Some(connection) => connection,
                None => pool.get().await.map_err(anyhow::Error::from)?,
            };
            let told = all.query_async::<()>(&mut connection).await;
            told.map_err(anyhow::Error::from)?;
            Ok::<Connection, anyhow::Error>(connection)
        };
        match tokio::time::timeout(WAIT, asking).await {
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
    /// A connection of its own, on which pokes arrive: those to `node`, and what is asked for.
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
    /// From now on, or no longer, pokes of these topics arrive.
    pub async fn change(&mut self, topics: &[Topic], wanted: bool) -> Result<()> {
        for topics in topics.chunks(AT_ONCE) {
            let channels: Vec<String> = topics.iter().map(|topic| topic.channel()).collect();
            let changed = if wanted {
                tokio::time::timeout(WAIT, self.sink.subscribe(channels)).await
            } else {
                tokio::time::timeout(WAIT, self.sink.unsubscribe(channels)).await
            };
            answered(changed)?;
        }
        Ok(())
    }

    /// Whether Redis answers on this connection. What it subscribes to has been subscribed to before.
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
    /// The next poke; `None` when the connection has ended.
    pub async fn next(&mut self) -> Option<Notification> {
        loop {
            let message = self.stream.next().await?;
            if let Some(notify) = self.read(&message) {
                return Some(notify);
            }
        }
    }

    fn read(&self, message: &Msg) -> Option<Notification> {
        let payload: String = message.get_payload().ok()?;
        match Topic::of_channel(message.get_channel_name()) {
            // Who watches here was woken when this node told the others.
            Some(_) if payload == self.node.to_string() => None,
            Some(topic) => Some(Notification::News(topic)),
            None => Some(Notification::Turn(self.node, payload.parse().ok()?)),
        }
    }
}
