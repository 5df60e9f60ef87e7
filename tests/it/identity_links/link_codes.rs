//! Link codes: single use, one answer to whatever is not good, and lockouts for whoever guesses.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::{Fields, Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn of_many_who_redeem_a_code_one_does() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let key = world.bridge_key(&tenant, &["telegram"]).await;
    let code = world.mint(&key, "telegram:0").await;
    let redeems = (1..=32).map(|n| {
        let url = world.url_on(n % 2, "/v1/link-codes/redeem");
        let body = json!({"code": code, "identity": format!("telegram:{n}")});
        Reply::of(world.client.post(url).bearer_auth(&key).json(&body))
    });
    let replies = join_all(redeems).await;
    let with = |status: u16| {
        replies
            .iter()
            .filter(|reply| reply.status == status)
            .count()
    };
    assert_eq!((with(200), with(404)), (1, 31));
    let owner = world.dm(&key, "telegram:0").await;
    let path = format!("/v1/users/{}/identities", owner.text("user_id"));
    let accounts = world.get(&tenant.key, &path).await.expect(200);
    assert_eq!(accounts.list().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_code_that_is_not_good_has_one_answer() {
    let world = World::new().await;
    let (tenant, other) = (world.tenant("Acme").await, world.tenant("Other").await);
    let key = world.bridge_key(&tenant, &["telegram", "slack"]).await;
    let foreign = world.bridge_key(&other, &["telegram"]).await;
    let used = world.mint(&key, "telegram:1").await;
    world.redeem(&key, &used, "telegram:2").await.expect(200);
    let expired = world.mint(&key, "telegram:3").await;
    world.clock.advance(Duration::from_secs(10 * 60 + 1));
    let of_other_tenant = world.mint(&foreign, "telegram:1").await;
    let body = json!({"identity": "telegram:4", "platform": "slack"});
    let elsewhere = world.post(&key, "/v1/link-codes", body).await.expect(201)["code"].clone();
    let seen = world.mint(&key, "telegram:5").await;
    let in_group =
        json!({"code": seen, "identity": "telegram:6", "chat": {"type": "group", "id": "1"}});
    let refused = world.post(&key, "/v1/link-codes/redeem", in_group).await;
    refused.expect_problem(403, "private_chat_required");
    let mut problems = Vec::new();
    for (n, code) in [
        "ABCDEFGH",
        "no code",
        &used,
        &expired,
        &of_other_tenant,
        &seen,
        elsewhere.as_str().unwrap(),
    ]
    .iter()
    .enumerate()
    {
        let reply = world.redeem(&key, code, &format!("telegram:9{n}")).await;
        let mut problem = reply.expect_problem(404, "code_not_found");
        problem["request_id"] = Value::Null;
        problems.push(problem);
    }
    assert!(problems.iter().all(|problem| *problem == problems[0]));
    // Still good where it was meant for, typed as people type.
    let typed = elsewhere.as_str().unwrap().to_lowercase();
    world
        .redeem(
            &key,
            &format!(" {}-{} ", &typed[..4], &typed[4..]),
            "slack:1",
        )
        .await
        .expect(200);
    let in_group = json!({"identity": "telegram:1", "chat": {"type": "channel", "id": "1"}});
    world
        .post(&key, "/v1/link-codes", in_group)
        .await
        .expect_problem(403, "private_chat_required");
}

#[tokio::test(flavor = "multi_thread")]
async fn guessing_is_locked_out_at_three_levels() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let key = world.bridge_key(&tenant, &["telegram"]).await;
    let second = world.bridge_key(&tenant, &["telegram"]).await;
    let good = world.mint(&key, "telegram:1").await;
    // Five by one account, all at once with many more: no crowd gets around it.
    let guesses = (0..20).map(|n| {
        let url = world.url_on(n % 2, "/v1/link-codes/redeem");
        let body = json!({"code": "ABCDEFGH", "identity": "telegram:2"});
        Reply::of(world.client.post(url).bearer_auth(&key).json(&body))
    });
    let replies = join_all(guesses).await;
    let with = |status: u16| {
        replies
            .iter()
            .filter(|reply| reply.status == status)
            .count()
    };
    assert_eq!((with(404), with(429)), (5, 15));
    let locked = world.redeem(&key, &good, "telegram:2").await;
    locked.expect_problem(429, "too_many_attempts");
    let wait: u64 = locked.header("retry-after").parse().unwrap();
    assert!((3500..=3600).contains(&wait), "{wait}");
    // Nine more accounts, five each: the key has its fifty.
    for n in 10..19 {
        for _ in 0..5 {
            world
                .redeem(&key, "ABCDEFGH", &format!("telegram:{n}"))
                .await
                .expect_problem(404, "code_not_found");
        }
    }
    world
        .redeem(&key, &good, "telegram:30")
        .await
        .expect_problem(429, "too_many_attempts");
    world
        .redeem(&second, &good, "telegram:30")
        .await
        .expect(200);
    // Ten minutes later the key may again; the account after an hour, from its last guess.
    world.clock.advance(Duration::from_secs(10 * 60 + 1));
    let good = world.mint(&key, "telegram:1").await;
    world
        .redeem(&key, &good, "telegram:2")
        .await
        .expect_problem(429, "too_many_attempts");
    world.clock.advance(Duration::from_secs(50 * 60));
    let good = world.mint(&key, "telegram:1").await;
    world.redeem(&key, &good, "telegram:2").await.expect(200);
    // The tenant, however many keys and accounts.
    for n in 0..40 {
        let key = world.bridge_key(&tenant, &["telegram"]).await;
        for _ in 0..5 {
            world
                .redeem(&key, "ABCDEFGH", &format!("telegram:1{n:03}"))
                .await
                .expect_problem(404, "code_not_found");
        }
    }
    let fresh = world.bridge_key(&tenant, &["telegram"]).await;
    let good = world.mint(&fresh, "telegram:1").await;
    world
        .redeem(&fresh, &good, "telegram:5000")
        .await
        .expect_problem(429, "too_many_attempts");
}

