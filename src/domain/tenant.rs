//! A tenant: one customer of the service.

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::ids::TenantId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TenantState {
    Active,
    Suspended,
}

impl TenantState {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Suspended => "suspended",
        }
    }

    /// The state a column holds; `None` for the operator's own plane, which is no customer.
    pub fn from_column(text: &str) -> Option<Self> {
        match text {
            "active" => Some(Self::Active),
            "suspended" => Some(Self::Suspended),
            _ => None,
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
