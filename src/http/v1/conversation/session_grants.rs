//! `/v1/sessions/{id}/grants`: list and revoke the rights of other users to a conversation.

use actix_web::{HttpResponse, delete, get, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::domain::conversation::grant::{Grant, GrantVia};
use crate::domain::conversation::session::Permission;
use crate::domain::conversation::session_name::SessionRef;
use crate::error::Result;
use crate::http::auth::conversation::{ConversationReader, ConversationWriter};
use crate::http::request::extract::{PathSession, Query};
use crate::http::request::paging::{ListName, ListResponse, PageParams};
use crate::ids::UserId;
use crate::sessions;
use crate::store;

/// The right of another user to read a conversation and write in it. It holds until it expires or is revoked.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct GrantResponse {
    pub user_id: UserId,
    pub via: GrantVia,
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
    pub revoked_at: Option<DateTime<Utc>>,
}

impl From<Grant> for GrantResponse {
    fn from(grant: Grant) -> Self {
        Self {
            user_id: grant.user_id,
            via: grant.via,
            created_at: grant.created_at,
            expires_at: grant.expires_at,
            revoked_at: grant.revoked_at,
        }
    }
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RevokeGrantsParams {
    /// The user whose grant is revoked. Without it, all grants are.
    user_id: Option<UserId>,
}

/// List the grants of a conversation, newest first, with expired and revoked ones.
#[utoipa::path(
    operation_id = "list_grants",
    tag = "sessions",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain"), PageParams),
    responses((status = 200, description = "A page", body = ListResponse<GrantResponse>))
)]
#[get("/sessions/{id}/grants")]
pub async fn list_grants(
    app: web::Data<App>,
    caller: ConversationReader,
    PathSession(id): PathSession,
    Query(params): Query<PageParams>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let now = app.clock.now();
    let tip = sessions::find(&mut tx, &context.access, &id, Permission::Manage, now).await?;
    let chain = tip.name.conversation_id;
    let name = ListName::for_context(&context, format!("grants/{chain}"));
    let page = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let page = store::conversation::grants::list(&mut tx, chain, &page).await?;
    tx.commit().await?;
    let response = name.close(&app.keyring, page, GrantResponse::from)?;
    Ok(HttpResponse::Ok().json(response))
}

/// Revoke one user's grant, or all. A repetition changes nothing.
#[utoipa::path(
    operation_id = "revoke_grants",
    tag = "sessions",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain"), RevokeGrantsParams),
    responses((status = 204, description = "Revoked: the conversation is 404 for them"))
)]
#[delete("/sessions/{id}/grants")]
pub async fn revoke_grants(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathSession(id): PathSession,
    Query(params): Query<RevokeGrantsParams>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let actor = context.actor();
    let access = &context.access;
    let mut tx = context.begin(&app.db).await?;
    sessions::revoke_grants(&app, &mut tx, &actor, access, &id, params.user_id).await?;
    tx.commit().await?;
    Ok(HttpResponse::NoContent().finish())
}
