//! Somebody of whom there is something in every table, beside others who must not notice their end.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::types::Uuid;
use throughline::ids::{IdentityId, SessionId, UserId};

use crate::support::conversations::{assistant_message, grant, user_message};
use crate::support::data::summaries::set_sources;
use crate::support::people::{User, as_bridge, sign_in};
use crate::support::{Fields, Reply, Tenant, World, eventually};

/// Accounts and names that occur nowhere else.
pub const TELEGRAM: &str = "telegram:770012345";
pub const IRC: &str = "irc@net:ada-on-irc";
const WEB: &str = "ada-to-erase";
const EXTERNAL: &str = "external-ada-to-erase";
/// In everything that Ada says.
pub const SECRET: &str = "the secret of Ada";
/// What the account said that was once Ada's, and is not any more.
pub const PARTED: &str = "said by the one who left";

pub struct WholeUser {
    pub bridge: String,
    pub ada: User,
    /// Those who were merged into Ada.
    pub merged: Vec<String>,
    pub identities: Vec<String>,
    /// Ada's own, by the ids of their first sessions.
    pub sessions: Vec<String>,
    pub session_keys: Vec<String>,
    /// A thread that is everybody's, and how many messages of Ada's it has; one of Bob's, where Ada is a
    /// guest.
    pub thread: String,
    pub in_thread: usize,
    pub guest_in: String,
    pub bob: User,
    /// The account that was parted from Ada, `IRC`.
    pub parted: String,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

impl WholeUser {
    /// Every word that tells of Ada, in all spellings that rows have.
    pub fn words(&self) -> Vec<String> {
        let users = [&self.ada.user_id].into_iter().chain(&self.merged);
        let users = users.map(|id| id.parse::<UserId>().unwrap().as_uuid());
        let accounts = self.identities.iter();
        let accounts = accounts.map(|id| id.parse::<IdentityId>().unwrap().as_uuid());
        let sessions = self.sessions.iter();
        let sessions = sessions.map(|id| id.parse::<SessionId>().unwrap().as_uuid());
        let ids: Vec<Uuid> = users.chain(accounts).chain(sessions).collect();
        let spelt = |id: &Uuid| [id.to_string(), id.simple().to_string()];
        let names = ["770012345", WEB, EXTERNAL, SECRET].map(str::to_owned);
        ids.iter().flat_map(spelt).chain(names).collect()
    }
}

/// Sends a request that is named for retries.
pub async fn retryable(
    world: &World,
    (key, identity): (&str, Option<&str>),
    path: &str,
    name: &str,
    body: Value,
) -> Reply {
    let mut request = world
        .request(Method::POST, path, key)
        .header("idempotency-key", name)
        .json(&body);
    if let Some(identity) = identity {
        request = request.header("x-throughline-identity", identity);
    }
    Reply::of(request).await
}

/// The answer to be found by an admin who asks again.
pub async fn make_by_admin(world: &World, tenant: &Tenant) -> Reply {
    let body = json!({"external_id": EXTERNAL, "display_name": "Ada", "identities": []});
    retryable(world, (&tenant.key, None), "/v1/users", "made", body).await
}

pub async fn whole_user(world: &World, tenant: &Tenant) -> WholeUser {
    let key = &tenant.key;
    let bridge = world.bridge_key(tenant, &["telegram", "irc"]).await;
    let ada = sign_in(world, tenant, WEB).await;
    let bob = sign_in(world, tenant, "bob").await;
    let mut sessions = vec![text(
        &world.write_dm(&bridge, TELEGRAM, SECRET).await["session_id"],
    )];

    // A conversation with names of her own, a link, a branch and a title; answers stored for retries.
    let body = json!({
        "id": "adas-own", "session_key": "adas-key", "title": "Of Ada", "messages": [user_message(SECRET)],
    });
    retryable(
        world,
        (&ada.token, None),
        "/v1/sessions",
        "r1",
        body.clone(),
    )
    .await
    .expect(201);
    let listed = world
        .get(key, &format!("/v1/sessions?user_id={}", ada.user_id))
        .await
        .expect(200);
    sessions.push(listed["data"][0].id());
    let own = sessions[1].clone();
    world
        .append(
            key,
            &own,
            json!([assistant_message("Hello"), user_message(SECRET)]),
        )
        .await
        .expect(201);
    world
        .compress(&ada.token, &own, json!({"summary": SECRET, "keep_last": 2}))
        .await
        .expect(201);
    let branch = world
        .post(&ada.token, &format!("/v1/sessions/{own}/branch"), json!({}))
        .await
        .expect(201);
    sessions.push(branch.id());

    // One person: by a code, and by an admin, who made the other with a name for retries.
    let linked = world.link(&bridge, TELEGRAM, IRC).await;
    let of_telegram = text(&linked["user_id"]);
    let made = make_by_admin(world, tenant).await.expect(201);
    let mut merged = vec![text(&linked["merged_user_id"])];
    for from in [of_telegram, text(&made["id"])] {
        let body = json!({"from_user_id": from, "reason": "one person"});
        world
            .post(key, &format!("/v1/users/{}/merge", ada.user_id), body)
            .await
            .expect(200);
        merged.push(from);
    }
    let dm = json!({ "identity": TELEGRAM });
    retryable(world, (&bridge, None), "/v1/resolve", "r2", dm)
        .await
        .expect(200);
    retryable(
        world,
        (&bridge, Some(TELEGRAM)),
        "/v1/sessions",
        "r3",
        json!({}),
    )
    .await
    .expect(201);

    // A thread where all speak: she began it.
    let chat = json!({"type": "thread", "id": "C", "thread_id": "9"});
    let begun = world
        .resolve(key, json!({"identity": format!("web:{WEB}"), "chat": chat}))
        .await
        .expect(200);
    let thread = text(&begun["session_id"]);
    let speak = async |identity: &str, what: &str| {
        let path = format!("/v1/sessions/{thread}/messages");
        let body = json!({"messages": [user_message(what)]});
        as_bridge(
            world,
            key,
            identity,
            (Method::POST, path.as_str()),
            Some(body),
        )
        .await
        .expect(201);
    };
    speak(TELEGRAM, SECRET).await;
    speak("web:bob", "of Bob").await;
    speak(IRC, PARTED).await;
    let met = json!({"summary": "they met", "keep_last": 3});
    let met = world.compress(key, &thread, met).await.expect(201);
    set_sources(world, tenant, &thread, met.text("session_id")).await;
    speak(TELEGRAM, SECRET).await;

    // Turns: in her own chat, and in the thread, where the answer repeats only what is text.
    for session in [None, Some(&thread)] {
        let parts = json!([{"type": "text", "text": "and?"}, {"type": "note", "note": SECRET}]);
        let body = json!({
            "model": "main", "user": TELEGRAM, "messages": [{"role": "user", "content": parts}],
        });
        let mut request = world
            .request(Method::POST, "/v1/chat/completions", &bridge)
            .json(&body);
        if let Some(session) = session {
            request = world
                .request(Method::POST, "/v1/chat/completions", key)
                .header("x-hermes-session-id", session)
                .header("idempotency-key", "turn")
                .json(&body);
        }
        Reply::of(request).await.expect(200);
    }

    // A message of a platform, a link that waits for its confirmation, an answer that is a delivery.
    let shown = world.mint(key, "discord:of-nobody").await;
    for (id, text, wait) in [
        ("m1", SECRET, false),
        ("m2", &*format!("/link {shown}"), true),
    ] {
        let body = json!({"identity": TELEGRAM, "text": text, "message_id": id, "wait": wait});
        world
            .post(&bridge, "/v1/inbound", body)
            .await
            .expect_success();
    }

    // What they used is counted now, and not while somebody looks.
    eventually(
        "both turns are counted",
        Duration::from_secs(10),
        async || {
            throughline::jobs::flush_usage::tick(world.app()).await;
            counts_turns(world, tenant).await
        },
    )
    .await;

    // Guests both ways.
    let bobs = world
        .session(&bob.token, json!({"messages": [user_message("come in")]}))
        .await;
    let guest_in = bobs.id();
    grant(world, tenant, &guest_in, &ada.user_id).await;
    grant(world, tenant, &own, &bob.user_id).await;
    world
        .append(&ada.token, &guest_in, json!([user_message(SECRET)]))
        .await
        .expect(201);

    // One account leaves; what is told of that names the others.
    let parted = world.identity_id(key, &json!(ada.user_id), IRC).await;
    world
        .delete(key, &format!("/v1/identities/{parted}"))
        .await
        .expect(200);

    // A code that waits, a wrong one, a home, use.
    world.mint(&bridge, TELEGRAM).await;
    let guess = world.redeem(&bridge, "ABCDEFGH", TELEGRAM).await;
    guess.expect_problem(404, "code_not_found");
    let home = format!("/v1/users/{}/home-channels/telegram", ada.user_id);
    let chat = json!({"chat": {"type": "dm"}});
    world.put(key, &home, chat).await.expect(200);
    world.dm(&bridge, TELEGRAM).await;
    plant_usage(world, tenant, &ada.user_id).await;

    let listed = world
        .walk(key, &format!("/v1/sessions?user_id={}", ada.user_id))
        .await;
    for one in &listed {
        let id = text(&one["conversation_id"]);
        // By the name she gave it, it is listed too.
        if id.starts_with("ses_") && !sessions.contains(&id) {
            sessions.push(id);
        }
    }
    let keys = format!("/v1/session-keys?user_id={}", ada.user_id);
    let keys = world.walk(key, &keys).await;
    let accounts = format!("/v1/users/{}/identities", ada.user_id);
    let accounts = world.get(key, &accounts).await.expect(200);
    let accounts = accounts.list();
    assert_eq!(accounts.len(), 2);
    WholeUser {
        bridge,
        merged,
        identities: accounts.iter().map(|one| text(&one["id"])).collect(),
        sessions,
        session_keys: keys.iter().map(|one| text(&one["session_key"])).collect(),
        thread,
        in_thread: 3,
        guest_in,
        bob,
        parted,
        ada,
    }
}

async fn counts_turns(world: &World, tenant: &Tenant) -> bool {
    sqlx::query_scalar("select coalesce(sum(turns), 0) >= 2 from usage_hourly where tenant_id = $1")
        .bind(tenant.uuid())
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
}

/// What turns will count for a person.
pub async fn plant_usage(world: &World, tenant: &Tenant, user: &str) {
    sqlx::query(
        "insert into usage_hourly (tenant_id, hour, agent, user_id, model, source, requests, turns,
                                   input_tokens, output_tokens)
         select $1, date_trunc('hour', now()) - n * interval '1 hour', 'main', $2, 'demo', 'api', 1, 2, 3, 4
           from generate_series(1, 3) n
             on conflict on constraint usage_hourly_pkey do nothing",
    )
    .bind(tenant.uuid())
    .bind(user.parse::<UserId>().unwrap())
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
}
