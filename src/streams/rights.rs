//! The rights of readers: checked once for each reader and conversation on this node, many in one statement.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use chrono::{DateTime, Utc};
use tokio::time::Instant;

use super::{BATCH, Verdict, lock};
use crate::auth::ServiceCaller;
use crate::domain::conversation::session::{Ownership, Permission};
use crate::domain::conversation::session_name::session_not_found;
use crate::domain::people::access::{Access, Visibility};
use crate::error::{Code, Error, Result};
use crate::ids::{IdentityId, SessionId, SlotId, TenantId, UserId};
use crate::store::Db;
use crate::store::people::stream_rights::{self, ReaderRights, RightsQuery};

/// A reader and a conversation. Two streams with equal subjects share one right.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Subject {
    tenant_id: TenantId,
    /// `None` for a call without a session: then only the identity must still be the user's.
    conversation_id: Option<SessionId>,
    visibility: Visibility,
    /// The identity that must still be the user's.
    sender: Option<IdentityId>,
    /// The slot that must lead to the conversation.
    slot_id: Option<SlotId>,
}

impl Subject {
    pub fn new(tenant_id: TenantId, access: &Access, conversation_id: Option<SessionId>) -> Self {
        let sender = match access.visibility {
            Visibility::User(_) => access.sender.as_ref().map(|sender| sender.id),
            Visibility::Tenant | Visibility::Service => None,
        };
        Self {
            tenant_id,
            conversation_id,
            visibility: access.visibility,
            sender,
            slot_id: None,
        }
    }

    /// Limits the right to the time in which this slot leads to the conversation.
    pub fn through(self, slot_id: Option<SlotId>) -> Self {
        Self { slot_id, ..self }
    }

    fn user_id(&self) -> Option<UserId> {
        match self.visibility {
            Visibility::User(user_id) => Some(user_id),
            Visibility::Tenant | Visibility::Service => None,
        }
    }

    fn check(&self, found: ReaderRights) -> Result<()> {
        let no_such_user = || Error::not_found("user");
        if let (Some(user_id), Some(_)) = (self.user_id(), self.sender) {
            let present = found.speaker_user_id.ok_or_else(no_such_user)?;
            if present != user_id && found.survivor_id != Some(present) {
                return Err(no_such_user());
            }
        }
        if self.conversation_id.is_none() {
            return Ok(());
        }
        if !found.exists {
            return Err(session_not_found());
        }
        let mut owner = Ownership {
            user_id: found.user_id,
            session_key: found.session_key,
            granted: found.granted,
        };
        let checked = owner.check_visibility(self.visibility, Permission::Participate);
        // A user who was merged into another reads on as the survivor.
        let checked = match (checked, found.survivor_id) {
            (Err(_), Some(survivor)) => {
                owner.granted = found.survivor_granted;
                owner.check_visibility(Visibility::User(survivor), Permission::Participate)
            }
            (checked, _) => checked,
        };
        checked?;
        if self.slot_id.is_some() && found.slot_conversation_id != self.conversation_id {
            let detail = "the key leads to another session now";
            return Err(Error::new(Code::SessionMoved, detail));
        }
        Ok(())
    }
}

/// All rights of open streams on this node.
#[derive(Default)]
pub struct Rights {
    open: Arc<Mutex<HashMap<Subject, Weak<Right>>>>,
    queues: Mutex<HashMap<TenantId, Weak<Queue>>>,
}

/// A tenant's rights that wait for one check: a right that arrives during a check is in the next one.
#[derive(Default)]
struct Queue {
    checking: tokio::sync::Mutex<()>,
    waiting: Mutex<Vec<Arc<Right>>>,
}

pub struct Right {
    open: Arc<Mutex<HashMap<Subject, Weak<Right>>>>,
    queue: Arc<Queue>,
    subject: Subject,
    verdict: Verdict,
}

impl Rights {
    /// Adds the right of a reader that was just accepted.
    pub fn open(&self, subject: Subject) -> Arc<Right> {
        let queue = self.queue(subject.tenant_id);
        // Before the guard, so that it is dropped after it: the last one to drop a right takes the lock.
        let existing;
        let mut open = lock(&self.open);
        existing = open.get(&subject).and_then(Weak::upgrade);
        if let Some(right) = &existing
            // A refused right that came back is a new one.
            && !right.verdict.is_refused()
        {
            return right.clone();
        }
        let right = Arc::new(Right {
            open: self.open.clone(),
            queue,
            subject: subject.clone(),
            verdict: Verdict::new(),
        });
        open.insert(subject, Arc::downgrade(&right));
        right
    }

