//! The turn engine, one for every source of turns: what was accepted is answered once, whatever happens to
//! the node, the connection or the model. Accepting is one transaction; a turn is then run by the node that
//! holds its lease, and taken over by any other when that node is lost. Every write carries the fence.
//!
//! Must never: call a model before the message is committed; hold a transaction while a model is waited for.

mod accept;
mod call;
mod cancel;
mod follow;
mod launch;
mod limit;
mod outcome;
mod recover;
mod reply;
mod run;
mod target;
mod writer;

pub use crate::turns::target::Target;
pub use accept::{Accepted, Disposition, RunnableTurn, TurnRequest, accept};
pub use cancel::cancel;
pub use follow::Follower;
pub use launch::{LiveUpdate, Piece, launch};
pub use outcome::{Outcome, Said};
pub use recover::sweep;
pub use reply::{AnswerWaiter, deliver_unclaimed, failure_notice, text_of};
pub use run::start;

use crate::app::App;
use crate::store::turn::turn_claims::Runner;

/// This node, as the holder of a turn.
fn runner(app: &App) -> Runner {
    Runner {
        node: app.boot_id,
        lease_ms: i64::try_from(app.config.turn_lease.as_millis()).unwrap_or(i64::MAX),
    }
}
