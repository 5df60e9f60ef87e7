//! Every error a client can see. `Code` is the closed table: one row for each thing a client can act
//! on. `http::problem` is the one place that turns an `Error` into an answer.

use std::fmt;

use serde::Serialize;

use crate::ids::TenantId;

pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! error_codes {
    ($($(#[doc = $when:literal])+ $variant:ident, $code:literal, $status:literal, $retry:ident, $title:literal;)+) => {
        /// A stable code. Rows are never renamed or given another status.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Code { $($(#[doc = $when])+ $variant),+ }

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

            /// When it is answered, for the reference.
            pub const fn when(self) -> &'static str {
                match self { $(Code::$variant => concat!($($when),+)),+ }
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
    /// The body is not JSON or not UTF-8, or is nested too deeply.
    InvalidJson, "invalid_json", 400, Final, "Invalid JSON";
    /// The body is not YAML that this endpoint reads.
    InvalidYaml, "invalid_yaml", 400, Final, "Invalid YAML";
    /// A member of the body is missing, unknown, repeated or of the wrong type; or a query parameter or a header
    /// cannot be read.
    InvalidRequest, "invalid_request", 400, Final, "Invalid request";
    /// The cursor belongs to another list, filter or credential.
    InvalidCursor, "invalid_cursor", 400, Final, "Invalid cursor";
    /// The header `Idempotency-Key` is empty, too long or not visible ASCII.
    InvalidIdempotencyKey, "invalid_idempotency_key", 400, Final, "Invalid Idempotency-Key";
    /// The session id is empty, too long, or has characters that an id may not have.
    InvalidSessionId, "invalid_session_id", 400, Final, "Invalid session id";
    /// A message of the role `tool` names a call that no turn waits for.
    ToolCallUnknown, "tool_call_unknown", 400, Final, "Unknown tool call";
    /// The model's server answered 4xx. `detail` has its reason.
    UpstreamRefused, "upstream_refused", 400, Final, "The model provider rejected the request";
    /// The messages are too long for the model.
    ContextLengthExceeded, "context_length_exceeded", 400, Final, "Context length exceeded";
    /// The request has passed through this service before: an agent's model is the service itself.
    LoopDetected, "loop_detected", 400, Final, "Loop detected";
    /// The session key is empty, too long, or has characters that a key may not have.
    InvalidSessionKey, "invalid_session_key", 400, Final, "Invalid session key";
    /// There is no credential, or it is not a known one, or its tenant is gone.
    Unauthorized, "unauthorized", 401, Final, "Missing or invalid credential";
    /// The API key has expired.
    KeyExpired, "key_expired", 401, Final, "API key expired";
    /// The API key was revoked.
    KeyRevoked, "key_revoked", 401, Final, "API key revoked";
    /// The user token has no valid signature of a registered issuer, or a wrong claim. The log has the reason.
    InvalidToken, "invalid_token", 401, Final, "Invalid token";
    /// `exp` of the user token has passed.
    TokenExpired, "token_expired", 401, Final, "Token expired";
    /// `nbf` or `iat` of the user token is in the future.
    TokenNotYetValid, "token_not_yet_valid", 401, Final, "Token not yet valid";
    /// The user token is valid for more than 24 hours.
    TokenLivesTooLong, "token_lives_too_long", 401, Final, "Token lifetime exceeds 24 hours";
    /// `aud` of the user token is not the audience that the issuer is registered with.
    WrongAudience, "wrong_audience", 401, Final, "Wrong audience";
    /// The user token and the header `X-Throughline-Tenant` name no tenant, or more than one.
    TenantAmbiguous, "tenant_ambiguous", 401, Final, "Ambiguous tenant";
    /// The credential lacks the scope for this operation.
    MissingScope, "missing_scope", 403, Final, "Insufficient scope";
    /// A bridge key has to name the identity that it acts for.
    IdentityRequired, "identity_required", 403, Final, "An identity is required";
    /// The bridge key does not cover the platform of the identity or chat.
    PlatformNotAllowed, "platform_not_allowed", 403, Final, "The key does not cover this platform";
    /// An operator has suspended the tenant.
    TenantSuspended, "tenant_suspended", 403, Final, "Tenant suspended";
    /// The page's origin is not in the tenant's `allowed_origins`.
    OriginNotAllowed, "origin_not_allowed", 403, Final, "Origin not allowed";
    /// The user has a grant for the session, and the operation is for its owner.
    GuestNotAllowed, "guest_not_allowed", 403, Final, "Not allowed for guests";
    /// The credential may not write messages of this role.
    RoleNotAllowed, "role_not_allowed", 403, Final, "Message role not allowed";
    /// The operation shows or changes private data, and the chat is not a direct chat.
    PrivateChatRequired, "private_chat_required", 403, Final, "A direct chat is required";
    /// Undoing an unlink needs a link code of the other side, sent by the unlinked identity.
    ProofRequired, "proof_required", 403, Final, "Proof of the other identity is required";
    /// A user may unlink the sending identity and newer ones only.
    OlderIdentity, "older_identity", 403, Final, "Cannot unlink an older identity";
    /// The link code is wrong, expired or used.
    CodeNotFound, "code_not_found", 404, Final, "Invalid or expired code";
    /// The session does not exist, or is not visible to the caller.
    SessionNotFound, "session_not_found", 404, Final, "Session not found";
    /// The session key does not exist, or is not visible to the caller.
    SessionKeyNotFound, "session_key_not_found", 404, Final, "Session key not found";
    /// The path or the resource does not exist, or is not visible to the caller.
    NotFound, "not_found", 404, Final, "Not found";
    /// `model` is not an agent of the tenant.
    ModelNotFound, "model_not_found", 404, Final, "Model not found";
    /// The path has no such method. The header `Allow` lists those it has.
    MethodNotAllowed, "method_not_allowed", 405, Final, "Method not allowed";
    /// The request's body did not arrive in time, or the client read the answer too slowly.
    RequestTimeout, "request_timeout", 408, Retryable, "Request timeout";
    /// The `Idempotency-Key` was used with another request.
    IdempotencyConflict, "idempotency_conflict", 409, Final, "Idempotency-Key reused with another request";
    /// An issuer and a bridge key, or two issuers, cannot stand for the same platform.
    PlatformTaken, "platform_taken", 409, Final, "Platform already claimed";
    /// The same `issuer` and audience are registered under another name.
    IssuerTaken, "issuer_taken", 409, Final, "Issuer already registered";
    /// The agent `main` is the default: it can be changed, and not deleted.
    AgentInUse, "agent_in_use", 409, Final, "Agent in use";
    /// The session belongs to another agent than the one that the request names.
    AgentMismatch, "agent_mismatch", 409, Final, "The session belongs to another agent";
    /// The tenant has, or had, a session with this id.
    SessionIdTaken, "session_id_taken", 409, Final, "Session id already used";
    /// The session and the session key of the request do not belong together.
    SessionKeyMismatch, "session_key_mismatch", 409, Final, "The session belongs to another session key";
    /// No compression created the session, so there is none to undo.
    NotCompressed, "not_compressed", 409, Final, "The session is not a compressed one";
    /// Messages were added after the compression, so it cannot be undone.
    HasNewMessages, "has_new_messages", 409, Final, "The session has new messages since the compression";
    /// The delivery's lease has expired, or the delivery has ended already.
    StaleLease, "stale_lease", 409, Final, "The lease has expired";
    /// A turn is active, and `on_busy` is `reject`; or the operation needs an idle conversation.
    SessionBusy, "session_busy", 409, Retryable, "A turn is already active";
    /// The event stream of a session key ends because the key leads to another session now.
    SessionMoved, "session_moved", 409, Retryable, "The session key leads to another session now";
    /// The turn was cancelled or interrupted, so there is no answer.
    TurnStopped, "turn_stopped", 409, Final, "The turn was stopped";
    /// A chat stream ends because its turn runs again on another node, after a part was shown.
    TurnRestarted, "turn_restarted", 409, Final, "The turn was restarted on another node; discard the partial output";
    /// Another user has the identity.
    IdentityTaken, "identity_taken", 409, Final, "The identity belongs to another user";
    /// Another user has the external id.
    ExternalIdTaken, "external_id_taken", 409, Final, "The external id belongs to another user";
    /// The two identities belong to the same user.
    AlreadyLinked, "already_linked", 409, Final, "The identities are already linked";
    /// Both users sign in with an issuer, so a link code is not enough.
    MergeRequired, "merge_required", 409, Final, "Only an admin may merge these users";
    /// The last admin key that does not expire cannot be revoked. Create another one first.
    LastAdminKey, "last_admin_key", 409, Final, "Cannot revoke the last admin key that does not expire";
    /// The tenant has as many API keys, agents or issuers as its limits allow.
    LimitReached, "limit_reached", 409, Final, "Tenant limit reached";
    /// The user's only identity cannot be unlinked.
    LastIdentity, "last_identity", 409, Final, "Cannot unlink the last identity";
    /// The unlink is older than 30 days, or its identity or user changed since.
    UndoNotPossible, "undo_not_possible", 409, Final, "The unlink can no longer be undone";
    /// Another request changed the same data at the same time. Try again.
    Conflict, "conflict", 409, Retryable, "Concurrent change";
    /// The user would have more than 100 identities.
    TooManyIdentities, "too_many_identities", 409, Final, "Too many identities";
    /// `If-Match` does not name the present state. Read it again.
    PreconditionFailed, "precondition_failed", 412, Final, "Precondition failed";
    /// The body has more bytes than the endpoint takes, or needs too much memory.
    PayloadTooLarge, "payload_too_large", 413, Final, "Payload too large";
    /// The URI is too long.
    UriTooLong, "uri_too_long", 414, Final, "URI too long";
    /// `Content-Type` is not one that the endpoint reads.
    UnsupportedMediaType, "unsupported_media_type", 415, Final, "Unsupported media type";
    /// A member has a value that breaks a rule. `errors` points at each.
    InvalidValue, "invalid_value", 422, Final, "Invalid value";
    /// The session is empty, or a compression would not make it shorter.
    NothingToCompress, "nothing_to_compress", 422, Final, "Nothing to compress";
    /// The compression has no `summary`.
    SummaryRequired, "summary_required", 422, Final, "A summary is required";
    /// The tenant has no retention, and the request names none.
    RetentionNotSet, "retention_not_set", 422, Final, "Retention is not set";
    /// The agent's `base_url` changed, so its `api_key` has to be given again.
    SecretRequired, "secret_required", 422, Final, "The secret is required again";
    /// The model's server answered 429.
    UpstreamBusy, "upstream_busy", 429, Retryable, "The model provider is rate limiting";
    /// 100 messages wait in the conversation.
    QueueFull, "queue_full", 429, Retryable, "The conversation's queue is full";
    /// The limit `concurrent_turns` is reached.
    TooManyTurns, "too_many_turns", 429, Retryable, "Too many concurrent turns";
    /// The limit `concurrent_calls` is reached.
    TooManyCalls, "too_many_calls", 429, Retryable, "Too many concurrent model calls";
    /// The limit `open_streams` is reached.
    TooManyStreams, "too_many_streams", 429, Retryable, "Too many open streams";
    /// The tenant uses its share of the node, or other requests hold the same rows.
    Busy, "busy", 429, Retryable, "Too many concurrent requests";
    /// A limit per minute or hour is reached. `Retry-After` says when it is free again.
    RateLimited, "rate_limited", 429, Retryable, "Rate limit exceeded";
    /// Too many wrong link codes came from this identity, key or tenant.
    TooManyAttempts, "too_many_attempts", 429, Retryable, "Too many wrong codes";
    /// Three link codes of the user are pending.
    TooManyCodes, "too_many_codes", 429, Retryable, "Too many pending codes";
    /// 20 users were merged into this one within a day.
    TooManyMerges, "too_many_merges", 429, Retryable, "Too many merges";
    /// An unexpected error. The log has its cause under the `request_id`.
    Internal, "internal", 500, Retryable, "Internal server error";
    /// The turn lost its node five times, or could not be recovered.
    TurnAbandoned, "turn_abandoned", 500, Final, "The turn was abandoned after repeated failures";
    /// The model called tools in more rounds than the agent allows.
    TooManyToolRounds, "too_many_tool_rounds", 502, Final, "Too many tool rounds";
    /// The model's server is not reachable, or its answer is not usable, or its breaker is open.
    UpstreamFailed, "upstream_failed", 502, Retryable, "The model provider failed";
    /// Postgres does not answer, or the node is shutting down. Try again.
    Unavailable, "unavailable", 503, Retryable, "Service temporarily unavailable";
    /// The model did not answer within the agent's `timeout_seconds`.
    UpstreamTimeout, "upstream_timeout", 504, Retryable, "The model provider timed out";
    /// The request took too long.
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
