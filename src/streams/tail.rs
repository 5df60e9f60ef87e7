//! The end of a conversation's events, read once for all its followers on this node. A follower that is behind the
//! kept events reads from the database itself.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use tokio::time::Instant;

use super::{BATCH, lock};
use crate::auth::ServiceCaller;
use crate::domain::turn::event::Event;
use crate::error::Result;
use crate::ids::{SessionId, TenantId, TurnId};
use crate::notifications::{Changes, Notifications, Subscription};
use crate::store::Db;
use crate::store::turn::events;

/// Events per read.
pub const MAX_BATCH: i64 = 100;
/// The events that are kept for followers. Slower ones read from the database.
const MAX_KEPT: usize = 200;
const MAX_KEPT_BYTES: usize = 256 * 1024;
/// A follower has read the events by then, or is slow.
const KEPT_FOR: std::time::Duration = std::time::Duration::from_secs(5);

type Name = (TenantId, SessionId);

/// The followed conversations of this node.
#[derive(Default)]
pub struct Tails {
    open: Arc<Mutex<HashMap<Name, Weak<Tail>>>>,
}

pub struct Tail {
    open: Arc<Mutex<HashMap<Name, Weak<Tail>>>>,
    pub tenant_id: TenantId,
    pub conversation_id: SessionId,
    subscription: Subscription,
    window: Mutex<Window>,
    /// Held by the follower that reads for all.
    reading: tokio::sync::Mutex<()>,
    /// The followed turns: how many followers each has, and whether it is found to have ended.
    turns: Mutex<HashMap<TurnId, (usize, bool)>>,
}

/// The events after `floor` and up to `head`.
struct Window {
    floor: i64,
    /// `None` until a follower has read to the end.
    head: Option<i64>,
    kept: VecDeque<Arc<Event>>,
    bytes: usize,
    /// The version of the notifications that the last read covers.
    version: u64,
    read_at: Instant,
    /// How often a notification came without an event.
    empty_reads: u64,
}

/// The events after a position.
pub enum Read {
    /// With the time of the read: a right that was checked later covers them.
    Events(Vec<Arc<Event>>, Instant),
    /// The events after the position are not kept.
    Behind,
    Nothing,
}

impl Tails {
    /// The tail of a conversation, which lives as long as somebody has it.
    pub fn open(
        &self,
        notifications: &Notifications,
        tenant_id: TenantId,
        conversation_id: SessionId,
    ) -> Arc<Tail> {
        let name = (tenant_id, conversation_id);
        let mut open = lock(&self.open);
        if let Some(tail) = open.get(&name).and_then(Weak::upgrade) {
            return tail;
        }
        let tail = Arc::new(Tail {
            open: self.open.clone(),
            tenant_id,
            conversation_id,
            // Before anything is read, so that nothing that comes later is missed.
            subscription: notifications.subscribe(conversation_id),
            window: Mutex::new(Window {
                floor: 0,
                head: None,
                kept: VecDeque::new(),
                bytes: 0,
                version: 0,
                read_at: Instant::now(),
                empty_reads: 0,
            }),
            reading: tokio::sync::Mutex::default(),
            turns: Mutex::default(),
        });
        open.insert(name, Arc::downgrade(&tail));
        tail
    }

    fn list(&self) -> Vec<Arc<Tail>> {
        lock(&self.open)
            .values()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// Wakes the followers of conversations with unread events; with `only`, of these conversations.
    pub async fn wake_missed(&self, db: &Db, only: Option<&HashSet<SessionId>>) -> Result<()> {
        let mut tails = self.list();
        if let Some(only) = only {
            tails.retain(|tail| only.contains(&tail.conversation_id));
        }
        let mut outcome = Ok(());
        for tails in batches(&mut tails) {
            if let Err(error) = wake_missed_of(db, tails).await {
                outcome = Err(error);
            }
        }
        outcome
    }

    /// Wakes the followers of turns that ended without an event.
    pub async fn wake_ended_turns(&self, db: &Db) -> Result<()> {
        let mut tails = self.list();
        tails.retain(|tail| !lock(&tail.turns).is_empty());
        let mut outcome = Ok(());
        for tails in batches(&mut tails) {
            if let Err(error) = wake_ended_of(db, tails).await {
                outcome = Err(error);
            }
        }
        outcome
    }

    /// Drops the events that every follower in time has read.
    pub fn drop_read_events(&self) {
        for tail in self.list() {
            let mut window = lock(&tail.window);
            if window.read_at.elapsed() >= KEPT_FOR && !window.kept.is_empty() {
                window.floor = window.head.unwrap_or(window.floor);
                window.kept = VecDeque::new();
                window.bytes = 0;
            }
        }
    }
}

/// Tails of one tenant each, at most as many as one statement can check.
fn batches(tails: &mut [Arc<Tail>]) -> impl Iterator<Item = &[Arc<Tail>]> {
    tails.sort_by_key(|tail| tail.tenant_id);
    tails
        .chunk_by(|one, next| one.tenant_id == next.tenant_id)
        .flat_map(|tails| tails.chunks(BATCH))
}

async fn wake_missed_of(db: &Db, tails: &[Arc<Tail>]) -> Result<()> {
    let Some(first) = tails.first() else {
        return Ok(());
    };
    let ids: Vec<SessionId> = tails.iter().map(|tail| tail.conversation_id).collect();
    let caller = ServiceCaller::for_tenant(first.tenant_id);
    let mut tx = caller.begin(db).await?;
    let last: HashMap<SessionId, i64> = events::list_last(&mut tx, &ids).await?;
    tx.commit().await?;
    for tail in tails {
        let head = lock(&tail.window).head;
        let last = last.get(&tail.conversation_id);
        // The check of its readers' rights notices a deleted conversation.
        if last.is_some_and(|last| head.is_none_or(|head| *last > head)) {
            tail.subscription.wake();
        }
    }
    Ok(())
}

async fn wake_ended_of(db: &Db, tails: &[Arc<Tail>]) -> Result<()> {
    let Some(first) = tails.first() else {
        return Ok(());
    };
    let mut followed = Vec::new();
    for tail in tails {
        let turns = lock(&tail.turns);
        let open = turns.iter().filter(|(_, (_, ended))| !ended);
        followed.extend(open.map(|(turn_id, _)| (*turn_id, tail)));
    }
    for followed in followed.chunks(BATCH) {
        let ids: Vec<TurnId> = followed.iter().map(|(turn_id, _)| *turn_id).collect();
        let caller = ServiceCaller::for_tenant(first.tenant_id);
        let mut tx = caller.begin(db).await?;
        let open = events::list_unended_turns(&mut tx, &ids).await?;
        tx.commit().await?;
        for (turn_id, tail) in followed.iter().filter(|(id, _)| !open.contains(id)) {
            if let Some((_, ended)) = lock(&tail.turns).get_mut(turn_id) {
                *ended = true;
            }
            tail.subscription.wake();
        }
    }
    Ok(())
}

impl Tail {
    /// Hears of what comes from now on.
    pub fn changes(&self) -> Changes {
        self.subscription.changes()
    }

