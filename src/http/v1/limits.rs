//! `/v1/operator/tenants/{id}/limits`: what the operator lets a tenant use.

use actix_web::{HttpResponse, put, web};

use crate::app::App;
use crate::domain::limits::{LimitOverrides, Limits};
use crate::error::{Error, Result};
use crate::http::callers::Operator;
use crate::http::extract::{JsonBody, PathId};
use crate::ids::TenantId;
use crate::store;

/// Set a tenant's limits. What is left out has its default; all nodes follow within a second.
#[utoipa::path(
    operation_id = "set_tenant_limits",
    tag = "tenants",
    security(("operator_key" = [])),
    extensions(("x-acts-for" = json!("nobody"))),
    params(("id" = TenantId, Path, description = "The tenant")),
    request_body = LimitOverrides,
    responses((status = 200, description = "All limits that now apply", body = Limits))
)]
#[put("/operator/tenants/{id}/limits")]
pub async fn set_tenant_limits(
    app: web::Data<App>,
    _operator: Operator,
    PathId(id): PathId<TenantId>,
    body: JsonBody<LimitOverrides>,
) -> Result<HttpResponse> {
    let errors = body.value.errors();
    if !errors.is_empty() {
        return Err(Error::invalid(errors));
    }
    let found = store::tenants::update_limits(&app.db, id, &body.value, app.clock.now()).await?;
    if !found {
        return Err(Error::not_found("tenant"));
    }
    Ok(HttpResponse::Ok().json(body.value.effective()))
}
