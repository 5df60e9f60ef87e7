//! `/v1/tenant`: a tenant's view of itself, and its own settings.

use actix_web::{HttpResponse, get, patch, web};
use serde::{Deserialize, Serialize};

use super::tenants::TenantResponse;
use crate::app::App;
use crate::auth::KeyCaller;
use crate::domain::people::display_name::DisplayName;
use crate::domain::tenant::agent::DmScope;
use crate::domain::tenant::limits::Limits;
use crate::domain::tenant::origin::Origin;
use crate::domain::tenant::{Retention, TenantSettings};
use crate::error::Result;
use crate::http::auth::keys::{Admin, Reader};
use crate::http::request::json_body::JsonBody;
use crate::store;
use crate::tenants::{self, SettingsChange};

/// A tenant as it sees itself.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct OwnTenantResponse {
    #[serde(flatten)]
    pub tenant: TenantResponse,
    #[serde(flatten)]
    pub settings: TenantSettings,
    /// The origins of web pages that may call with the tenant's credentials.
    pub allowed_origins: Vec<String>,
    /// The tenant's limits; the operator sets them.
    pub limits: Limits,
}

/// Absent members stay as they are.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpdateTenantRequest {
    pub name: Option<DisplayName>,
    pub dm_scope: Option<DmScope>,
    #[schema(max_items = 50)]
    pub allowed_origins: Option<Vec<Origin>>,
    pub retention: Option<Retention>,
}

/// Get the tenant of the calling key.
#[utoipa::path(
    operation_id = "get_tenant",
    tag = "tenant",
    security(("api_key" = ["admin", "read"])),
    responses((status = 200, description = "The tenant", body = OwnTenantResponse))
)]
#[get("/tenant")]
pub async fn get_tenant(app: web::Data<App>, caller: Reader) -> Result<HttpResponse> {
    render(&app, &caller).await
}

/// Change the tenant's own settings.
#[utoipa::path(
    operation_id = "update_tenant",
    tag = "tenant",
    security(("api_key" = ["admin"])),
    request_body = UpdateTenantRequest,
    responses((status = 200, description = "The tenant", body = OwnTenantResponse))
)]
#[patch("/tenant")]
pub async fn update_tenant(
    app: web::Data<App>,
    caller: Admin,
    body: JsonBody<UpdateTenantRequest>,
) -> Result<HttpResponse> {
    let change = SettingsChange {
        name: body.value.name,
        dm_scope: body.value.dm_scope,
        allowed_origins: body.value.allowed_origins,
        retention: body.value.retention,
    };
    let mut tx = caller.begin(&app.db).await?;
    tenants::update_settings(&app, &mut tx, &caller.principal(), change).await?;
    tx.commit().await?;
    render(&app, &caller).await
}

async fn render(app: &App, caller: &KeyCaller) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let own = store::tenant::tenants::get_own(&mut tx).await?;
    tx.end().await?;
    Ok(HttpResponse::Ok().json(OwnTenantResponse {
        tenant: own.tenant.into(),
        settings: own.settings,
        allowed_origins: own.allowed_origins,
        limits: *caller.limits(),
    }))
}
