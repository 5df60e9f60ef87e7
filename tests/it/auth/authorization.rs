//! Walks every operation of the OpenAPI document with every kind of credential. Default deny: an
//! operation that states no rule, or that has no sample here, fails the test.

use crate::support::Fields;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::tokens;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Reply, Tenant, World};
use throughline::http;

const ISSUER: &str = "walk";
const TOKEN_SECRET: &str = "a secret of the walk, 32 bytes or more";

fn issuer_body() -> Value {
    json!({"issuer": "https://walk.example", "platform": "web", "algorithm": "HS256", "secret": TOKEN_SECRET})
}

/// The id of the user that the walk's token stands for in `tenant`.
async fn token_user(world: &World, tenant: &Tenant) -> String {
    let user = world
        .get(&user_token(world, tenant), "/v1/users/me")
        .await
        .expect(200);
    user.id()
}

fn user_token(world: &World, tenant: &Tenant) -> String {
    let claims = json!({
        "iss": "https://walk.example", "aud": tenant.id, "sub": "walker",
        "exp": world.clock.now().timestamp() + 600,
    });
    tokens::hs256(&claims, TOKEN_SECRET)
}

/// One kind of credential, as `security` names it, and one of that kind.
struct Credential {
    name: String,
    key: Option<String>,
}

impl Credential {
    fn new(name: &str, key: &str) -> Self {
        Self {
            name: name.to_owned(),
            key: Some(key.to_owned()),
        }
    }

    fn stranger(key: Option<&str>) -> Self {
        Self {
            name: "a stranger".to_owned(),
            key: key.map(str::to_owned),
        }
    }

    /// Adds what it is believed by, and for a bridge the person it acts for.
    fn sign(&self, mut request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        if self.name == "api_key:bridge" {
            request = request.header("x-throughline-identity", "telegram:1");
        }
        request
    }
}

/// A session and its key, of the credential's own making where it may make one: both have one name, and
/// the session's ends in `-session`.
async fn session_sample(
    world: &World,
    own: &Tenant,
    other: &Tenant,
    credential: &Credential,
    body: Option<Value>,
) -> Sample {
    let of_key = |name: &str| format!("{name}-session");
    let make = async |credential: &Credential, name: &str| {
        let body = json!({
            "id": of_key(name), "session_key": name, "messages": [{"role": "user", "content": "walked"}],
        });
        let request = reqwest::Client::new().post(world.url("/v1/sessions"));
        Reply::of(credential.sign(request).json(&body))
            .await
            .expect(201);
    };
    let name = format!("walk-{}", throughline::ids::RequestId::generate());
    let foreign = format!("foreign-{name}");
    let makes = [
        "api_key:admin",
        "api_key:bridge",
        "api_key:chat",
        "user_token",
    ];
    let admin = Credential::new("api_key:admin", &own.key);
    let maker = if makes.contains(&credential.name.as_str()) {
        credential
    } else {
        &admin
    };
    make(maker, &name).await;
    make(&Credential::new("api_key:admin", &other.key), &foreign).await;
    Sample {
        ids: Some((name, foreign)),
        body,
    }
}

fn chat_body() -> Value {
    json!({"model": "main", "messages": [{"role": "user", "content": "walked"}]})
}

/// A turn in a session of the credential's own making, where it may make one, and one of another tenant.
async fn turn_sample(
    world: &World,
    own: &Tenant,
    other: &Tenant,
    credential: &Credential,
) -> Sample {
    let admin = Credential::new("api_key:admin", &own.key);
    let foreign = Credential::new("api_key:admin", &other.key);
    let maker = match credential.name.as_str() {
        "api_key:bridge" | "api_key:chat" | "user_token" => credential,
        _ => &admin,
    };
    let ask = async |credential: &Credential| {
        let key = throughline::ids::RequestId::generate().to_string();
        let request = reqwest::Client::new().post(world.url("/v1/chat/completions"));
        let request = credential.sign(request).header("x-hermes-session-key", key);
        let reply = Reply::of(request.json(&chat_body())).await;
        let answer = reply.expect(200);
        answer.text("/hermes/turn_id").to_owned()
    };
    Sample {
        ids: Some((ask(maker).await, ask(&foreign).await)),
        body: None,
    }
}