#[tokio::test(flavor = "multi_thread")]
async fn three_codes_are_pending_and_a_fourth_waits() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let key = world.bridge_key(&tenant, &["telegram"]).await;
    world.dm(&key, "telegram:1").await;
    let mints = (0..8).map(|n| {
        let url = world.url_on(n % 2, "/v1/link-codes");
        Reply::of(
            world
                .client
                .post(url)
                .bearer_auth(&key)
                .json(&json!({"identity": "telegram:1"})),
        )
    });
    let replies = join_all(mints).await;
    let with = |status: u16| {
        replies
            .iter()
            .filter(|reply| reply.status == status)
            .count()
    };
    assert_eq!((with(201), with(429)), (3, 5));
    let refused = replies.iter().find(|reply| reply.status == 429).unwrap();
    refused.expect_problem(429, "too_many_codes");
    world.clock.advance(Duration::from_secs(10 * 60 + 1));
    world.mint(&key, "telegram:1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_redeem_is_answered_as_the_first_and_is_no_guess() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let key = world.bridge_key(&tenant, &["telegram"]).await;
    let code = world.mint(&key, "telegram:1").await;
    let body = json!({"code": code, "identity": "telegram:2"});
    let mut answers = Vec::new();
    // More often than one may guess.
    for n in 0..8 {
        let url = world.url_on(n % 2, "/v1/link-codes/redeem");
        let request = world.client.post(url).bearer_auth(&key);
        let request = request.header("idempotency-key", "once").json(&body);
        answers.push(Reply::of(request).await.expect(200));
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));
}

/// Whoever reads along could use it, however it was written.
#[tokio::test(flavor = "multi_thread")]
async fn a_code_that_others_have_read_is_void_whatever_surrounds_it() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let group = json!({"type": "group", "id": "1"});
    let forms = [
        json!({"text": "CODE"}),
        json!({"text": "my code is CODE, use it"}),
        json!({"text": "/link CODE"}),
        json!({"text": "/link CODE please"}),
        json!({"text": "@bot /link CODE"}),
        json!({"text": "//link CODE"}),
        json!({"text": "/link yes CODE"}),
        json!({"text": "/unlink CODE"}),
        json!({"text": "https://example.com/?code=CODE"}),
        json!({"text": "CODE", "mentioned": false}),
        json!({"text": "CODE", "edit": true, "message_id": "7"}),
    ];
    for (place, form) in forms.iter().enumerate() {
        let code = world.mint(&tenant.key, &format!("telegram:{place}")).await;
        let mut body = form.clone();
        let text = form.text("text");
        body["text"] = json!(text.replace("CODE", &format!("{}-{}", &code[..4], &code[4..])));
        body["chat"] = group.clone();
        body["identity"] = json!(format!("telegram:{place}"));
        world.post(&tenant.key, "/v1/inbound", body).await;
        let redeemed = world
            .redeem(&tenant.key, &code, &format!("discord:{place}"))
            .await;
        assert_eq!(redeemed.status, 404, "{form}: {}", redeemed.body);
    }
    // In a direct chat nobody else reads.
    let code = world.mint(&tenant.key, "telegram:99").await;
    let body = json!({"identity": "telegram:99", "text": code});
    world
        .post(&tenant.key, "/v1/inbound", body)
        .await
        .expect(200);
    world
        .redeem(&tenant.key, &code, "discord:99")
        .await
        .expect(200);
}
