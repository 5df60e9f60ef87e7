//! The subscriptions of this node, and how notifications reach them: at once from this node, through Redis from
//! the others. A notification only wakes its subscribers: they read what is new, and poll now and then anyway.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::ids::{BootId, SessionId, TenantId, TurnId};
use crate::notification::{Notification, Notifier, Topic};
use crate::redis::Redis;
use crate::redis::pubsub::{Publisher, Subscriptions};

/// Notifications that wait for Redis. One that does not fit is lost, which only delays.
const MAX_QUEUED: usize = 10_000;
const BATCH: usize = 256;
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// How long nothing arrives before the connection is checked.
const PING_AFTER: Duration = Duration::from_secs(5);

/// Cheap to clone; all clones are of one node.
#[derive(Clone)]
pub struct Notifications {
    inner: Arc<Inner>,
}

struct Inner {
    node: BootId,
    topics: Mutex<HashMap<Topic, Subscribers>>,
    running_turns: Mutex<HashMap<TurnId, Arc<Notify>>>,
    queue: mpsc::Sender<Notification>,
    queued: Mutex<Option<mpsc::Receiver<Notification>>>,
    /// Topics whose first subscriber came or whose last one left, while Redis is connected: a new connection
    /// begins with all topics that have subscribers by then.
    changes: Mutex<Option<HashSet<Topic>>>,
    topics_changed: Notify,
    is_connected: AtomicBool,
    /// What has to be polled once, because its notifications may have been lost.
    missed: Mutex<Missed>,
    has_missed: Notify,
}

/// Conversations whose notifications may have been lost.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Missed {
    /// Those of all conversations.
    pub all: bool,
    pub conversations: HashSet<SessionId>,
}

struct Subscribers {
    version: watch::Sender<u64>,
    count: usize,
}

impl Notifications {
    pub fn new(node: BootId) -> Self {
        let (queue, queued) = mpsc::channel(MAX_QUEUED);
        Self {
            inner: Arc::new(Inner {
                node,
                topics: Mutex::default(),
                running_turns: Mutex::default(),
                queue,
                queued: Mutex::new(Some(queued)),
                changes: Mutex::default(),
                topics_changed: Notify::new(),
                is_connected: AtomicBool::new(false),
                missed: Mutex::default(),
                has_missed: Notify::new(),
            }),
        }
    }

    /// What a transaction calls once it is committed.
    pub fn notifier(&self) -> Notifier {
        let notifications = self.clone();
        Arc::new(move |notification| notifications.publish(notification))
    }

    /// Wakes the subscribers of this node at once, and those of the others through Redis.
    fn publish(&self, notification: Notification) {
        match notification {
            Notification::Changed(topic) => self.wake(topic),
            Notification::Turn(node, turn_id) if node == self.inner.node => {
                return self.wake_turn(turn_id);
            }
            Notification::Turn(..) => {}
        }
        let _ = self.inner.queue.try_send(notification);
    }

    /// Subscribes to what happens in a conversation from now on.
    pub fn subscribe(&self, conversation_id: SessionId) -> Subscription {
        self.subscribe_to(Topic::Conversation(conversation_id))
    }

    /// The same for the deliveries of a tenant.
    pub fn subscribe_deliveries(&self, tenant_id: TenantId) -> Subscription {
        self.subscribe_to(Topic::Deliveries(tenant_id))
    }

    fn subscribe_to(&self, topic: Topic) -> Subscription {
        let mut topics = self.topics();
        let subscribers = topics.entry(topic).or_insert_with(|| {
            self.note_change(topic);
            Subscribers {
                version: watch::Sender::new(0),
                count: 0,
            }
        });
        subscribers.count += 1;
        Subscription {
            notifications: self.clone(),
            topic,
            version: subscribers.version.subscribe(),
        }
    }

    fn note_change(&self, topic: Topic) {
        if let Some(changes) = self.changes().as_mut() {
            changes.insert(topic);
            self.inner.topics_changed.notify_one();
        }
    }

    fn changes(&self) -> MutexGuard<'_, Option<HashSet<Topic>>> {
        self.inner
            .changes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The notifications of a turn that runs on this node.
    pub fn run_turn(&self, turn_id: TurnId) -> RunningTurn {
        let woken = Arc::new(Notify::new());
        self.running_turns().insert(turn_id, woken.clone());
        RunningTurn {
            notifications: self.clone(),
            turn_id,
            woken,
        }
    }

    /// Whether notifications of other nodes arrive. While they do not, subscribers poll more often.
    pub fn is_connected(&self) -> bool {
        self.inner.is_connected.load(Ordering::Relaxed)
    }