    /// To be read before the events, and passed to `begin_at`.
    pub fn version(&self) -> u64 {
        self.subscription.version()
    }

    pub fn follow_turn(&self, turn_id: TurnId) {
        lock(&self.turns).entry(turn_id).or_default().0 += 1;
    }

    pub fn unfollow_turn(&self, turn_id: TurnId) {
        let mut turns = lock(&self.turns);
        if let Some((followers, _)) = turns.get_mut(&turn_id) {
            *followers -= 1;
            if *followers == 0 {
                turns.remove(&turn_id);
            }
        }
    }

    /// Whether the turn is found to have ended, even if no event says so.
    pub fn has_ended(&self, turn_id: TurnId) -> bool {
        lock(&self.turns).get(&turn_id).is_some_and(|turn| turn.1)
    }

    /// A follower has read everything up to `position` from the database; `version` is from before that read.
    pub fn begin_at(&self, position: i64, version: u64) {
        let mut window = lock(&self.window);
        if window.head.is_none() {
            window.floor = position;
            window.head = Some(position);
            window.version = version;
        }
    }

    /// The kept events after `position`.
    pub fn after(&self, position: i64) -> Read {
        let window = lock(&self.window);
        if window.head.is_none() || position < window.floor {
            return Read::Behind;
        }
        let found = window.kept.iter().filter(|event| event.seq > position);
        let found: Vec<Arc<Event>> = found.cloned().collect();
        if found.is_empty() {
            Read::Nothing
        } else {
            Read::Events(found, window.read_at)
        }
    }

    /// How often a notification came without an event: a followed turn may have ended without one.
    pub fn empty_reads(&self) -> u64 {
        lock(&self.window).empty_reads
    }

    /// Whether there is a notification whose events are not read yet.
    pub fn is_stale(&self) -> bool {
        lock(&self.window).version < self.version()
    }

    /// Reads the new events, unless another follower has done so.
    pub async fn read(&self, db: &Db) -> Result<()> {
        let _reading = self.reading.lock().await;
        let version = self.version();
        let head = match &*lock(&self.window) {
            window if window.version >= version => return Ok(()),
            window => window.head,
        };
        let Some(head) = head else {
            return Ok(());
        };
        let caller = ServiceCaller::for_tenant(self.tenant_id);
        let mut tx = caller.begin(db).await?;
        let found = events::list(&mut tx, self.conversation_id, None, head, MAX_BATCH).await?;
        tx.commit().await?;
        let mut window = lock(&self.window);
        window.read_at = Instant::now();
        if found.events.is_empty() {
            window.empty_reads += 1;
        }
        // There are more events than one read returns: the next read continues.
        if !found.is_followed {
            window.version = version;
        }
        window.keep(found.events);
        Ok(())
    }
}

impl Window {
    fn keep(&mut self, found: Vec<Event>) {
        for event in found {
            self.head = Some(event.seq);
            self.bytes += event.size();
            self.kept.push_back(Arc::new(event));
        }
        while self.kept.len() > MAX_KEPT || self.bytes > MAX_KEPT_BYTES && self.kept.len() > 1 {
            if let Some(oldest) = self.kept.pop_front() {
                self.bytes -= oldest.size();
                self.floor = oldest.seq;
            }
        }
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        let name = (self.tenant_id, self.conversation_id);
        // Another follower may have opened the tail again.
        if open.get(&name).is_some_and(|tail| tail.strong_count() == 0) {
            open.remove(&name);
        }
    }
}
