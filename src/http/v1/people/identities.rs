//! A user's identities: `/v1/users/{id}/identities`, their presence, unlink and its undo.

use actix_web::{HttpResponse, delete, get, post, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::users::MergeResponse;
use crate::app::App;
use crate::domain::bridge::chat::Chat;
use crate::domain::people::access::{Access, Visibility};
use crate::domain::people::identity::IdentityName;
use crate::domain::people::presence::Presence;
use crate::domain::people::user::IdentityRecord;
use crate::error::{Code, Error, Result};
use crate::http::auth::conversation::{UserReader, UserWriter};
use crate::http::request::extract::PathId;
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::JsonBody;
use crate::http::request::paging::ListResponse;
use crate::idempotency::Answer;
use crate::ids::{IdentityId, UserId};
use crate::people::{self, UnlinkResult};
use crate::store;

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct IdentityResponse {
    pub id: IdentityId,
    pub user_id: UserId,
    /// `platform:external_id`, normalised.
    #[schema(value_type = IdentityName)]
    pub identity: String,
    /// `platform`, or `platform@scope`.
    pub platform: String,
    pub external_id: String,
    /// The external id as the bridge, the token or the tenant wrote it.
    pub raw: String,
    /// The issuer whose tokens prove it; null if a bridge or the tenant vouched for it.
    pub issuer: Option<String>,
    /// Whether an imported document lists it.
    pub imported: bool,
    /// Since when it belongs to this user.
    pub linked_at: DateTime<Utc>,
    pub created_at: DateTime<Utc>,
}

impl From<IdentityRecord> for IdentityResponse {
    fn from(record: IdentityRecord) -> Self {
        Self {
            id: record.id,
            user_id: record.user_id,
            identity: record.name.to_string(),
            platform: record.name.platform().to_string(),
            external_id: record.name.external_id().to_owned(),
            raw: record.raw,
            issuer: record.issuer,
            imported: record.imported,
            linked_at: record.linked_at,
            created_at: record.created_at,
        }
    }
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct PresenceResponse {
    #[schema(value_type = IdentityName)]
    pub identity: String,
    pub platform: String,
    /// To the minute; null before its first message.
    pub last_seen_at: Option<DateTime<Utc>>,
    /// The session key of its last message.
    pub session_key: Option<String>,
    /// The current session of that key.
    pub session_id: Option<String>,
    /// Where the user wants to be reached there.
    pub home_channel: Option<Chat>,
}

impl PresenceResponse {
    fn new(presence: Presence, access: &Access) -> Self {
        Self {
            identity: presence.identity.name.to_string(),
            platform: presence.identity.name.platform().to_string(),
            last_seen_at: presence.last_seen_at,
            session_key: presence.session_key,
            session_id: presence.session.map(|session| session.public_id(access)),
            home_channel: presence.home_channel,
        }
    }
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct UnlinkedResponse {
    pub identity_id: IdentityId,
    /// The identity's own user from now on.
    pub user_id: UserId,
    /// The user it was unlinked from.
    pub previous_user_id: UserId,
    /// The number of moved conversations: those in which only this identity wrote.
    pub conversations: usize,
    /// The end of the time in which the unlink can be undone.
    pub undo_until: DateTime<Utc>,
}

impl From<UnlinkResult> for UnlinkedResponse {
    fn from(unlinked: UnlinkResult) -> Self {
        Self {
            identity_id: unlinked.identity.id,
            user_id: unlinked.unlink.to_user,
            previous_user_id: unlinked.unlink.from_user,
            conversations: unlinked.conversations,
            undo_until: unlinked.unlink.undo_until,
        }
    }
}

#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UndoUnlinkRequest {
    /// A link code from another identity of the user; an admin needs none.
    #[schema(min_length = 1, max_length = 64)]
    pub code: Option<String>,
    /// The chat of the identity: a direct chat.
    pub chat: Option<Chat>,
}

/// List the identities of a user, oldest first.
#[utoipa::path(
    operation_id = "list_identities",
    tag = "people",
    security(("api_key" = ["admin", "read", "bridge"]), ("user_token" = [])),
    params(("id" = UserId, Path, description = "The user")),
    responses((status = 200, description = "All of them", body = ListResponse<IdentityResponse>))
)]
#[get("/users/{id}/identities")]
pub async fn list_identities(
    app: web::Data<App>,
    caller: UserReader,
    PathId(id): PathId<UserId>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let user = context.find_user(&mut tx, id).await?;
    let identities = store::people::identities::list(&mut tx, user.id).await?;
    tx.commit().await?;
    let list = ListResponse::whole(identities, IdentityResponse::from);
    Ok(HttpResponse::Ok().json(list))
}

