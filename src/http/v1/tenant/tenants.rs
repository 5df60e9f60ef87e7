//! `/v1/tenants`: the operator's view of the tenants.

use actix_web::{HttpResponse, delete, get, patch, post, web};
use chrono::{DateTime, TimeDelta, Utc};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::auth::OperatorCaller;
use crate::domain::people::display_name::DisplayName;
use crate::domain::tenant::limits::{LimitChanges, Limits};
use crate::domain::tenant::{ServiceState, Tenant, TenantState};
use crate::domain::values::timestamp;
use crate::error::Result;
use crate::http::auth::keys::Operator;
use crate::http::request::extract::{PathId, Query, given};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::JsonBody;
use crate::http::request::paging::{ListName, ListResponse, PageParams};
use crate::idempotency::Answer;
use crate::ids::TenantId;
use crate::store;
use crate::tenants::{self, LimitsChange, OperatorChange, TenantView};

use super::usage::usage_period;

/// The default length of the summed usage.
const DEFAULT_PERIOD: TimeDelta = TimeDelta::days(30);

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateTenantRequest {
    pub name: DisplayName,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct CreatedTenantResponse {
    pub id: TenantId,
    pub name: String,
    pub state: TenantState,
    pub created_at: DateTime<Utc>,
    /// The tenant's first admin key, shown once; null in a retry after ten minutes.
    pub api_key: Option<String>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct TenantResponse {
    pub id: TenantId,
    pub name: String,
    pub state: TenantState,
    pub created_at: DateTime<Utc>,
}

impl From<Tenant> for TenantResponse {
    fn from(tenant: Tenant) -> Self {
        Self {
            id: tenant.id,
            name: tenant.name,
            state: tenant.state,
            created_at: tenant.created_at,
        }
    }
}

/// Create a tenant and its first admin key.
#[utoipa::path(
    operation_id = "create_tenant",
    tag = "tenants",
    security(("operator_key" = [])),
    request_body = CreateTenantRequest,
    responses((status = 201, description = "Created", body = CreatedTenantResponse))
)]
#[post("/tenants")]
pub async fn create_tenant(
    app: web::Data<App>,
    Operator(operator): Operator,
    retryable: IdempotencyKey,
    body: JsonBody<CreateTenantRequest>,
) -> Result<HttpResponse> {
    let tx = operator.begin(&app.db).await?;
    let request = body.value;
    retryable
        .answer(&app, tx, operator.principal(), body.hash, async |tx| {
            let actor = operator.principal();
            let now = app.clock.now();
            let created = tenants::create(&app.keyring, tx, &actor, &request.name, now).await?;
            let answer = Answer::new(
                201,
                &CreatedTenantResponse {
                    id: created.tenant.id,
                    name: created.tenant.name,
                    state: created.tenant.state,
                    created_at: created.tenant.created_at,
                    api_key: Some(created.api_key.expose_secret().to_owned()),
                },
            )?;
            Ok(answer.with_secret("api_key"))
        })
        .await
}

/// List all tenants, newest first.
#[utoipa::path(
    operation_id = "list_tenants",
    tag = "tenants",
    security(("operator_key" = [])),
    params(PageParams),
    responses((status = 200, description = "A page", body = ListResponse<TenantResponse>))
)]
#[get("/tenants")]
pub async fn list_tenants(
    app: web::Data<App>,
    Operator(operator): Operator,
    Query(params): Query<PageParams>,
) -> Result<HttpResponse> {
    let name = ListName::for_operator(&operator, "tenants");
    let request = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let page = store::tenant::tenants::list(&app.db, &request).await?;
    let response = name.close(&app.keyring, page, TenantResponse::from)?;
    Ok(HttpResponse::Ok().json(response))
}

/// A tenant as its operator sees it: its limits and its usage, and no text of its users.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct TenantViewResponse {
    #[serde(flatten)]
    pub tenant: TenantResponse,
    /// All limits that apply.
    pub limits: Limits,
    pub usage: UsageSumsResponse,
}

/// The tenant's whole usage in the hours from `from` until before `to`.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct UsageSumsResponse {
    pub from: DateTime<Utc>,
    pub to: DateTime<Utc>,
    pub requests: i64,
    pub turns: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ViewTenantParams {
    /// The first hour is the one of this time. Default: 30 days before `to`.
    #[serde(default, deserialize_with = "timestamp::optional")]
    from: Option<DateTime<Utc>>,
    /// The usage ends before this time. Default: now. At most 31 days after `from`.
    #[serde(default, deserialize_with = "timestamp::optional")]
    to: Option<DateTime<Utc>>,
}

/// Absent members stay as they are. The change is applied as a whole or not at all.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeTenantRequest {
    pub name: Option<DisplayName>,
    /// `suspended` and `active` do the same as suspending and resuming.
    pub state: Option<ServiceState>,
    /// Single limits: a number sets one, null resets one to its default, an absent one stays. Null instead of the
    /// object resets all of them.
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = Option<LimitChanges>)]
    pub limits: Option<Option<LimitChanges>>,
}

