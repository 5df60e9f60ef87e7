//! `/v1/users`: the tenant's users.

use actix_web::{HttpResponse, delete, get, patch, post, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::domain::conversation::reset::TimeZone;
use crate::domain::identity_links::{MergeCounts, MoveKind};
use crate::domain::people::access::Visibility;
use crate::domain::people::display_name::DisplayName;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::user::User;
use crate::error::{Code, Error, FieldError, Result};
use crate::http::auth::conversation::{UserReader, UserWriter};
use crate::http::auth::keys::{Admin, Reader, TokenUser};
use crate::http::request::extract::{PathId, Query, given};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::JsonBody;
use crate::http::request::paging::{ListName, ListResponse};
use crate::idempotency::Answer;
use crate::ids::UserId;
use crate::people::{self, MergeRequest, NewUser, UserChange};
use crate::store;

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct UserResponse {
    pub id: UserId,
    /// The tenant's own name of the user.
    pub external_id: Option<String>,
    pub display_name: Option<String>,
    /// An IANA time zone; null means UTC.
    pub time_zone: Option<String>,
    /// Whether the user has or had several identities: then all platforms share one session key.
    pub linked: bool,
    pub created_at: DateTime<Utc>,
}

impl From<User> for UserResponse {
    fn from(user: User) -> Self {
        Self {
            id: user.id,
            external_id: user.external_id,
            display_name: user.display_name,
            time_zone: user.time_zone,
            linked: user.shared_since.is_some(),
            created_at: user.created_at,
        }
    }
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateUserRequest {
    /// The tenant's own name of the user, unique within the tenant.
    #[schema(min_length = 1, max_length = 256)]
    pub external_id: Option<String>,
    pub display_name: Option<DisplayName>,
    pub time_zone: Option<TimeZone>,
    /// Identities of the user that belong to no other user yet.
    #[serde(default)]
    #[schema(max_items = 100)]
    pub identities: Vec<IdentityName>,
}

/// Absent members stay as they are; null removes a value.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpdateUserRequest {
    /// Only an admin may change it.
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 256)]
    pub external_id: Option<Option<String>>,
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = Option<DisplayName>)]
    pub display_name: Option<Option<DisplayName>>,
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = Option<TimeZone>)]
    pub time_zone: Option<Option<TimeZone>>,
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListUsersParams {
    #[param(min_length = 1, max_length = 256)]
    external_id: Option<String>,
    /// The user of this identity.
    identity: Option<IdentityName>,
    limit: Option<u32>,
    cursor: Option<String>,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MergeUsersRequest {
    /// The user that is merged into the user in the path.
    pub from_user_id: UserId,
    /// The reason; stored with the merge.
    #[schema(min_length = 1, max_length = 500, pattern = r"\S")]
    pub reason: String,
    /// Report what would be moved, and move nothing.
    #[serde(default)]
    pub dry_run: bool,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct MergeResponse {
    /// The user that stays.
    pub user_id: UserId,
    /// The user that no longer exists. Its id still answers, as the user that stays.
    pub merged_user_id: UserId,
    /// The identities that were moved.
    #[schema(value_type = Vec<IdentityName>)]
    pub identities: Vec<String>,
    pub moved: MergeCounts,
    pub dry_run: bool,
}

impl MergeResponse {
    pub fn new(merge: crate::domain::identity_links::Merge, dry_run: bool) -> Self {
        Self {
            user_id: merge.into,
            merged_user_id: merge.from,
            identities: merge
                .identities
                .iter()
                .map(|one| one.name.to_string())
                .collect(),
            moved: merge.counts,
            dry_run,
        }
    }
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ErasedResponse {
    /// The erased user. This id and every other id of the user is 404 from now on.
    pub user_id: UserId,
    /// The number of identities the user had.
    pub identities: usize,
    /// The number of conversations that were deleted.
    pub conversations: usize,
}

/// Create a user with the identities that belong to it.
#[utoipa::path(
    operation_id = "create_user",
    tag = "people",
    security(("api_key" = ["admin"])),
    extensions(("x-acts-for" = json!("the tenant"))),
    request_body = CreateUserRequest,
    responses(
        (status = 201, description = "The user", body = UserResponse),
        (status = 409, description = "An identity or the external id belongs to another user", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[post("/users")]
pub async fn create_user(
    app: web::Data<App>,
    caller: Admin,
    retryable: IdempotencyKey,
    body: JsonBody<CreateUserRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let new = NewUser {
        external_id: request.external_id,
        display_name: request.display_name,
        time_zone: request.time_zone,
        identities: request.identities,
    };
    let tx = caller.begin(&app.db).await?;
    retryable
        .answer(&app, tx, caller.principal(), body.hash, async |tx| {
            let user = people::create(&app, tx, &caller.principal(), &new).await?;
            Answer::new(201, &UserResponse::from(user))
        })
        .await
}

/// List users, newest first.
#[utoipa::path(
    operation_id = "list_users",
    tag = "people",
    security(("api_key" = ["admin", "read"])),
    extensions(("x-acts-for" = json!("the tenant"))),
    params(ListUsersParams),
    responses((status = 200, description = "A page", body = ListResponse<UserResponse>))
)]
#[get("/users")]
pub async fn list_users(
    app: web::Data<App>,
    caller: Reader,
    Query(params): Query<ListUsersParams>,
) -> Result<HttpResponse> {
    let length = params.external_id.as_ref().map(|id| id.chars().count());
    if length.is_some_and(|length| !(1..=256).contains(&length)) {
        let error = FieldError::new("/query/external_id", "must have 1 to 256 characters");
        return Err(Error::fields(Code::InvalidRequest, vec![error]));
    }
    let filter = (&params.external_id, &params.identity);
    let name = ListName::for_key(&caller, format!("users?{filter:?}"));
    let page = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let mut tx = caller.begin(&app.db).await?;
    let owner = match &params.identity {
        Some(identity) => match store::people::identities::find(&mut tx, identity).await? {
            Some(owner) => Some(owner.user_id),
            None => return Ok(HttpResponse::Ok().json(ListResponse::<UserResponse>::empty())),
        },
        None => None,
    };
    let external_id = params.external_id.as_deref();
    let page = store::people::users::list(&mut tx, external_id, owner, &page).await?;
    tx.commit().await?;
    let page = name.close(&app.keyring, page, UserResponse::from)?;
    Ok(HttpResponse::Ok().json(page))
}

/// Get the user of the user token.
#[utoipa::path(
    operation_id = "get_own_user",
    tag = "people",
    security(("user_token" = [])),
    responses((status = 200, description = "The user", body = UserResponse))
)]
#[get("/users/me")]
pub async fn get_own_user(app: web::Data<App>, caller: TokenUser) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let user = store::people::users::find(&mut tx, caller.user_id()).await?;
    tx.end().await?;
    let user = user.ok_or_else(|| Error::not_found("user"))?;
    Ok(HttpResponse::Ok().json(UserResponse::from(user)))
}

