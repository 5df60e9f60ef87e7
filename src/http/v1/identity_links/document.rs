//! `/v1/identity-links`: who is who, as a document that tenants keep themselves.

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
use crate::people::{self, Imported, ImportedChange};
use crate::store;

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PutIdentityLinksParams {
    /// Answers what would change, and changes nothing.
    #[serde(default)]
    dry_run: bool,
}

/// What is left out or null stays as it is; what is not known here comes back as a warning.
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
    /// Becomes the tenant's own.
    pub dm_scope: Option<DmScope>,
    /// The tenant's names of people, each with the identities that are theirs. Whoever is no longer
    /// listed loses what imports linked; an empty object says that there is nobody.
    #[schema(value_type = Option<BTreeMap<ExternalId, Vec<IdentityName>>>)]
    pub identity_links: Option<BTreeMap<String, Vec<String>>>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct IdentityLinksResponse {
    /// Whether the document is in force: not after a dry run.
    pub applied: bool,
    pub dry_run: bool,
    /// The tenant's, with this document.
    pub dm_scope: DmScope,
    /// What changes besides people: `dm_scope`, `toolsets`.
    #[schema(value_type = Vec<String>)]
    pub settings: Vec<&'static str>,
    pub changes: Vec<LinkChange>,
    /// What was left out, or may not be meant so.
    pub warnings: Vec<FieldError>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct LinkChange {
    pub action: LinkAction,
    /// The person's name in the document, or in the one before; null for someone without one.
    pub name: Option<String>,
    /// Null for someone who would be made.
    pub user_id: Option<UserId>,
    #[schema(value_type = Option<IdentityName>)]
    pub identity: Option<String>,
    /// Whose it was.
    pub from_user_id: Option<UserId>,
}

impl From<ImportedChange> for LinkChange {
    fn from(change: ImportedChange) -> Self {
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
    fn new(imported: Imported, dry_run: bool) -> Self {
        Self {
            applied: !dry_run,
            dry_run,
            dm_scope: imported.dm_scope,
            settings: imported.settings,
            changes: imported.changes.into_iter().map(LinkChange::from).collect(),
            warnings: imported.warnings,
        }
    }
}

/// Put a document of links in force, whole or not at all. It adds and removes only links that imports
/// made; doing it again changes nothing.
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
        (status = 200, description = "In force, or what would change", body = IdentityLinksResponse),
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
    let document = document::read(&body.tree)?;
    let dry_run = params.dry_run;
    let mut tx = caller.begin(&app.db).await?;
    let imported = people::import(&app, &mut tx, &caller.principal(), document, dry_run).await?;
    if !dry_run {
        tx.commit().await?;
    }
    Ok(HttpResponse::Ok().json(IdentityLinksResponse::new(imported, dry_run)))
}

/// The document that is in force, as what is stored now says it. Putting it changes nothing.
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
