//! Which IP addresses may be dialled for a tenant. Pure rules: it resolves nothing and opens nothing.
//! An address that no rule knows is refused, never let through.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use super::url_rules::UrlRefused;
use crate::config::PrivateUpstreams;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Public,
    /// Loopback, RFC 1918 and unique local: for the operator to open.
    Private,
    /// Not a place of its own, or one that hands out credentials. No setting opens it.
    Never,
}

/// Public addresses take https only; private ones what the operator allows, then with http too.
pub(super) fn check(
    policy: &PrivateUpstreams,
    https: bool,
    address: IpAddr,
) -> Result<(), UrlRefused> {
    match kind(address) {
        Kind::Never => Err(UrlRefused::ReservedAddress),
        Kind::Public if https => Ok(()),
        Kind::Public => Err(UrlRefused::PlainHttp),
        Kind::Private if allows(policy, address) => Ok(()),
        Kind::Private => Err(UrlRefused::PrivateAddress),
    }
}

fn allows(policy: &PrivateUpstreams, address: IpAddr) -> bool {
    match policy {
        PrivateUpstreams::Refused => false,
        PrivateUpstreams::Allowed => true,
        PrivateUpstreams::Only(networks) => {
            networks.iter().any(|network| network.contains(&address))
        }
    }
}

fn kind(address: IpAddr) -> Kind {
    match address {
        IpAddr::V4(address) => kind_v4(address),
        IpAddr::V6(address) => kind_v6(address),
    }
}

const fn v4([a, b, c, d]: [u8; 4], prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix)
}

const V4_NEVER: [Ipv4Net; 12] = [
    v4([0, 0, 0, 0], 8),
    // Carrier NAT; Alibaba's metadata is at 100.100.100.200.
    v4([100, 64, 0, 0], 10),
    // Azure's host: public by number, metadata by nature.
    v4([168, 63, 129, 16], 32),
    // Link-local, with the metadata of nearly every cloud.
    v4([169, 254, 0, 0], 16),
    // Protocol assignments; an older metadata of Oracle's.
    v4([192, 0, 0, 0], 24),
    // Documentation, three times.
    v4([192, 0, 2, 0], 24),
    v4([198, 51, 100, 0], 24),
    v4([203, 0, 113, 0], 24),
    // 6to4 relays.
    v4([192, 88, 99, 0], 24),
    // Benchmarking.
    v4([198, 18, 0, 0], 15),
    // Multicast.
    v4([224, 0, 0, 0], 4),
    // Reserved, and broadcast at its end.
    v4([240, 0, 0, 0], 4),
];

fn kind_v4(address: Ipv4Addr) -> Kind {
    if V4_NEVER.iter().any(|network| network.contains(&address)) {
        Kind::Never
    } else if address.is_loopback() || address.is_private() {
        Kind::Private
    } else {
        Kind::Public
    }
}

/// The clouds that put their metadata inside the unique local range.
const ULA_METADATA: [Ipv6Net; 4] = [
    // AWS: metadata, DNS, time and pod identity.
    v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0], 32),
    // Google.
    v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0], 32),
    // Scaleway.
    v6([0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42], 128),
    // Oracle.
    v6([0xfd00, 0xc1, 0, 0, 0, 0, 0, 0], 32),
];

const ULA: Ipv6Net = v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7);
const GLOBAL_UNICAST: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);

/// Inside global unicast, yet not places of their own. What carries an IPv4 address inside
/// (mapped, compatible, NAT64), discard, SRv6, link-local, site-local and multicast lie outside it.
const GLOBAL_NEVER: [Ipv6Net; 4] = [
    // Protocol assignments: Teredo, benchmarking, ORCHID.
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23),
    // Documentation, twice.
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32),
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20),
    // 6to4, with an IPv4 address inside.
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16),
];