    fn wake(&self, topic: Topic) {
        if let Some(subscribers) = self.topics().get(&topic) {
            subscribers.version.send_modify(|version| *version += 1);
        }
    }

    /// For topics whose notifications may have been lost: those who wait for deliveries poll at once, and
    /// conversations are polled together.
    fn miss(&self, topics: &[Topic]) {
        for topic in topics {
            match topic {
                Topic::Conversation(id) => drop(self.missed().conversations.insert(*id)),
                Topic::Deliveries(_) => self.wake(*topic),
            }
        }
        self.inner.has_missed.notify_one();
    }

    /// Notifications of other nodes do not arrive, or have not arrived until now.
    fn miss_all(&self) {
        let topics: Vec<Topic> = self.topics().keys().copied().collect();
        topics.into_iter().for_each(|topic| match topic {
            Topic::Conversation(_) => {}
            Topic::Deliveries(_) => self.wake(topic),
        });
        self.missed().all = true;
        self.inner.has_missed.notify_one();
    }

    /// Waits until notifications may have been lost.
    pub async fn has_missed(&self) {
        self.inner.has_missed.notified().await;
    }

    /// What may have been missed since the last call.
    pub fn take_missed(&self) -> Missed {
        std::mem::take(&mut *self.missed())
    }

    fn missed(&self) -> MutexGuard<'_, Missed> {
        self.inner
            .missed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_turn(&self, turn_id: TurnId) {
        if let Some(woken) = self.running_turns().get(&turn_id) {
            woken.notify_one();
        }
    }

    fn topics(&self) -> MutexGuard<'_, HashMap<Topic, Subscribers>> {
        self.inner
            .topics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn running_turns(&self) -> MutexGuard<'_, HashMap<TurnId, Arc<Notify>>> {
        self.inner
            .running_turns
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes its owner when its topic changes, until it is dropped.
pub struct Subscription {
    notifications: Notifications,
    topic: Topic,
    version: watch::Receiver<u64>,
}

/// Another receiver of a `Subscription`'s notifications, for as long as that lives.
pub struct Changes(watch::Receiver<u64>);

impl Changes {
    /// Waits for a change since the last time this was waited for.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            // The subscription has ended, so nothing more arrives.
            std::future::pending::<()>().await;
        }
    }
}

impl Subscription {
    /// Waits for a change since the last time this was waited for.
    pub async fn changed(&mut self) {
        // The sender lives as long as there is a subscriber, and this is one.
        drop(self.version.changed().await);
    }

    /// Grows with each change.
    pub fn version(&self) -> u64 {
        *self.version.borrow()
    }

    pub fn changes(&self) -> Changes {
        let mut version = self.version.clone();
        version.mark_unchanged();
        Changes(version)
    }

    /// Wakes the topic's subscribers on this node.
    pub fn wake(&self) {
        self.notifications.wake(self.topic);
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut topics = self.notifications.topics();
        let Some(subscribers) = topics.get_mut(&self.topic) else {
            return;
        };
        subscribers.count -= 1;
        if subscribers.count == 0 {
            topics.remove(&self.topic);
            self.notifications.note_change(self.topic);
        }
    }
}

/// Wakes the task that runs a turn, until it is dropped.
pub struct RunningTurn {
    notifications: Notifications,
    turn_id: TurnId,
    woken: Arc<Notify>,
}

impl RunningTurn {
    pub async fn woken(&self) {
        self.woken.notified().await;
    }
}

impl Drop for RunningTurn {
    fn drop(&mut self) {
        let mut running_turns = self.notifications.running_turns();
        // A turn that came back to this node may be run by another task by now.
        let own = |woken: &Arc<Notify>| Arc::ptr_eq(woken, &self.woken);
        if running_turns.get(&self.turn_id).is_some_and(own) {
            running_turns.remove(&self.turn_id);
        }
    }
}

/// Publishes to the other nodes, until `stop` is cancelled.
pub async fn publish_loop(notifications: Notifications, redis: Redis, stop: CancellationToken) {
    let Some(mut queued) = take(&notifications.inner.queued) else {
        return;
    };
    let mut publisher = Publisher::new(redis, notifications.inner.node);
    let mut batch = Vec::with_capacity(BATCH);
    loop {
        tokio::select! {
            biased;
            count = queued.recv_many(&mut batch, BATCH) => if count == 0 { return },
            () = stop.cancelled() => return,
        }
        batch.dedup();
        if let Err(error) = publisher.publish(&batch).await {
            tracing::debug!(error = %error, "publish failed");
        }
        batch.clear();
    }
}

