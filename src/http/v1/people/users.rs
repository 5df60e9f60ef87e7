//! `/v1/users`: the tenant's people.

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
use crate::http::auth::keys::{Admin, Person, Reader};
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
    /// The tenant's own name of the person.
    pub external_id: Option<String>,
    pub display_name: Option<String>,
    /// A name of the IANA database; UTC where it is null.
    pub time_zone: Option<String>,
    /// Whether the person is or was linked: then all platforms share one key.
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
    /// The tenant's own name of the person, unique within the tenant.
    #[schema(min_length = 1, max_length = 256)]
    pub external_id: Option<String>,
    pub display_name: Option<DisplayName>,
    pub time_zone: Option<TimeZone>,
    /// Accounts of the person that nobody has yet.
    #[serde(default)]
    #[schema(max_items = 100)]
    pub identities: Vec<IdentityName>,
}

/// What is left out stays; null takes it away.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpdateUserRequest {
    /// Only an admin changes it.
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
    /// The person with this account.
    identity: Option<IdentityName>,
    limit: Option<u32>,
    cursor: Option<String>,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MergeUsersRequest {
    /// Who joins the person in the path, whole.
    pub from_user_id: UserId,
    /// Why; kept with the merge.
    #[schema(min_length = 1, max_length = 500, pattern = r"\S")]
    pub reason: String,
    /// Answers what would be moved, and moves nothing.
    #[serde(default)]
    pub dry_run: bool,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct MergeResponse {
    /// Who stays.
    pub user_id: UserId,
    /// Who is no more; the id goes on answering, as the one who stays.
    pub merged_user_id: UserId,
    /// The accounts that joined.
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
    /// Who is no more. This id and every other of theirs is 404 from now on.
    pub user_id: UserId,
    /// How many accounts they had.
    pub identities: usize,
    /// How many conversations went with them.
    pub conversations: usize,
}

/// Make a person, with the accounts the tenant knows to be theirs.
#[utoipa::path(
    operation_id = "create_user",
    tag = "people",
    security(("api_key" = ["admin"])),
    extensions(("x-acts-for" = json!("the tenant"))),
    request_body = CreateUserRequest,
    responses(
        (status = 201, description = "The person", body = UserResponse),
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

/// People, newest first.
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
    let asked = (&params.external_id, &params.identity);
    let name = ListName::of_key(&caller, format!("users?{asked:?}"));
    let page = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let mut tx = caller.begin(&app.db).await?;
    let owner = match &params.identity {
        Some(identity) => match store::people::identities::find(&mut tx, identity).await? {
            Some(known) => Some(known.user_id),
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

/// The person a user token stands for.
#[utoipa::path(
    operation_id = "get_own_user",
    tag = "people",
    security(("user_token" = [])),
    responses((status = 200, description = "The person", body = UserResponse))
)]
#[get("/users/me")]
pub async fn get_own_user(app: web::Data<App>, caller: Person) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let user = store::people::users::find(&mut tx, caller.user_id())
        .await?
        .ok_or_else(|| Error::not_found("user"))?;
    Ok(HttpResponse::Ok().json(UserResponse::from(user)))
}

/// One person; an id that was merged away answers as the one who stayed.
#[utoipa::path(
    operation_id = "get_user",
    tag = "people",
    security(("api_key" = ["admin", "read", "bridge"]), ("user_token" = [])),
    params(("id" = UserId, Path, description = "The person")),
    responses((status = 200, description = "The person", body = UserResponse))
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

/// Rename a person, or say where they live.
#[utoipa::path(
    operation_id = "update_user",
    tag = "people",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    params(("id" = UserId, Path, description = "The person")),
    request_body = UpdateUserRequest,
    responses(
        (status = 200, description = "The person", body = UserResponse),
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
    if request.external_id.is_some() && context.access.reach != Visibility::Tenant {
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

/// Erase a person: accounts, conversations, keys, rights, codes, deliveries, stored answers.
///
/// They are gone at once, by every id they ever had. In conversations that are not theirs, what they said
/// becomes `[erased]` soon after, and so does what the agent answered them there. An account of theirs that speaks
/// again is someone new.
#[utoipa::path(
    operation_id = "delete_user",
    tag = "people",
    security(("api_key" = ["admin"])),
    extensions(("x-acts-for" = json!("the tenant"))),
    params(("id" = UserId, Path, description = "The person")),
    responses((status = 202, description = "Gone; their rows follow", body = ErasedResponse))
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
    let people = &erased.user_ids;
    app.limits.forget_people(caller.tenant_id(), people).await;
    Ok(HttpResponse::Accepted().json(ErasedResponse {
        user_id: people.first().copied().unwrap_or(id),
        identities: erased.identities,
        conversations: erased.conversations,
    }))
}

/// Merge another person into this one, whole.
#[utoipa::path(
    operation_id = "merge_users",
    tag = "people",
    security(("api_key" = ["admin"])),
    extensions(("x-acts-for" = json!("the tenant"))),
    params(("id" = UserId, Path, description = "Who stays")),
    request_body = MergeUsersRequest,
    responses(
        (status = 200, description = "Merged, or what would be moved", body = MergeResponse),
        (status = 409, description = "They are one person already, or would have too many identities", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
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
