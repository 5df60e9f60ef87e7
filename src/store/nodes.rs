//! The nodes that run now: global, and by the clock of Postgres, so that no node's own clock decides
//! whether another lives.

use chrono::{DateTime, Utc};

use super::Db;
use crate::error::Result;
use crate::ids::BootId;

/// The nodes that live, this one included.
#[derive(Debug, Clone, Copy)]
pub struct Living {
    pub nodes: u32,
    /// One of them is older than `nodes.version`.
    pub has_old: bool,
}

/// Says that this node lives, forgets those that have not said so for a minute, and answers which
/// live: those that missed two beats of five seconds do not count.
pub async fn beat(db: &Db, boot_id: BootId, addr: Option<&str>) -> Result<Living> {
    let (others, has_old): (i64, bool) = sqlx::query_as(
        "with beat as (
           insert into nodes (boot_id, addr, version, seen_at)
           values ($1, $2, $3, now())
               on conflict on constraint nodes_pkey do update
              set addr = excluded.addr, version = excluded.version, seen_at = excluded.seen_at
         ), gone as (
           delete from nodes
            where boot_id <> $1
              and seen_at < now() - interval '1 minute'
         )
         select count(*), coalesce(bool_or(version is null), false)
           from nodes
          where boot_id <> $1
            and seen_at > now() - interval '12 seconds'",
    )
    .bind(boot_id)
    .bind(addr)
    .bind(env!("CARGO_PKG_VERSION"))
    .fetch_one(db.connection().await?.limited())
    .await?;
    Ok(Living {
        nodes: u32::try_from(others).unwrap_or(u32::MAX).saturating_add(1),
        has_old,
    })
}

#[derive(Debug, sqlx::FromRow)]
pub struct NodeRow {
    pub boot_id: BootId,
    pub addr: Option<String>,
    pub version: Option<String>,
    pub seen_at: DateTime<Utc>,
    pub live: bool,
}

/// All that are known; each has a row for a minute after it was last seen, so there are not many.
pub async fn list(db: &Db) -> Result<Vec<NodeRow>> {
    Ok(sqlx::query_as(
        "select boot_id, addr, version, seen_at, seen_at > now() - interval '12 seconds' as live
           from nodes
          order by boot_id",
    )
    .fetch_all(db.connection().await?.limited())
    .await?)
}

/// This node ends.
pub async fn delete(db: &Db, boot_id: BootId) -> Result<()> {
    sqlx::query(
        "delete from nodes
          where boot_id = $1",
    )
    .bind(boot_id)
    .execute(db.connection().await?.limited())
    .await?;
    Ok(())
}
