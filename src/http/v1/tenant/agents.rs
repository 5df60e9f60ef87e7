//! `/v1/agents`: the tenant's named assistants. The answers never contain an upstream's API key.

use actix_web::{HttpResponse, delete, get, put, web};
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::app::App;
use crate::domain::tenant::agent::AgentSpec;
use crate::domain::values::resource_name::ResourceName;
use crate::error::{Error, Result};
use crate::http::auth::keys::{Admin, Reader};
use crate::http::request::extract::PathName;
use crate::http::request::json_body::LargeJsonBody;
use crate::http::request::paging::ListResponse;
use crate::store;
use crate::store::tenant::agents::AgentRow;
use crate::tenants::agents;

#[derive(Debug, Serialize)]
pub struct AgentResponse {
    #[serde(flatten)]
    pub spec: AgentSpec,
    #[serde(flatten)]
    pub record: AgentRecord,
}

/// The members of an agent in an answer besides its specification.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct AgentRecord {
    pub name: String,
    /// Whether a key for the upstream is stored.
    pub has_api_key: bool,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl From<AgentRow> for AgentResponse {
    fn from(row: AgentRow) -> Self {
        Self {
            spec: row.spec,
            record: AgentRecord {
                name: row.name,
                has_api_key: row.api_key_enc.is_some(),
                created_at: row.created_at,
                updated_at: row.updated_at,
            },
        }
    }
}

/// By hand: the derive would refer to `AgentSpec`, which refuses the members of the record.
impl PartialSchema for AgentResponse {
    fn schema() -> RefOr<Schema> {
        let mut whole = ObjectBuilder::new();
        for part in [AgentSpec::schema(), AgentRecord::schema()] {
            if let RefOr::T(Schema::Object(part)) = part {
                for (name, member) in part.properties {
                    whole = whole.property(&name, member).required(name);
                }
            }
        }
        whole.into()
    }
}

impl ToSchema for AgentResponse {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        AgentSpec::schemas(schemas);
        AgentRecord::schemas(schemas);
    }
}

/// Create an agent, or replace it as a whole. Everything but `upstream` has a default.
#[utoipa::path(
    operation_id = "put_agent",
    tag = "agents",
    security(("api_key" = ["admin"])),
    params(("name" = ResourceName, Path, description = "The agent's name")),
    request_body = AgentSpec,
    responses(
        (status = 200, description = "Replaced", body = AgentResponse),
        (status = 201, description = "Created", body = AgentResponse),
    )
)]
#[put("/agents/{name}")]
pub async fn put_agent(
    app: web::Data<App>,
    caller: Admin,
    path: PathName,
    body: LargeJsonBody<AgentSpec>,
) -> Result<HttpResponse> {
    let name = path.or_invalid()?;
    let mut tx = caller.begin(&app.db).await?;
    let put = agents::put(&app, &mut tx, &caller.principal(), &name, body.value).await?;
    tx.commit().await?;
    app.models
        .invalidate(caller.tenant_id(), name.as_str())
        .await;
    let response = AgentResponse::from(put.agent);
    Ok(if put.is_new {
        HttpResponse::Created().json(response)
    } else {
        HttpResponse::Ok().json(response)
    })
}

/// List all agents of the tenant, by name.
#[utoipa::path(
    operation_id = "list_agents",
    tag = "agents",
    security(("api_key" = ["admin", "read"])),
    responses((status = 200, description = "All of them", body = ListResponse<AgentResponse>))
)]
#[get("/agents")]
pub async fn list_agents(app: web::Data<App>, caller: Reader) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let agents = store::tenant::agents::list(&mut tx).await?;
    tx.end().await?;
    Ok(HttpResponse::Ok().json(ListResponse::whole(agents, AgentResponse::from)))
}

/// Get an agent.
#[utoipa::path(
    operation_id = "get_agent",
    tag = "agents",
    security(("api_key" = ["admin", "read"])),
    params(("name" = ResourceName, Path, description = "The agent's name")),
    responses((status = 200, description = "The agent", body = AgentResponse))
)]
#[get("/agents/{name}")]
pub async fn get_agent(
    app: web::Data<App>,
    caller: Reader,
    path: PathName,
) -> Result<HttpResponse> {
    let name = path.or_missing()?;
    let mut tx = caller.begin(&app.db).await?;
    let agent = store::tenant::agents::find(&mut tx, name.as_str()).await?;
    tx.end().await?;
    let agent = agent.ok_or_else(|| Error::not_found("agent"))?;
    Ok(HttpResponse::Ok().json(AgentResponse::from(agent)))
}

/// Delete an agent. `main` cannot be deleted: it is the default agent.
#[utoipa::path(
    operation_id = "delete_agent",
    tag = "agents",
    security(("api_key" = ["admin"])),
    params(("name" = ResourceName, Path, description = "The agent's name")),
    responses(
        (status = 204, description = "Deleted"),
        (status = 409, description = "In use", body = crate::http::response::problem::Problem,
         content_type = "application/problem+json"),
    )
)]
#[delete("/agents/{name}")]
pub async fn delete_agent(
    app: web::Data<App>,
    caller: Admin,
    path: PathName,
) -> Result<HttpResponse> {
    let name = path.or_missing()?;
    let mut tx = caller.begin(&app.db).await?;
    agents::delete(&app, &mut tx, &caller.principal(), &name).await?;
    tx.commit().await?;
    app.models
        .invalidate(caller.tenant_id(), name.as_str())
        .await;
    Ok(HttpResponse::NoContent().finish())
}
