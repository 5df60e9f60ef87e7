//! Key sets that issuers publish at a URL: remembered, asked for again, and never in everyone's way.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix_web::{App, HttpResponse, HttpServer, web};
use serde_json::{Value, json};

use crate::support::World;
use crate::support::tokens::{ISS, SigningKey, claims, me};
use crate::support::world::WorldOptions;

/// A server that publishes a key set and counts how often it is asked.
async fn publish(document: Value) -> (String, Arc<Mutex<(Value, usize)>>) {
    let state = Arc::new(Mutex::new((document, 0)));
    let shared = web::Data::from(state.clone());
    let server = HttpServer::new(move || {
        App::new().app_data(shared.clone()).route(
            "/jwks",
            web::get().to(async |state: web::Data<Mutex<(Value, usize)>>| {
                let mut state = state.lock().unwrap();
                state.1 += 1;
                HttpResponse::Ok().json(&state.0)
            }),
        )
    })
    .workers(1)
    .disable_signals()
    .bind("127.0.0.1:0")
    .unwrap();
    let url = format!("http://{}/jwks", server.addrs()[0]);
    tokio::spawn(server.run());
    (url, state)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_published_key_set_is_cached_and_fetched_again_once_for_an_unknown_key() {
    let world = World::with(WorldOptions {
        private_upstreams: true,
        ..WorldOptions::default()
    })
    .await;
    let tenant = world.tenant("Acme").await;
    let old = SigningKey::generate("ES256", "old");
    let new = SigningKey::generate("ES256", "new");
    let (url, published) = publish(SigningKey::jwks(&[&old])).await;
    let body = json!({"issuer": ISS, "platform": "web", "algorithm": "ES256", "jwks_url": url});
    world
        .put(&tenant.key, "/v1/issuers/idp", body)
        .await
        .expect(201);
    let asked = || published.lock().unwrap().1;
    let claims = claims(&world, &tenant);
    for _ in 0..5 {
        me(&world, &old.sign(&claims)).await.expect(200);
    }
    assert_eq!(asked(), 1);
    published.lock().unwrap().0 = SigningKey::jwks(&[&old, &new]);
    me(&world, &new.sign(&claims)).await.expect(200);
    assert_eq!(asked(), 2, "asked again at once for the unknown key");
    let unknown = SigningKey::generate("ES256", "made-up");
    for _ in 0..5 {
        me(&world, &unknown.sign(&claims))
            .await
            .expect_problem(401, "invalid_token");
    }
    assert_eq!(asked(), 2, "made-up keys are no load on the publisher");
    world.clock.advance(Duration::from_secs(61));
    me(&world, &unknown.sign(&claims))
        .await
        .expect_problem(401, "invalid_token");
    assert_eq!(asked(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_set_that_cannot_be_fetched_is_a_503_and_a_private_one_is_refused_at_once() {
    let world = World::with(WorldOptions {
        private_upstreams: true,
        ..WorldOptions::default()
    })
    .await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"issuer": ISS, "platform": "web", "algorithm": "ES256", "jwks_url": "http://127.0.0.1:1/jwks"});
    world
        .put(&tenant.key, "/v1/issuers/idp", body.clone())
        .await
        .expect(201);
    let key = SigningKey::generate("ES256", "k");
    me(&world, &key.sign(&claims(&world, &tenant)))
        .await
        .expect_problem(503, "unavailable");
    let strict = World::new().await;
    let tenant = strict.tenant("Acme").await;
    let reply = strict.put(&tenant.key, "/v1/issuers/idp", body).await;
    let problem = reply.expect_problem(422, "invalid_value");
    assert_eq!(problem["errors"][0]["pointer"], "/jwks_url");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_hangs_holds_requests_up_once_and_not_one_after_another() {
    let world = World::with(WorldOptions {
        private_upstreams: true,
        ..WorldOptions::default()
    })
    .await;
    let tenant = world.tenant("Acme").await;
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/jwks", silent.local_addr().unwrap());
    let body = json!({"issuer": ISS, "platform": "web", "algorithm": "ES256", "jwks_url": url});
    world
        .put(&tenant.key, "/v1/issuers/idp", body)
        .await
        .expect(201);
    let token = SigningKey::generate("ES256", "k").sign(&claims(&world, &tenant));
    let started = std::time::Instant::now();
    let asks = (0..6).map(|_| me(&world, &token));
    for reply in futures_util::future::join_all(asks).await {
        reply.expect_problem(503, "unavailable");
    }
    // One fetch gives up after three seconds; six in a row would take eighteen.
    assert!(
        started.elapsed() < Duration::from_secs(9),
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publishers_error_page_does_not_push_good_keys_out() {
    let world = World::with(WorldOptions {
        private_upstreams: true,
        ..WorldOptions::default()
    })
    .await;
    let tenant = world.tenant("Acme").await;
    let key = SigningKey::generate("ES256", "k");
    let (url, published) = publish(SigningKey::jwks(&[&key])).await;
    let body = json!({"issuer": ISS, "platform": "web", "algorithm": "ES256", "jwks_url": url});
    world
        .put(&tenant.key, "/v1/issuers/idp", body)
        .await
        .expect(201);
    me(&world, &key.sign(&claims(&world, &tenant)))
        .await
        .expect(200);
    published.lock().unwrap().0 = json!({"error": "sorry"});
    world.clock.advance(Duration::from_secs(11 * 60));
    me(&world, &key.sign(&claims(&world, &tenant)))
        .await
        .expect(200);
    world.clock.advance(Duration::from_secs(60 * 60));
    let late = me(&world, &key.sign(&claims(&world, &tenant))).await;
    late.expect_problem(503, "unavailable");
}
