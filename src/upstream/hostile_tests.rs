//! Every URL of `hostile_urls.txt` is refused, and none leads to a connection: the tests listen where
//! the URLs point.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use url::Url;

use super::client::{FetchError, GuardedClient, Lookup};
use super::own_ports::OwnPorts;
use super::url_rules::UrlRefused;
use crate::config::PrivateUpstreams;

const DEADLINE: Duration = Duration::from_secs(5);

/// Listeners that nobody must ever reach, on one port of every loopback address.
pub(super) struct Sentinel {
    listeners: Vec<TcpListener>,
    pub port: u16,
}

impl Sentinel {
    pub fn listen() -> Self {
        let v4 = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = v4.local_addr().unwrap().port();
        let mut listeners = vec![v4];
        // A machine may be without IPv6.
        listeners.extend(TcpListener::bind((Ipv6Addr::LOCALHOST, port)));
        Self { listeners, port }
    }

    /// Connections queue up in order, so the first that is accepted must be the one made here.
    pub fn assert_untouched(&self) {
        for listener in &self.listeners {
            let ours = match listener.local_addr().unwrap().ip() {
                IpAddr::V4(_) => TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)),
                IpAddr::V6(_) => TcpStream::connect((Ipv6Addr::LOCALHOST, self.port)),
            };
            let (_, first) = listener.accept().unwrap();
            assert_eq!(first, ours.unwrap().local_addr().unwrap());
        }
    }
}

fn hostile_urls(port: u16) -> Vec<(String, String)> {
    let placeholders = [
        ("{port}", port.to_string()),
        ("{tab}", "\t".to_owned()),
        ("{nl}", "\n".to_owned()),
        ("{cr}", "\r".to_owned()),
        ("{nul}", "\0".to_owned()),
        ("{space}", " ".to_owned()),
        ("{nbsp}", "\u{a0}".to_owned()),
        ("{lsep}", "\u{2028}".to_owned()),
    ];
    include_str!("hostile_urls.txt")
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (reason, url) = line.split_once(' ').unwrap();
            let url = placeholders
                .iter()
                .fold(url.to_owned(), |url, (from, to)| url.replace(from, to));
            (reason.to_owned(), url)
        })
        .collect()
}

/// The addresses that the file's names stand for.
fn hostile_lookup() -> Lookup {
    Arc::new(|name| {
        let label = name.split('.').next().unwrap_or_default().to_owned();
        let address: Option<IpAddr> = if let Some(v4) = label.strip_prefix("v4-") {
            Some(v4.replace('-', ".").parse().unwrap())
        } else {
            let v6 = label.strip_prefix("v6-");
            v6.map(|v6| v6.replace('-', ":").parse().unwrap())
        };
        let loopbacks = vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        let addresses = address.map_or(loopbacks, |address| vec![address]);
        Box::pin(async move { Ok(addresses) })
    })
}

async fn outcome(client: &GuardedClient, text: &str) -> Result<Vec<u8>, FetchError> {
    let url = client.check_url(text)?;
    client.get_bytes(&url, 1024, DEADLINE).await
}

#[tokio::test]
async fn no_hostile_url_leads_to_a_connection() {
    let sentinel = Sentinel::listen();
    let client = GuardedClient::with_lookup(
        PrivateUpstreams::Refused,
        OwnPorts::default(),
        hostile_lookup(),
    )
    .unwrap();
    let urls = hostile_urls(sentinel.port);
    let distinct: BTreeSet<_> = urls.iter().map(|(_, url)| url).collect();
    assert_eq!(distinct.len(), urls.len());
    assert!(urls.len() >= 200, "only {} URLs", urls.len());

    let mut wrong = Vec::new();
    for (reason, url) in &urls {
        match outcome(&client, url).await {
            Err(FetchError::Refused(refused)) if format!("{refused:?}") == *reason => {}
            other => wrong.push(format!("{url:?}: {other:?} instead of {reason}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    sentinel.assert_untouched();
}

/// A URL from the database is not trusted to have been checked.
#[tokio::test]
async fn a_url_that_was_never_checked_is_judged_when_it_is_fetched() {
    let sentinel = Sentinel::listen();
    let client = GuardedClient::with_lookup(
        PrivateUpstreams::Refused,
        OwnPorts::default(),
        hostile_lookup(),
    )
    .unwrap();
    let mut fetched = 0;
    for (_, text) in hostile_urls(sentinel.port) {
        let Ok(url) = Url::parse(&text) else { continue };
        let answer = client.get_bytes(&url, 1024, DEADLINE).await;
        assert!(matches!(answer, Err(FetchError::Refused(_))), "{text:?}");
        fetched += 1;
    }
    assert!(fetched >= 200);
    sentinel.assert_untouched();
}

#[tokio::test]
async fn with_loopback_allowed_the_same_urls_do_not_reach_an_own_port() {
    let sentinel = Sentinel::listen();
    let networks = [
        (IpAddr::from([127, 0, 0, 0]), 8),
        (Ipv6Addr::LOCALHOST.into(), 128),
    ];
    let policy = PrivateUpstreams::Only(
        networks
            .map(|(address, prefix)| IpNet::new_assert(address, prefix))
            .to_vec(),
    );
    let own = OwnPorts::new([sentinel.port], []);
    let client = GuardedClient::with_lookup(policy, own, hostile_lookup()).unwrap();
    let mut at_own_port = 0;
    for (_, text) in hostile_urls(sentinel.port) {
        for text in [text.replace("https:", "http:"), text] {
            match outcome(&client, &text).await {
                Err(FetchError::Refused(UrlRefused::OwnPort)) => at_own_port += 1,
                Err(FetchError::Refused(_)) => {}
                other => panic!("{text:?}: {other:?}"),
            }
        }
    }
    assert!(at_own_port >= 100, "only {at_own_port}");
    sentinel.assert_untouched();
}
