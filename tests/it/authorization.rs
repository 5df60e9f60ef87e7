//! Walks every operation of the OpenAPI document with every kind of credential. Default deny: an
//! operation that states no rule, or that has no sample here, fails the test.

use std::collections::BTreeMap;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::world::OPERATOR_KEY;
use crate::support::{Reply, Tenant, World};
use throughline::http;

/// How to call an operation so that only rights can stand in its way.
struct Sample {
    /// An `{id}` of the caller's own tenant, and one of another tenant.
    ids: Option<(String, String)>,
    body: Option<Value>,
}

async fn sample(world: &World, operation: &str, own: &Tenant, other: &Tenant) -> Sample {
    let plain = Sample {
        ids: None,
        body: None,
    };
    let with_body = |body: Value| Sample {
        ids: None,
        body: Some(body),
    };
    let with_ids = |own: String, other: String| Sample {
        ids: Some((own, other)),
        body: None,
    };
    match operation {
        "get_health" | "get_readiness" | "get_tenant" | "get_usage" | "list_api_keys"
        | "list_tenants" => plain,
        "create_tenant" => with_body(json!({"name": "made by the walk"})),
        "create_api_key" => with_body(json!({"name": "made by the walk", "scopes": ["chat"]})),
        "revoke_api_key" => {
            let (own, _) = world.api_key(own, "chat").await;
            let (other, _) = world.api_key(other, "chat").await;
            with_ids(own, other)
        }
        // The operator is of no tenant: there is no foreign one.
        "suspend_tenant" | "resume_tenant" => {
            let tenant = world.tenant("made by the walk").await;
            with_ids(tenant.id, "ten_01a1e2373db47013a539524902c63338".to_owned())
        }
        "set_tenant_limits" => {
            let tenant = world.tenant("made by the walk").await;
            Sample {
                ids: Some((tenant.id, "ten_01a1e2373db47013a539524902c63338".to_owned())),
                body: Some(json!({"open_streams": 10})),
            }
        }
        unknown => {
            panic!("the operation {unknown} has no sample: add one, so that its rights are tested")
        }
    }
}

/// The credentials that `security` admits: names like `operator_key` and `api_key:admin`.
fn admitted(operation: &Value) -> Vec<String> {
    let mut names = Vec::new();
    for requirement in operation["security"].as_array().unwrap() {
        for (scheme, scopes) in requirement.as_object().unwrap() {
            let scopes = scopes.as_array().unwrap();
            if scopes.is_empty() {
                names.push(scheme.clone());
            }
            names.extend(
                scopes
                    .iter()
                    .map(|scope| format!("{scheme}:{}", scope.as_str().unwrap())),
            );
        }
    }
    names
}

async fn call(
    world: &World,
    method: &Method,
    path: &str,
    id: Option<&str>,
    body: &Option<Value>,
    key: Option<&str>,
) -> Reply {
    let path = path.replace("{id}", id.unwrap_or("{id}"));
    let mut request = reqwest::Client::new().request(method.clone(), world.url(&path));
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    if let Some(body) = body {
        request = request.json(body);
    }
    Reply::of(request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_admits_exactly_whom_it_says() {
    let world = World::new().await;
    let own = world.tenant("own").await;
    let other = world.tenant("other").await;
    let mut credentials = BTreeMap::from([
        ("operator_key".to_owned(), OPERATOR_KEY.to_owned()),
        ("api_key:admin".to_owned(), own.key.clone()),
    ]);
    for scope in ["bridge", "chat", "read"] {
        let (_, key) = world.api_key(&own, scope).await;
        credentials.insert(format!("api_key:{scope}"), key);
    }
    let document = http::document().unwrap();
    let mut walked = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let name = operation["operationId"].as_str().unwrap();
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            assert!(operation["security"].is_array(), "{name} states no rule");
            assert!(
                operation["x-acts-for"].is_string(),
                "{name} does not say for whom it acts"
            );
            let admitted = admitted(operation);
            let public = operation["security"] == json!([{}]);
            assert!(public || !admitted.is_empty(), "{name} admits nobody");
            let stranger = sample(&world, name, &own, &other).await;
            let id = stranger.ids.as_ref().map(|(own, _)| own.as_str());
            for key in [None, Some("tl_nonsense"), Some("x")] {
                let reply = call(&world, &method, path, id, &stranger.body, key).await;
                if public {
                    assert!(reply.status < 300, "{name}: {}", reply.text);
                } else {
                    reply.expect_problem(401, "unauthorized");
                }
            }
            for (credential, key) in credentials.iter().filter(|_| !public) {
                let sample = sample(&world, name, &own, &other).await;
                let own_id = sample.ids.as_ref().map(|(own, _)| own.as_str());
                let reply = call(&world, &method, path, own_id, &sample.body, Some(key)).await;
                if admitted.contains(credential) {
                    assert!(reply.status < 300, "{credential} on {name}: {}", reply.text);
                    if let Some((_, foreign)) = &sample.ids {
                        let reply = call(
                            &world,
                            &method,
                            path,
                            Some(foreign),
                            &sample.body,
                            Some(key),
                        )
                        .await;
                        reply.expect_problem(404, "not_found");
                    }
                } else {
                    assert_eq!(reply.status, 403, "{credential} on {name}: {}", reply.text);
                }
            }
            walked += 1;
        }
    }
    assert!(walked >= 10, "the walk saw only {walked} operations");
}