/// A delivery of Telegram that is leased, or dead, and one of another tenant.
async fn delivery_sample(world: &World, own: &Tenant, other: &Tenant, operation: &str) -> Sample {
    let lease = "0".repeat(32);
    let make = async |tenant: &Tenant| {
        let id = throughline::ids::DeliveryId::generate();
        let (state, lease) = match operation {
            "replay_delivery" => ("dead", None),
            _ => ("leased", Some(lease.parse::<sqlx::types::Uuid>().unwrap())),
        };
        let chat = format!("dm:{id}");
        for sql in [
            "insert into chats (tenant_id, platform, scope, chat_ref) values ($1, 'telegram', '', $3)
               on conflict do nothing",
            "insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, payload, state, lease,
                                     visible_at, created_at)
             values ($1, $2, 'telegram', '', $3, 1, 'notice', '{}', $4, $5, now() + interval '1 hour', now())",
        ] {
            sqlx::query(sql)
                .bind(tenant.uuid())
                .bind(id)
                .bind(&chat)
                .bind(state)
                .bind(lease)
                .execute(&mut world.superuser().await)
                .await
                .unwrap();
        }
        id.to_string()
    };
    let body = match operation {
        "ack_delivery" => Some(json!({ "lease": lease })),
        "nack_delivery" => Some(json!({"lease": lease, "error": "walked", "retry": true})),
        _ => None,
    };
    Sample {
        ids: Some((make(own).await, make(other).await)),
        body,
    }
}

/// The account a credential speaks for.
fn acting_identity(credential: &Credential) -> &'static str {
    match credential.name.as_str() {
        "user_token" => "web:walker",
        _ => "telegram:1",
    }
}

/// The person of that account, who also has one on Telegram.
async fn acting_user(world: &World, own: &Tenant, credential: &Credential) -> String {
    let token_user = token_user(world, own).await;
    let of_bridge = world.dm(&own.key, "telegram:1").await["user_id"].clone();
    if credential.name != "user_token" {
        return of_bridge.as_str().unwrap().to_owned();
    }
    let accounts = format!("/v1/users/{token_user}/identities");
    let accounts = world.get(&own.key, &accounts).await.expect(200);
    let accounts = accounts.list();
    if !accounts.iter().any(|one| one["platform"] == "telegram") {
        void_codes(world).await;
        let second = format!("telegram:{}", throughline::ids::RequestId::generate());
        world.link(&own.key, "web:walker", &second).await;
    }
    token_user
}

/// A person can have three pending: the walk begins anew each time.
async fn void_codes(world: &World) {
    sqlx::query("update codes set voided_at = now() where voided_at is null")
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
}

/// A second account of the acting person, linked or just parted again, and one of another tenant.
async fn parted_sample(
    world: &World,
    own: &Tenant,
    other: &Tenant,
    credential: &Credential,
    operation: &str,
) -> Sample {
    let speaks = acting_identity(credential);
    let second = format!("irc@net:{}", throughline::ids::RequestId::generate());
    void_codes(world).await;
    let linked = world.link(&own.key, speaks, &second).await;
    let user = &linked["user_id"];
    let foreign = world.dm(&other.key, "telegram:1").await["user_id"].clone();
    let foreign = world.identity_id(&other.key, &foreign, "telegram:1").await;
    if operation == "unlink_identity" {
        let id = world.identity_id(&own.key, user, &second).await;
        return Sample {
            ids: Some((id, foreign)),
            body: None,
        };
    }
    // The account that speaks is parted, and brings a code of the one that stays.
    let id = world.identity_id(&own.key, user, speaks).await;
    let path = format!("/v1/identities/{id}");
    world.delete(&own.key, &path).await.expect(200);
    let code = world.mint(&own.key, &second).await;
    Sample {
        ids: Some((id, foreign)),
        body: Some(json!({ "code": code })),
    }
}

/// How to call an operation so that only rights can stand in its way.
struct Sample {
    /// An `{id}` or `{name}` of the caller's own tenant, and one of another tenant.
    ids: Option<(String, String)>,
    body: Option<Value>,
}

