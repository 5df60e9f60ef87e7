//! `/v1/identity-links`: the links between a tenant's users and their identities, as one document.

use std::collections::BTreeMap;

use actix_web::{HttpResponse, get, put, web};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::domain::identity_links::document;
use crate::domain::identity_links::plan::LinkAction;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::ExternalId;
use crate::domain::tenant::agent::{DEFAULT_AGENT, DmScope, ToolName};
use crate::error::{FieldError, Result};
use crate::http::auth::keys::{Admin, Reader};
use crate::http::request::documents::DocumentBody;
use crate::http::request::extract::Query;
use crate::ids::UserId;
use crate::people::{self, LinkImportChange, LinkImportResult};
use crate::store;

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PutIdentityLinksParams {
    /// Report the changes, and change nothing.
    #[serde(default)]
    dry_run: bool,
}

/// Absent members and nulls stay as they are. Unknown members come back as warnings.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct IdentityLinksDocument {
    pub session: Option<SessionLinks>,
    /// The tools that the agent `main` offers on each platform. Stored, not used yet: a warning says so.
    #[schema(value_type = Option<BTreeMap<PlatformScope, Vec<ToolName>>>)]
    pub platform_toolsets: Option<BTreeMap<String, Vec<ToolName>>>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SessionLinks {
    /// Becomes the tenant's setting.
    pub dm_scope: Option<DmScope>,
    /// The tenant's names of its users, each with the user's identities. A user who is no longer listed loses the
    /// identities that imports linked. An empty object lists no user.
    #[schema(value_type = Option<BTreeMap<ExternalId, Vec<IdentityName>>>)]
    pub identity_links: Option<BTreeMap<String, Vec<String>>>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct IdentityLinksResponse {
    /// Whether the document was applied: not in a dry run.
    pub applied: bool,
    pub dry_run: bool,
    /// The tenant's setting, with this document.
    pub dm_scope: DmScope,
    /// The changed settings: `dm_scope`, `toolsets`.
    #[schema(value_type = Vec<String>)]
    pub settings: Vec<&'static str>,
    pub changes: Vec<LinkChange>,
    /// Ignored members, and entries that may be mistakes.
    pub warnings: Vec<FieldError>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct LinkChange {
    pub action: LinkAction,
    /// The user's name in this document, or in the previous one; null for a user without a name.
    pub name: Option<String>,
    /// Null for a user whom a dry run would create.
    pub user_id: Option<UserId>,
    #[schema(value_type = Option<IdentityName>)]
    pub identity: Option<String>,
    /// The previous user of the identity.
    pub from_user_id: Option<UserId>,
}

impl From<LinkImportChange> for LinkChange {
    fn from(change: LinkImportChange) -> Self {
        Self {
            action: change.action,
            name: change.name,
            user_id: change.user_id,
            identity: change.identity.map(|identity| identity.to_string()),
            from_user_id: change.from_user_id,
        }
    }
}

impl IdentityLinksResponse {
    fn new(result: LinkImportResult, dry_run: bool) -> Self {
        Self {
            applied: !dry_run,
            dry_run,
            dm_scope: result.dm_scope,
            settings: result.settings,
            changes: result.changes.into_iter().map(LinkChange::from).collect(),
            warnings: result.warnings,
        }
    }
}

/// Apply a document of identity links, all of it or nothing.
///
/// It adds and removes only links that imports made. A repetition changes nothing.
#[utoipa::path(
    operation_id = "put_identity_links",
    tag = "people",
    security(("api_key" = ["admin"])),
    extensions(("x-acts-for" = json!("the tenant"))),
    params(PutIdentityLinksParams),
    request_body(content(
        (IdentityLinksDocument = "application/json"),
        (IdentityLinksDocument = "application/yaml")
    )),
    responses(
        (status = 200, description = "Applied, or the changes of a dry run", body = IdentityLinksResponse),
        (status = 415, description = "The body is neither JSON nor YAML", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[put("/identity-links")]
pub async fn put_identity_links(
    app: web::Data<App>,
    caller: Admin,
    Query(params): Query<PutIdentityLinksParams>,
    body: DocumentBody,
) -> Result<HttpResponse> {
    let document = document::parse(&body.tree)?;
    let dry_run = params.dry_run;
    let mut tx = caller.begin(&app.db).await?;
    let result = people::import(&app, &mut tx, &caller.principal(), document, dry_run).await?;
    if !dry_run {
        tx.commit().await?;
    }
    Ok(HttpResponse::Ok().json(IdentityLinksResponse::new(result, dry_run)))
}

/// Get the identity links as a document. To put it unchanged changes nothing.
#[utoipa::path(
    operation_id = "get_identity_links",
    tag = "people",
    security(("api_key" = ["admin", "read"])),
    extensions(("x-acts-for" = json!("the tenant"))),
    responses((status = 200, description = "The document", body = IdentityLinksDocument))
)]
#[get("/identity-links")]
pub async fn get_identity_links(app: web::Data<App>, caller: Reader) -> Result<HttpResponse> {
    let mut tx = caller.begin(&app.db).await?;
    let dm_scope = store::tenant::tenants::find_dm_scope(&mut tx).await?;
    let agent = store::tenant::agents::find(&mut tx, DEFAULT_AGENT).await?;
    let links = store::identity_links::imports::list_links(&mut tx).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(IdentityLinksDocument {
        session: Some(SessionLinks {
            dm_scope: Some(dm_scope),
            identity_links: Some(links),
        }),
        platform_toolsets: Some(agent.map(|agent| agent.spec.toolsets).unwrap_or_default()),
    }))
}
