//! Two tenants whose people have equal ids, accounts and keys never meet: with row-level security, and
//! with the predicates of the statements alone.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::data::catalog::{copy_rows, disable_row_level_security, dump_people};
use crate::support::people::as_bridge;
use crate::support::{Fields, Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn users_with_equal_ids_never_meet() {
    let world = World::new().await;
    equal_people(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_with_equal_ids_never_meet_even_without_row_level_security() {
    let world = World::new().await;
    disable_row_level_security(&mut world.superuser().await).await;
    equal_people(&world).await;
}

/// Does everything that can be done to people in one tenant, beside another with the same rows.
async fn equal_people(world: &World) {
    let a = world.tenant("a").await;
    let b = world.tenant("b").await;
    let key = world.bridge_key(&a, &["telegram", "slack", "irc"]).await;
    // Somebody linked, somebody to be linked, somebody to be parted, each with something said.
    for (first, second) in [("telegram:1", "slack:1"), ("telegram:2", "irc@n:two")] {
        world.write_dm(&key, first, "here").await;
        world.write_dm(&key, second, "there").await;
        world.link(&key, first, second).await;
    }
    let group = json!({"identity": "telegram:1", "chat": {"type": "group", "id": "G"}});
    world.resolve(&key, group.clone()).await.expect(200);
    let three = world.write_dm(&key, "telegram:3", "alone").await;
    let pending = world.mint(&key, "telegram:1").await;
    let one = world.dm(&key, "telegram:1").await;
    let one_id = one.text("identity_id");
    let user = one.text("user_id");
    let home = format!("/v1/users/{user}/home-channels/telegram");
    let chat = json!({"chat": {"type": "dm"}});
    world.put(&a.key, &home, chat.clone()).await.expect(200);
    world
        .redeem(&key, "ABCDEFGH", "telegram:9")
        .await
        .expect_problem(404, "code_not_found");
    copy_rows(&mut world.superuser().await, a.uuid(), b.uuid()).await;
    let of_b = dump_people(&mut world.superuser().await, b.uuid()).await;
    let unmoved = async |what: &str| {
        let now = dump_people(&mut world.superuser().await, b.uuid()).await;
        assert_eq!(now, of_b, "{what}");
    };
    let as_one = async |method: Method, path: &str, body: Option<Value>| -> Reply {
        as_bridge(world, &key, "telegram:1", (method, path), body).await
    };

    for path in ["", "/identities", "/presence", "/home-channels"] {
        let path = format!("/v1/users/{user}{path}");
        as_one(Method::GET, &path, None).await.expect(200);
    }
    let known = world.dm(&key, "telegram:1").await;
    assert_eq!(known["session_id"], one["session_id"]);
    unmoved("reading and resolving").await;
    world.clock.advance(std::time::Duration::from_secs(61));
    world.dm(&key, "telegram:1").await;
    unmoved("presence").await;
    as_one(
        Method::PATCH,
        &format!("/v1/users/{user}"),
        Some(json!({"display_name": "One", "external_id": null})),
    )
    .await
    .expect_problem(403, "missing_scope");
    as_one(
        Method::PATCH,
        &format!("/v1/users/{user}"),
        Some(json!({"display_name": "One"})),
    )
    .await
    .expect(200);
    world
        .patch(
            &a.key,
            &format!("/v1/users/{user}"),
            json!({"external_id": "one"}),
        )
        .await
        .expect(200);
    unmoved("renaming").await;
    as_one(Method::PUT, &home, Some(chat)).await.expect(200);
    as_one(Method::DELETE, &home, None).await.expect(204);
    unmoved("home channels").await;
    let made = json!({"external_id": "two", "identities": ["irc@n:new", "irc@n:newer"]});
    let made = world.post(&a.key, "/v1/users", made).await.expect(201);
    world.dm(&key, "irc@n:newest").await;
    unmoved("new people").await;
    let spec = |linked: &str| json!({"upstream": {"kind": "demo"}, "linked_sessions": linked});
    world
        .put(&a.key, "/v1/agents/main", spec("separate"))
        .await
        .expect(200);
    world.dm(&key, "slack:1").await;
    world
        .put(&a.key, "/v1/agents/main", spec("shared"))
        .await
        .expect(200);
    unmoved("unfolding").await;
    world
        .redeem(&key, "ABCDEFGH", "telegram:9")
        .await
        .expect_problem(404, "code_not_found");
    let body = json!({"code": pending, "identity": "telegram:3", "dry_run": true});
    world
        .post(&key, "/v1/link-codes/redeem", body)
        .await
        .expect(200);
    world.redeem(&key, &pending, "telegram:3").await.expect(200);
    unmoved("a code").await;
    world.mint(&key, "telegram:1").await;
    let seen = world.mint(&key, "telegram:1").await;
    let in_group =
        json!({"code": seen, "identity": "telegram:9", "chat": {"type": "group", "id": "1"}});
    world
        .post(&key, "/v1/link-codes/redeem", in_group)
        .await
        .expect_problem(403, "private_chat_required");
    unmoved("codes").await;
    let three_id = three.text("identity_id");
    as_one(Method::DELETE, &format!("/v1/identities/{three_id}"), None)
        .await
        .expect(200);
    unmoved("unlinking").await;
    world
        .post(
            &a.key,
            &format!("/v1/identities/{three_id}/undo-unlink"),
            json!({}),
        )
        .await
        .expect(200);
    unmoved("undoing").await;
    let body = json!({"from_user_id": made["id"], "reason": "one"});
    world
        .post(&a.key, &format!("/v1/users/{user}/merge"), body)
        .await
        .expect(200);
    unmoved("merging").await;
    world
        .delete(&a.key, &format!("/v1/identities/{one_id}"))
        .await
        .expect(200);
    unmoved("unlinking by an admin").await;
}
