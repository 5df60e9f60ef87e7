//! Whose words a summary contains.

use crate::ids::IdentityId;

/// The identities whose messages a summary stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SummarySources {
    /// These and nobody else.
    Complete(Vec<IdentityId>),
    /// These, and perhaps others: it stands for messages without an identity, or updates a summary whose sources are
    /// unknown.
    Partial(Vec<IdentityId>),
}

impl SummarySources {
    /// All that are known. Publication asks whether one of them was erased meanwhile.
    pub fn identities(&self) -> &[IdentityId] {
        match self {
            Self::Complete(identities) | Self::Partial(identities) => identities,
        }
    }

    /// What the message stores: a list only if it is complete.
    pub fn to_column(&self) -> Option<&[IdentityId]> {
        match self {
            Self::Complete(identities) => Some(identities),
            Self::Partial(_) => None,
        }
    }
}