fn kind_v6(address: Ipv6Addr) -> Kind {
    let within = |networks: &[Ipv6Net]| networks.iter().any(|network| network.contains(&address));
    if within(&ULA_METADATA) || within(&GLOBAL_NEVER) {
        Kind::Never
    } else if address == Ipv6Addr::LOCALHOST || ULA.contains(&address) {
        Kind::Private
    } else if GLOBAL_UNICAST.contains(&address) {
        Kind::Public
    } else {
        Kind::Never
    }
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;

    use super::*;

    fn check_kind(expected: Kind, addresses: &[&str]) {
        for text in addresses {
            assert_eq!(kind(text.parse().unwrap()), expected, "{text}");
        }
    }

    #[test]
    fn public_addresses_are_public_up_to_the_edges_of_what_is_not() {
        check_kind(
            Kind::Public,
            &[
                "1.1.1.1",
                "8.8.8.8",
                "9.255.255.255",
                "11.0.0.0",
                "100.63.255.255",
                "100.128.0.0",
                "126.255.255.255",
                "128.0.0.0",
                "168.63.129.15",
                "169.253.255.255",
                "169.255.0.0",
                "172.15.255.255",
                "172.32.0.0",
                "192.167.255.255",
                "192.169.0.0",
                "198.17.255.255",
                "198.20.0.0",
                "223.255.255.255",
                "2000::1",
                "2001:200::1",
                "2001:4860:4860::8888",
                "2003::1",
                "2606:4700:4700::1111",
                "3ffe:ffff::1",
                "3fff:1000::1",
            ],
        );
    }

    #[test]
    fn private_is_loopback_rfc_1918_and_unique_local() {
        check_kind(
            Kind::Private,
            &[
                "127.0.0.1",
                "127.255.255.255",
                "10.0.0.0",
                "10.255.255.255",
                "172.16.0.0",
                "172.31.255.255",
                "192.168.0.0",
                "192.168.255.255",
                "::1",
                "fc00::1",
                "fd00::1",
                "fdff:ffff::1",
            ],
        );
    }

    #[test]
    fn some_addresses_are_never_dialled() {
        check_kind(
            Kind::Never,
            &[
                "0.0.0.0",
                "0.255.255.255",
                "100.64.0.0",
                "100.100.100.200",
                "100.127.255.255",
                "168.63.129.16",
                "169.254.169.254",
                "169.254.170.2",
                "192.0.0.192",
                "192.0.2.1",
                "192.88.99.1",
                "198.18.0.0",
                "198.19.255.255",
                "198.51.100.1",
                "203.0.113.1",
                "224.0.0.1",
                "239.255.255.255",
                "240.0.0.1",
                "255.255.255.255",
                "::",
                "::2",
                "::127.0.0.1",
                "::8.8.8.8",
                "::ffff:127.0.0.1",
                "::ffff:8.8.8.8",
                "::ffff:0:127.0.0.1",
                "64:ff9b::127.0.0.1",
                "64:ff9b::8.8.8.8",
                "64:ff9b:1::1",
                "100::1",
                "100:0:0:1::1",
                "2001::1",
                "2001:2::1",
                "2001:10::1",
                "2001:20::1",
                "2001:db8::1",
                "2002:7f00:1::",
                "3fff::1",
                "4000::1",
                "5f00::1",
                "fd00:ec2::254",
                "fd20:ce::254",
                "fd00:42::42",
                "fd00:c1::a9fe:a9fe",
                "fe80::1",
                "febf::1",
                "fec0::1",
                "ff02::1",
                "ff0e::1",
            ],
        );
    }

    fn only(networks: &[(&str, u8)]) -> PrivateUpstreams {
        PrivateUpstreams::Only(
            networks
                .iter()
                .map(|(address, prefix)| IpNet::new(address.parse().unwrap(), *prefix).unwrap())
                .collect(),
        )
    }

    #[test]
    fn the_operators_setting_opens_private_addresses_and_nothing_else() {
        use PrivateUpstreams::{Allowed, Refused};
        let ten = only(&[("10.1.0.0", 16), ("fd12::", 16)]);
        let all = only(&[("0.0.0.0", 0), ("::", 0)]);
        let one = only(&[("10.1.2.3", 32), ("fd12::1", 128)]);
        let private = Err(UrlRefused::PrivateAddress);
        let plain = Err(UrlRefused::PlainHttp);
        let never = Err(UrlRefused::ReservedAddress);
        for (policy, https, address, expected) in [
            (&Refused, true, "8.8.8.8", Ok(())),
            (&Refused, false, "8.8.8.8", plain.clone()),
            (&Refused, true, "10.1.2.3", private.clone()),
            (&Refused, true, "::1", private.clone()),
            (&Allowed, false, "10.1.2.3", Ok(())),
            (&Allowed, false, "127.0.0.1", Ok(())),
            (&Allowed, true, "::1", Ok(())),
            (&Allowed, false, "8.8.8.8", plain.clone()),
            (&Allowed, true, "8.8.8.8", Ok(())),
            (&Allowed, false, "169.254.169.254", never.clone()),
            (&Allowed, true, "fd00:ec2::254", never.clone()),
            (&ten, false, "10.1.2.3", Ok(())),
            (&ten, false, "10.2.0.0", private.clone()),
            (&ten, true, "127.0.0.1", private.clone()),
            (&ten, false, "fd12::9", Ok(())),
            (&ten, false, "fd13::9", private.clone()),
            (&ten, true, "2606:4700::1", Ok(())),
            (&all, false, "192.168.1.1", Ok(())),
            (&all, false, "fd13::9", Ok(())),
            (&all, false, "8.8.8.8", plain),
            (&all, true, "169.254.169.254", never.clone()),
            (&all, true, "::ffff:10.1.2.3", never),
            (&one, false, "10.1.2.3", Ok(())),
            (&one, false, "10.1.2.4", private.clone()),
            (&one, false, "fd12::1", Ok(())),
            (&one, false, "fd12::2", private),
        ] {
            let answer = check(policy, https, address.parse().unwrap());
            assert_eq!(answer, expected, "{policy:?} https={https} {address}");
        }
    }
}