async fn sample(
    world: &World,
    operation: &str,
    own: &Tenant,
    other: &Tenant,
    credential: &Credential,
) -> Sample {
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
        | "list_tenants" | "list_issuers" | "list_agents" | "get_own_user" | "list_audit"
        | "get_audit_head" => plain,
        "list_sessions" | "list_session_keys" | "get_retention" => plain,
        "sweep_retention" => with_body(json!({"dry_run": true, "conversations_days": 30})),
        "create_session" => with_body(json!({"title": "made by the walk"})),
        "get_session"
        | "delete_session"
        | "list_messages"
        | "get_tip"
        | "list_lineage"
        | "export_session"
        | "list_grants"
        | "revoke_grants"
        | "list_turns"
        | "stream_session_events"
        | "stream_session_key_events" => session_sample(world, own, other, credential, None).await,
        "list_models" | "fetch_deliveries" | "list_dead_deliveries" | "stream_deliveries" => plain,
        "create_inbound" => {
            let identity = acting_identity(credential);
            with_body(json!({"identity": identity, "text": "walked"}))
        }
        "ack_delivery" | "nack_delivery" | "replay_delivery" => {
            delivery_sample(world, own, other, operation).await
        }
        "get_model" => with_ids("main".to_owned(), String::new()),
        "create_chat_completion" => with_body(chat_body()),
        "get_turn" | "cancel_turn" | "stream_turn_events" => {
            turn_sample(world, own, other, credential).await
        }
        "delete_user" => {
            let made = json!({"display_name": "made by the walk"});
            let made = world.post(&own.key, "/v1/users", made).await.expect(201);
            let id = made.id();
            with_ids(id, token_user(world, other).await)
        }
        "export_user" => {
            let other = token_user(world, other).await;
            with_ids(acting_user(world, own, credential).await, other)
        }
        "import_session" => {
            let message = json!({"seq": 1, "role": "user", "content": "walked"});
            with_body(json!({"links": [{"messages": [message]}]}))
        }
        "update_session" => {
            session_sample(world, own, other, credential, Some(json!({"pinned": true}))).await
        }
        "append_messages" => {
            let body = json!({"messages": [{"role": "user", "content": "walked"}]});
            session_sample(world, own, other, credential, Some(body)).await
        }
        "branch_session" => session_sample(world, own, other, credential, Some(json!({}))).await,
        "compress_session" => {
            session_sample(
                world,
                own,
                other,
                credential,
                Some(json!({"summary": "walked"})),
            )
            .await
        }
        "uncompress_session" => {
            let sample = session_sample(world, own, other, credential, None).await;
            let name = &sample.ids.as_ref().unwrap().0;
            let path = format!("/v1/sessions/{name}-session/compress");
            let request = reqwest::Client::new().post(world.url(&path));
            let body = json!({"summary": "walked"});
            Reply::of(credential.sign(request).json(&body)).await;
            sample
        }
        "get_session_key" | "reset_session_key" => {
            session_sample(world, own, other, credential, None).await
        }
        "switch_session_key" => {
            let sample = session_sample(world, own, other, credential, None).await;
            let current = format!("{}-session", sample.ids.as_ref().unwrap().0);
            let body = json!({ "session_id": current });
            Sample {
                body: Some(body),
                ..sample
            }
        }
        "append_to_session_key" => {
            let body = json!({"messages": [{"role": "user", "content": "walked"}]});
            session_sample(world, own, other, credential, Some(body)).await
        }
        "get_identity_links" => plain,
        "put_identity_links" => {
            with_body(json!({"session": {"identityLinks": {"walk": ["irc:walk"]}}}))
        }
        "create_tenant" => with_body(json!({"name": "made by the walk"})),
        "update_tenant" => with_body(json!({"dm_scope": "per-peer"})),
        "create_api_key" => with_body(json!({"name": "made by the walk", "scopes": ["chat"]})),
        "revoke_api_key" => {
            let (own, _) = world.api_key(own, "chat").await;
            let (other, _) = world.api_key(other, "chat").await;
            with_ids(own, other)
        }
        // A name that is free is nobody's: there is no foreign one to put to.
        "put_issuer" => Sample {
            ids: Some((ISSUER.to_owned(), String::new())),
            body: Some(issuer_body()),
        },
        "put_agent" => Sample {
            ids: Some(("walked".to_owned(), String::new())),
            body: Some(json!({"upstream": {"kind": "demo"}})),
        },
        "get_issuer" => with_ids(ISSUER.to_owned(), "foreign".to_owned()),
        "get_agent" => with_ids("main".to_owned(), "foreign".to_owned()),
        "delete_agent" => {
            let body = json!({"upstream": {"kind": "demo"}});
            world.put(&own.key, "/v1/agents/walked", body).await;
            world
                .put(
                    &other.key,
                    "/v1/agents/foreign",
                    json!({"upstream": {"kind": "demo"}}),
                )
                .await;
            with_ids("walked".to_owned(), "foreign".to_owned())
        }
        "delete_issuer" => {
            // Not the walk's own, whose token must go on working.
            let mut body = issuer_body();
            body["issuer"] = json!("https://another.example");
            body["platform"] = json!("another");
            world
                .put(&own.key, "/v1/issuers/another", body)
                .await
                .expect_success();
            with_ids("another".to_owned(), "foreign".to_owned())
        }
        "create_user" => with_body(json!({"display_name": "made by the walk"})),
        "list_users" => plain,
        "get_user" | "list_identities" | "list_presence" | "list_home_channels" => {
            let other = token_user(world, other).await;
            with_ids(acting_user(world, own, credential).await, other)
        }
        "update_user" => {
            let other = token_user(world, other).await;
            Sample {
                ids: Some((acting_user(world, own, credential).await, other)),
                body: Some(json!({"time_zone": "Europe/Berlin"})),
            }
        }
        "put_home_channel" => {
            let other = token_user(world, other).await;
            Sample {
                ids: Some((acting_user(world, own, credential).await, other)),
                body: Some(json!({"chat": {"type": "dm"}})),
            }
        }
        "delete_home_channel" => {
            let own_user = acting_user(world, own, credential).await;
            let path = format!("/v1/users/{own_user}/home-channels/telegram");
            let chat = json!({"chat": {"type": "dm"}});
            world.put(&own.key, &path, chat).await.expect(200);
            with_ids(own_user, token_user(world, other).await)
        }
        "merge_users" => {
            let from = world.dm(&own.key, "discord:1").await["user_id"].clone();
            let own_user = acting_user(world, own, credential).await;
            let body = json!({"from_user_id": from, "reason": "walked", "dry_run": true});
            Sample {
                ids: Some((own_user, token_user(world, other).await)),
                body: Some(body),
            }
        }
        "unlink_identity" | "undo_unlink_identity" => {
            parted_sample(world, own, other, credential, operation).await
        }
        "resolve" => with_body(json!({ "identity": acting_identity(credential) })),
        "create_link_code" => {
            let identity = acting_identity(credential);
            void_codes(world).await;
            with_body(json!({ "identity": identity }))
        }
        "redeem_link_code" => {
            void_codes(world).await;
            let shown = world.mint(&own.key, "discord:2").await;
            let identity = acting_identity(credential);
            with_body(json!({"code": shown, "identity": identity, "dry_run": true}))
        }
        // The operator is of no tenant: there is no foreign one.
        "suspend_tenant" | "resume_tenant" | "delete_tenant" => {
            let tenant = world.tenant("made by the walk").await;
            with_ids(tenant.id, "ten_01a1e2373db47013a539524902c63338".to_owned())
        }
        "whoami" | "list_nodes" | "list_operator_audit" => plain,
        "view_tenant" | "create_admin_key" => {
            let tenant = world.tenant("made by the walk").await;
            with_ids(tenant.id, "ten_01a1e2373db47013a539524902c63338".to_owned())
        }
        "change_tenant" => {
            let tenant = world.tenant("made by the walk").await;
            Sample {
                ids: Some((tenant.id, "ten_01a1e2373db47013a539524902c63338".to_owned())),
                body: Some(json!({"name": "walked"})),
            }
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