/// Get a user. The id of a merged user answers as the user that stayed.
#[utoipa::path(
    operation_id = "get_user",
    tag = "people",
    security(("api_key" = ["admin", "read", "bridge"]), ("user_token" = [])),
    params(("id" = UserId, Path, description = "The user")),
    responses((status = 200, description = "The user", body = UserResponse))
)]
#[get("/users/{id}")]
pub async fn get_user(
    app: web::Data<App>,
    caller: UserReader,
    PathId(id): PathId<UserId>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let user = context.find_user(&mut tx, id).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(UserResponse::from(user)))
}

/// Change a user's names or time zone.
#[utoipa::path(
    operation_id = "update_user",
    tag = "people",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    params(("id" = UserId, Path, description = "The user")),
    request_body = UpdateUserRequest,
    responses(
        (status = 200, description = "The user", body = UserResponse),
        (status = 409, description = "The external id belongs to another user", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[patch("/users/{id}")]
pub async fn update_user(
    app: web::Data<App>,
    caller: UserWriter,
    PathId(id): PathId<UserId>,
    body: JsonBody<UpdateUserRequest>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let request = body.value;
    if request.external_id.is_some() && context.access.visibility != Visibility::Tenant {
        let detail = "only an admin may change the external id";
        return Err(Error::new(Code::MissingScope, detail));
    }
    let change = UserChange {
        external_id: request.external_id,
        display_name: request.display_name,
        time_zone: request.time_zone,
    };
    let mut tx = context.begin(&app.db).await?;
    let user = context.find_user(&mut tx, id).await?;
    let user = people::update(&app, &mut tx, &context.actor(), user.id, &change).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(UserResponse::from(user)))
}

/// Erase a user: identities, conversations, session keys, grants, codes, deliveries, stored answers.
///
/// The user is gone at once, by every id it ever had. In conversations of others, the user's messages and the
/// agent's answers to them become `[erased]` soon after. An erased identity that writes again gets a new user.
#[utoipa::path(
    operation_id = "delete_user",
    tag = "people",
    security(("api_key" = ["admin"])),
    extensions(("x-acts-for" = json!("the tenant"))),
    params(("id" = UserId, Path, description = "The user")),
    responses((status = 202, description = "Erased; the rows are deleted soon after", body = ErasedResponse))
)]
#[delete("/users/{id}")]
pub async fn delete_user(
    app: web::Data<App>,
    caller: Admin,
    PathId(id): PathId<UserId>,
) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let erased = people::erase(&app, &mut tx, &caller.principal(), id).await?;
    tx.commit().await?;
    let user_ids = &erased.user_ids;
    app.limits.forget_users(caller.tenant_id(), user_ids).await;
    Ok(HttpResponse::Accepted().json(ErasedResponse {
        user_id: user_ids.first().copied().unwrap_or(id),
        identities: erased.identities,
        conversations: erased.conversations,
    }))
}

/// Merge another user into this one, whole.
#[utoipa::path(
    operation_id = "merge_users",
    tag = "people",
    security(("api_key" = ["admin"])),
    extensions(("x-acts-for" = json!("the tenant"))),
    params(("id" = UserId, Path, description = "The user that stays")),
    request_body = MergeUsersRequest,
    responses(
        (status = 200, description = "Merged, or the changes of a dry run", body = MergeResponse),
        (status = 409, description = "They are one user already, or would have too many identities", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[post("/users/{id}/merge")]
pub async fn merge_users(
    app: web::Data<App>,
    caller: Admin,
    PathId(into): PathId<UserId>,
    retryable: IdempotencyKey,
    body: JsonBody<MergeUsersRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    people::check_reason(&request.reason)?;
    let merge = MergeRequest {
        into,
        from: request.from_user_id,
        kind: MoveKind::Merge,
        reason: Some(request.reason.trim()),
        by: None,
        dry_run: request.dry_run,
    };
    let tx = caller.begin(&app.db).await?;
    retryable
        .answer(&app, tx, caller.principal(), body.hash, async |tx| {
            let merged = people::merge(&app, tx, &caller.principal(), &merge).await?;
            Answer::new(200, &MergeResponse::new(merged, request.dry_run))
        })
        .await
}
