//! Every error a client can see. `Code` is the closed table: one row for each thing a client can act
//! on. `http::problem` is the one place that turns an `Error` into an answer.

use std::fmt;

use serde::Serialize;

use crate::ids::TenantId;

pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! error_codes {
    ($($variant:ident, $code:literal, $status:literal, $retry:ident, $title:literal;)+) => {
        /// A stable code. Rows are never renamed or given another status.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Code { $($variant),+ }

        impl Code {
            pub const ALL: &'static [Code] = &[$(Code::$variant),+];

            /// What clients compare with.
            pub const fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $code),+ }
            }

            pub const fn status(self) -> u16 {
                match self { $(Code::$variant => $status),+ }
            }

            pub const fn title(self) -> &'static str {
                match self { $(Code::$variant => $title),+ }
            }

            /// The row of a stored code.
            pub fn parse(code: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|row| row.as_str() == code)
            }

            /// Whether the same request may succeed later, unchanged.
            pub const fn retry_helps(self) -> bool {
                matches!(match self { $(Code::$variant => RetryHint::$retry),+ }, RetryHint::Retryable)
            }
        }
    };
}

enum RetryHint {
    Retryable,
    Final,
}

error_codes! {
    InvalidJson, "invalid_json", 400, Final, "Invalid JSON";
    InvalidYaml, "invalid_yaml", 400, Final, "Invalid YAML";
    InvalidRequest, "invalid_request", 400, Final, "Invalid request";
    InvalidCursor, "invalid_cursor", 400, Final, "Invalid cursor";
    InvalidIdempotencyKey, "invalid_idempotency_key", 400, Final, "Invalid Idempotency-Key";
    InvalidSessionId, "invalid_session_id", 400, Final, "Invalid session id";
    ToolCallUnknown, "tool_call_unknown", 400, Final, "Unknown tool call";
    UpstreamRefused, "upstream_refused", 400, Final, "The model provider rejected the request";
    ContextLengthExceeded, "context_length_exceeded", 400, Final, "Context length exceeded";
    LoopDetected, "loop_detected", 400, Final, "Loop detected";
    InvalidSessionKey, "invalid_session_key", 400, Final, "Invalid session key";
    Unauthorized, "unauthorized", 401, Final, "Missing or invalid credential";
    KeyExpired, "key_expired", 401, Final, "API key expired";
    KeyRevoked, "key_revoked", 401, Final, "API key revoked";
    InvalidToken, "invalid_token", 401, Final, "Invalid token";
    TokenExpired, "token_expired", 401, Final, "Token expired";
    TokenNotYetValid, "token_not_yet_valid", 401, Final, "Token not yet valid";
    TokenLivesTooLong, "token_lives_too_long", 401, Final, "Token lifetime exceeds 24 hours";
    WrongAudience, "wrong_audience", 401, Final, "Wrong audience";
    TenantAmbiguous, "tenant_ambiguous", 401, Final, "Ambiguous tenant";
    MissingScope, "missing_scope", 403, Final, "Insufficient scope";
    IdentityRequired, "identity_required", 403, Final, "An identity is required";
    PlatformNotAllowed, "platform_not_allowed", 403, Final, "The key does not cover this platform";
    TenantSuspended, "tenant_suspended", 403, Final, "Tenant suspended";
    OriginNotAllowed, "origin_not_allowed", 403, Final, "Origin not allowed";
    GuestNotAllowed, "guest_not_allowed", 403, Final, "Not allowed for guests";
    RoleNotAllowed, "role_not_allowed", 403, Final, "Message role not allowed";
    PrivateChatRequired, "private_chat_required", 403, Final, "A direct chat is required";
    ProofRequired, "proof_required", 403, Final, "Proof of the other identity is required";
    OlderIdentity, "older_identity", 403, Final, "Cannot unlink an older identity";
    CodeNotFound, "code_not_found", 404, Final, "Invalid or expired code";
    SessionNotFound, "session_not_found", 404, Final, "Session not found";
    SessionKeyNotFound, "session_key_not_found", 404, Final, "Session key not found";
    NotFound, "not_found", 404, Final, "Not found";
    ModelNotFound, "model_not_found", 404, Final, "Model not found";
    MethodNotAllowed, "method_not_allowed", 405, Final, "Method not allowed";
    RequestTimeout, "request_timeout", 408, Retryable, "Request timeout";
    IdempotencyConflict, "idempotency_conflict", 409, Final, "Idempotency-Key reused with another request";
    PlatformTaken, "platform_taken", 409, Final, "Platform already claimed";
    IssuerTaken, "issuer_taken", 409, Final, "Issuer already registered";
    AgentInUse, "agent_in_use", 409, Final, "Agent in use";
    AgentMismatch, "agent_mismatch", 409, Final, "The session belongs to another agent";
    SessionIdTaken, "session_id_taken", 409, Final, "Session id already used";
    SessionKeyMismatch, "session_key_mismatch", 409, Final, "The session belongs to another session key";
    NotCompressed, "not_compressed", 409, Final, "The session is not a compressed one";
    HasNewMessages, "has_new_messages", 409, Final, "The session has new messages since the compression";
    StaleLease, "stale_lease", 409, Final, "The lease has expired";
    SessionBusy, "session_busy", 409, Retryable, "A turn is already active";
    SessionMoved, "session_moved", 409, Retryable, "The session key leads to another session now";
    TurnStopped, "turn_stopped", 409, Final, "The turn was stopped";
    TurnRestarted, "turn_restarted", 409, Final, "The turn was restarted on another node; discard the partial output";
    IdentityTaken, "identity_taken", 409, Final, "The identity belongs to another user";
    ExternalIdTaken, "external_id_taken", 409, Final, "The external id belongs to another user";
    AlreadyLinked, "already_linked", 409, Final, "The identities are already linked";
    MergeRequired, "merge_required", 409, Final, "Only an admin may merge these users";
    LastAdminKey, "last_admin_key", 409, Final, "Cannot revoke the last admin key that does not expire";
    LimitReached, "limit_reached", 409, Final, "Tenant limit reached";
    LastIdentity, "last_identity", 409, Final, "Cannot unlink the last identity";
    UndoNotPossible, "undo_not_possible", 409, Final, "The unlink can no longer be undone";
    Conflict, "conflict", 409, Retryable, "Concurrent change";
    TooManyIdentities, "too_many_identities", 409, Final, "Too many identities";
    PreconditionFailed, "precondition_failed", 412, Final, "Precondition failed";
    PayloadTooLarge, "payload_too_large", 413, Final, "Payload too large";
    UriTooLong, "uri_too_long", 414, Final, "URI too long";
    UnsupportedMediaType, "unsupported_media_type", 415, Final, "Unsupported media type";
    InvalidValue, "invalid_value", 422, Final, "Invalid value";
    NothingToCompress, "nothing_to_compress", 422, Final, "Nothing to compress";
    SummaryRequired, "summary_required", 422, Final, "A summary is required";
    RetentionNotSet, "retention_not_set", 422, Final, "Retention is not set";
    SecretRequired, "secret_required", 422, Final, "The secret is required again";
    UpstreamBusy, "upstream_busy", 429, Retryable, "The model provider is rate limiting";
    QueueFull, "queue_full", 429, Retryable, "The conversation's queue is full";
    TooManyTurns, "too_many_turns", 429, Retryable, "Too many concurrent turns";
    TooManyCalls, "too_many_calls", 429, Retryable, "Too many concurrent model calls";
    TooManyStreams, "too_many_streams", 429, Retryable, "Too many open streams";
    Busy, "busy", 429, Retryable, "Too many concurrent requests";
    RateLimited, "rate_limited", 429, Retryable, "Rate limit exceeded";
    TooManyAttempts, "too_many_attempts", 429, Retryable, "Too many wrong codes";
    TooManyCodes, "too_many_codes", 429, Retryable, "Too many pending codes";
    TooManyMerges, "too_many_merges", 429, Retryable, "Too many merges";
    Internal, "internal", 500, Retryable, "Internal server error";
    TurnAbandoned, "turn_abandoned", 500, Final, "The turn was abandoned after repeated failures";
    TooManyToolRounds, "too_many_tool_rounds", 502, Final, "Too many tool rounds";
    UpstreamFailed, "upstream_failed", 502, Retryable, "The model provider failed";
    Unavailable, "unavailable", 503, Retryable, "Service temporarily unavailable";
    UpstreamTimeout, "upstream_timeout", 504, Retryable, "The model provider timed out";
    Timeout, "timeout", 504, Retryable, "Request timed out";
}

