//! The addresses of this machine's interfaces, as Linux tells them in `/proc`. Elsewhere none are known but those
//! of the configuration. Loopback and link-local addresses say nothing to other machines.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub(super) fn addresses() -> BTreeSet<IpAddr> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let fib_trie = read("/proc/net/fib_trie");
    let if_inet6 = read("/proc/net/if_inet6");
    let v4 = v4_of(&fib_trie).map(IpAddr::V4);
    v4.chain(v6_of(&if_inet6).map(IpAddr::V6)).collect()
}

/// Routes to this machine itself: an address, and below it `/32 host LOCAL`.
fn v4_of(fib_trie: &str) -> impl Iterator<Item = Ipv4Addr> {
    let below = fib_trie.lines().skip(1);
    fib_trie
        .lines()
        .zip(below)
        .filter(|(_, below)| below.trim() == "/32 host LOCAL")
        .filter_map(|(line, _)| line.trim().strip_prefix("|-- ")?.parse().ok())
        .filter(|address: &Ipv4Addr| !address.is_loopback() && !address.is_link_local())
}

/// 32 hexadecimal digits at the beginning of each line.
fn v6_of(if_inet6: &str) -> impl Iterator<Item = Ipv6Addr> {
    if_inet6
        .lines()
        .filter_map(|line| u128::from_str_radix(line.split(' ').next()?, 16).ok())
        .map(Ipv6Addr::from_bits)
        .filter(|address| !address.is_loopback() && !address.is_unicast_link_local())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_read_as_linux_tells_them() {
        let fib_trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n\
                        \x20    |-- 127.0.0.1\n        /32 host LOCAL\n\
                        \x20    |-- 10.1.2.3\n        /32 host LOCAL\n\
                        \x20    |-- 10.1.2.255\n        /32 link BROADCAST\n";
        assert_eq!(
            v4_of(fib_trie).collect::<Vec<_>>(),
            [Ipv4Addr::new(10, 1, 2, 3)]
        );
        let if_inet6 = "00000000000000000000000000000001 01 80 10 80       lo\n\
                        fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n\
                        fd000000000000000000000000000002 04 40 00 82     eth0\n";
        let expected: Ipv6Addr = "fd00::2".parse().unwrap();
        assert_eq!(v6_of(if_inet6).collect::<Vec<_>>(), [expected]);
        assert!(addresses().iter().all(|address| !address.is_loopback()));
    }
}
