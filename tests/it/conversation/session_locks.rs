//! Appends and compressions that wait for each other's rows: each in its turn, and none in a ring.

use std::time::Duration;

use serde_json::json;
use sqlx::{Connection, PgConnection};

use crate::support::conversations::{user_message, uuid_of_session};
use crate::support::{Fields, Reply, World, eventually};

/// Takes the lock that an append takes, whether it then finds the link open or not.
async fn lock_link(database: &mut PgConnection, id: &str) {
    sqlx::query("select id from sessions where id = $1 for no key update")
        .bind(uuid_of_session(id))
        .execute(database)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_that_comes_late_from_a_parent_to_its_child_lets_the_child_be_undone() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"messages": [user_message("one"), user_message("two")]});
    let parent = world.session(&tenant.key, body).await.id();
    let done = world
        .compress(&tenant.key, &parent, json!({"summary": "s"}))
        .await
        .expect(201);
    let child = done.text("session_id");
    // What an append holds that waited for the parent while it was compressed.
    let mut superuser = world.superuser().await;
    let mut late = superuser.begin().await.unwrap();
    lock_link(&mut late, &parent).await;
    let undo = world
        .client
        .post(world.url(&format!("/v1/sessions/{parent}/uncompress")))
        .bearer_auth(&tenant.key);
    let undo = tokio::spawn(Reply::of(undo));
    let watcher = tokio::sync::Mutex::new(world.superuser().await);
    eventually("it waits", Duration::from_secs(20), async || {
        sqlx::query_scalar(
            "select exists (select 1
                              from pg_stat_activity
                             where datname = current_database()
                               and wait_event_type = 'Lock')",
        )
        .fetch_one(&mut *watcher.lock().await)
        .await
        .unwrap()
    })
    .await;
    // And then takes, because the child is the tip now.
    lock_link(&mut late, child).await;
    late.rollback().await.unwrap();
    assert_eq!(undo.await.unwrap().expect(200)["id"], parent);
}
