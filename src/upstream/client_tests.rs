//! How the guarded client behaves against real servers on loopback, opened by the operator's setting.

use std::error::Error as StdError;
use std::net::{IpAddr, Ipv4Addr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipnet::IpNet;
use reqwest::dns::Resolve;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use url::Url;

use super::*;
use crate::upstream::hostile_tests::Sentinel;

const DEADLINE: Duration = Duration::from_secs(10);
const HELLO: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";

/// Answers every connection with `answer`, then closes it, or leaves it hanging.
async fn serve(answer: impl Into<String>, hang: bool) -> u16 {
    let answer = answer.into();
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut hanging = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            // One read takes a small request, and whatever else a client begins with.
            let _ = stream.read(&mut [0; 4096]).await;
            // The client hangs up in the middle of an answer that is too long.
            let _ = stream.write_all(answer.as_bytes()).await;
            if hang {
                hanging.push(stream);
            }
        }
    });
    port
}

fn allowing(policy: PrivateUpstreams) -> GuardedClient {
    GuardedClient::new(policy, OwnPorts::default()).unwrap()
}

/// Each dial takes the next answer.
fn scripted(answers: &[&[&str]]) -> (Lookup, Arc<AtomicUsize>) {
    let answers: Vec<Vec<IpAddr>> = answers
        .iter()
        .map(|answer| answer.iter().map(|text| text.parse().unwrap()).collect())
        .collect();
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = asked.clone();
    let lookup: Lookup = Arc::new(move |_| {
        let answer = answers[counter.fetch_add(1, Ordering::SeqCst)].clone();
        Box::pin(async move { Ok(answer) })
    });
    (lookup, asked)
}

fn only(address: [u8; 4], prefix: u8) -> PrivateUpstreams {
    PrivateUpstreams::Only(vec![IpNet::new_assert(address.into(), prefix)])
}

async fn get(client: &GuardedClient, url: &str) -> Result<String, FetchError> {
    let url = client.check_url(url)?;
    let body = client.get_bytes(&url, 1000, DEADLINE).await?;
    Ok(String::from_utf8(body).unwrap())
}

