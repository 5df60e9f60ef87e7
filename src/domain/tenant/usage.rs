//! The counters of a tenant's usage, and the dimensions they are grouped by.

use chrono::{DateTime, Timelike, Utc};
use serde::{Deserialize, Serialize};

use crate::domain::tenant::agent::AgentSpec;
use crate::domain::turn::completion::TokenUsage;
use crate::ids::UserId;

/// The dimensions of one usage row. Empty text means none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UsageName {
    pub hour: DateTime<Utc>,
    pub source: UsageSource,
    pub agent: String,
    pub model: String,
    pub user_id: Option<UserId>,
}

impl UsageName {
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

impl UsageName {
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

/// The source of the usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UsageSource {
    Api,
    /// Model calls whose provider reported the tokens.
    Chat,
    /// Model calls with estimated tokens.
    ChatEstimated,
}

impl UsageSource {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::Chat => "chat",
            Self::ChatEstimated => "chat_estimated",
        }
    }
}

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

/// A dimension that a report groups its rows by. It sums over the other dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum UsageGroup {
    Hour,
    Source,
    Agent,
    Model,
    UserId,
}

impl UsageGroup {
    pub const ALL: [Self; 5] = [
        Self::Hour,
        Self::Source,
        Self::Agent,
        Self::Model,
        Self::UserId,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Source => "source",
            Self::Agent => "agent",
            Self::Model => "model",
            Self::UserId => "user_id",
        }
    }
}

/// The hour that `time` lies in.
pub fn hour_of(time: DateTime<Utc>) -> DateTime<Utc> {
    let into = i64::from(time.minute()) * 60 + i64::from(time.second());
    let whole = DateTime::from_timestamp(time.timestamp() - into, 0);
    whole.unwrap_or(time)
}
