//! `/v1/operator/tenants/{id}/limits`: the limits that the operator sets for a tenant.

use actix_web::{HttpResponse, put, web};

use crate::app::App;
use crate::domain::tenant::limits::{LimitOverrides, Limits};
use crate::error::Result;
use crate::http::auth::keys::Operator;
use crate::http::request::extract::PathId;
use crate::http::request::json_body::JsonBody;
use crate::ids::TenantId;
use crate::tenants;

/// Set a tenant's limits. Absent members get their defaults; all nodes follow within a second.
#[utoipa::path(
    operation_id = "set_tenant_limits",
    tag = "tenants",
    security(("operator_key" = [])),
    params(("id" = TenantId, Path, description = "The tenant")),
    request_body = LimitOverrides,
    responses((status = 200, description = "All limits that now apply", body = Limits))
)]
#[put("/operator/tenants/{id}/limits")]
pub async fn set_tenant_limits(
    app: web::Data<App>,
    Operator(operator): Operator,
    PathId(id): PathId<TenantId>,
    body: JsonBody<LimitOverrides>,
) -> Result<HttpResponse> {
    let mut tx = operator.begin(&app.db).await?;
    tenants::set_limits(&app, &mut tx, &operator.principal(), id, &body.value).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(body.value.effective()))
}
