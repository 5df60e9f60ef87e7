//! Calls from web pages: preflights for anyone, real requests only from pages the tenant allowed.

use reqwest::Method;
use serde_json::json;

use crate::support::people::{sign_in, token};
use crate::support::world::{OPERATOR_KEY, WorldOptions};
use crate::support::{Fields, Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn a_preflight_is_answered_for_any_origin_and_allows_the_session_headers() {
    let world = World::new().await;
    for path in ["/v1/tenant", "/v1/chat/completions", "/v1/nothing"] {
        let request = reqwest::Client::new()
            .request(Method::OPTIONS, world.url(path))
            .header("origin", "https://anyone.example")
            .header("access-control-request-method", "POST")
            .header(
                "access-control-request-headers",
                "authorization,x-hermes-session-id,x-stainless-lang",
            );
        let reply = Reply::of(request).await;
        assert_eq!(reply.status, 204, "{}", reply.body);
        assert_eq!(reply.header("access-control-allow-origin"), "*");
        assert!(
            reply
                .headers
                .get("access-control-allow-credentials")
                .is_none()
        );
        let allowed = reply.header("access-control-allow-headers");
        assert!(allowed.contains("x-hermes-session-id") && allowed.contains("x-stainless-lang"));
        for method in ["POST", "PATCH", "DELETE"] {
            assert!(
                reply
                    .header("access-control-allow-methods")
                    .contains(method)
            );
        }
    }
    let bare = reqwest::Client::new()
        .request(Method::OPTIONS, world.url("/v1/tenant"))
        .header("origin", "https://anyone.example")
        .header("access-control-request-method", "GET");
    let allowed = Reply::of(bare)
        .await
        .header("access-control-allow-headers")
        .to_owned();
    for header in [
        "X-Hermes-Session-Id",
        "X-Hermes-Session-Key",
        "Idempotency-Key",
        "Authorization",
    ] {
        assert!(allowed.contains(header), "{allowed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_the_tenant_has_not_allowed_is_refused_before_any_effect() {
    let world = World::new().await;
    let (tenant, other) = (world.tenant("Acme").await, world.tenant("Other").await);
    let body = json!({"allowed_origins": ["https://app.example"]});
    let patch = world
        .request(Method::PATCH, "/v1/tenant", &tenant.key)
        .json(&body);
    Reply::of(patch).await.expect(200);
    let make_key = async |key: &str, origin: &str| {
        let request = world
            .request(Method::POST, "/v1/api-keys", key)
            .header("origin", origin);
        Reply::of(request.json(&json!({"name": "x", "scopes": ["chat"]}))).await
    };
    // The key look-up of a second ago may still be believed.
    crate::support::eventually(
        "the change has arrived",
        std::time::Duration::from_secs(2),
        async || {
            let request = world
                .request(Method::GET, "/v1/tenant", &tenant.key)
                .header("origin", "https://app.example");
            Reply::of(request).await.status == 200
        },
    )
    .await;
    let allowed = make_key(&tenant.key, "https://app.example").await;
    allowed.expect(201);
    assert_eq!(
        allowed.header("access-control-allow-origin"),
        "https://app.example"
    );
    assert!(allowed.header("vary").contains("Origin"));
    let exposed = allowed.header("access-control-expose-headers");
    for header in [
        "X-Hermes-Session-Id",
        "X-Hermes-Session-Key",
        "X-Throughline-Conversation-Id",
        "X-Throughline-Turn-Id",
    ] {
        assert!(exposed.contains(header), "{exposed}");
    }
    for origin in [
        "https://evil.example",
        "http://app.example",
        "https://app.example:8443",
        "null",
        "x",
    ] {
        let refused = make_key(&tenant.key, origin).await;
        refused.expect_problem(403, "origin_not_allowed");
        assert!(refused.headers.get("access-control-allow-origin").is_none());
    }
    make_key(&other.key, "https://app.example")
        .await
        .expect_problem(403, "origin_not_allowed");
    make_key(OPERATOR_KEY, "https://app.example")
        .await
        .expect_problem(403, "origin_not_allowed");
    let keys = world.get(&tenant.key, "/v1/api-keys").await.expect(200);
    assert_eq!(keys.list().len(), 2, "only the allowed page made one");
    let unknown = make_key("tl_wrong", "https://evil.example").await;
    unknown.expect_problem(401, "unauthorized");
    assert_eq!(unknown.header("access-control-allow-origin"), "*");
    let own = format!("http://{}", world.nodes[0].address);
    make_key(&tenant.key, &own).await.expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_is_not_our_own_because_its_name_leads_here() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let port = world.nodes[0].address.port();
    let ask = async |host: &str, origins: &[&str]| {
        let mut request = world
            .request(Method::GET, "/v1/tenant", &tenant.key)
            .header("host", host);
        for origin in origins {
            request = request.header("origin", *origin);
        }
        Reply::of(request).await
    };
    // A name that its owner points at us, as DNS rebinding does.
    let refused = ask("evil.example", &["http://evil.example"]).await;
    refused.expect_problem(403, "origin_not_allowed");
    assert!(refused.headers.get("access-control-allow-origin").is_none());
    // What no name server can point elsewhere.
    for host in ["127.0.0.1", "localhost", "[::1]"] {
        let authority = format!("{host}:{port}");
        ask(&authority, &[&format!("http://{authority}")])
            .await
            .expect(200);
        ask(&authority, &["http://127.0.0.1:1"])
            .await
            .expect_problem(403, "origin_not_allowed");
    }
    let authority = format!("localhost:{port}");
    let own = format!("http://{authority}");
    for two in [
        [own.as_str(), "http://evil.example"],
        ["http://evil.example", &own],
    ] {
        ask(&authority, &two)
            .await
            .expect_problem(403, "origin_not_allowed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_at_the_public_url_are_our_own_also_for_the_operator() {
    let world = World::with(WorldOptions {
        public_url: Some("https://chat.example".to_owned()),
        ..WorldOptions::default()
    })
    .await;
    let tenant = world.tenant("Acme").await;
    for key in [&tenant.key, OPERATOR_KEY] {
        let ask = async |origin: &str| {
            let request = world.request(Method::GET, "/v1/whoami", key);
            Reply::of(
                request
                    .header("host", "chat.example")
                    .header("origin", origin),
            )
            .await
        };
        let own = ask("https://chat.example").await;
        own.expect(200);
        assert_eq!(
            own.header("access-control-allow-origin"),
            "https://chat.example"
        );
        for other in ["http://chat.example", "https://chat.example:8443"] {
            ask(other).await.expect_problem(403, "origin_not_allowed");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_is_refused_makes_no_user() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    sign_in(&world, &tenant, "ada").await;
    let token = token(&world, &tenant, "stranger");
    let ask = |origin: Option<&str>| {
        let request = world.request(Method::GET, "/v1/users/me", &token);
        Reply::of(match origin {
            Some(origin) => request.header("origin", origin),
            None => request,
        })
    };
    let known = async || -> i64 {
        sqlx::query_scalar("select count(*) from identities where external_id = 'stranger'")
            .fetch_one(&mut world.superuser().await)
            .await
            .unwrap()
    };
    let refused = ask(Some("https://evil.example")).await;
    refused.expect_problem(403, "origin_not_allowed");
    assert_eq!(known().await, 0);
    ask(None).await.expect(200);
    assert_eq!(known().await, 1);
}
