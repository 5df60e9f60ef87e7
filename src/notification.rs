//! What a committed transaction notifies others of. A notification only says where to look: a lost one delays,
//! and a forged one makes somebody look in vain.

use std::sync::Arc;

use crate::ids::{BootId, SessionId, TenantId, TurnId};

/// What can be subscribed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Topic {
    Conversation(SessionId),
    Deliveries(TenantId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Notification {
    /// Something new was committed.
    Changed(Topic),
    /// The node that runs the turn should look at it.
    Turn(BootId, TurnId),
}

/// Publishes the notifications of committed transactions, to this node and to the others.
pub type Notifier = Arc<dyn Fn(Notification) + Send + Sync>;
