//! `TenantCaller`: a caller that acts inside a tenant. The operator never does.

use super::{KeyCaller, UserCaller};
use crate::domain::tenant::limits::Limits;
use crate::error::Result;
use crate::ids::{ApiKeyId, TenantId};
use crate::store::{Db, TenantTx};

pub enum TenantCaller {
    Key(KeyCaller),
    User(UserCaller),
}

impl TenantCaller {
    pub async fn begin(&self, db: &Db) -> Result<TenantTx> {
        match self {
            Self::Key(key) => key.begin(db).await,
            Self::User(user) => user.begin(db).await,
        }
    }

    pub fn tenant_id(&self) -> TenantId {
        match self {
            Self::Key(key) => key.tenant_id(),
            Self::User(user) => user.tenant_id(),
        }
    }

    pub fn key_id(&self) -> Option<ApiKeyId> {
        match self {
            Self::Key(key) => Some(key.key_id()),
            Self::User(_) => None,
        }
    }

    /// Names the credential, for the audit.
    pub fn principal(&self) -> String {
        match self {
            Self::Key(key) => key.principal(),
            Self::User(user) => user.principal(),
        }
    }

    /// What its tenant may use.
    pub fn limits(&self) -> &Limits {
        match self {
            Self::Key(key) => key.limits(),
            Self::User(user) => user.limits(),
        }
    }
}