/// Receives the notifications of the other nodes, until `stop` is cancelled.
pub async fn subscribe_loop(notifications: Notifications, redis: Redis, stop: CancellationToken) {
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = listen(&notifications, &redis) => {}
        }
        *notifications.changes() = None;
        if notifications
            .inner
            .is_connected
            .swap(false, Ordering::Relaxed)
        {
            notifications.miss_all();
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RECONNECT_PAUSE) => {}
        }
    }
}

/// Listens on one connection until it ends.
async fn listen(notifications: &Notifications, redis: &Redis) {
    let (mut subscriptions, mut incoming) = match redis.listen(notifications.inner.node).await {
        Ok(both) => both,
        Err(error) => {
            tracing::debug!(error = %error, "subscribe failed");
            return;
        }
    };
    // Before the list of topics is read: what comes later is a change.
    *notifications.changes() = Some(HashSet::new());
    let topics: Vec<Topic> = notifications.topics().keys().copied().collect();
    if subscriptions.change(&topics, true).await.is_err() {
        return;
    }
    notifications
        .inner
        .is_connected
        .store(true, Ordering::Relaxed);
    // What was published while there was no connection is lost.
    notifications.miss_all();
    loop {
        tokio::select! {
            notification = incoming.next() => match notification {
                Some(Notification::Changed(topic)) => notifications.wake(topic),
                Some(Notification::Turn(_, turn_id)) => notifications.wake_turn(turn_id),
                None => return,
            },
            () = notifications.inner.topics_changed.notified() => {
                if change_subscriptions(notifications, &mut subscriptions).await.is_err() {
                    return;
                }
            }
            // A connection whose other end vanished looks like one on which nothing happens.
            () = tokio::time::sleep(PING_AFTER) => {
                if subscriptions.ping().await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Subscribes in Redis to the topics that have subscribers now, whatever the order of the changes was.
async fn change_subscriptions(
    notifications: &Notifications,
    subscriptions: &mut Subscriptions,
) -> crate::error::Result<()> {
    let changed = notifications
        .changes()
        .replace(HashSet::new())
        .unwrap_or_default();
    let (wanted, unwanted): (Vec<Topic>, Vec<Topic>) = {
        let topics = notifications.topics();
        changed
            .into_iter()
            .partition(|topic| topics.contains_key(topic))
    };
    subscriptions.change(&wanted, true).await?;
    subscriptions.change(&unwanted, false).await?;
    // Something may have been published before the subscription held.
    notifications.miss(&wanted);
    Ok(())
}

fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(id: SessionId) -> Notification {
        Notification::Changed(Topic::Conversation(id))
    }

    #[tokio::test]
    async fn subscribers_are_woken_and_forgotten_when_dropped() {
        let notifications = Notifications::new(BootId::generate());
        let id = SessionId::generate();
        notifications.publish(changed(id));
        let mut one = notifications.subscribe(id);
        let mut two = notifications.subscribe(id);
        notifications.publish(changed(id));
        one.changed().await;
        two.changed().await;
        drop(one);
        notifications.publish(changed(id));
        two.changed().await;
        drop(two);
        assert!(notifications.topics().is_empty());
    }

    #[tokio::test]
    async fn without_redis_no_changes_are_collected_for_it() {
        let notifications = Notifications::new(BootId::generate());
        for _ in 0..1000 {
            drop(notifications.subscribe(SessionId::generate()));
        }
        assert!(notifications.changes().is_none());
        *notifications.changes() = Some(HashSet::new());
        let subscription = notifications.subscribe(SessionId::generate());
        assert_eq!(notifications.changes().as_ref().unwrap().len(), 1);
        drop(subscription);
    }

    #[tokio::test]
    async fn a_running_turn_is_woken_by_its_own_notifications_alone() {
        let notifications = Notifications::new(BootId::generate());
        let node = notifications.inner.node;
        let turn = TurnId::generate();
        let other = TurnId::generate();
        let running = notifications.run_turn(turn);
        notifications.publish(Notification::Turn(node, turn));
        running.woken().await;
        notifications.publish(Notification::Turn(node, other));
        notifications.publish(Notification::Turn(BootId::generate(), turn));
        let again = tokio::time::timeout(Duration::from_millis(20), running.woken()).await;
        assert!(again.is_err());
        let second = notifications.run_turn(turn);
        drop(running);
        notifications.publish(Notification::Turn(node, turn));
        second.woken().await;
    }
}
