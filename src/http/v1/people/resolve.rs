//! `/v1/resolve`: the user of an identity, and the session of its next message.

use actix_web::{HttpResponse, post, web};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::domain::bridge::chat::Chat;
use crate::domain::people::access::Access;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::user::{Identity, IdentityOwner};
use crate::domain::tenant::agent::DEFAULT_AGENT;
use crate::domain::values::resource_name::ResourceName;
use crate::error::{Error, Result};
use crate::http::auth::identity::{Claim, IdentityCaller, VerifiedIdentity};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::JsonBody;
use crate::http::v1::conversation::session_keys::ResetResponse;
use crate::idempotency::Answer;
use crate::ids::{IdentityId, UserId};
use crate::people::{self, Resolution};

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// The sender; else the header `X-Throughline-Identity`, else the token's own identity.
    pub identity: Option<IdentityName>,
    /// Default: `main`.
    pub agent: Option<ResourceName>,
    /// The chat of the message. Default: a direct chat.
    pub chat: Option<Chat>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ResolveResponse {
    pub user_id: UserId,
    pub identity_id: IdentityId,
    /// Whether the user has or had several identities.
    pub linked: bool,
    pub session_key: String,
    pub session_id: String,
    pub conversation_id: String,
    /// Whether the session is new.
    pub created: bool,
    /// Why the session was reset, if it was.
    pub reset: Option<ResetResponse>,
    /// A session of the user that could be continued here.
    #[schema(value_type = Option<Object>)]
    pub offer: Option<()>,
}

impl ResolveResponse {
    fn new(resolved: Resolution, access: &Access) -> Self {
        Self {
            user_id: resolved.user_id,
            identity_id: resolved.identity_id,
            linked: resolved.linked,
            session_key: resolved.session_key,
            session_id: resolved.session.public_id(access),
            conversation_id: resolved.session.name.public_id(access),
            created: resolved.created,
            reset: resolved.reset.map(|(reason, before)| ResetResponse {
                reason,
                previous_session_id: before.public_id(access),
            }),
            offer: None,
        }
    }
}

/// Resolve an identity to its user and session, as a message would, before one is sent.
///
/// An unknown identity gets a new user, a new chat its session, and the agent's reset policy is applied.
#[utoipa::path(
    operation_id = "resolve",
    tag = "people",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named identity, or the token's user"))),
    request_body = ResolveRequest,
    responses((status = 200, description = "The user and the session", body = ResolveResponse))
)]
#[post("/resolve")]
pub async fn resolve(
    app: web::Data<App>,
    caller: IdentityCaller,
    retryable: IdempotencyKey,
    body: JsonBody<ResolveRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let verified = caller.vouch(Claim {
        identity: request.identity,
        chat: request.chat.as_ref(),
        display_name: None,
    })?;
    let chat = request.chat.unwrap_or(Chat::DM);
    let agent = request
        .agent
        .as_ref()
        .map_or(DEFAULT_AGENT, ResourceName::as_str);
    let resolve_request = people::ResolveRequest {
        identity: &verified.identity,
        agent,
        chat: &chat,
        namespace: verified.namespace(),
    };
    let now = app.clock.now();
    let mut tx = verified.begin(&app.db).await?;
    if !retryable.has_key()
        && let Some(resolved) = people::resolve(&mut tx, resolve_request, now).await?
    {
        let response = render(&verified, resolved)?;
        tx.commit().await?;
        return Ok(HttpResponse::Ok().json(response));
    }
    drop(tx);
    verified.contact(&app).await?;
    let tx = verified.begin(&app.db).await?;
    retryable
        .answer(&app, tx, verified.principal(), body.hash, async |tx| {
            let resolved = people::resolve(tx, resolve_request, now).await?;
            let resolved = resolved.ok_or_else(|| Error::not_found("identity"))?;
            Answer::new(200, &render(&verified, resolved)?)
        })
        .await
}

fn render(verified: &VerifiedIdentity, resolved: Resolution) -> Result<ResolveResponse> {
    verified.check_own(&IdentityOwner {
        id: resolved.identity_id,
        user_id: resolved.user_id,
    })?;
    let sender = Identity {
        id: resolved.identity_id,
        name: verified.identity.clone(),
    };
    let access = if verified.is_user() {
        Access::of_user(resolved.user_id, sender)
    } else {
        Access::of_service(resolved.user_id, sender)
    };
    Ok(ResolveResponse::new(resolved, &access))
}
