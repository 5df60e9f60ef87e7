//! `/v1/users/{id}/home-channels`: where a user wants to be reached on each platform.

use actix_web::{HttpResponse, delete, get, put, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::domain::bridge::chat::Chat;
use crate::domain::people::home_channel::HomeChannel;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::error::{Error, Result};
use crate::http::auth::conversation::{UserReader, UserWriter};
use crate::http::request::extract::{PathId, PathPlatform};
use crate::http::request::json_body::JsonBody;
use crate::http::request::paging::ListResponse;
use crate::ids::UserId;
use crate::people;
use crate::store;

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PutHomeChannelRequest {
    /// The identity on that platform; else the sender's, else the only one.
    pub identity: Option<IdentityName>,
    /// The user's own direct chat; an admin may set any other.
    pub chat: Chat,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct HomeChannelResponse {
    pub platform: PlatformScope,
    #[schema(value_type = IdentityName)]
    pub identity: String,
    pub chat: Chat,
    pub updated_at: DateTime<Utc>,
}

impl From<HomeChannel> for HomeChannelResponse {
    fn from(channel: HomeChannel) -> Self {
        Self {
            platform: channel.platform,
            identity: channel.identity.name.to_string(),
            chat: channel.chat,
            updated_at: channel.updated_at,
        }
    }
}

/// List where a user wants to be reached, by platform. Stored, not used yet: nothing is sent there by itself.
#[utoipa::path(
    operation_id = "list_home_channels",
    tag = "people",
    security(("api_key" = ["admin", "read", "bridge"]), ("user_token" = [])),
    params(("id" = UserId, Path, description = "The user")),
    responses((status = 200, description = "All of them", body = ListResponse<HomeChannelResponse>))
)]
#[get("/users/{id}/home-channels")]
pub async fn list_home_channels(
    app: web::Data<App>,
    caller: UserReader,
    PathId(id): PathId<UserId>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let user = context.find_user(&mut tx, id).await?;
    let channels = store::people::home_channels::list(&mut tx, user.id).await?;
    tx.commit().await?;
    let list = ListResponse::whole(channels, HomeChannelResponse::from);
    Ok(HttpResponse::Ok().json(list))
}

/// Set where a user wants to be reached on a platform. Stored, not used yet: nothing is sent there by itself.
#[utoipa::path(
    operation_id = "put_home_channel",
    tag = "people",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    params(
        ("id" = UserId, Path, description = "The user"),
        ("platform" = inline(PlatformScope), Path, description = "The platform, percent-encoded")
    ),
    request_body = PutHomeChannelRequest,
    responses((status = 200, description = "The home channel", body = HomeChannelResponse))
)]
#[put("/users/{id}/home-channels/{platform}")]
pub async fn put_home_channel(
    app: web::Data<App>,
    caller: UserWriter,
    PathId(id): PathId<UserId>,
    PathPlatform(platform): PathPlatform,
    body: JsonBody<PutHomeChannelRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let context = caller.context(&app, None).await?;
    context.check_chat(&request.chat)?;
    let mut tx = context.begin(&app.db).await?;
    let user = context.find_user(&mut tx, id).await?;
    people::put_home_channel(
        &app,
        &mut tx,
        &context.actor(),
        &context.access,
        &people::NewHomeChannel {
            user_id: user.id,
            platform: &platform,
            identity: request.identity.as_ref(),
            chat: &request.chat,
        },
    )
    .await?;
    let channels = store::people::home_channels::list(&mut tx, user.id).await?;
    tx.commit().await?;
    let channel = channels
        .into_iter()
        .find(|channel| channel.platform == platform);
    let channel = channel.ok_or_else(|| Error::not_found("home channel"))?;
    Ok(HttpResponse::Ok().json(HomeChannelResponse::from(channel)))
}

/// Delete where a user wants to be reached on a platform.
#[utoipa::path(
    operation_id = "delete_home_channel",
    tag = "people",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    params(
        ("id" = UserId, Path, description = "The user"),
        ("platform" = inline(PlatformScope), Path, description = "The platform, percent-encoded")
    ),
    responses((status = 204, description = "Deleted"))
)]
#[delete("/users/{id}/home-channels/{platform}")]
pub async fn delete_home_channel(
    app: web::Data<App>,
    caller: UserWriter,
    PathId(id): PathId<UserId>,
    PathPlatform(platform): PathPlatform,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let user = context.find_user(&mut tx, id).await?;
    people::delete_home_channel(&app, &mut tx, &context.actor(), user.id, &platform).await?;
    tx.commit().await?;
    Ok(HttpResponse::NoContent().finish())
}