/// One field that is wrong: `pointer` is a JSON pointer into the body, or `/query/…`, `/path/…`,
/// `/header/…` for the other parts of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct FieldError {
    pub pointer: String,
    pub detail: String,
}

impl FieldError {
    pub fn new(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self {
            pointer: pointer.into(),
            detail: detail.into(),
        }
    }
}

/// A name as a JSON pointer has it (RFC 6901).
pub fn escape_pointer(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// A call of a model that failed, for the log: no URL, no key, no text.
#[derive(Debug, Clone)]
pub struct FailedCall {
    pub tenant_id: TenantId,
    pub agent: String,
    /// Host and port of the model's server.
    pub host: String,
    /// A short class, such as `refused`, `timeout` or `status 401`.
    pub reason: String,
}

/// A failure on its way to a client: a row of the table and what is particular to this case.
#[derive(Debug)]
pub struct Error {
    pub code: Code,
    pub detail: String,
    pub errors: Vec<FieldError>,
    /// Methods the path takes; only with `MethodNotAllowed`.
    pub allow: Option<String>,
    /// Seconds after which a retry may succeed, where that is known.
    pub retry_after: Option<u32>,
    /// Whether asking again changes nothing, whatever the code usually means.
    pub is_final: bool,
    /// Headers that name what it is about.
    pub headers: Box<[(&'static str, String)]>,
    /// Logged once where the error is answered, never shown.
    pub cause: Option<anyhow::Error>,
    /// The call of a model that failed, where that is the reason. Logged once, never shown.
    pub failed_call: Option<Box<FailedCall>>,
}

impl Error {
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self {
            code,
            detail: detail.into(),
            errors: Vec::new(),
            allow: None,
            retry_after: None,
            is_final: false,
            headers: Box::default(),
            cause: None,
            failed_call: None,
        }
    }

    /// A value that breaks a rule, or several.
    pub fn invalid(errors: Vec<FieldError>) -> Self {
        Self::fields(Code::InvalidValue, errors)
    }

    /// Fine if nothing was found wrong.
    pub fn check(errors: Vec<FieldError>) -> Result<()> {
        if errors.is_empty() {
            Ok(())
        } else {
            Err(Self::invalid(errors))
        }
    }

    /// `code` with the fields it is about; the detail names the first. An empty pointer is the whole body.
    pub fn fields(code: Code, errors: Vec<FieldError>) -> Self {
        let detail = match errors.first() {
            Some(first) if first.pointer.is_empty() => first.detail.clone(),
            Some(first) => format!("{}: {}", first.pointer, first.detail),
            None => String::new(),
        };
        Self {
            errors,
            ..Self::new(code, detail)
        }
    }

    pub fn not_found(what: &str) -> Self {
        Self::new(Code::NotFound, format!("no such {what}"))
    }

    pub fn unauthorized(detail: impl Into<String>) -> Self {
        Self::new(Code::Unauthorized, detail)
    }

    pub fn internal(cause: impl Into<anyhow::Error>) -> Self {
        Self {
            cause: Some(cause.into()),
            ..Self::new(
                Code::Internal,
                "an unexpected error; quote the request_id when you report it",
            )
        }
    }

    /// Too many ask for the same at once: a retry in a moment may succeed.
    pub fn busy(detail: impl Into<String>) -> Self {
        Self {
            retry_after: Some(1),
            ..Self::new(Code::Busy, detail)
        }
    }

    /// Whether the dependency or the moment is at fault, and not what was asked: the same may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self.code, Code::Unavailable | Code::Timeout | Code::Busy)
    }

    /// Whether a dependency is away. That a tenant is busy is no such thing: its own requests bring that about.
    pub fn is_outage(&self) -> bool {
        matches!(self.code, Code::Unavailable | Code::Timeout)
    }

    /// This node ends; another one takes the request.
    pub fn shutting_down() -> Self {
        Self {
            retry_after: Some(1),
            ..Self::new(Code::Unavailable, "this node is shutting down; try again")
        }
    }

    pub fn unavailable(dependency: &str, cause: impl Into<anyhow::Error>) -> Self {
        Self {
            cause: Some(cause.into()),
            ..Self::new(Code::Unavailable, format!("{dependency} does not answer"))
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.as_str(), self.detail)
    }
}

impl std::error::Error for Error {}

impl From<anyhow::Error> for Error {
    fn from(cause: anyhow::Error) -> Self {
        Self::internal(cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_codes_is_pinned() {
        let rows: Vec<String> = Code::ALL
            .iter()
            .map(|code| {
                let retry = if code.retry_helps() { "retry" } else { "final" };
                let status = code.status();
                format!("{status} {} {retry}: {}", code.as_str(), code.title())
            })
            .collect();
        insta::assert_snapshot!(rows.join("\n"));
    }

    #[test]
    fn the_detail_names_the_first_field_if_it_has_a_name() {
        let fields = |pointer: &str| {
            Error::fields(
                Code::InvalidJson,
                vec![FieldError::new(pointer, "is cut off")],
            )
        };
        assert_eq!(fields("").detail, "is cut off");
        assert_eq!(fields("/name").detail, "/name: is cut off");
        assert_eq!(Error::fields(Code::InvalidJson, Vec::new()).detail, "");
    }

    #[test]
    fn no_two_rows_share_a_code() {
        let mut codes: Vec<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), Code::ALL.len());
    }
}
