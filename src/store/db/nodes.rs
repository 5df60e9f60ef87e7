//! The nodes that run now: global, and by the clock of Postgres, so that no node's own clock decides
//! whether another lives.

use chrono::{DateTime, Utc};
use url::Url;

use crate::domain::tenant::node_addresses::{NodeAddresses, address_of};
use crate::error::Result;
use crate::ids::BootId;
use crate::store::Db;

/// What a node learns of the others when it says that it lives.
#[derive(Debug)]
pub struct Others {
    /// How many live, this one included: those that missed two beats of five seconds do not count.
    pub live: u32,
    /// One of those that live is older than `nodes.version`.
    pub has_old: bool,
    /// Where they listen, those too that were there a minute ago.
    pub places: NodeAddresses,
}

#[derive(sqlx::FromRow)]
struct Row {
    addr: Option<String>,
    addresses: Option<Vec<String>>,
    ports: Option<Vec<i32>>,
    internal_ports: Option<Vec<i32>>,
    is_old: bool,
    lives: bool,
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
        // All that is known of a node of an older version.
        if let Some(url) = self.addr.as_ref().and_then(|text| Url::parse(text).ok()) {
            place.internal_ports.extend(url.port_or_known_default());
            place.addresses.extend(address_of(&url));
        }
        place
    }
}

/// Says that this node lives and where it listens, forgets those that have not said so for a minute, and answers
/// what is known of the others.
pub async fn beat(
    db: &Db,
    boot_id: BootId,
    addr: Option<&str>,
    place: &NodeAddresses,
) -> Result<Others> {
    let addresses: Vec<String> = place.addresses.iter().map(ToString::to_string).collect();
    let ports: Vec<i32> = place.ports.iter().copied().map(i32::from).collect();
    let internal_ports: Vec<i32> = place
        .internal_ports
        .iter()
        .copied()
        .map(i32::from)
        .collect();
    let others: Vec<Row> = sqlx::query_as(
        "with beat as (
           insert into nodes (boot_id, addr, addresses, ports, internal_ports, version, seen_at)
           values ($1, $2, $3, $4, $5, $6, now())
               on conflict on constraint nodes_pkey do update
              set addr = excluded.addr, version = excluded.version, addresses = excluded.addresses, ports = excluded.ports,
                  internal_ports = excluded.internal_ports, seen_at = excluded.seen_at
         ), gone as (
           delete from nodes
            where boot_id <> $1
              and seen_at < now() - interval '1 minute'
         )
         select addr, addresses, ports, internal_ports, version is null as is_old,
                seen_at > now() - interval '12 seconds' as lives
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
    let live = others.iter().filter(|other| other.lives);
    let (live, has_old) = (live.clone().count(), live.clone().any(|other| other.is_old));
    let mut places = NodeAddresses::default();
    for other in &others {
        places.merge(other.place());
    }
    Ok(Others {
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
