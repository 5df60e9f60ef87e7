//! Who watches what on this node, and how they hear of news: at once from this node, and through Redis from
//! the others. Nothing here is the truth: whoever is woken looks it up, and looks now and then anyway.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::ids::{BootId, SessionId, TenantId, TurnId};
use crate::redis::Redis;
use crate::redis::pubsub::{Notification, Publisher, Subscriptions, Topic};

/// Notifications that wait for Redis; what does not fit is lost, which only delays.
const QUEUED_NOTIFICATIONS: usize = 10_000;
const BATCH: usize = 256;
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// How long nothing arrives before the connection is tried.
const PING: Duration = Duration::from_secs(5);

/// Cheap to clone; all clones are of one node.
#[derive(Clone)]
pub struct Live {
    inner: Arc<Inner>,
}

struct Inner {
    node: BootId,
    watched: Mutex<HashMap<Topic, Watched>>,
    runners: Mutex<HashMap<TurnId, Arc<Notify>>>,
    pokes: mpsc::Sender<Notification>,
    outgoing: Mutex<Option<mpsc::Receiver<Notification>>>,
    /// Topics that somebody began or ceased to watch, while there is a subscriber to follow that: whoever
    /// subscribes later begins with what is watched by then.
    changes: Mutex<Option<HashSet<Topic>>>,
    changed: Notify,
    is_connected: AtomicBool,
    /// Conversations of which news may have been missed; somebody has to look.
    unsure: Mutex<Unsure>,
    became_unsure: Notify,
}

/// What may have been missed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Unsure {
    /// News of all conversations.
    pub all: bool,
    pub conversations: HashSet<SessionId>,
}

struct Watched {
    news: watch::Sender<u64>,
    watchers: usize,
}

impl Live {
    pub fn new(node: BootId) -> Self {
        let (pokes, outgoing) = mpsc::channel(QUEUED_NOTIFICATIONS);
        Self {
            inner: Arc::new(Inner {
                node,
                watched: Mutex::default(),
                runners: Mutex::default(),
                pokes,
                outgoing: Mutex::new(Some(outgoing)),
                changes: Mutex::default(),
                changed: Notify::new(),
                is_connected: AtomicBool::new(false),
                unsure: Mutex::default(),
                became_unsure: Notify::new(),
            }),
        }
    }

    /// Wakes who watches the conversation, on every node.
    pub fn notify(&self, conversation_id: SessionId) {
        self.notify_topic(Topic::Conversation(conversation_id));
    }

    /// Wakes who waits for deliveries of the tenant.
    pub fn notify_deliveries(&self, tenant_id: TenantId) {
        self.notify_topic(Topic::Deliveries(tenant_id));
    }

    fn notify_topic(&self, topic: Topic) {
        self.wake(topic);
        let _ = self.inner.pokes.try_send(Notification::News(topic));
    }

    /// Wakes who runs the turn, on the node that does.
    pub fn notify_turn(&self, node: Option<BootId>, turn_id: TurnId) {
        match node {
            Some(node) if node == self.inner.node => self.wake_runner(turn_id),
            Some(node) => drop(self.inner.pokes.try_send(Notification::Turn(node, turn_id))),
            None => {}
        }
    }

    /// Watches a conversation until the answer is dropped. News from before are not told.
    pub fn watch(&self, conversation_id: SessionId) -> Watching {
        self.watch_topic(Topic::Conversation(conversation_id))
    }

    /// The same for the deliveries of a tenant.
    pub fn watch_deliveries(&self, tenant_id: TenantId) -> Watching {
        self.watch_topic(Topic::Deliveries(tenant_id))
    }

    fn watch_topic(&self, topic: Topic) -> Watching {
        let mut watched = self.watched();
        let entry = watched.entry(topic).or_insert_with(|| {
            self.note_change(topic);
            Watched {
                news: watch::Sender::new(0),
                watchers: 0,
            }
        });
        entry.watchers += 1;
        Watching {
            live: self.clone(),
            topic,
            news: entry.news.subscribe(),
        }
    }

    fn note_change(&self, topic: Topic) {
        if let Some(changes) = self.changes().as_mut() {
            changes.insert(topic);
            self.inner.changed.notify_one();
        }
    }