/// Get a tenant: its name and state, its limits, and sums of its usage.
#[utoipa::path(
    operation_id = "view_tenant",
    tag = "tenants",
    security(("operator_key" = [])),
    params(("id" = TenantId, Path, description = "The tenant"), ViewTenantParams),
    responses((status = 200, description = "The tenant", body = TenantViewResponse))
)]
#[get("/tenants/{id}")]
pub async fn view_tenant(
    app: web::Data<App>,
    Operator(operator): Operator,
    PathId(id): PathId<TenantId>,
    Query(params): Query<ViewTenantParams>,
) -> Result<HttpResponse> {
    let (from, to) = usage_period(params.from, params.to, app.clock.now(), DEFAULT_PERIOD)?;
    let mut tx = operator.begin(&app.db).await?;
    let view = tenants::view(&mut tx, id, from, to).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(render(view, from, to)))
}

/// Change a tenant's name, state or limits. All nodes follow within a second.
#[utoipa::path(
    operation_id = "change_tenant",
    tag = "tenants",
    security(("operator_key" = [])),
    params(("id" = TenantId, Path, description = "The tenant")),
    request_body = ChangeTenantRequest,
    responses((status = 200, description = "The tenant, with its usage of the last 30 days", body = TenantViewResponse))
)]
#[patch("/tenants/{id}")]
pub async fn change_tenant(
    app: web::Data<App>,
    Operator(operator): Operator,
    PathId(id): PathId<TenantId>,
    body: JsonBody<ChangeTenantRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let change = OperatorChange {
        name: request.name,
        state: request.state,
        limits: match request.limits {
            None => LimitsChange::Keep,
            Some(None) => LimitsChange::Reset,
            Some(Some(limits)) => LimitsChange::Some(limits),
        },
    };
    let (from, to) = usage_period(None, None, app.clock.now(), DEFAULT_PERIOD)?;
    let mut tx = operator.begin(&app.db).await?;
    tenants::update(&app, &mut tx, &operator.principal(), id, &change).await?;
    tx.commit().await?;
    if change.state == Some(ServiceState::Suspended) {
        stop_turns(&app, id).await;
    }
    // After the commit: the sums take a while, and every writer of the tenant's audit would wait.
    let mut tx = operator.begin(&app.db).await?;
    let view = tenants::view(&mut tx, id, from, to).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(render(view, from, to)))
}

fn render(view: TenantView, from: DateTime<Utc>, to: DateTime<Utc>) -> TenantViewResponse {
    TenantViewResponse {
        tenant: view.tenant.into(),
        limits: view.limits,
        usage: UsageSumsResponse {
            from,
            to,
            requests: view.usage.requests,
            turns: view.usage.turns,
            input_tokens: view.usage.input_tokens,
            output_tokens: view.usage.output_tokens,
        },
    }
}

/// Suspend a tenant: all its credentials are refused until it is resumed.
#[utoipa::path(
    operation_id = "suspend_tenant",
    tag = "tenants",
    security(("operator_key" = [])),
    params(("id" = TenantId, Path, description = "The tenant")),
    responses((status = 200, description = "Suspended", body = TenantResponse))
)]
#[post("/tenants/{id}/suspend")]
pub async fn suspend_tenant(
    app: web::Data<App>,
    Operator(operator): Operator,
    PathId(id): PathId<TenantId>,
) -> Result<HttpResponse> {
    set_state(&app, &operator, id, TenantState::Suspended).await
}

/// Resume a suspended tenant: its credentials are accepted again.
#[utoipa::path(
    operation_id = "resume_tenant",
    tag = "tenants",
    security(("operator_key" = [])),
    params(("id" = TenantId, Path, description = "The tenant")),
    responses((status = 200, description = "Active", body = TenantResponse))
)]
#[post("/tenants/{id}/resume")]
pub async fn resume_tenant(
    app: web::Data<App>,
    Operator(operator): Operator,
    PathId(id): PathId<TenantId>,
) -> Result<HttpResponse> {
    set_state(&app, &operator, id, TenantState::Active).await
}

/// Delete a tenant with all its data. Its credentials stop at once, its rows are deleted in the background.
#[utoipa::path(
    operation_id = "delete_tenant",
    tag = "tenants",
    security(("operator_key" = [])),
    params(("id" = TenantId, Path, description = "The tenant")),
    responses((status = 202, description = "Being deleted", body = TenantResponse))
)]
#[delete("/tenants/{id}")]
pub async fn delete_tenant(
    app: web::Data<App>,
    Operator(operator): Operator,
    PathId(id): PathId<TenantId>,
) -> Result<HttpResponse> {
    let mut tx = operator.begin(&app.db).await?;
    let tenant = tenants::delete(&app, &mut tx, &operator.principal(), id).await?;
    tx.commit().await?;
    stop_turns(&app, id).await;
    Ok(HttpResponse::Accepted().json(TenantResponse::from(tenant)))
}

async fn set_state(
    app: &App,
    operator: &OperatorCaller,
    id: TenantId,
    state: TenantState,
) -> Result<HttpResponse> {
    let mut tx = operator.begin(&app.db).await?;
    let tenant = tenants::update_state(app, &mut tx, &operator.principal(), id, state).await?;
    tx.commit().await?;
    if state != TenantState::Active {
        stop_turns(app, id).await;
    }
    Ok(HttpResponse::Ok().json(TenantResponse::from(tenant)))
}

/// Stops the turns. The job stops those that cannot be stopped now.
async fn stop_turns(app: &App, id: TenantId) {
    if let Err(error) = tenants::stop_turns(app, id).await {
        tracing::warn!(tenant = %id, error = %error, "turn stop deferred");
    }
}
