//! Issuers and the user tokens they sign: who is believed, and every way not to be.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::tokens::{ISS, SigningKey, claims, hs256, me, unsigned};
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, World};

const SECRET: &str = "a shared secret of thirty-two bytes or more";

fn hs256_issuer() -> Value {
    json!({"issuer": ISS, "platform": "web", "algorithm": "HS256", "secret": SECRET})
}

fn with(mut claims: Value, changes: Value) -> Value {
    for (name, value) in changes.as_object().unwrap() {
        claims[name] = value.clone();
    }
    claims
}

async fn people(world: &World) -> i64 {
    sqlx::query_scalar("select (select count(*) from users) + (select count(*) from identities)")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_opens_its_own_user_and_nothing_else() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    world
        .put(&tenant.key, "/v1/issuers/idp", hs256_issuer())
        .await
        .expect(201);
    let alice = hs256(&claims(&world, &tenant), SECRET);
    let bob = hs256(
        &with(claims(&world, &tenant), json!({"sub": "bob"})),
        SECRET,
    );
    let first = me(&world, &alice).await.expect(200);
    assert_eq!(
        me(&world, &alice).await.expect(200),
        first,
        "one person, however often"
    );
    let other = me(&world, &bob).await.expect(200);
    assert_ne!(first["id"], other["id"]);
    let path = |user: &Value| format!("/v1/users/{}", user.text("id"));
    assert_eq!(world.get(&alice, &path(&first)).await.expect(200), first);
    world
        .get(&alice, &path(&other))
        .await
        .expect_problem(404, "not_found");
    world.get(&tenant.key, &path(&other)).await.expect(200);
    for path in ["/v1/tenant", "/v1/api-keys", "/v1/issuers", "/v1/tenants"] {
        world
            .get(&alice, path)
            .await
            .expect_problem(404, "not_found");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_has_its_code_and_makes_nothing() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let other = world.tenant("Other").await;
    let rsa = SigningKey::generate("RS256", "k1");
    let stranger = SigningKey::generate("RS256", "k2");
    let rs256 = json!({
        "issuer": "https://rsa.example", "platform": "app", "algorithm": "RS256",
        "jwks": SigningKey::jwks(&[&rsa]),
    });
    world
        .put(&tenant.key, "/v1/issuers/idp", hs256_issuer())
        .await
        .expect(201);
    world
        .put(&tenant.key, "/v1/issuers/rsa", rs256)
        .await
        .expect(201);
    let good = claims(&world, &tenant);
    let good_rsa = with(good.clone(), json!({"iss": "https://rsa.example"}));
    let now = world.clock.now().timestamp();
    let sign = |changes: Value| hs256(&with(good.clone(), changes), SECRET);
    for (token, code) in [
        (
            sign(json!({"exp": now - 60, "iat": now - 600})),
            "token_expired",
        ),
        (sign(json!({"nbf": now + 120})), "token_not_yet_valid"),
        (sign(json!({"iat": now + 120})), "token_not_yet_valid"),
        (
            sign(json!({"exp": now + 25 * 3600})),
            "token_lives_too_long",
        ),
        (
            sign(json!({"exp": now + 600, "iat": now - 48 * 3600})),
            "token_lives_too_long",
        ),
        (sign(json!({"exp": "tomorrow"})), "invalid_token"),
        (sign(json!({"nbf": "yesterday"})), "invalid_token"),
        (sign(json!({"exp": null})), "invalid_token"),
        (sign(json!({"sub": ""})), "invalid_token"),
        (sign(json!({"sub": null})), "invalid_token"),
        (sign(json!({"sub": "a\u{0}b"})), "invalid_token"),
        (
            sign(json!({"iss": "https://elsewhere.example"})),
            "invalid_token",
        ),
        (sign(json!({"aud": other.id})), "invalid_token"),
        (sign(json!({"aud": null})), "tenant_ambiguous"),
        (sign(json!({"aud": "my-app"})), "tenant_ambiguous"),
        (
            sign(json!({"aud": [tenant.id, other.id]})),
            "tenant_ambiguous",
        ),
        (
            hs256(&good, "another secret of thirty-two bytes or more"),
            "invalid_token",
        ),
        (unsigned(&good), "invalid_token"),
        (unsigned(&good_rsa), "invalid_token"),
        // The old trick: the public key as an HMAC secret.
        (hs256(&good_rsa, &rsa.public_part()), "invalid_token"),
        (rsa.sign(&good), "invalid_token"),
        (stranger.sign(&good_rsa), "invalid_token"),
        ("a.b.c".to_owned(), "invalid_token"),
        (format!("{}.{}.x", "e30", "e30"), "invalid_token"),
        ("x".repeat(9000) + ".y.z", "invalid_token"),
    ] {
        let reply = me(&world, &token).await;
        assert!(reply.body.contains(code), "{code}: {}", reply.body);
        reply.expect_problem(401, code);
    }
    assert_eq!(people(&world).await, 0, "nothing was made");
    me(&world, &rsa.sign(&good_rsa)).await.expect(200);
    me(&world, &sign(json!({"exp": now - 10, "iat": now - 600})))
        .await
        .expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tenants_may_register_the_same_issuer_and_never_mix() {
    let world = World::new().await;
    let a = world.tenant("A").await;
    let b = world.tenant("B").await;
    for tenant in [&a, &b] {
        let body = with(hs256_issuer(), json!({"audience": "my-app"}));
        world
            .put(&tenant.key, "/v1/issuers/idp", body)
            .await
            .expect(201);
    }
    let token = hs256(&with(claims(&world, &a), json!({"aud": "my-app"})), SECRET);
    me(&world, &token)
        .await
        .expect_problem(401, "tenant_ambiguous");
    assert_eq!(people(&world).await, 0);
    let ask = async |tenant: &str| {
        let request = world.request(reqwest::Method::GET, "/v1/users/me", &token);
        Reply::of(request.header("x-throughline-tenant", tenant)).await
    };
    let in_a = ask(&a.id).await.expect(200);
    let in_b = ask(&b.id).await.expect(200);
    assert_ne!(in_a["id"], in_b["id"]);
    ask("nonsense")
        .await
        .expect_problem(401, "tenant_ambiguous");
    let both = hs256(
        &with(claims(&world, &a), json!({"aud": ["my-app", a.id]})),
        SECRET,
    );
    let request = world.request(reqwest::Method::GET, "/v1/users/me", &both);
    let reply = Reply::of(request.header("x-throughline-tenant", &b.id)).await;
    reply.expect_problem(401, "tenant_ambiguous");
    let wrong = hs256(&with(claims(&world, &a), json!({"aud": [a.id]})), SECRET);
    me(&world, &wrong)
        .await
        .expect_problem(401, "wrong_audience");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_algorithm_verifies_with_its_key_set_and_key_id() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for algorithm in ["RS256", "ES256", "EdDSA"] {
        let one = SigningKey::generate(algorithm, "one");
        let two = SigningKey::generate(algorithm, "two");
        let iss = format!("https://{algorithm}.example");
        let body = json!({
            "issuer": iss, "platform": algorithm.to_lowercase(), "algorithm": algorithm,
            "jwks": SigningKey::jwks(&[&one, &two]),
        });
        let path = format!("/v1/issuers/{}", algorithm.to_lowercase());
        world.put(&tenant.key, &path, body).await.expect(201);
        let claims = with(claims(&world, &tenant), json!({ "iss": iss }));
        let first = me(&world, &one.sign(&claims)).await.expect(200);
        assert_eq!(
            me(&world, &two.sign(&claims)).await.expect(200),
            first,
            "{algorithm}"
        );
        let imposter = SigningKey::generate(algorithm, "one");
        me(&world, &imposter.sign(&claims))
            .await
            .expect_problem(401, "invalid_token");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_platform_has_one_voucher() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    world
        .put(&tenant.key, "/v1/issuers/idp", hs256_issuer())
        .await
        .expect(201);
    let second = with(hs256_issuer(), json!({"issuer": "https://two.example"}));
    world
        .put(&tenant.key, "/v1/issuers/two", second)
        .await
        .expect_problem(409, "platform_taken");
    let twin = with(hs256_issuer(), json!({"platform": "app"}));
    world
        .put(&tenant.key, "/v1/issuers/two", twin)
        .await
        .expect_problem(409, "issuer_taken");
    for platform in ["web", "web@eu"] {
        let body = json!({"name": "x", "scopes": ["bridge"], "platforms": ["irc", platform]});
        world
            .post(&tenant.key, "/v1/api-keys", body)
            .await
            .expect_problem(409, "platform_taken");
    }
    let body = json!({"name": "x", "scopes": ["bridge"], "platforms": ["slack@T1"]});
    let key = world
        .post(&tenant.key, "/v1/api-keys", body)
        .await
        .expect(201);
    let slack = with(
        hs256_issuer(),
        json!({"issuer": "https://s.example", "platform": "slack"}),
    );
    world
        .put(&tenant.key, "/v1/issuers/slack", slack.clone())
        .await
        .expect_problem(409, "platform_taken");
    let path = format!("/v1/api-keys/{}", key.text("id"));
    world.delete(&tenant.key, &path).await.expect(204);
    world
        .put(&tenant.key, "/v1/issuers/slack", slack)
        .await
        .expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuer_and_a_bridge_key_racing_for_a_platform_never_both_win() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    for round in 0..10 {
        let platform = format!("p{round}");
        let issuer = with(
            hs256_issuer(),
            json!({"issuer": platform, "platform": platform}),
        );
        let key = json!({"name": "x", "scopes": ["bridge"], "platforms": [platform]});
        let path = format!("/v1/issuers/i{round}");
        let (a, b) = tokio::join!(
            world.put(&tenant.key, &path, issuer),
            world.post(&tenant.key, "/v1/api-keys", key),
        );
        let won = [a.status, b.status]
            .iter()
            .filter(|status| **status == 201)
            .count();
        assert_eq!(won, 1, "{} {}", a.body, b.body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuers_secret_is_never_shown_and_its_rules_have_pointers() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let made = world
        .put(&tenant.key, "/v1/issuers/idp", hs256_issuer())
        .await;
    made.expect(201);
    world
        .put(&tenant.key, "/v1/issuers/idp", hs256_issuer())
        .await
        .expect(200);
    for reply in [
        made,
        world.get(&tenant.key, "/v1/issuers").await,
        world.get(&tenant.key, "/v1/issuers/idp").await,
    ] {
        assert!(!reply.body.contains(SECRET));
    }
    let rsa = SigningKey::jwks(&[&SigningKey::generate("RS256", "k")]);
    for (body, pointer) in [
        (
            json!({"issuer": "i", "platform": "p", "algorithm": "HS256", "secret": "short"}),
            "/secret",
        ),
        (
            json!({"issuer": "i", "platform": "p", "algorithm": "HS256", "jwks": rsa}),
            "/algorithm",
        ),
        (
            json!({"issuer": "i", "platform": "p", "algorithm": "RS256", "secret": SECRET}),
            "/algorithm",
        ),
        (
            json!({"issuer": "i", "platform": "p", "algorithm": "RS256"}),
            "",
        ),
        (
            json!({"issuer": "i", "platform": "p", "algorithm": "RS256", "jwks": rsa, "jwks_url": "https://x.example"}),
            "",
        ),
        (
            json!({"issuer": "i", "platform": "p", "algorithm": "ES256", "jwks": rsa}),
            "/jwks",
        ),
        (
            json!({"issuer": "i", "platform": "p", "algorithm": "ES256", "jwks": {}}),
            "/jwks",
        ),
        (
            json!({"issuer": "i", "platform": "p", "algorithm": "ES256", "jwks_url": "ftp://x"}),
            "/jwks_url",
        ),
        (
            json!({"issuer": "i", "platform": "p@s", "algorithm": "HS256", "secret": SECRET}),
            "/platform",
        ),
        (
            json!({"issuer": "", "platform": "p", "algorithm": "HS256", "secret": SECRET}),
            "/issuer",
        ),
    ] {
        let reply = world.put(&tenant.key, "/v1/issuers/bad", body).await;
        let problem = reply.expect_problem(422, "invalid_value");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{problem}");
    }
    world
        .get(&tenant.key, "/v1/issuers/bad")
        .await
        .expect_problem(404, "not_found");
    world
        .put(&tenant.key, "/v1/issuers/Bad%20Name", hs256_issuer())
        .await
        .expect_problem(422, "invalid_value");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_issuers_and_a_suspended_tenants_tokens_stop_within_a_second() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    world
        .put(&tenant.key, "/v1/issuers/idp", hs256_issuer())
        .await
        .expect(201);
    let token = hs256(&claims(&world, &tenant), SECRET);
    world.get_on(1, &token, "/v1/users/me").await.expect(200);
    let suspend = format!("/v1/tenants/{}/suspend", tenant.id);
    world
        .post(OPERATOR_KEY, &suspend, json!({}))
        .await
        .expect(200);
    refused_within_a_second(&world, &token, "tenant_suspended").await;
    let resume = format!("/v1/tenants/{}/resume", tenant.id);
    world
        .post(OPERATOR_KEY, &resume, json!({}))
        .await
        .expect(200);
    crate::support::eventually("resumed", Duration::from_secs(2), async || {
        world.delete(&tenant.key, "/v1/issuers/idp").await.status == 204
    })
    .await;
    refused_within_a_second(&world, &token, "invalid_token").await;
}

async fn refused_within_a_second(world: &World, token: &str, code: &str) {
    crate::support::eventually(code, Duration::from_secs(1), async || {
        world
            .get_on(1, token, "/v1/users/me")
            .await
            .body
            .contains(code)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_first_contacts_at_once_make_one_user() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    world
        .put(&tenant.key, "/v1/issuers/idp", hs256_issuer())
        .await
        .expect(201);
    let token = hs256(&claims(&world, &tenant), SECRET);
    let asks = (0..64).map(|n| world.get_on(n % 2, &token, "/v1/users/me"));
    let replies = futures_util::future::join_all(asks).await;
    let first = replies[0].expect(200);
    assert!(replies.iter().all(|reply| reply.expect(200) == first));
    assert_eq!(people(&world).await, 2, "one user, one identity");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_and_new_users_have_limits_of_their_own() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    world
        .put(&tenant.key, "/v1/issuers/idp", hs256_issuer())
        .await
        .expect(201);
    let path = format!("/v1/operator/tenants/{}/limits", tenant.id);
    let limits = json!({"requests_per_minute_per_person": 3, "new_identities_per_hour": 2});
    world.put(OPERATOR_KEY, &path, limits).await.expect(200);
    // An hour begins with a minute: no window ends below.
    world.start_window(Duration::from_secs(3600));
    world.app().limits.set_patience(10_000);
    let token = |name: &str| {
        hs256(
            &with(claims(&world, &tenant), json!({ "sub": name })),
            SECRET,
        )
    };
    let alice = token("alice");
    let bob = token("bob");
    let carol = token("carol");
    for _ in 0..3 {
        me(&world, &alice).await.expect(200);
    }
    let refused = me(&world, &alice).await;
    let problem = refused.expect_problem(429, "rate_limited");
    assert!(problem.text("detail").contains("person"), "{problem}");
    assert!(refused.header("retry-after").parse::<u32>().unwrap() <= 60);
    me(&world, &bob).await.expect(200);
    let refused = me(&world, &carol).await;
    refused.expect_problem(429, "rate_limited");
    assert!(refused.header("retry-after").parse::<u32>().unwrap() <= 3600);
    assert_eq!(
        people(&world).await,
        4,
        "two people, each with one identity"
    );
    world.clock.advance(Duration::from_secs(3600));
    me(&world, &token("carol")).await.expect(200);
}
