//! Where a node listens: what no other node dials for a tenant.

use std::collections::BTreeSet;
use std::net::IpAddr;

use url::{Host, Url};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodePlace {
    /// Of its machine, but for loopback.
    pub addresses: BTreeSet<IpAddr>,
    /// Never dialled at an address of a node.
    pub ports: BTreeSet<u16>,
    /// Where nodes talk to each other: never dialled anywhere.
    pub internal_ports: BTreeSet<u16>,
}

/// The address in a URL, where it is no name.
pub fn address_of(url: &Url) -> Option<IpAddr> {
    match url.host()? {
        Host::Ipv4(address) => Some(address.into()),
        Host::Ipv6(address) => Some(address.into()),
        Host::Domain(_) => None,
    }
}

impl NodePlace {
    /// What it says together with another.
    pub fn merge(&mut self, other: Self) {
        self.addresses.extend(other.addresses);
        self.ports.extend(other.ports);
        self.internal_ports.extend(other.internal_ports);
    }
}
