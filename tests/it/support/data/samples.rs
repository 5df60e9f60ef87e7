//! One call of each operation that only rights can stop, for the walk over all operations.

use serde_json::{Value, json};

use crate::support::{Fields, Reply, Tenant, World, tokens};

pub const ISSUER: &str = "walk";

pub const TOKEN_SECRET: &str = "a secret of the walk, 32 bytes or more";

pub fn issuer_body() -> Value {
    json!({"issuer": "https://walk.example", "platform": "web", "algorithm": "HS256", "secret": TOKEN_SECRET})
}

/// The id of the user that the walk's token stands for in `tenant`.
pub async fn token_user(world: &World, tenant: &Tenant) -> String {
    let user = world
        .get(&user_token(world, tenant), "/v1/users/me")
        .await
        .expect(200);
    user.id()
}

pub fn user_token(world: &World, tenant: &Tenant) -> String {
    let claims = json!({
        "iss": "https://walk.example", "aud": tenant.id, "sub": "walker",
        "exp": world.clock.now().timestamp() + 600,
    });
    tokens::hs256(&claims, TOKEN_SECRET)
}

/// A session and its key, of the credential's own making where it may make one: both have one name, and
/// the session's ends in `-session`.
pub async fn session_sample(
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

pub fn chat_body() -> Value {
    json!({"model": "main", "messages": [{"role": "user", "content": "walked"}]})
}

/// A turn in a session of the credential's own making, where it may make one, and one of another tenant.
pub async fn turn_sample(
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
pub async fn delivery_sample(
    world: &World,
    own: &Tenant,
    other: &Tenant,
    operation: &str,
) -> Sample {
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
pub fn acting_identity(credential: &Credential) -> &'static str {
    match credential.name.as_str() {
        "user_token" => "web:walker",
        _ => "telegram:1",
    }
}

/// The person of that account, who also has one on Telegram.
pub async fn acting_user(world: &World, own: &Tenant, credential: &Credential) -> String {
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
pub async fn void_codes(world: &World) {
    sqlx::query("update codes set voided_at = now() where voided_at is null")
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
}

/// A second account of the acting person, linked or just parted again, and one of another tenant.
pub async fn parted_sample(
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
pub struct Sample {
    /// An `{id}` or `{name}` of the caller's own tenant, and one of another tenant.
    pub ids: Option<(String, String)>,
    pub body: Option<Value>,
}

pub async fn sample(
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

/// One kind of credential, as `security` names it, and one of that kind.
pub struct Credential {
    pub name: String,
    pub key: Option<String>,
}

impl Credential {
    pub fn new(name: &str, key: &str) -> Self {
        Self {
            name: name.to_owned(),
            key: Some(key.to_owned()),
        }
    }

    pub fn stranger(key: Option<&str>) -> Self {
        Self {
            name: "a stranger".to_owned(),
            key: key.map(str::to_owned),
        }
    }

    /// Adds what it is believed by, and for a bridge the person it acts for.
    pub fn sign(&self, mut request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        if self.name == "api_key:bridge" {
            request = request.header("x-throughline-identity", "telegram:1");
        }
        request
    }
}