    fn changes(&self) -> MutexGuard<'_, Option<HashSet<Topic>>> {
        self.inner
            .changes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Is woken when somebody asks to look at the turn, until the answer is dropped.
    pub fn run(&self, turn_id: TurnId) -> Running {
        let woken = Arc::new(Notify::new());
        self.runners().insert(turn_id, woken.clone());
        Running {
            live: self.clone(),
            turn_id,
            woken,
        }
    }

    /// Whether news of other nodes arrive. While they do not, whoever watches looks more often.
    pub fn is_connected(&self) -> bool {
        self.inner.is_connected.load(Ordering::Relaxed)
    }

    fn wake(&self, topic: Topic) {
        if let Some(watched) = self.watched().get(&topic) {
            watched.news.send_modify(|count| *count += 1);
        }
    }

    /// For topics of which news may have been missed: whoever waits for deliveries looks at once, and
    /// conversations are looked at together.
    fn miss(&self, topics: &[Topic]) {
        for topic in topics {
            match topic {
                Topic::Conversation(id) => drop(self.unsure().conversations.insert(*id)),
                Topic::Deliveries(_) => self.wake(*topic),
            }
        }
        self.inner.became_unsure.notify_one();
    }

    /// News of other nodes do not arrive, or have not arrived until now.
    fn miss_all(&self) {
        let topics: Vec<Topic> = self.watched().keys().copied().collect();
        topics.into_iter().for_each(|topic| match topic {
            Topic::Conversation(_) => {}
            Topic::Deliveries(_) => self.wake(topic),
        });
        self.unsure().all = true;
        self.inner.became_unsure.notify_one();
    }

    /// Waits until news may have been missed.
    pub async fn became_unsure(&self) {
        self.inner.became_unsure.notified().await;
    }

    /// What may have been missed since this was asked for the last time.
    pub fn take_unsure(&self) -> Unsure {
        std::mem::take(&mut *self.unsure())
    }

    fn unsure(&self) -> MutexGuard<'_, Unsure> {
        self.inner
            .unsure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_runner(&self, turn_id: TurnId) {
        if let Some(woken) = self.runners().get(&turn_id) {
            woken.notify_one();
        }
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<Topic, Watched>> {
        self.inner
            .watched
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn runners(&self) -> MutexGuard<'_, HashMap<TurnId, Arc<Notify>>> {
        self.inner
            .runners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody who watches.
pub struct Watching {
    live: Live,
    topic: Topic,
    news: watch::Receiver<u64>,
}

/// Hears of what a `Watching` watches, for as long as that lives.
pub struct News(watch::Receiver<u64>);

impl News {
    /// Waits until something happened since the last time this was waited for.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            // Nobody watches any more, so nothing is heard.
            std::future::pending::<()>().await;
        }
    }
}

impl Watching {
    /// Waits until something happened since the last time this was waited for.
    pub async fn news(&mut self) {
        // The sender lives as long as somebody watches, and this one does.
        drop(self.news.changed().await);
    }

    /// How much has happened; grows with each piece of news.
    pub fn version(&self) -> u64 {
        *self.news.borrow()
    }

    pub fn subscribe(&self) -> News {
        let mut news = self.news.clone();
        news.mark_unchanged();
        News(news)
    }

    /// Wakes all who watch the same on this node.
    pub fn wake(&self) {
        self.live.wake(self.topic);
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut watched = self.live.watched();
        let Some(entry) = watched.get_mut(&self.topic) else {
            return;
        };
        entry.watchers -= 1;
        if entry.watchers == 0 {
            watched.remove(&self.topic);
            self.live.note_change(self.topic);
        }
    }
}

/// Somebody who runs a turn.
pub struct Running {
    live: Live,
    turn_id: TurnId,
    woken: Arc<Notify>,
}

impl Running {
    pub async fn woken(&self) {
        self.woken.notified().await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut runners = self.live.runners();
        // A turn that came back to this node may be run by another task by now.
        let own = |woken: &Arc<Notify>| Arc::ptr_eq(woken, &self.woken);
        if runners.get(&self.turn_id).is_some_and(own) {
            runners.remove(&self.turn_id);
        }
    }
}

/// Tells the other nodes, until `stop` is cancelled.
pub async fn publish_loop(live: Live, redis: Redis, stop: CancellationToken) {
    let taken = take(&live.inner.outgoing);
    let Some(mut outgoing) = taken else {
        return;
    };
    let mut publisher = Publisher::new(redis, live.inner.node);
    let mut batch = Vec::with_capacity(BATCH);
    loop {
        tokio::select! {
            biased;
            count = outgoing.recv_many(&mut batch, BATCH) => if count == 0 { return },
            () = stop.cancelled() => return,
        }
        batch.dedup();
        if let Err(error) = publisher.publish(&batch).await {
            tracing::debug!(error = %error, "other nodes were not told of news");
        }
        batch.clear();
    }
}

/// Listens to the other nodes, until `stop` is cancelled.
pub async fn subscribe_loop(live: Live, redis: Redis, stop: CancellationToken) {
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = listen(&live, &redis) => {}
        }
        *live.changes() = None;
        if live.inner.is_connected.swap(false, Ordering::Relaxed) {
            live.miss_all();
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RECONNECT_PAUSE) => {}
        }
    }
}

