//! The turn engine, one for every source of turns: an accepted message is answered once, whatever happens to the node,
//! the connection or the model. Accepting is one transaction. The node that holds a turn's lease runs it, and any
//! other claims it when that node is lost. Every write carries the lease's fence.
//!
//! Must never: call a model before the message is committed; hold a transaction while a model is waited for.
//!
//! Steps, in a transaction of the caller's: `accept`, `cancel`. Operations: `ask`, `sweep`, `deliver_unclaimed`. After
//! a commit: `launch`, `start`.

mod accept;
mod ask;
mod call;
mod cancel;
mod follow;
mod limit;
mod live;
mod outcome;
mod recover;
mod reply;
mod run;
mod starts;
mod stream;
mod target;
mod writer;

pub use accept::{Accepted, Disposition, RunnableTurn, TurnRequest, accept};
pub use ask::{LiveUpdates, ask, launch};
pub use cancel::cancel;
pub use follow::Follower;
pub use live::Piece;
pub use outcome::{TurnOutcome, TurnResult};
pub use recover::sweep;
pub use reply::{deliver_unclaimed, failure_notice, text_of};
pub use run::start;
pub use stream::{AcceptedTurn, TurnStream, Update};
pub use target::Target;

use crate::app::App;
use crate::store::turn::turn_lease::Runner;

/// This node, as the holder of a lease.
fn runner(app: &App) -> Runner {
    Runner {
        node: app.boot_id,
        lease_ms: i64::try_from(app.config.turn_lease.as_millis()).unwrap_or(i64::MAX),
    }
}
