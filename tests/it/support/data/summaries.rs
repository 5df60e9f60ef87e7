//! Summaries whose sources are known, as the service's own are.

use throughline::dev::service_caller;
use throughline::domain::conversation::summary_sources::SummarySources;
use throughline::ids::{SessionId, TenantId};
use throughline::store::conversation::summary_sources;

use crate::support::{Fields, Tenant, World};

/// Compresses, and stores whose words the summary has: as if the service had made it of the whole parent.
pub async fn compress_with_sources(
    world: &World,
    tenant: &Tenant,
    session: &str,
    summary: &str,
) -> (String, SummarySources) {
    let body = serde_json::json!({ "summary": summary });
    let done = world.compress(&tenant.key, session, body).await.expect(201);
    let child = done.text("session_id").to_owned();
    let sources = set_sources(world, tenant, done.text("parent_id"), &child).await;
    (child, sources)
}

/// Stores the sources of the summary that `child` begins with.
pub async fn set_sources(
    world: &World,
    tenant: &Tenant,
    parent: &str,
    child: &str,
) -> SummarySources {
    let path = format!("/v1/sessions/{child}/messages?exact=true");
    let messages = world.walk(&tenant.key, &path).await;
    let is_new = |message: &&serde_json::Value| {
        message["kind"] == "summary" && message["copied_from"].is_null()
    };
    let seq = messages.iter().find(is_new).unwrap().number("seq");
    let parent: SessionId = parent.parse().unwrap();
    let child: SessionId = child.parse().unwrap();
    let tenant_id = TenantId::from_uuid(tenant.uuid());
    let mut tx = service_caller(tenant_id)
        .begin(&world.app().db)
        .await
        .unwrap();
    let sources = summary_sources::find(&mut tx, parent, i64::MAX)
        .await
        .unwrap();
    summary_sources::update(&mut tx, (child, seq), &sources)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    sources
}
