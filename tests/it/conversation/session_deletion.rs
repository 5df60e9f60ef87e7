//! Deleted conversations: gone with all their ids, also for messages under way.

use std::time::Duration;

use serde_json::json;
use sqlx::Connection;

use crate::support::conversations::user_message;
use crate::support::{Fields, World, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_conversation_is_gone_with_all_its_ids_for_good() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"id": "mine", "session_key": "k", "messages": [user_message("secret")]});
    world.session(&tenant.key, body).await;
    let child = world
        .compress(&tenant.key, "mine", json!({"summary": "s"}))
        .await
        .expect(201);
    let branch = world
        .post(&tenant.key, "/v1/sessions/mine/branch", json!({}))
        .await
        .expect(201);
    let child = child.text("session_id").to_owned();
    let before = world
        .get(&tenant.key, "/v1/session-keys/k")
        .await
        .expect(200);
    world
        .delete(&tenant.key, "/v1/sessions/mine")
        .await
        .expect(204);
    let after = world
        .get(&tenant.key, "/v1/session-keys/k")
        .await
        .expect(200);
    assert_eq!(
        (&after["session_id"], &after["conversation_id"]),
        (&json!(null), &json!(null))
    );
    assert!(after["generation"].as_i64() > before["generation"].as_i64());
    let gone = async || {
        for id in ["mine", &child] {
            let path = format!("/v1/sessions/{id}");
            for query in ["", "?exact=true", "/messages", "/tip"] {
                let reply = world.get(&tenant.key, &format!("{path}{query}")).await;
                reply.expect_problem(404, "session_not_found");
            }
            let reply = world
                .append(&tenant.key, id, json!([user_message("again")]))
                .await;
            reply.expect_problem(404, "session_not_found");
            world
                .delete(&tenant.key, &path)
                .await
                .expect_problem(404, "session_not_found");
        }
        let again = world
            .post(&tenant.key, "/v1/sessions", json!({"id": "mine"}))
            .await;
        again.expect_problem(409, "session_id_taken");
    };
    gone().await;
    let rows = async || -> i64 {
        sqlx::query_scalar(
            "select (select count(*) from messages where content::text like '%secret%' and session_id <> $1)
                  + (select count(*) from conversations where client_id = 'mine')",
        )
        .bind(crate::support::conversations::uuid_of_session(&branch.id()))
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
    };
    eventually("its rows are gone", Duration::from_secs(10), async || {
        throughline::jobs::tick(world.app()).await.unwrap();
        rows().await == 0
    })
    .await;
    gone().await;
    // A branch is a conversation of its own; where it came from is no longer told.
    let path = format!("/v1/sessions/{}", branch.id());
    let branch = world.get(&tenant.key, &path).await.expect(200);
    assert_eq!(
        (&branch["parent_id"], &branch["edge"]),
        (&json!(null), &json!("branch"))
    );
    let audit = world.get(&tenant.key, "/v1/audit").await.expect(200);
    assert_eq!(audit["data"][0]["action"], "conversation.delete");
    // The key goes on with a fresh session.
    let next = world
        .post(
            &tenant.key,
            "/v1/session-keys/k/messages",
            json!({"messages": [user_message("hi")]}),
        )
        .await
        .expect(201);
    assert_eq!(
        (&next["created"], &next["reset"]),
        (&json!(true), &json!(null))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_a_deletion_overtakes_is_refused() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = world.session(&tenant.key, json!({})).await.id();
    // Who deletes waits for the audit's head, with everything else done.
    let mut superuser = world.superuser().await;
    let mut head = superuser.begin().await.unwrap();
    sqlx::query("select seq from audit_heads for update")
        .execute(&mut *head)
        .await
        .unwrap();
    let path = format!("/v1/sessions/{id}");
    let delete = world.delete(&tenant.key, &path);
    let append = async {
        world.waiting(1).await;
        world
            .append(&tenant.key, &id, json!([user_message("late")]))
            .await
    };
    let release = async {
        world.waiting(2).await;
        head.commit().await.unwrap();
    };
    let (deleted, appended, ()) = tokio::join!(delete, append, release);
    deleted.expect(204);
    appended.expect_problem(404, "session_not_found");
}
