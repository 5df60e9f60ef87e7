//! The counters of a tenant's usage, and the dimensions they are grouped by.

use chrono::{DateTime, Timelike, Utc};

use crate::domain::tenant::agent::AgentSpec;
use crate::domain::turn::completion::TokenUsage;
use crate::domain::values::text_enum::text_enum;
use crate::ids::UserId;

/// The dimensions of one usage row. Empty text means none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UsageKey {
    pub hour: DateTime<Utc>,
    pub source: UsageSource,
    pub agent: String,
    pub model: String,
    pub user_id: Option<UserId>,
}

impl UsageKey {
    /// An API request of any kind.
    pub fn api_request(now: DateTime<Utc>) -> Self {
        Self {
            hour: hour_of(now),
            source: UsageSource::Api,
            agent: String::new(),
            model: String::new(),
            user_id: None,
        }
    }
}

impl UsageKey {
    /// A call of an agent's model.
    pub fn model_call(
        now: DateTime<Utc>,
        agent: &str,
        spec: &AgentSpec,
        user_id: Option<UserId>,
        usage: &TokenUsage,
    ) -> Self {
        Self {
            hour: hour_of(now),
            source: if usage.estimated {
                UsageSource::ChatEstimated
            } else {
                UsageSource::Chat
            },
            agent: agent.to_owned(),
            model: spec
                .upstream
                .model
                .clone()
                .unwrap_or_else(|| "demo".to_owned()),
            user_id,
        }
    }
}

text_enum!(
    /// Where the use came from.
    #[derive(Hash, PartialOrd, Ord)]
    UsageSource {
        Api = "api",
        /// Calls of models whose provider told the tokens.
        Chat = "chat",
        /// Those whose tokens are an estimate.
        ChatEstimated = "chat_estimated",
    }
);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageCounts {
    pub requests: i64,
    pub turns: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
}

impl UsageCounts {
    pub const ONE_REQUEST: Self = Self {
        requests: 1,
        turns: 0,
        input_tokens: 0,
        output_tokens: 0,
    };

    pub fn add(&mut self, more: &Self) {
        self.requests += more.requests;
        self.turns += more.turns;
        self.input_tokens += more.input_tokens;
        self.output_tokens += more.output_tokens;
    }
}

text_enum!(
    /// By what rows of a report are told apart; what is left out is summed over.
    UsageGroup {
        Hour = "hour",
        Source = "source",
        Agent = "agent",
        Model = "model",
        UserId = "user_id",
    }
);

/// The hour that `time` lies in.
pub fn hour_of(time: DateTime<Utc>) -> DateTime<Utc> {
    let into = i64::from(time.minute()) * 60 + i64::from(time.second());
    let whole = DateTime::from_timestamp(time.timestamp() - into, 0);
    whole.unwrap_or(time)
}
