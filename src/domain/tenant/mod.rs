//! A tenant: one customer of the service, and its own settings.

pub mod agent;
pub(in crate::domain) mod agent_rules;
pub mod api_key;
pub mod audit;
pub mod hop;
pub mod issuer;
pub mod limits;
pub mod node_addresses;
pub mod origin;
pub mod retention;
pub mod usage;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::domain::tenant::agent::DmScope;
use crate::domain::tenant::limits::Limits;
use crate::error::{Code, Error, Result};
use crate::ids::TenantId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TenantState {
    Active,
    /// Refuses every credential until it is resumed.
    Suspended,
    /// Refuses every credential; its rows are being deleted.
    Deleting,
}

impl TenantState {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Suspended => "suspended",
            Self::Deleting => "deleting",
        }
    }

    /// Reads a column; `None` for the operator's own plane, which is no customer.
    pub fn from_column(text: &str) -> Option<Self> {
        match text {
            "active" => Some(Self::Active),
            "suspended" => Some(Self::Suspended),
            "deleting" => Some(Self::Deleting),
            _ => None,
        }
    }
}

/// Whether a tenant is served. The operator sets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServiceState {
    Active,
    Suspended,
}

impl From<ServiceState> for TenantState {
    fn from(state: ServiceState) -> Self {
        match state {
            ServiceState::Active => Self::Active,
            ServiceState::Suspended => Self::Suspended,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    pub id: TenantId,
    pub name: String,
    pub state: TenantState,
    pub created_at: DateTime<Utc>,
}

/// The terms of every credential of a tenant, looked up together with the credential.
#[derive(Debug, Clone)]
pub struct TenantTerms {
    pub state: TenantState,
    pub limits: Limits,
    /// Origins of pages that may call from a browser.
    pub allowed_origins: Vec<String>,
}

impl TenantTerms {
    pub fn check_state(&self) -> Result<()> {
        match self.state {
            TenantState::Active => Ok(()),
            TenantState::Suspended => Err(Error::new(
                Code::TenantSuspended,
                "the tenant is suspended; its operator can resume it",
            )),
            TenantState::Deleting => Err(Error::unauthorized("the tenant is deleted")),
        }
    }
}

/// The settings of a tenant for all its agents and users. An older node ignores members it does not
/// recognise; missing members have their defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub struct TenantSettings {
    /// The default of agents without a DM scope of their own.
    pub dm_scope: DmScope,
    pub retention: Retention,
}

impl Default for TenantSettings {
    fn default() -> Self {
        Self {
            dm_scope: DmScope::PerChannelPeer,
            retention: Retention::default(),
        }
    }
}

/// Retention times; null is for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Retention {
    /// Conversations without a message for this many days are deleted, pinned and archived ones too.
    #[schema(minimum = 1, maximum = 36_500)]
    pub conversations_days: Option<u32>,
}

pub const MAX_RETENTION_DAYS: u32 = 36_500;