    fn queue(&self, tenant_id: TenantId) -> Arc<Queue> {
        let mut queues = lock(&self.queues);
        if let Some(queue) = queues.get(&tenant_id).and_then(Weak::upgrade) {
            return queue;
        }
        queues.retain(|_, queue| queue.strong_count() > 0);
        let queue = Arc::new(Queue::default());
        queues.insert(tenant_id, Arc::downgrade(&queue));
        queue
    }

    /// Checks all of them. A tenant whose check fails does not delay the others.
    pub async fn renew(&self, db: &Db, now: DateTime<Utc>) -> Result<()> {
        let mut open: Vec<Arc<Right>> = lock(&self.open)
            .values()
            .filter_map(Weak::upgrade)
            .collect();
        open.sort_by_key(|right| right.subject.tenant_id);
        let of_tenants = open.chunk_by(|a, b| a.subject.tenant_id == b.subject.tenant_id);
        let mut outcome = Ok(());
        for rights in of_tenants.flat_map(|rights| rights.chunks(BATCH)) {
            if let Err(error) = check(db, rights, now).await {
                outcome = Err(error);
            }
        }
        outcome
    }
}

impl Right {
    pub fn read(&self) -> Result<()> {
        self.verdict.read()
    }

    pub fn is_fresh(&self) -> bool {
        self.verdict.is_fresh()
    }

    pub async fn refused(&self) {
        self.verdict.refused().await;
    }

    /// Fails if a check that began after `since` refuses. During an outage of the database the last verdict stands.
    pub async fn check_since(
        self: &Arc<Self>,
        db: &Db,
        since: Instant,
        now: DateTime<Utc>,
    ) -> Result<()> {
        if !self.verdict.is_checked_since(since) {
            lock(&self.queue.waiting).push(self.clone());
            let _checking = self.queue.checking.lock().await;
            if !self.verdict.is_checked_since(since) {
                let mut waiting = std::mem::take(&mut *lock(&self.queue.waiting));
                // The task that took the queue may have been dropped in the middle.
                if !waiting.iter().any(|right| Arc::ptr_eq(right, self)) {
                    waiting.push(self.clone());
                }
                for rights in waiting.chunks(BATCH) {
                    check(db, rights, now).await?;
                }
            }
        }
        self.read()
    }
}

impl Drop for Right {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        if open
            .get(&self.subject)
            .is_some_and(|right| right.strong_count() == 0)
        {
            open.remove(&self.subject);
        }
    }
}

/// Checks rights of one tenant.
async fn check(db: &Db, rights: &[Arc<Right>], now: DateTime<Utc>) -> Result<()> {
    let Some(first) = rights.first() else {
        return Ok(());
    };
    let began = Instant::now();
    let found = find(db, first.subject.tenant_id, rights, now).await;
    match found {
        Ok(found) => {
            for (right, found) in rights.iter().zip(found) {
                right.verdict.set(began, right.subject.check(found));
            }
            Ok(())
        }
        Err(error) => {
            // While the tenant is busy the verdicts get stale instead: only an outage lets the last one stand.
            if error.code != Code::Busy {
                for right in rights {
                    let outage = anyhow::anyhow!("it does not answer");
                    let outage = Error::unavailable("the database", outage);
                    right.verdict.set(began, Err(outage));
                }
            }
            Err(error)
        }
    }
}

async fn find(
    db: &Db,
    tenant_id: TenantId,
    rights: &[Arc<Right>],
    now: DateTime<Utc>,
) -> Result<Vec<ReaderRights>> {
    let queries: Vec<RightsQuery> = rights
        .iter()
        .map(|right| RightsQuery {
            conversation_id: right.subject.conversation_id,
            user_id: right.subject.user_id(),
            sender: right.subject.sender,
            slot_id: right.subject.slot_id,
        })
        .collect();
    let mut tx = ServiceCaller::for_tenant(tenant_id).begin(db).await?;
    let found = stream_rights::list(&mut tx, &queries, now).await?;
    tx.commit().await?;
    Ok(found)
}
