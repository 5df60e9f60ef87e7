//! How many streams, or calls of models, a tenant has open on this node. A node lets it have its share of the limit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::ids::TenantId;

#[derive(Clone, Default)]
pub struct OpenCounts {
    open: Arc<Mutex<HashMap<TenantId, u32>>>,
}

/// An open stream or call; dropped, it is closed.
pub struct OpenCount {
    counts: OpenCounts,
    tenant_id: TenantId,
}

impl OpenCounts {
    /// Opens one, unless as many as `share` are open.
    pub fn open(&self, tenant_id: TenantId, share: u32) -> Option<OpenCount> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(tenant_id).or_default();
        if *count >= share {
            return None;
        }
        *count += 1;
        Some(OpenCount {
            counts: self.clone(),
            tenant_id,
        })
    }
}

impl Drop for OpenCount {
    fn drop(&mut self) {
        let mut open = self
            .counts
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.tenant_id) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.tenant_id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_as_many_streams_as_its_share() {
        let streams = OpenCounts::default();
        let ada = TenantId::generate();
        let bob = TenantId::generate();
        let first = streams.open(ada, 2).unwrap();
        let _second = streams.open(ada, 2).unwrap();
        assert!(streams.open(ada, 2).is_none());
        assert!(streams.open(bob, 2).is_some());
        drop(first);
        assert!(streams.open(ada, 2).is_some());
    }
}
