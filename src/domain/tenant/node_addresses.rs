//! The addresses and ports a node listens on. No node connects to them for a tenant.

use std::collections::BTreeSet;
use std::net::IpAddr;

use url::{Host, Url};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeAddresses {
    /// The addresses of its machine, without loopback.
    pub addresses: BTreeSet<IpAddr>,
    /// Ports that are refused at an address of a node.
    pub ports: BTreeSet<u16>,
    /// Ports between nodes, which are refused at every address.
    pub internal_ports: BTreeSet<u16>,
}

/// The IP address in a URL; `None` for a domain name.
pub fn address_of(url: &Url) -> Option<IpAddr> {
    match url.host()? {
        Host::Ipv4(address) => Some(address.into()),
        Host::Ipv6(address) => Some(address.into()),
        Host::Domain(_) => None,
    }
}

impl NodeAddresses {
    /// Adds the addresses and ports of another.
    pub fn merge(&mut self, other: Self) {
        self.addresses.extend(other.addresses);
        self.ports.extend(other.ports);
        self.internal_ports.extend(other.internal_ports);
    }
}
