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
            pub fn of(code: &str) -> Option<Self> {
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
    InvalidJson, "invalid_json", 400, Final, "The body is not valid JSON";
    InvalidYaml, "invalid_yaml", 400, Final, "The body is not valid YAML";
    InvalidRequest, "invalid_request", 400, Final, "The request does not have the documented shape";
    InvalidCursor, "invalid_cursor", 400, Final, "The cursor is not one of this list";
    InvalidIdempotencyKey, "invalid_idempotency_key", 400, Final, "The Idempotency-Key is not valid";
    InvalidSessionId, "invalid_session_id", 400, Final, "The session id is not valid";
    ToolCallUnknown, "tool_call_unknown", 400, Final, "No turn waits for the result of this call";
    UpstreamRefused, "upstream_refused", 400, Final, "The model's server refuses the request";
    ContextLengthExceeded, "context_length_exceeded", 400, Final, "The conversation is too long for the model";
    LoopDetected, "loop_detected", 400, Final, "The request has passed through this service before";
    InvalidSessionKey, "invalid_session_key", 400, Final, "The session key is not valid";
    Unauthorized, "unauthorized", 401, Final, "The credential is missing or not valid";
    KeyExpired, "key_expired", 401, Final, "The API key has expired";
    KeyRevoked, "key_revoked", 401, Final, "The API key was revoked";
    InvalidToken, "invalid_token", 401, Final, "The token is not valid";
    TokenExpired, "token_expired", 401, Final, "The token has expired";
    TokenNotYetValid, "token_not_yet_valid", 401, Final, "The token is not valid yet";
    TokenLivesTooLong, "token_lives_too_long", 401, Final, "The token is valid for more than 24 hours";
    WrongAudience, "wrong_audience", 401, Final, "The token is for someone else";
    TenantAmbiguous, "tenant_ambiguous", 401, Final, "The token does not say for which one tenant it is";
    MissingScope, "missing_scope", 403, Final, "The credential lacks the right to do this";
    IdentityRequired, "identity_required", 403, Final, "A bridge must say for whom it calls";
    PlatformNotAllowed, "platform_not_allowed", 403, Final, "The key does not vouch for this platform";
    TenantSuspended, "tenant_suspended", 403, Final, "The tenant is suspended";
    OriginNotAllowed, "origin_not_allowed", 403, Final, "The tenant has not allowed calls from this origin";
    GuestNotAllowed, "guest_not_allowed", 403, Final, "A guest may only read and speak";
    RoleNotAllowed, "role_not_allowed", 403, Final, "The credential may write only messages of the role user";
    PrivateChatRequired, "private_chat_required", 403, Final, "This is only done in a direct chat";
    ProofRequired, "proof_required", 403, Final, "This needs a fresh proof of the other side";
    OlderIdentity, "older_identity", 403, Final, "A person may not unlink an older identity than the one that speaks";
    CodeNotFound, "code_not_found", 404, Final, "The code is not good, or no longer";
    SessionNotFound, "session_not_found", 404, Final, "There is no such session";
    SessionKeyNotFound, "session_key_not_found", 404, Final, "There is no such session key";
    NotFound, "not_found", 404, Final, "There is no such thing";
    ModelNotFound, "model_not_found", 404, Final, "There is no such agent";
    MethodNotAllowed, "method_not_allowed", 405, Final, "The path does not take this method";
    RequestTimeout, "request_timeout", 408, Retryable, "The request did not arrive in time";
    IdempotencyConflict, "idempotency_conflict", 409, Final, "The Idempotency-Key was used with another request";
    PlatformTaken, "platform_taken", 409, Final, "The platform is vouched for by someone else";
    IssuerTaken, "issuer_taken", 409, Final, "Issuer and audience are registered under another name";
    AgentInUse, "agent_in_use", 409, Final, "The agent is in use";
    AgentMismatch, "agent_mismatch", 409, Final, "The session belongs to another agent";
    SessionIdTaken, "session_id_taken", 409, Final, "The session id was given before";
    SessionKeyMismatch, "session_key_mismatch", 409, Final, "The session was made under another key";
    NotCompressed, "not_compressed", 409, Final, "The session is not a compressed one";
    HasNewMessages, "has_new_messages", 409, Final, "Something was said since the compression";
    StaleLease, "stale_lease", 409, Final, "The delivery was given out again, or has ended";
    SessionBusy, "session_busy", 409, Retryable, "A turn is active in the conversation";
    SessionMoved, "session_moved", 409, Retryable, "The key leads to another session now";
    TurnStopped, "turn_stopped", 409, Final, "The turn was stopped before it had an answer";
    TurnRestarted, "turn_restarted", 409, Final, "What was shown is void: the turn began anew on another node";
    IdentityTaken, "identity_taken", 409, Final, "The identity belongs to someone else";
    ExternalIdTaken, "external_id_taken", 409, Final, "The external id belongs to someone else";
    AlreadyLinked, "already_linked", 409, Final, "Both are the same person already";
    MergeRequired, "merge_required", 409, Final, "Only an admin may merge two people who both sign in";
    LastAdminKey, "last_admin_key", 409, Final, "A tenant keeps at least one admin key that does not expire";
    LimitReached, "limit_reached", 409, Final, "The tenant has as many of these as its limits allow";
    LastIdentity, "last_identity", 409, Final, "A person keeps at least one identity";
    UndoNotPossible, "undo_not_possible", 409, Final, "The parting cannot be taken back";
    Conflict, "conflict", 409, Retryable, "Someone else changed it at the same time";
    TooManyIdentities, "too_many_identities", 409, Final, "The person would have too many identities";
    PreconditionFailed, "precondition_failed", 412, Final, "It has changed since it was read";
    PayloadTooLarge, "payload_too_large", 413, Final, "The body is too large";
    UriTooLong, "uri_too_long", 414, Final, "The address is too long";
    UnsupportedMediaType, "unsupported_media_type", 415, Final, "The body is not of a type that is read here";
    InvalidValue, "invalid_value", 422, Final, "A value breaks a rule";
    NothingToCompress, "nothing_to_compress", 422, Final, "Compression would not make the session smaller";
    SummaryRequired, "summary_required", 422, Final, "Give the summary";
    RetentionNotSet, "retention_not_set", 422, Final, "The tenant keeps its conversations for ever";
    SecretRequired, "secret_required", 422, Final, "The address changed: give its secret anew, or null";
    UpstreamBusy, "upstream_busy", 429, Retryable, "The model's server asks to wait";
    QueueFull, "queue_full", 429, Retryable, "Too many messages wait in the conversation";
    TooManyTurns, "too_many_turns", 429, Retryable, "Too many turns run at one time";
    TooManyCalls, "too_many_calls", 429, Retryable, "Too many calls of models run at one time";
    TooManyStreams, "too_many_streams", 429, Retryable, "Too many streams are open at one time";
    Busy, "busy", 429, Retryable, "Too many requests wait for the same thing";
    RateLimited, "rate_limited", 429, Retryable, "There were too many requests";
    TooManyAttempts, "too_many_attempts", 429, Retryable, "There were too many wrong codes";
    TooManyCodes, "too_many_codes", 429, Retryable, "Too many codes are pending";
    TooManyMerges, "too_many_merges", 429, Retryable, "Too many people were merged into one";
    Internal, "internal", 500, Retryable, "Something went wrong on our side";
    TurnAbandoned, "turn_abandoned", 500, Final, "The turn was lost with its node again and again";
    TooManyToolRounds, "too_many_tool_rounds", 502, Final, "The model went on calling tools";
    UpstreamFailed, "upstream_failed", 502, Retryable, "The model's server failed";
    Unavailable, "unavailable", 503, Retryable, "The service cannot answer right now";
    UpstreamTimeout, "upstream_timeout", 504, Retryable, "The model's server did not answer in time";
    Timeout, "timeout", 504, Retryable, "The answer took too long";
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
                format!("{} {} {retry}", code.status(), code.as_str())
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
