//! A tenant with many turns that have ended: what stops, moves or looks for turns reads those that have not, and
//! no others.

use std::time::Duration;

use serde_json::json;

use crate::support::servers::model::Step;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Scene, real_time};

const ENDED: i64 = 30_000;

/// Copies the only turn, which has ended.
const FILL: &str = "
  insert into turns
  select (jsonb_populate_record(t, jsonb_build_object('id', gen_random_uuid(), 'turn_no', 1 + n))).*
    from turns t, generate_series(1, 30000) n;
  update conversations
     set next_turn_no = 40000";

/// Rows of turns that were read.
async fn rows_read(b: &Scene) -> i64 {
    let reason = "idle connections add what they counted within ten seconds";
    real_time(reason, Duration::from_secs(11)).await;
    sqlx::query_scalar(
        "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'turns'",
    )
    .fetch_one(&mut b.world.superuser().await)
    .await
    .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_stops_turns_reads_none_that_has_ended() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let send = async |identity: &str, wait: bool| {
        let body = json!({"identity": identity, "text": "hi", "wait": wait});
        b.send(body).await.expect_success()
    };
    send("telegram:1", true).await;
    let mut database = b.world.superuser().await;
    for sql in [FILL, "analyze turns"] {
        sqlx::raw_sql(sql).execute(&mut database).await.unwrap();
    }
    let before = rows_read(&b).await;

    // Unlink somebody, delete a conversation, erase somebody, each with a turn that has not ended; then suspend.
    b.world.link(&b.bridge_key, "telegram:5", "discord:5").await;
    for place in 0..6 {
        b.model.push(Step::Hold);
        send(&format!("telegram:{place}"), false).await;
    }
    send("discord:5", false).await;
    let user = b.world.dm(&b.bridge_key, "discord:5").await["user_id"].clone();
    let id = b.world.identity_id(&b.tenant.key, &user, "discord:5").await;
    let unlinked = b
        .world
        .delete(&b.tenant.key, &format!("/v1/identities/{id}"))
        .await;
    unlinked.expect(200);
    let session = b.world.dm(&b.bridge_key, "telegram:2").await["session_id"].clone();
    let path = format!("/v1/sessions/{}", session.as_str().unwrap());
    b.world.delete(&b.tenant.key, &path).await.expect(204);
    let user = b.world.dm(&b.bridge_key, "telegram:3").await["user_id"].clone();
    let path = format!("/v1/users/{}", user.as_str().unwrap());
    b.world.delete(&b.tenant.key, &path).await.expect(202);
    let path = format!("/v1/tenants/{}/suspend", b.tenant.id);
    b.world
        .post(OPERATOR_KEY, &path, json!({}))
        .await
        .expect(200);

    let read = rows_read(&b).await - before;
    assert!(read > 20, "what was read is counted");
    assert!(read < ENDED / 3, "{read} rows were read");
}