/// List when and where each identity of a user was last active, the latest first.
#[utoipa::path(
    operation_id = "list_presence",
    tag = "people",
    security(("api_key" = ["admin", "read", "bridge"]), ("user_token" = [])),
    params(("id" = UserId, Path, description = "The user")),
    responses((status = 200, description = "All identities", body = ListResponse<PresenceResponse>))
)]
#[get("/users/{id}/presence")]
pub async fn list_presence(
    app: web::Data<App>,
    caller: UserReader,
    PathId(id): PathId<UserId>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let user = context.find_user(&mut tx, id).await?;
    let presence = store::people::presence::list(&mut tx, access, user.id).await?;
    tx.commit().await?;
    let list = ListResponse::whole(presence, |one| PresenceResponse::new(one, access));
    Ok(HttpResponse::Ok().json(list))
}

/// Unlink an identity: it gets a user of its own. Conversations in which only it wrote go with it.
#[utoipa::path(
    operation_id = "unlink_identity",
    tag = "people",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    params(("id" = IdentityId, Path, description = "The identity")),
    responses(
        (status = 200, description = "Unlinked", body = UnlinkedResponse),
        (status = 409, description = "It is the only identity of its user", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[delete("/identities/{id}")]
pub async fn unlink_identity(
    app: web::Data<App>,
    caller: UserWriter,
    PathId(id): PathId<IdentityId>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let unlinked = people::unlink(&app, &mut tx, &context.actor(), &context.access, id).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(UnlinkedResponse::from(unlinked)))
}

/// Undo an unlink within 30 days: as an admin, or as the identity with a fresh code of the other side.
#[utoipa::path(
    operation_id = "undo_unlink_identity",
    tag = "people",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    params(("id" = IdentityId, Path, description = "The identity")),
    request_body = UndoUnlinkRequest,
    responses(
        (status = 200, description = "Merged again", body = MergeResponse),
        (status = 409, description = "The unlink can no longer be undone", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[post("/identities/{id}/undo-unlink")]
pub async fn undo_unlink_identity(
    app: web::Data<App>,
    caller: UserWriter,
    PathId(id): PathId<IdentityId>,
    retryable: IdempotencyKey,
    body: JsonBody<UndoUnlinkRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let context = caller.context(&app, None).await?;
    let access = &context.access;
    if access.visibility == Visibility::Tenant {
        let tx = context.begin(&app.db).await?;
        return retryable
            .answer(&app, tx, context.principal(), body.hash, async |tx| {
                let actor = context.actor();
                let merged = people::undo_unlink(&app, tx, &actor, access, id, None).await?;
                Answer::new(200, &MergeResponse::new(merged, false))
            })
            .await;
    }
    if let Some(chat) = &request.chat {
        context.check_chat(chat)?;
        chat.require_private()?;
    }
    let mut tx = context.begin(&app.db).await?;
    people::find_identity(&mut tx, access, id).await?;
    drop(tx);
    let sender = access.sender.clone().filter(|sender| sender.id == id);
    let (Some(sender), Some(code)) = (sender, request.code) else {
        let detail = "the identity itself sends a link code of the other side";
        return Err(Error::new(Code::ProofRequired, detail));
    };
    people::with_charged_attempt(&app, context.caller(), sender.id, async || {
        let tx = context.begin(&app.db).await?;
        retryable
            .answer(&app, tx, context.principal(), body.hash, async |tx| {
                let actor = context.actor();
                let proven = people::consume(&app, tx, &code, &sender).await?;
                let proven = Some(proven);
                let merged = people::undo_unlink(&app, tx, &actor, access, id, proven).await?;
                Answer::new(200, &MergeResponse::new(merged, false))
            })
            .await
    })
    .await
}
