//! Walks every operation of the OpenAPI document with every kind of credential. Default deny: an
//! operation that states no rule, or that has no sample here, fails the test.

use reqwest::Method;
use serde_json::{Value, json};
use throughline::http;

use crate::support::data::samples::{Credential, ISSUER, issuer_body, sample, user_token};
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, World};

/// The credentials that `security` admits: names like `operator_key` and `api_key:admin`.
fn admitted(operation: &Value) -> Vec<String> {
    let mut names = Vec::new();
    for requirement in operation.items("security") {
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

fn fill(path: &str, id: &str) -> String {
    path.replace("/sessions/{id}", &format!("/sessions/{id}-session"))
        .replace("{id}", id)
        .replace("{name}", id)
        .replace("{platform}", "telegram")
        .replace("{key}", id)
}

/// Everything that a user token could say of who it speaks for and where, without proving it: by the header, where
/// an operation acts for somebody, and by each member of its body that says so.
fn claims_of_others(
    document: &Value,
    operation: &Value,
    body: Option<&Value>,
) -> Vec<(Option<String>, Option<Value>)> {
    let mut claims = Vec::new();
    let identities = ["telegram:walker", "web:other", "web@other:walker"];
    let is_header = |parameter: &Value| parameter["name"] == "X-Throughline-Identity";
    let parameters = operation["parameters"].as_array();
    if parameters.is_some_and(|all| all.iter().any(is_header)) {
        for identity in identities {
            claims.push((Some(identity.to_owned()), body.cloned()));
        }
    }
    let content = &operation["requestBody"]["content"]["application/json"]["schema"];
    let schema = match content["$ref"].as_str() {
        Some(name) => document
            .pointer(name.trim_start_matches('#'))
            .unwrap_or(&Value::Null),
        None => content,
    };
    let mut add = |member: &str, value: Value| {
        let mut body = body.cloned().unwrap_or_else(|| json!({}));
        body[member] = value;
        claims.push((None, Some(body)));
    };
    // A home channel's identity is who is reached, and not who speaks.
    let speaks = operation["operationId"] != "put_home_channel";
    if speaks && schema["properties"]["identity"].is_object() {
        for identity in identities {
            add("identity", json!(identity));
        }
    }
    if schema["properties"]["chat"].is_object() {
        for chat in [
            json!({"type": "dm", "id": "5"}),
            json!({"type": "dm", "scope": "other"}),
            json!({"type": "dm", "thread_id": "5"}),
            json!({"type": "group", "id": "5"}),
            json!({"type": "channel", "id": "5"}),
            json!({"type": "thread", "id": "5", "thread_id": "6"}),
        ] {
            add("chat", chat);
        }
    }
    if operation["operationId"] == "create_inbound" {
        add("display_name", json!("the boss"));
    }
    claims
}

async fn call(
    world: &World,
    method: &Method,
    path: &str,
    id: Option<&str>,
    body: &Option<Value>,
    credential: &Credential,
) -> Reply {
    let path = fill(path, id.unwrap_or_default());
    let mut request = reqwest::Client::new().request(method.clone(), world.url(&path));
    request = credential.sign(request);
    if let Some(body) = body {
        request = request.json(body);
    }
    if path.ends_with("/events") || path.ends_with("/stream") {
        Reply::head_of(request).await
    } else {
        Reply::of(request).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_admits_exactly_whom_it_says() {
    let world = World::new().await;
    let own = world.tenant("own").await;
    let other = world.tenant("other").await;
    let mut credentials = vec![
        Credential::new("operator_key", OPERATOR_KEY),
        Credential::new("api_key:admin", &own.key),
    ];
    for scope in ["bridge", "chat", "read"] {
        let (_, key) = world.api_key(&own, scope).await;
        credentials.push(Credential::new(&format!("api_key:{scope}"), &key));
    }
    for tenant in [&own, &other] {
        let path = format!("/v1/issuers/{ISSUER}");
        world
            .put(&tenant.key, &path, issuer_body())
            .await
            .expect(201);
    }
    credentials.push(Credential::new("user_token", &user_token(&world, &own)));
    let document = http::document().unwrap();
    let mut walked = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let name = operation.text("operationId");
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            assert!(operation["security"].is_array(), "{name} states no rule");
            assert!(
                operation["x-acts-for"].is_string(),
                "{name} does not say for whom it acts"
            );
            let admitted = admitted(operation);
            let public = operation["security"] == json!([{}]);
            assert!(public || !admitted.is_empty(), "{name} admits nobody");
            for key in [None, Some("tl_nonsense"), Some("x")] {
                let stranger = Credential::stranger(key);
                let sample = sample(&world, name, &own, &other, &stranger).await;
                let id = sample.ids.as_ref().map(|(own, _)| own.as_str());
                let reply = call(&world, &method, path, id, &sample.body, &stranger).await;
                if public {
                    assert!(reply.status < 300, "{name}: {}", reply.body);
                } else {
                    if path.starts_with("/v1/chat") || path.starts_with("/v1/models") {
                        reply.expect_openai_error(401, "unauthorized")
                    } else {
                        reply.expect_problem(401, "unauthorized")
                    };
                }
            }
            for credential in credentials.iter().filter(|_| !public) {
                let sample = sample(&world, name, &own, &other, credential).await;
                let own_id = sample.ids.as_ref().map(|(own, _)| own.as_str());
                let reply = call(&world, &method, path, own_id, &sample.body, credential).await;
                let who = &credential.name;
                if admitted.contains(who) {
                    assert!(reply.status < 300, "{who} on {name}: {}", reply.body);
                    let foreign = sample.ids.as_ref().map(|(_, foreign)| foreign.as_str());
                    if let Some(foreign) = foreign.filter(|foreign| !foreign.is_empty()) {
                        let reply = call(
                            &world,
                            &method,
                            path,
                            Some(foreign),
                            &sample.body,
                            credential,
                        )
                        .await;
                        let code = match path {
                            path if path.contains("/sessions/") => "session_not_found",
                            path if path.contains("/session-keys/") => "session_key_not_found",
                            _ => "not_found",
                        };
                        // A client's own key that is free is made: a foreign one is simply not there.
                        if name != "append_to_session_key" {
                            reply.expect_problem(404, code);
                        }
                    }
                    if who == "user_token" {
                        let body = sample.body.as_ref();
                        for (header, body) in claims_of_others(&document, operation, body) {
                            let id = own_id.unwrap_or_default();
                            let path = fill(path, id);
                            let mut request = world.request(
                                method.clone(),
                                &path,
                                credential.key.as_ref().unwrap(),
                            );
                            if let Some(header) = &header {
                                request = request.header("x-throughline-identity", header);
                            }
                            if let Some(body) = &body {
                                request = request.json(body);
                            }
                            let reply = Reply::of(request).await;
                            let claim = (&header, &body);
                            assert_eq!(reply.status, 404, "{name} with {claim:?}: {}", reply.body);
                        }
                    }
                } else {
                    // What is not a person's own is not there for them; keys are told what they lack.
                    let refusal = if who == "user_token" { 404 } else { 403 };
                    assert_eq!(reply.status, refusal, "{who} on {name}: {}", reply.body);
                }
            }
            walked += 1;
        }
    }
    assert!(walked >= 10, "the walk saw only {walked} operations");
}
