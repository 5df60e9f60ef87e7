//! Why a call of a model brought no answer, and what that means for the next call.

use std::time::Duration;

use super::client::FetchError;
use crate::retry::Backoff;

/// A server that asks for more patience is not waited for.
const MOST_PATIENCE: Duration = Duration::from_secs(5);

/// Why a call brought no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("the model's server cannot be called: {0}")]
    NotReached(#[source] FetchError),
    #[error("the model's server did not answer in time")]
    TooSlow,
    #[error("the model's server failed with status {0}")]
    Failed(u16),
    #[error("the model's server asks to wait")]
    Busy { retry_after: Option<Duration> },
    #[error("the model's server is not available")]
    Unavailable { retry_after: Duration },
    /// In the answer itself, whose status was a success.
    #[error("the model's server reports an error: {0}")]
    Reported(String),
    #[error("the conversation is too long for the model: {0}")]
    TooLong(String),
    #[error("the model's server does not take the agent's key (status {0})")]
    NotAllowed(u16),
    /// It does not take the request; `message` is what it says about it.
    #[error("the model's server refuses the request: {message}")]
    Refused { status: u16, message: String },
    #[error("the model's server failed repeatedly; it is called again in {} s", whole_seconds(.retry_after))]
    LeftAlone { retry_after: Duration },
    #[error("the connection to the model's server broke")]
    Broken,
    #[error("the model's server answered something that is no completion")]
    Malformed,
    #[error("the model's answer is too large")]
    TooLarge,
}

impl CallError {
    /// Whether the server is to blame: a refusal shows that it works.
    pub(super) fn is_outage(&self) -> bool {
        match self {
            Self::NotReached(_)
            | Self::TooSlow
            | Self::Failed(_)
            | Self::Unavailable { .. }
            | Self::Broken => true,
            Self::Busy { .. }
            | Self::Reported(_)
            | Self::TooLong(_)
            | Self::NotAllowed(_)
            | Self::Refused { .. }
            | Self::LeftAlone { .. }
            | Self::Malformed
            | Self::TooLarge => false,
        }
    }

    /// How long to wait before the same call may be made again, where it may.
    pub(super) fn pause_before_retry(&self, backoff: &mut Backoff) -> Option<Duration> {
        match self {
            Self::NotReached(FetchError::Refused(_)) => None,
            Self::NotReached(_) | Self::Failed(_) => Some(backoff.next_pause()),
            Self::Busy { retry_after, .. } => {
                let asked = retry_after.unwrap_or_else(|| backoff.next_pause());
                (asked <= MOST_PATIENCE).then_some(asked)
            }
            Self::Unavailable { retry_after } => {
                (*retry_after <= MOST_PATIENCE).then_some(*retry_after)
            }
            Self::TooSlow
            | Self::Reported(_)
            | Self::TooLong(_)
            | Self::NotAllowed(_)
            | Self::Refused { .. }
            | Self::LeftAlone { .. }
            | Self::Broken
            | Self::Malformed
            | Self::TooLarge => None,
        }
    }
}

/// Rounded up, as `Retry-After` has it.
fn whole_seconds(time: &Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}