/// Listens on one connection until it ends.
async fn listen(live: &Live, redis: &Redis) {
    let (mut subscriptions, mut pokes) = match redis.listen(live.inner.node).await {
        Ok(both) => both,
        Err(error) => {
            tracing::debug!(error = %error, "news of other nodes do not arrive");
            return;
        }
    };
    // Before the list of what is watched: what comes later is a change.
    *live.changes() = Some(HashSet::new());
    let ids: Vec<Topic> = live.watched().keys().copied().collect();
    if subscriptions.change(&ids, true).await.is_err() {
        return;
    }
    live.inner.is_connected.store(true, Ordering::Relaxed);
    // Whatever happened while nobody listened.
    live.miss_all();
    loop {
        tokio::select! {
            notify = pokes.next() => match notify {
                Some(Notification::News(topic)) => live.wake(topic),
                Some(Notification::Turn(_, turn_id)) => live.wake_runner(turn_id),
                None => return,
            },
            () = live.inner.changed.notified() => {
                if change(live, &mut subscriptions).await.is_err() {
                    return;
                }
            }
            // A connection whose other end vanished looks like one on which nothing happens.
            () = tokio::time::sleep(PING) => {
                if subscriptions.ping().await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Makes what Redis tells us fit to what is watched now, whatever the order of the changes was.
async fn change(live: &Live, subscriptions: &mut Subscriptions) -> crate::error::Result<()> {
    let changed = live.changes().replace(HashSet::new()).unwrap_or_default();
    let (wanted, unwanted): (Vec<Topic>, Vec<Topic>) = {
        let watched = live.watched();
        changed.into_iter().partition(|id| watched.contains_key(id))
    };
    subscriptions.change(&wanted, true).await?;
    subscriptions.change(&unwanted, false).await?;
    // Something may have happened before Redis began to tell.
    live.miss(&wanted);
    Ok(())
}

fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whoever_watches_hears_of_news_and_is_forgotten_when_gone() {
        let live = Live::new(BootId::generate());
        let id = SessionId::generate();
        live.notify(id);
        let mut one = live.watch(id);
        let mut two = live.watch(id);
        live.notify(id);
        one.news().await;
        two.news().await;
        drop(one);
        live.notify(id);
        two.news().await;
        drop(two);
        assert!(live.watched().is_empty());
    }

    #[tokio::test]
    async fn while_nobody_listens_to_redis_nothing_is_kept_for_it() {
        let live = Live::new(BootId::generate());
        for _ in 0..1000 {
            drop(live.watch(SessionId::generate()));
        }
        assert!(live.changes().is_none());
        *live.changes() = Some(HashSet::new());
        let kept = live.watch(SessionId::generate());
        assert_eq!(live.changes().as_ref().unwrap().len(), 1);
        drop(kept);
    }

    #[tokio::test]
    async fn a_runner_is_woken_by_its_turn_alone() {
        let live = Live::new(BootId::generate());
        let turn = TurnId::generate();
        let other = TurnId::generate();
        let running = live.run(turn);
        live.notify_turn(Some(live.inner.node), turn);
        running.woken().await;
        live.notify_turn(Some(live.inner.node), other);
        live.notify_turn(Some(BootId::generate()), turn);
        let again = tokio::time::timeout(Duration::from_millis(20), running.woken()).await;
        assert!(again.is_err());
        let second = live.run(turn);
        drop(running);
        live.notify_turn(Some(live.inner.node), turn);
        second.woken().await;
    }
}
