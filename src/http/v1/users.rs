//! `/v1/users`: the tenant's people.

use actix_web::{HttpResponse, get, web};
use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::app::App;
use crate::domain::user::User;
use crate::error::{Error, Result};
use crate::http::callers::{Person, PersonReader};
use crate::http::extract::PathId;
use crate::ids::UserId;
use crate::store;

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct UserResponse {
    pub id: UserId,
    pub external_id: Option<String>,
    pub display_name: Option<String>,
    pub created_at: DateTime<Utc>,
}

impl From<User> for UserResponse {
    fn from(user: User) -> Self {
        Self {
            id: user.id,
            external_id: user.external_id,
            display_name: user.display_name,
            created_at: user.created_at,
        }
    }
}

/// The person a user token stands for.
#[utoipa::path(
    operation_id = "get_own_user",
    tag = "people",
    security(("user_token" = [])),
    extensions(("x-acts-for" = json!("the token's user"))),
    responses((status = 200, description = "The person", body = UserResponse))
)]
#[get("/users/me")]
pub async fn get_own_user(app: web::Data<App>, caller: Person) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let user = store::users::find(&mut tx, caller.user_id())
        .await?
        .ok_or_else(|| Error::not_found("user"))?;
    Ok(HttpResponse::Ok().json(UserResponse::from(user)))
}

/// One person.
#[utoipa::path(
    operation_id = "get_user",
    tag = "people",
    security(("api_key" = ["admin", "read"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the tenant, or the token's own user"))),
    params(("id" = UserId, Path, description = "The person")),
    responses((status = 200, description = "The person", body = UserResponse))
)]
#[get("/users/{id}")]
pub async fn get_user(
    app: web::Data<App>,
    caller: PersonReader,
    PathId(id): PathId<UserId>,
) -> Result<HttpResponse> {
    let missing = || Error::not_found("user");
    if !caller.may_see(id) {
        return Err(missing());
    }
    let mut tx = caller.begin(&app.db).await?;
    let user = store::users::find(&mut tx, id).await?.ok_or_else(missing)?;
    Ok(HttpResponse::Ok().json(UserResponse::from(user)))
}
