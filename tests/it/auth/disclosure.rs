//! What answers must not give away, and to whom.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::chat::agent_on;
use crate::support::conversations::user_message;
use crate::support::servers::cluster::cluster;
use crate::support::servers::model::Step;
use crate::support::tokens::{SigningKey, hs256, unsigned};
use crate::support::{Fields, Reply, Scene, World};

#[tokio::test(flavor = "multi_thread")]
async fn no_private_key_is_registered_or_shown() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let mut jwks = SigningKey::jwks(&[&SigningKey::generate("ES256", "one")]);
    let public = jwks.clone();
    jwks["keys"][0]["d"] = json!("c2VjcmV0");
    let body = |jwks| json!({"issuer": "https://id.example", "platform": "web", "algorithm": "ES256", "jwks": jwks});
    let path = "/v1/issuers/id";
    let refused = world.put(&tenant.key, path, body(jwks.clone())).await;
    let refused = refused.expect_problem(422, "invalid_value");
    assert_eq!(refused["errors"][0]["pointer"], "/jwks/keys/0/d");
    world
        .put(&tenant.key, path, body(public.clone()))
        .await
        .expect(201);
    // As it could be registered once.
    sqlx::query("update issuers set jwks = $1")
        .bind(&jwks)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    let shown = world.get(&tenant.key, path).await.expect(200);
    assert_eq!(shown["jwks"], public);
    let listed = world.get(&tenant.key, "/v1/issuers").await;
    assert!(!listed.body.contains("c2VjcmV0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cache_keeps_an_answer_and_no_browser_guesses_its_type() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for path in ["/v1/users", "/v1/nothing", "/v1/api-keys"] {
        let request = world.request(Method::GET, path, &tenant.key);
        let answer = request.send().await.unwrap();
        assert_eq!(answer.headers()["cache-control"], "no-store", "{path}");
        assert_eq!(answer.headers()["x-content-type-options"], "nosniff");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_is_refused_for_what_it_is() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let expires = world.clock.now().timestamp() + 60;
    let claims = json!({"iss": "a\0b", "aud": tenant.id, "sub": "x", "exp": expires});
    world
        .get(&unsigned(&claims), "/v1/users/me")
        .await
        .expect_problem(401, "invalid_token");
    let request = world
        .request(Method::POST, "/v1/sessions", &tenant.key)
        .header("content-encoding", "gzip")
        .header("content-type", "application/json")
        .body("\u{1f}");
    Reply::of(request)
        .await
        .expect_problem(415, "unsupported_media_type");
}

/// Without what tells two refusals apart by themselves.
fn same_for_all(reply: &Reply) -> Value {
    let mut problem = reply.expect_problem(401, "invalid_token");
    problem.as_object_mut().unwrap().remove("request_id");
    problem
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_valid_signature_nothing_of_a_tenants_issuers_shows() {
    let world = World::new().await;
    let (tenant, other) = (world.tenant("Acme").await, world.tenant("Other").await);
    let secret = "a secret of the tests, 32 bytes or more";
    let key = SigningKey::generate("RS256", "k1");
    let stranger = SigningKey::generate("RS256", "k2");
    for (name, body) in [
        (
            "web",
            json!({"issuer": "https://hs.example", "platform": "web", "algorithm": "HS256", "secret": secret}),
        ),
        (
            "app",
            json!({"issuer": "https://rs.example", "platform": "app", "algorithm": "RS256",
                       "audience": "the-app", "jwks": SigningKey::jwks(&[&key])}),
        ),
    ] {
        let path = format!("/v1/issuers/{name}");
        world.put(&tenant.key, &path, body).await.expect(201);
    }
    let exp = world.clock.now().timestamp() + 600;
    let claims = |iss: &str, aud: Value| json!({"iss": iss, "aud": aud, "sub": "x", "exp": exp});
    let forger = "another secret of thirty-two bytes or more";
    let ask = async |token: String| {
        let request = world.request(Method::GET, "/v1/users/me", &token);
        Reply::of(request.header("x-throughline-tenant", &tenant.id)).await
    };
    let none = same_for_all(
        &ask(hs256(
            &claims("https://no.example", json!(tenant.id)),
            forger,
        ))
        .await,
    );
    for token in [
        hs256(&claims("https://hs.example", json!(tenant.id)), forger),
        unsigned(&claims("https://hs.example", json!(tenant.id))),
        stranger.sign(&claims("https://hs.example", json!(tenant.id))),
        hs256(&claims("https://hs.example", json!("elsewhere")), forger),
        hs256(&claims("https://rs.example", json!("the-app")), forger),
        stranger.sign(&claims("https://rs.example", json!("the-app"))),
        stranger.sign(&claims("https://rs.example", json!("elsewhere"))),
    ] {
        assert_eq!(same_for_all(&ask(token.clone()).await), none, "{token}");
    }
    let foreign = world.request(
        Method::GET,
        "/v1/users/me",
        &hs256(&claims("https://hs.example", json!(other.id)), secret),
    );
    assert_eq!(same_for_all(&Reply::of(foreign).await), none);
    // Who signs for the tenant is told what is wrong.
    let told = ask(hs256(
        &claims("https://hs.example", json!("elsewhere")),
        secret,
    ))
    .await;
    told.expect_problem(401, "wrong_audience");
    let told = ask(key.sign(&claims("https://rs.example", json!("elsewhere")))).await;
    told.expect_problem(401, "wrong_audience");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_key_is_in_no_text_of_its_server_however_short_it_is() {
    let key = "pass word";
    let error =
        json!({"error": {"message": format!("user 'pass word' ({key}) is over its quota")}});
    let refused = || Step::Fail {
        status: 400,
        body: error.clone(),
    };
    let inside = Step::Raw(format!("data: {error}\n\n"));
    let steps = [refused(), refused(), inside];
    let chat = Scene::chat(steps).await;
    let mut agent = agent_on(&chat.model, json!({}));
    agent["upstream"]["api_key"] = json!(key);
    let put = chat.world.put(&chat.tenant.key, "/v1/agents/main", agent);
    put.await.expect(200);
    let body = json!({"model": "main", "messages": [user_message("hi")]});
    let path = "/v1/chat/completions";
    let stateless = chat.world.request(Method::POST, path, &chat.key);
    let stateless = Reply::of(stateless.json(&body)).await;
    let stored = chat.say(0, "mine", "hi").await;
    let streamed = chat.say(0, "mine", "hi").await;
    for reply in [stateless, stored, streamed] {
        assert!(reply.body.contains("over its quota"), "{}", reply.body);
        assert!(!reply.body.contains(key), "{}", reply.body);
    }
}

/// The statements that `ask` makes the service run, from Postgres' own log.
async fn statements(world: &World, ask: impl AsyncFn() -> Reply) -> Vec<String> {
    ask().await.expect_problem(404, "not_found");
    let begins = cluster().log_of(&world.database).len();
    ask().await.expect_problem(404, "not_found");
    let log = cluster().log_of(&world.database);
    let statement = |entry: &String| {
        let text = entry.split_once("execute ").map(|(_, text)| text)?;
        Some(text.split_once(": ")?.1.to_owned())
    };
    let seen: Vec<String> = log[begins..].iter().filter_map(statement).collect();
    assert!(!seen.is_empty());
    seen.into_iter()
        .filter(|sql| sql.contains("tenant_id = $1"))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_turn_costs_the_same_statements_as_one_that_is_not_there() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let (_, bridge) = world.api_key(&tenant, "bridge").await;
    let say = async |who: &str| {
        let body = json!({"identity": who, "text": "hi"});
        let said = world.post(&bridge, "/v1/inbound", body).await.expect(200);
        said.text("turn_id").to_owned()
    };
    say("telegram:1").await;
    let foreign = say("telegram:2").await;
    let mut superuser = world.superuser().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!(
        "alter database {} set log_statement = 'all';
         select pg_terminate_backend(pid) from pg_stat_activity
          where datname = current_database() and pid <> pg_backend_pid()",
        world.database
    )))
    .execute(&mut superuser)
    .await
    .unwrap();
    let ask = async |id: &str| {
        let path = format!("/v1/turns/{id}");
        let request = world.request(Method::GET, &path, &bridge);
        Reply::of(request.header("x-throughline-identity", "telegram:1")).await
    };
    crate::support::eventually(
        "connections are new",
        std::time::Duration::from_secs(5),
        async || ask("trn_01a1e2373db47013a539524902c63338").await.status == 404,
    )
    .await;
    let missing = statements(&world, async || {
        ask("trn_01a1e2373db47013a539524902c63338").await
    })
    .await;
    let found = statements(&world, async || ask(&foreign).await).await;
    assert_eq!(found, missing);
}
