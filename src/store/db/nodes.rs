//! The running nodes: a global table with times by the clock of Postgres, so that no node's own clock decides
//! whether another is alive.

use chrono::{DateTime, Utc};
use url::Url;

use crate::domain::tenant::node_addresses::{NodeAddresses, address_of};
use crate::error::Result;
use crate::ids::BootId;
use crate::store::Db;

/// The other nodes, as a heartbeat returns them.
#[derive(Debug)]
pub struct OtherNodes {
    /// The number of live nodes, this one included. A node that missed two heartbeats of five seconds does not count.
    pub live: u32,
    /// A live node is older than the column `nodes.version`.
    pub has_old: bool,
    /// The addresses of the others, including nodes that were last seen up to a minute ago.
    pub places: NodeAddresses,
}

#[derive(sqlx::FromRow)]
struct Row {
    addr: Option<String>,
    addresses: Option<Vec<String>>,
    ports: Option<Vec<i32>>,
    internal_ports: Option<Vec<i32>>,
    is_old: bool,
    is_live: bool,
}

impl Row {
    fn place(&self) -> NodeAddresses {
        let ports = |ports: &Option<Vec<i32>>| {
            let ports = ports.iter().flatten();
            ports.filter_map(|port| u16::try_from(*port).ok()).collect()
        };
        let addresses = self.addresses.iter().flatten();
        let mut place = NodeAddresses {
            addresses: addresses.filter_map(|text| text.parse().ok()).collect(),
            ports: ports(&self.ports),
            internal_ports: ports(&self.internal_ports),
        };
        // A node of an older version stores nothing else.
        if let Some(url) = self.addr.as_ref().and_then(|text| Url::parse(text).ok()) {
            place.internal_ports.extend(url.port_or_known_default());
            place.addresses.extend(address_of(&url));
        }
        place
    }
}

/// Stores the heartbeat and the addresses of this node, deletes nodes without a heartbeat for a minute, and returns
/// the others.
pub async fn upsert(
    db: &Db,
    boot_id: BootId,
    addr: Option<&str>,
    place: &NodeAddresses,
) -> Result<OtherNodes> {
    let addresses: Vec<String> = place.addresses.iter().map(ToString::to_string).collect();
    let ports: Vec<i32> = place.ports.iter().copied().map(i32::from).collect();
    let internal_ports: Vec<i32> = place
        .internal_ports
        .iter()
        .copied()
        .map(i32::from)
        .collect();
    let others: Vec<Row> = sqlx::query_as(
        "with heartbeat as (
           insert into nodes (boot_id, addr, addresses, ports, internal_ports, version, seen_at)
           values ($1, $2, $3, $4, $5, $6, now())
               on conflict on constraint nodes_pkey do update
              set addr = excluded.addr, version = excluded.version, addresses = excluded.addresses, ports = excluded.ports,
                  internal_ports = excluded.internal_ports, seen_at = excluded.seen_at
         ), expired as (
           delete from nodes
            where boot_id <> $1
              and seen_at < now() - interval '1 minute'
         )
         select addr, addresses, ports, internal_ports, version is null as is_old,
                seen_at > now() - interval '12 seconds' as is_live
           from nodes
          where boot_id <> $1
            and seen_at >= now() - interval '1 minute'",
    )
    .bind(boot_id)
    .bind(addr)
    .bind(addresses)
    .bind(ports)
    .bind(internal_ports)
    .bind(env!("CARGO_PKG_VERSION"))
    .fetch_all(db.connection().await?.limited())
    .await?;
    let live = others.iter().filter(|other| other.is_live).count();
    let has_old = others.iter().any(|other| other.is_live && other.is_old);
    let mut places = NodeAddresses::default();
    for other in &others {
        places.merge(other.place());
    }
    Ok(OtherNodes {
        live: u32::try_from(live).unwrap_or(u32::MAX).saturating_add(1),
        has_old,
        places,
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

/// All nodes with a row. A row stays for a minute after its last heartbeat, so there are few.
pub async fn list(db: &Db) -> Result<Vec<NodeRow>> {
    Ok(sqlx::query_as(
        "select boot_id, addr, version, seen_at, seen_at > now() - interval '12 seconds' as live
           from nodes
          order by boot_id",
    )
    .fetch_all(db.connection().await?.limited())
    .await?)
}

/// Deletes the row of a node that shuts down.
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
