//! `/v1/tenant`: a tenant's view of itself.

use actix_web::{HttpResponse, get, web};

use serde::Serialize;

use super::tenants::TenantResponse;
use crate::app::App;
use crate::domain::limits::Limits;
use crate::error::{Error, Result};
use crate::http::callers::Reader;
use crate::store;

/// A tenant as it sees itself.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct OwnTenantResponse {
    #[serde(flatten)]
    pub tenant: TenantResponse,
    /// What it may use; set by the operator.
    pub limits: Limits,
}

/// The tenant of the calling key.
#[utoipa::path(
    operation_id = "get_tenant",
    tag = "tenant",
    security(("api_key" = ["admin", "read"])),
    extensions(("x-acts-for" = json!("tenant"))),
    responses((status = 200, description = "The tenant", body = OwnTenantResponse))
)]
#[get("/tenant")]
pub async fn get_tenant(app: web::Data<App>, caller: Reader) -> Result<HttpResponse> {
    let tenant = store::tenants::find(&app.db, caller.tenant_id())
        .await?
        .ok_or_else(|| Error::not_found("tenant"))?;
    Ok(HttpResponse::Ok().json(OwnTenantResponse {
        tenant: tenant.into(),
        limits: *caller.limits(),
    }))
}
