//! `/v1/models`: the tenant's agents, as OpenAI's clients list models.

use actix_web::{HttpResponse, get, web};
use serde::Serialize;

use crate::app::App;
use crate::error::{Code, Error, Result};
use crate::http::auth::conversation::ConversationReader;
use crate::http::request::extract::PathName;
use crate::store;

/// A model, as OpenAI lists it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ModelResponse {
    /// The agent's name.
    pub id: String,
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: i64,
    pub owned_by: &'static str,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ModelsResponse {
    pub object: &'static str,
    pub data: Vec<ModelResponse>,
}

impl From<store::tenant::agents::AgentRow> for ModelResponse {
    fn from(agent: store::tenant::agents::AgentRow) -> Self {
        Self {
            id: agent.name,
            object: "model",
            created: agent.created_at.timestamp(),
            owned_by: "tenant",
        }
    }
}

/// The tenant's agents, as models.
#[utoipa::path(
    operation_id = "list_models",
    tag = "chat",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named person, the token's user, or the tenant"))),
    responses((status = 200, description = "All of them", body = ModelsResponse))
)]
#[get("/models")]
pub async fn list_models(app: web::Data<App>, caller: ConversationReader) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let mut tx = context.begin(&app.db).await?;
    let agents = store::tenant::agents::list(&mut tx).await?;
    tx.commit().await?;
    let data = agents.into_iter().map(ModelResponse::from).collect();
    Ok(HttpResponse::Ok().json(ModelsResponse {
        object: "list",
        data,
    }))
}

/// One agent, as a model.
#[utoipa::path(
    operation_id = "get_model",
    tag = "chat",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named person, the token's user, or the tenant"))),
    params(("name" = inline(crate::domain::values::resource_name::ResourceName), Path, description = "The agent's name")),
    responses((status = 200, description = "The model", body = ModelResponse))
)]
#[get("/models/{name}")]
pub async fn get_model(
    app: web::Data<App>,
    caller: ConversationReader,
    name: PathName,
) -> Result<HttpResponse> {
    let name = name.or_missing()?;
    let context = caller.context(&app, None).await?;
    let mut tx = context.begin(&app.db).await?;
    let agent = store::tenant::agents::find(&mut tx, name.as_str()).await?;
    tx.commit().await?;
    let agent = agent.ok_or_else(|| Error::new(Code::ModelNotFound, "no such model"))?;
    Ok(HttpResponse::Ok().json(ModelResponse::from(agent)))
}
