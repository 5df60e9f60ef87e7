//! The count of what all nodes used of a limit in a window. A node claims chunks, so it asks Redis rarely.

use deadpool_redis::redis::cmd;

use super::{Redis, WAIT};
use crate::error::{Error, Result};

const TAKE: &str = include_str!("claim_from_limit.lua");

/// One window of one limit.
pub struct LimitWindow {
    /// Unique among all windows; begins with the tenant's id.
    pub name: String,
    pub limit: u32,
    /// The TTL in Redis.
    pub kept_seconds: i64,
}

/// The result of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    pub granted: u64,
    /// How much of the window all nodes have used.
    pub used: u64,
}

fn key(window: &str) -> String {
    format!("throughline:limits:{window}")
}

impl Redis {
    /// Claims up to `amount` of a limit; less, or nothing, when the window has no more.
    pub async fn claim_from_limit(&self, window: &LimitWindow, amount: u64) -> Result<Grant> {
        let claiming = async {
            let mut connection = self.pool.get().await.map_err(anyhow::Error::from)?;
            cmd("EVAL")
                .arg(TAKE)
                .arg(1)
                .arg(key(&window.name))
                .arg(window.limit)
                .arg(amount)
                .arg(window.kept_seconds)
                .query_async::<(u64, u64)>(&mut connection)
                .await
                .map_err(anyhow::Error::from)
        };
        match tokio::time::timeout(WAIT, claiming).await {
            Ok(Ok((granted, used))) => Ok(Grant { granted, used }),
            Ok(Err(cause)) => Err(Error::unavailable("Redis", cause)),
            Err(late) => Err(Error::unavailable("Redis", late)),
        }
    }

    /// Deletes the counts of windows with these names.
    pub async fn forget_limits(&self, windows: &[String]) -> Result<()> {
        let deleting = async {
            let mut connection = self.pool.get().await.map_err(anyhow::Error::from)?;
            cmd("DEL")
                .arg(windows.iter().map(|name| key(name)).collect::<Vec<_>>())
                .query_async::<u64>(&mut connection)
                .await
                .map_err(anyhow::Error::from)
        };
        match tokio::time::timeout(WAIT, deleting).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(cause)) => Err(Error::unavailable("Redis", cause)),
            Err(late) => Err(Error::unavailable("Redis", late)),
        }
    }
}
