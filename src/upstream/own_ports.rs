//! The service's own ports: through the service a tenant must never reach the service itself, on any node,
//! its Postgres or its Redis, even where private addresses are allowed. A port of a node is refused at the
//! addresses of all nodes; a model's server beside them, on a port of its own, is not.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, UdpSocket};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use secrecy::{ExposeSecret, SecretString};
use url::Url;

use super::interfaces;
use crate::config::Config;
use crate::domain::tenant::node_addresses::{NodeAddresses, address_of};

const POSTGRES_PORT: u16 = 5432;
const REDIS_PORT: u16 = 6379;

#[derive(Debug, Default)]
pub struct OwnPorts {
    /// Of this node's listeners: refused at every address of a node.
    here: RwLock<BTreeSet<u16>>,
    /// Addresses by which others reach this machine.
    addresses: BTreeSet<IpAddr>,
    /// Of this node's listener for other nodes.
    internal: BTreeSet<u16>,
    /// The other nodes, by their last heartbeat.
    others: RwLock<NodeAddresses>,
    /// Refused at every address there is, because these servers move and have replicas, and nobody
    /// serves a model there.
    everywhere: BTreeSet<u16>,
}

impl OwnPorts {
    pub fn new(
        here: impl IntoIterator<Item = u16>,
        everywhere: impl IntoIterator<Item = u16>,
    ) -> Self {
        Self {
            here: RwLock::new(here.into_iter().collect()),
            everywhere: everywhere.into_iter().collect(),
            ..Self::default()
        }
    }

    /// The node's listeners, its servers, and the port where the nodes talk to each other.
    pub fn of(config: &Config) -> Self {
        let here = [Some(config.listen), config.operator_listen]
            .into_iter()
            .flatten()
            .chain([config.metrics_listen])
            .map(|address| address.port());
        let advertised = config.internal_advertise.as_ref();
        let internal = [
            config.internal_listen.map(|address| address.port()),
            advertised.and_then(Url::port_or_known_default),
        ];
        let internal: BTreeSet<u16> = internal.into_iter().flatten().collect();
        let servers = server_ports(&config.database_url, POSTGRES_PORT).into_iter();
        let everywhere = servers
            .chain(server_ports(&config.redis_url, REDIS_PORT))
            .chain(internal.clone());
        let mut addresses = interfaces::addresses();
        addresses.extend(advertised.and_then(address_of));
        Self {
            addresses,
            internal,
            ..Self::new(here, everywhere)
        }
    }

    /// For a listener whose port is known only once it is bound.
    pub fn add(&self, port: u16) {
        self.here
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(port);
    }

    /// What the other nodes get.
    pub(super) fn place(&self) -> NodeAddresses {
        let here = read(&self.here);
        NodeAddresses {
            addresses: self.addresses.clone(),
            // Zero is a port that is known once it is bound.
            ports: here.iter().copied().filter(|port| *port > 0).collect(),
            internal_ports: self.internal.clone(),
        }
    }

    pub(super) fn set_others(&self, others: NodeAddresses) {
        *self.others.write().unwrap_or_else(PoisonError::into_inner) = others;
    }

    pub(super) fn everywhere(&self, port: u16) -> bool {
        self.everywhere.contains(&port) || read(&self.others).internal_ports.contains(&port)
    }

    /// Whether a node has a listener there.
    pub(super) fn of_a_node(&self, port: u16) -> bool {
        read(&self.here).contains(&port) || read(&self.others).ports.contains(&port)
    }

    /// Whether another node reported this address as its machine's.
    pub(super) fn is_of_a_node(&self, address: IpAddr) -> bool {
        read(&self.others).addresses.contains(&address)
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Postgres takes its port as a parameter too.
fn server_ports(url: &SecretString, default: u16) -> Vec<u16> {
    let Ok(url) = Url::parse(url.expose_secret()) else {
        return vec![default];
    };
    let parameter = url
        .query_pairs()
        .filter(|(name, _)| name == "port")
        .filter_map(|(_, value)| value.parse().ok());
    parameter.chain([url.port().unwrap_or(default)]).collect()
}

/// Only an address of this machine can be bound. Any other failure counts as ours, to be safe.
pub(super) fn is_of_this_machine(address: IpAddr) -> bool {
    match UdpSocket::bind((address, 0)) {
        Ok(_) => true,
        Err(failure) => failure.kind() != ErrorKind::AddrNotAvailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_of_this_machine_and_a_public_address_is_not() {
        for address in ["127.0.0.1", "127.8.9.10", "::1", "0.0.0.0"] {
            assert!(is_of_this_machine(address.parse().unwrap()), "{address}");
        }
        assert!(!is_of_this_machine("8.8.8.8".parse().unwrap()));
    }

    #[test]
    fn a_port_of_any_node_is_refused_at_the_address_of_any_node() {
        let own = OwnPorts::new([8080], []);
        own.set_others(NodeAddresses {
            addresses: BTreeSet::from(["10.0.0.7".parse().unwrap()]),
            ports: BTreeSet::from([9000]),
            internal_ports: BTreeSet::from([9001]),
        });
        assert!(own.of_a_node(8080) && own.of_a_node(9000) && !own.of_a_node(11_434));
        assert!(own.is_of_a_node("10.0.0.7".parse().unwrap()));
        assert!(!own.is_of_a_node("10.0.0.8".parse().unwrap()));
        assert!(own.everywhere(9001) && !own.everywhere(9000));
    }

    #[test]
    fn the_ports_come_from_the_configuration() {
        let vars = |name: &str| {
            let value = match name.strip_prefix(crate::config::PREFIX)? {
                "DATABASE_URL" => "postgres://app:pw@db:6432/throughline?port=7432",
                "REDIS_URL" => "redis://cache",
                "OPERATOR_KEY" | "SECRET_KEY" => "0123456789abcdef0123456789abcdef",
                "OPERATOR_LISTEN" => "127.0.0.1:8090",
                "INTERNAL_LISTEN" => "0.0.0.0:8081",
                "INTERNAL_ADVERTISE" => "http://10.0.0.5:9081",
                _ => return None,
            };
            Some(value.to_owned())
        };
        let own = OwnPorts::of(&Config::from_lookup(&vars).unwrap());
        own.add(40_001);
        assert_eq!(
            *own.here.read().unwrap(),
            BTreeSet::from([8080, 8090, 9464, 40_001])
        );
        let place = own.place();
        assert_eq!(place.ports, BTreeSet::from([8080, 8090, 9464, 40_001]));
        assert_eq!(place.internal_ports, BTreeSet::from([8081, 9081]));
        assert!(place.addresses.contains(&"10.0.0.5".parse().unwrap()));
        assert_eq!(
            own.everywhere,
            BTreeSet::from([6379, 6432, 7432, 8081, 9081])
        );
    }
}
