//! Why a call of a model failed, as one short class for the log. It holds nothing that a server said.

use std::error::Error as StdError;
use std::io::{self, ErrorKind};

use super::call_error::CallError;
use super::client::FetchError;

impl CallError {
    /// The class of the failure: `refused`, `dns`, `tls`, `timeout`, `status 401`, `breaker open`, …
    pub fn reason(&self) -> String {
        match self {
            Self::NotReached(error) => fetch_reason(error),
            Self::TooSlow => "timeout".to_owned(),
            Self::Reported(_) => "error in the answer".to_owned(),
            Self::TooLong(_) => "context too long".to_owned(),
            Self::Busy { .. } => "status 429".to_owned(),
            Self::Unavailable { .. } => "status 503".to_owned(),
            Self::NotAllowed(0) => "key not sendable".to_owned(),
            Self::Failed(status) | Self::NotAllowed(status) | Self::Refused { status, .. } => {
                format!("status {status}")
            }
            Self::LeftAlone { .. } => "breaker open".to_owned(),
            Self::Broken => "connection broken".to_owned(),
            Self::Malformed => "not a completion".to_owned(),
            Self::TooLarge => "answer too large".to_owned(),
        }
    }
}

fn fetch_reason(error: &FetchError) -> String {
    match error {
        FetchError::Refused(_) => "address not allowed".to_owned(),
        FetchError::Unresolved => "dns".to_owned(),
        FetchError::TooSlow => "timeout".to_owned(),
        FetchError::Redirect(status) | FetchError::Status(status) => format!("status {status}"),
        FetchError::TooLarge(_) => "answer too large".to_owned(),
        FetchError::Broken(_) => "connection broken".to_owned(),
        FetchError::Unreachable(error) => match io_kind(error) {
            Some(ErrorKind::ConnectionRefused) => "refused".to_owned(),
            // What rustls finds wrong with a handshake or a certificate.
            Some(ErrorKind::InvalidData) => "tls".to_owned(),
            Some(_) | None => "unreachable".to_owned(),
        },
    }
}

/// The kind of the first I/O error among the causes that says one.
fn io_kind(error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
    let mut next = Some(error);
    while let Some(error) = next {
        next = match error.downcast_ref::<io::Error>() {
            Some(error) if error.kind() != ErrorKind::Other => return Some(error.kind()),
            // `source` of a wrapped error skips the error that it wraps.
            Some(error) => error
                .get_ref()
                .map(|wrapped| wrapped as &(dyn StdError + 'static)),
            None => error.source(),
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};
    use std::time::Duration;

    use super::*;
    use crate::config::PrivateUpstreams;
    use crate::upstream::{Completions, GuardedClient, ModelServer, OwnPorts};

    async fn reason_of(base_url: &str) -> String {
        let client = GuardedClient::new(PrivateUpstreams::Allowed, OwnPorts::default()).unwrap();
        let server = ModelServer::new(
            "owner",
            &base_url.parse().unwrap(),
            None,
            Duration::from_secs(30),
        );
        let completions = Completions::new(client);
        match completions
            .complete(&server, b"{}".to_vec(), &mut |_| true)
            .await
        {
            Ok(_) => panic!("{base_url} answered"),
            Err(error) => error.reason(),
        }
    }

    #[tokio::test]
    async fn a_port_without_a_listener_is_refused() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let reason = reason_of(&format!("http://127.0.0.1:{port}/v1")).await;
        assert_eq!(reason, "refused");
    }

    #[test]
    fn an_error_inside_another_is_found() {
        let wrapped = io::Error::other(io::Error::new(ErrorKind::InvalidData, "bad certificate"));
        assert_eq!(io_kind(&wrapped), Some(ErrorKind::InvalidData));
        assert_eq!(io_kind(&io::Error::other("unknown")), None);
        assert_eq!(io_kind(&std::fmt::Error), None);
    }

    #[test]
    fn each_failure_has_its_class() {
        let wait = Duration::from_secs(8);
        for (error, reason) in [
            (CallError::TooSlow, "timeout"),
            (CallError::Failed(502), "status 502"),
            (CallError::Reported(String::new()), "error in the answer"),
            (CallError::NotAllowed(401), "status 401"),
            (CallError::Busy { retry_after: None }, "status 429"),
            (CallError::Unavailable { retry_after: wait }, "status 503"),
            (CallError::LeftAlone { retry_after: wait }, "breaker open"),
            (CallError::NotReached(FetchError::Unresolved), "dns"),
        ] {
            assert_eq!(error.reason(), reason);
        }
    }

    #[test]
    fn an_open_breaker_says_when_the_server_is_called_again() {
        let retry_after = Duration::from_millis(7200);
        let text = CallError::LeftAlone { retry_after }.to_string();
        assert!(text.ends_with("it is called again in 8 s"), "{text}");
    }
}
