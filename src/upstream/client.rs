//! The one HTTP client for URLs that tenants give. Names are resolved and checked inside the connector,
//! so the address that was checked is the address that is dialled. It follows no redirect, asks no
//! proxy, and never repeats a URL in an error.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, Method, RequestBuilder, Response};
use tokio::runtime::{Handle, Id};
use url::Url;

use super::address;
use super::own_ports::{OwnPorts, is_of_this_machine};
use super::url_rules::{self, UrlRefused};
use crate::config::PrivateUpstreams;
use crate::domain::tenant::hop;
use crate::domain::tenant::node_addresses::NodeAddresses;

/// Name, handshake and all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// How a name becomes addresses: the system's way, or a test's.
pub type Lookup = Arc<dyn Fn(String) -> AddressLookup + Send + Sync>;
pub type AddressLookup = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;

/// Why a fetch brought nothing.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("the URL {0}")]
    Refused(#[from] UrlRefused),
    #[error("the server's name does not resolve")]
    Unresolved,
    #[error("the server cannot be reached")]
    Unreachable(#[source] reqwest::Error),
    #[error("the server did not answer in time")]
    TooSlow,
    #[error("the server redirects (status {0}), which is not followed")]
    Redirect(u16),
    #[error("the server answered with status {0}")]
    Status(u16),
    #[error("the answer has more than {0} bytes")]
    TooLarge(usize),
    #[error("the connection broke")]
    Broken(#[source] reqwest::Error),
}

/// Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct GuardedClient {
    inner: Arc<Inner>,
    /// Sent with every request, so that one that comes back to this deployment is recognised.
    hop_mark: Option<Arc<str>>,
}

struct Inner {
    rules: Arc<Rules>,
    /// The connector gets a name only. So there is a client for each of the things that the
    /// judgement of an address hangs on: the scheme, and whether the port is one of ours.
    ///
    /// And one for each runtime: a connection's work is done on the runtime that opened it, and waking
    /// another thread for every piece of an answer costs more than the piece.
    clients: Mutex<HashMap<ClientName, Client>>,
    lookup: Lookup,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ClientName {
    https: bool,
    own_port: bool,
    runtime: Option<Id>,
}

struct Rules {
    policy: PrivateUpstreams,
    own_ports: OwnPorts,
}

impl Rules {
    fn check_address(
        &self,
        https: bool,
        own_port: bool,
        address: IpAddr,
    ) -> Result<(), UrlRefused> {
        address::check(&self.policy, https, address)?;
        if own_port && (is_of_this_machine(address) || self.own_ports.is_of_a_node(address)) {
            return Err(UrlRefused::OwnPort);
        }
        Ok(())
    }
}

impl GuardedClient {
    pub fn new(policy: PrivateUpstreams, own_ports: OwnPorts) -> anyhow::Result<Self> {
        Self::with_lookup(policy, own_ports, Arc::new(|name| Box::pin(look_up(name))))
    }

    pub fn with_lookup(
        policy: PrivateUpstreams,
        own_ports: OwnPorts,
        lookup: Lookup,
    ) -> anyhow::Result<Self> {
        let client = Self {
            inner: Arc::new(Inner {
                rules: Arc::new(Rules { policy, own_ports }),
                clients: Mutex::default(),
                lookup,
            }),
            hop_mark: None,
        };
        // What cannot be built shows when the node starts.
        client.built(true, false)?;
        Ok(client)
    }

    pub fn marked(self, hop_mark: &str) -> Self {
        Self {
            hop_mark: Some(hop_mark.into()),
            ..self
        }
    }

    /// The client of this runtime; built if it is the first time.
    fn built(&self, https: bool, own_port: bool) -> anyhow::Result<Client> {
        let name = ClientName {
            https,
            own_port,
            runtime: Handle::try_current().ok().map(|handle| handle.id()),
        };
        let mut clients = self
            .inner
            .clients
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(&name) {
            return Ok(client.clone());
        }
        let client = build(GuardedResolver {
            rules: self.inner.rules.clone(),
            lookup: self.inner.lookup.clone(),
            https,
            own_port,
        })?;
        clients.insert(name, client.clone());
        Ok(client)
    }

    /// For a listener whose port is known only once it is bound.
    pub fn add_own_port(&self, port: u16) {
        self.inner.rules.own_ports.add(port);
    }

    /// Where this node listens, for the others.
    pub fn own_place(&self) -> NodeAddresses {
        self.inner.rules.own_ports.place()
    }

    /// Where the others listen.
    pub fn set_other_nodes(&self, places: NodeAddresses) {
        self.inner.rules.own_ports.set_others(places);
    }

    /// What can be checked while a URL is registered. A name is checked again by its addresses, each
    /// time it is dialled.
    pub fn check_url(&self, text: &str) -> Result<Url, UrlRefused> {
        let url = url_rules::parse(text)?;
        self.check_parsed(&url)?;
        Ok(url)
    }

    /// A request for the caller to fill and send. An answer of 3xx is not followed, so it must be treated
    /// for a failure; body and time have no cap here but the time to connect (see `fetch`).
    pub fn request(&self, method: Method, url: &Url) -> Result<RequestBuilder, UrlRefused> {
        let (https, own_port) = self.check_parsed(url)?;
        let client = self.built(https, own_port);
        let client = client.map_err(|_| UrlRefused::NoClient)?;
        let request = client.request(method, url.clone());
        Ok(match &self.hop_mark {
            Some(mark) => request.header(hop::HEADER, &**mark),
            None => request,
        })
    }

    /// The body of a successful answer, at most `limit` bytes, all within `deadline`.
    pub async fn get_bytes(
        &self,
        url: &Url,
        limit: usize,
        deadline: Duration,
    ) -> Result<Vec<u8>, FetchError> {
        fetch(self.request(Method::GET, url)?, limit, deadline).await
    }

    /// Whether it is https, and whether the port is one of ours. No literal address is dialled unjudged: the
    /// connector does not ask the resolver about those.
    fn check_parsed(&self, url: &Url) -> Result<(bool, bool), UrlRefused> {
        let rules = &self.inner.rules;
        let destination = url_rules::destination(&rules.policy, url)?;
        if rules.own_ports.everywhere(destination.port) {
            return Err(UrlRefused::OwnPort);
        }
        let own_port = rules.own_ports.of_a_node(destination.port);
        if let Some(address) = destination.address {
            rules.check_address(destination.https, own_port, address)?;
        }
        Ok((destination.https, own_port))
    }
}

/// Sends a request of `GuardedClient::request` and reads the successful answer, within both caps.
pub async fn fetch(
    request: RequestBuilder,
    limit: usize,
    deadline: Duration,
) -> Result<Vec<u8>, FetchError> {
    let fetching = async {
        let response = request.send().await?;
        let status = response.status();
        if status.is_redirection() {
            return Err(FetchError::Redirect(status.as_u16()));
        }
        if !status.is_success() {
            return Err(FetchError::Status(status.as_u16()));
        }
        read(response, limit).await
    };
    tokio::time::timeout(deadline, fetching)
        .await
        .unwrap_or(Err(FetchError::TooSlow))
}

async fn read(mut response: Response, limit: usize) -> Result<Vec<u8>, FetchError> {
    if response
        .content_length()
        .is_some_and(|length| length > limit as u64)
    {
        return Err(FetchError::TooLarge(limit));
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if chunk.len() > limit - body.len() {
            return Err(FetchError::TooLarge(limit));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

impl From<reqwest::Error> for FetchError {
    fn from(error: reqwest::Error) -> Self {
        let error = error.without_url();
        if let Some(refused) = refusal(&error) {
            Self::Refused(refused)
        } else if error.is_timeout() {
            Self::TooSlow
        } else if error.is_dns() {
            Self::Unresolved
        } else if error.is_connect() {
            Self::Unreachable(error)
        } else {
            Self::Broken(error)
        }
    }
}

/// The error of `GuardedResolver`, deep inside the connector's error.
fn refusal(error: &reqwest::Error) -> Option<UrlRefused> {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(refused) = cause.downcast_ref::<UrlRefused>() {
            return Some(refused.clone());
        }
        source = cause.source();
    }
    None
}

struct GuardedResolver {
    rules: Arc<Rules>,
    lookup: Lookup,
    https: bool,
    own_port: bool,
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let looking = (self.lookup)(name.as_str().to_owned());
        let rules = self.rules.clone();
        let https = self.https;
        let own_port = self.own_port;
        Box::pin(async move {
            let mut refused = None;
            let mut allowed = Vec::new();
            for address in looking.await? {
                match rules.check_address(https, own_port, address) {
                    // Port 0 stands for the URL's own.
                    Ok(()) => allowed.push(SocketAddr::new(address, 0)),
                    Err(reason) => refused = Some(reason),
                }
            }
            if allowed.is_empty() {
                return Err(match refused {
                    Some(reason) => reason.into(),
                    None => io::Error::from(io::ErrorKind::NotFound).into(),
                });
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

async fn look_up(name: String) -> io::Result<Vec<IpAddr>> {
    let found = tokio::net::lookup_host((name, 0)).await?;
    Ok(found.map(|address| address.ip()).collect())
}

fn build(resolver: GuardedResolver) -> anyhow::Result<Client> {
    let resolver = Arc::new(resolver);
    if resolver.https {
        match settings(resolver.clone()).build() {
            Ok(client) => return Ok(client),
            // The node serves on; dials over https then fail one by one.
            Err(error) => tracing::error!(
                error = format!("{:#}", anyhow::Error::from(error)),
                "https to upstreams disabled; install the system's CA certificates"
            ),
        }
    }
    settings(resolver)
        .tls_certs_only([])
        .build()
        .context("the client for upstreams")
}

#[allow(clippy::disallowed_methods, reason = "the home of the guarded client")]
fn settings(resolver: Arc<GuardedResolver>) -> reqwest::ClientBuilder {
    Client::builder()
        .https_only(resolver.https)
        .dns_resolver(resolver)
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .no_proxy()
        .referer(false)
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(IDLE_TIMEOUT)
        .tcp_nodelay(true)
        .user_agent(concat!("throughline/", env!("CARGO_PKG_VERSION")))
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