fn assert_refused(answer: Result<String, FetchError>, reason: UrlRefused) {
    match answer {
        Err(FetchError::Refused(refused)) => assert_eq!(refused, reason),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_private_server_is_reached_over_http_once_it_is_allowed() {
    let port = serve(HELLO, false).await;
    for policy in [PrivateUpstreams::Allowed, only([127, 0, 0, 0], 8)] {
        let client = allowing(policy);
        for host in ["127.0.0.1", "localhost"] {
            let body = get(&client, &format!("http://{host}:{port}/")).await;
            assert_eq!(body.unwrap(), "hello");
        }
    }
    let elsewhere = allowing(only([10, 0, 0, 0], 8));
    for host in ["127.0.0.1", "localhost"] {
        let answer = get(&elsewhere, &format!("http://{host}:{port}/")).await;
        assert_refused(answer, UrlRefused::PrivateAddress);
    }
}

/// The test above once more, in a process whose environment names a proxy.
#[test]
fn proxies_of_the_environment_are_not_asked() {
    let sentinel = Sentinel::listen();
    let proxy = format!("http://127.0.0.1:{}", sentinel.port);
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    again.args([
        "--exact",
        "upstream::client::tests::a_private_server_is_reached_over_http_once_it_is_allowed",
    ]);
    for name in [
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ] {
        again.env(name, &proxy);
    }
    let output = again.env_remove("NO_PROXY").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{said}");
    sentinel.assert_untouched();
}

#[tokio::test]
async fn a_redirect_is_told_and_not_followed() {
    let sentinel = Sentinel::listen();
    let client = allowing(PrivateUpstreams::Allowed);
    for status in [301, 302, 303, 307, 308] {
        let answer = format!(
            "HTTP/1.1 {status} Moved\r\nlocation: http://127.0.0.1:{}/\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            sentinel.port
        );
        let port = serve(answer, false).await;
        let url = format!("http://127.0.0.1:{port}/");
        match get(&client, &url).await {
            Err(FetchError::Redirect(told)) => assert_eq!(told, status),
            other => panic!("{other:?}"),
        }
    }
    sentinel.assert_untouched();
}

#[tokio::test]
async fn a_name_that_turns_to_another_address_is_refused_at_the_next_dial() {
    let port = serve(HELLO, false).await;
    let sentinel = TcpListener::bind(("127.0.0.2", port)).unwrap();
    sentinel.set_nonblocking(true).unwrap();
    let (lookup, asked) = scripted(&[&["127.0.0.1"], &["127.0.0.2"], &["169.254.169.254"]]);
    let client =
        GuardedClient::with_lookup(only([127, 0, 0, 1], 32), OwnPorts::default(), lookup).unwrap();
    let url = format!("http://rebind.example.com:{port}/");

    assert_eq!(get(&client, &url).await.unwrap(), "hello");
    // Asked once: what was judged is what was dialled.
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    assert_refused(get(&client, &url).await, UrlRefused::PrivateAddress);
    assert_refused(get(&client, &url).await, UrlRefused::ReservedAddress);
    assert_eq!(asked.load(Ordering::SeqCst), 3);
    assert!(sentinel.accept().is_err());
}

#[tokio::test]
async fn the_connector_is_given_public_addresses_and_no_others() {
    let answers: [&[&str]; 4] = [
        &["93.184.216.34"],
        &["127.0.0.1"],
        &["169.254.169.254", "2606:4700:4700::1111", "10.0.0.1", "::1"],
        &[],
    ];
    let (lookup, _) = scripted(&answers);
    let resolver = GuardedResolver {
        rules: Arc::new(Rules {
            policy: PrivateUpstreams::Refused,
            own_ports: OwnPorts::default(),
        }),
        lookup,
        https: true,
        own_port: false,
    };
    let mut given = Vec::new();
    for _ in answers {
        let resolved = resolver.resolve("rebind.example.com".parse().unwrap());
        given.push(match resolved.await {
            Ok(addresses) => addresses.map(|address| address.to_string()).collect(),
            Err(error) => error.to_string(),
        });
    }
    assert_eq!(
        given,
        [
            "93.184.216.34:0",
            "leads to a private address; this node does not call those. Ask its operator to allow it.",
            "[2606:4700:4700::1111]:0",
            "entity not found",
        ]
    );
}

#[tokio::test]
async fn an_answer_over_the_cap_is_not_read_to_its_end() {
    let client = allowing(PrivateUpstreams::Allowed);
    let long = "x".repeat(1001);
    let just = "x".repeat(1000);
    for (answer, fits) in [
        (format!("content-length: 1000\r\n\r\n{just}"), true),
        (format!("content-length: 1001\r\n\r\n{long}"), false),
        ("content-length: 99999999999\r\n\r\n".to_owned(), false),
        (format!("connection: close\r\n\r\n{just}"), true),
        (format!("connection: close\r\n\r\n{long}"), false),
        (
            format!("transfer-encoding: chunked\r\n\r\n3e8\r\n{just}\r\n1\r\nx\r\n"),
            false,
        ),
    ] {
        // An endless answer: without the cap this would last until the deadline.
        let port = serve(format!("HTTP/1.1 200 OK\r\n{answer}"), !fits).await;
        match get(&client, &format!("http://127.0.0.1:{port}/")).await {
            Ok(body) if fits => assert_eq!(body.len(), 1000),
            Err(FetchError::TooLarge(1000)) if !fits => {}
            other => panic!("{answer:.40}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn the_deadline_holds_for_the_head_and_for_the_body() {
    let client = allowing(PrivateUpstreams::Allowed);
    for answer in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\n\r\nhel"] {
        let port = serve(answer, true).await;
        let url = client
            .check_url(&format!("http://127.0.0.1:{port}/"))
            .unwrap();
        let fetched = client
            .get_bytes(&url, 1000, Duration::from_millis(100))
            .await;
        assert!(matches!(fetched, Err(FetchError::TooSlow)), "{fetched:?}");
    }
}

#[tokio::test]
async fn the_services_own_ports_are_not_reached() {
    let sentinel = Sentinel::listen();
    let port = sentinel.port;
    let client =
        GuardedClient::new(PrivateUpstreams::Allowed, OwnPorts::new([], [5432, 6379])).unwrap();
    client.add_own_port(port);

    let mut hosts: Vec<String> = ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"]
        .map(str::to_owned)
        .to_vec();
    hosts.extend(address_on_the_network());
    for host in hosts {
        for scheme in ["http", "https"] {
            let answer = get(&client, &format!("{scheme}://{host}:{port}/")).await;
            assert_refused(answer, UrlRefused::OwnPort);
        }
    }
    for url in ["http://10.1.2.3:5432/", "https://db.example.com:6379/"] {
        assert_eq!(client.check_url(url), Err(UrlRefused::OwnPort), "{url}");
    }
    sentinel.assert_untouched();

    // The same port elsewhere is another server's.
    client
        .check_url(&format!("https://api.example.com:{port}/"))
        .unwrap();
    client
        .check_url(&format!("https://8.8.8.8:{port}/"))
        .unwrap();
}

/// A private address of this machine besides loopback, where it has one. Sends nothing.
fn address_on_the_network() -> Option<String> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect(("8.8.8.8", 53)).ok()?;
    match socket.local_addr().ok()?.ip() {
        IpAddr::V4(address) if address.is_private() => Some(address.to_string()),
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    }
}

#[tokio::test]
async fn other_failures_have_their_names() {
    let client = allowing(PrivateUpstreams::Allowed);
    let missing = serve("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", false).await;
    let garbage = serve("SSH-2.0-OpenSSH_9.9\r\n", false).await;
    let closed = {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.local_addr().unwrap().port()
    };
    let failure = async |url: String| get(&client, &url).await.unwrap_err();
    assert!(matches!(
        failure(format!("http://127.0.0.1:{missing}/")).await,
        FetchError::Status(404)
    ));
    assert!(matches!(
        failure(format!("http://127.0.0.1:{garbage}/")).await,
        FetchError::Broken(_)
    ));
    assert!(matches!(
        failure(format!("https://127.0.0.1:{garbage}/")).await,
        FetchError::Unreachable(_)
    ));
    assert!(matches!(
        failure(format!("http://127.0.0.1:{closed}/")).await,
        FetchError::Unreachable(_)
    ));
    let nowhere = GuardedClient::with_lookup(
        PrivateUpstreams::Refused,
        OwnPorts::default(),
        Arc::new(|_| Box::pin(async { Err(io::Error::other("no such name")) })),
    )
    .unwrap();
    let answer = get(&nowhere, "https://nowhere.example.com/").await;
    assert!(matches!(answer, Err(FetchError::Unresolved)), "{answer:?}");
}

#[tokio::test]
async fn no_error_repeats_the_secrets_of_a_url() {
    let said = Mutex::new(String::new());
    let note = |error: &dyn StdError| {
        let mut said = said.lock().unwrap();
        let mut cause = Some(error);
        while let Some(error) = cause {
            said.push_str(&format!("{error} {error:?}\n"));
            cause = error.source();
        }
    };
    let client = allowing(PrivateUpstreams::Allowed);
    let garbage = serve("SSH-2.0-OpenSSH_9.9\r\n", false).await;
    for text in [
        "https://me:hunter2@example.com/".to_owned(),
        "https://169.254.169.254/?key=hunter2".to_owned(),
        "https://exa mple.com/?key=hunter2".to_owned(),
        "ftp://example.com/hunter2".to_owned(),
        format!("http://127.0.0.1:{garbage}/hunter2?key=hunter2"),
        format!("https://127.0.0.1:{garbage}/hunter2?key=hunter2"),
        "http://127.0.0.1:1/hunter2?key=hunter2".to_owned(),
    ] {
        if let Err(refused) = client.check_url(&text) {
            note(&refused);
        }
        if let Ok(url) = Url::parse(&text) {
            note(&client.get_bytes(&url, 1000, DEADLINE).await.unwrap_err());
        }
    }
    let said = said.into_inner().unwrap();
    assert!(said.lines().count() >= 10);
    assert!(!said.contains("hunter2"), "{said}");
}
