//! What a commit notifies others of, and what a rollback does not; and that reads end their transactions.

use std::sync::{Arc, Mutex};

use serde_json::json;
use throughline::dev::service_caller;
use throughline::domain::bridge::chat::Chat;
use throughline::domain::bridge::delivery::{Address, DeliveryKind, NewDelivery};
use throughline::ids::TenantId;
use throughline::notification::{Notification, Topic};
use throughline::notifications::Subscription;
use throughline::store::bridge::outbox;

use crate::support::{Fields, Tenant, World};

fn subscribe(world: &World, tenant: &Tenant) -> Subscription {
    let tenant_id: TenantId = tenant.id.parse().unwrap();
    world.app().notifications.subscribe_deliveries(tenant_id)
}

/// Two users of a tenant, each with one identity, and a key that vouches for both platforms.
async fn two_users(world: &World) -> (Tenant, String) {
    let tenant = world.tenant("Acme").await;
    let bridge = world.bridge_key(&tenant, &["telegram", "slack"]).await;
    for identity in ["telegram:1", "slack:1"] {
        world.dm(&bridge, identity).await;
    }
    (tenant, bridge)
}

#[tokio::test(flavor = "multi_thread")]
async fn security_notices_of_the_rest_api_notify_waiting_bridges_at_once() {
    // Without Redis nothing but this node's own commits wakes a subscription.
    let world = World::with_redis(1, "redis://127.0.0.1:1").await;
    let (tenant, bridge) = two_users(&world).await;
    let subscription = subscribe(&world, &tenant);

    let before = subscription.version();
    let linked = world.link(&bridge, "telegram:1", "slack:1").await;
    assert!(subscription.version() > before, "redeeming a code");

    let before = subscription.version();
    let user_id = &linked["user_id"];
    let id = world.identity_id(&tenant.key, user_id, "slack:1").await;
    let path = format!("/v1/identities/{id}");
    world.delete(&tenant.key, &path).await.expect(200);
    assert!(subscription.version() > before, "unlinking");

    let before = subscription.version();
    let path = format!("/v1/identities/{id}/undo-unlink");
    world.post(&tenant.key, &path, json!({})).await.expect(200);
    assert!(subscription.version() > before, "undoing an unlink");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_is_rolled_back_notifies_nobody() {
    let world = World::new().await;
    let (tenant, bridge) = two_users(&world).await;
    let dm = world.dm(&bridge, "telegram:1").await;
    let identity_id = dm.text("identity_id").parse().unwrap();
    let tenant_id: TenantId = tenant.id.parse().unwrap();
    let published = Arc::new(Mutex::new(Vec::new()));
    let collected = published.clone();
    let notifier = Arc::new(move |notification| collected.lock().unwrap().push(notification));
    let db = world.app().db.clone().with_notifier(notifier);
    let delivery = NewDelivery {
        kind: DeliveryKind::Notice,
        address: &Address::of(&Chat::DM, &"telegram:1".parse().unwrap()),
        identity_id: Some(identity_id),
        text: "hi",
        turn_id: None,
        session_id: None,
        conversation_id: None,
        in_reply_to: None,
    };
    let caller = service_caller(tenant_id);
    let now = world.clock.now();

    let mut tx = caller.begin(&db).await.unwrap();
    outbox::insert(&mut tx, &delivery, now).await.unwrap();
    drop(tx);
    assert_eq!(*published.lock().unwrap(), []);

    let mut tx = caller.begin(&db).await.unwrap();
    tx.mark().await.unwrap();
    outbox::insert(&mut tx, &delivery, now).await.unwrap();
    tx.after_commit(|| panic!("it was rolled back"));
    tx.roll_back_to_mark().await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(*published.lock().unwrap(), [], "nor what a mark undoes");

    let mut tx = caller.begin(&db).await.unwrap();
    outbox::insert(&mut tx, &delivery, now).await.unwrap();
    assert_eq!(*published.lock().unwrap(), [], "not before the commit");
    tx.commit().await.unwrap();
    let changed = Notification::Changed(Topic::Deliveries(tenant_id));
    assert_eq!(*published.lock().unwrap(), [changed]);
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_end_their_transactions_and_leave_no_rollback_to_a_task() {
    let world = World::new().await;
    let (tenant, bridge) = two_users(&world).await;
    let dm = world.write_dm(&bridge, "telegram:1", "hello").await;
    let asked = json!({"identity": "telegram:1", "text": "hello"});
    let turn = world.post(&bridge, "/v1/inbound", asked).await.expect(200);
    let session = dm.text("session_id");
    let user = dm.text("user_id");
    let turn = turn.text("turn_id");
    let paths = [
        "/v1/whoami".to_owned(),
        "/v1/tenant".to_owned(),
        "/v1/agents".to_owned(),
        "/v1/agents/main".to_owned(),
        "/v1/issuers".to_owned(),
        "/v1/api-keys".to_owned(),
        "/v1/audit".to_owned(),
        "/v1/users".to_owned(),
        format!("/v1/users/{user}"),
        format!("/v1/users/{user}/identities"),
        format!("/v1/users/{user}/presence"),
        "/v1/session-keys".to_owned(),
        "/v1/sessions".to_owned(),
        format!("/v1/sessions/{session}"),
        format!("/v1/sessions/{session}/messages"),
        format!("/v1/sessions/{session}/lineage"),
        format!("/v1/turns/{turn}"),
        "/v1/deliveries/dead".to_owned(),
        "/v1/identity-links".to_owned(),
        "/v1/models".to_owned(),
    ];
    let db = &world.app().db;
    for path in paths {
        let before = db.dropped_transactions();
        world.get(&tenant.key, &path).await.expect(200);
        assert_eq!(db.dropped_transactions(), before, "{path}");
    }
    let before = db.dropped_transactions();
    world.dm(&bridge, "telegram:1").await;
    assert_eq!(
        db.dropped_transactions(),
        before,
        "resolving a known identity"
    );
    let before = db.dropped_transactions();
    let asked = json!({"identity": "telegram:1", "text": "again"});
    world.post(&bridge, "/v1/inbound", asked).await.expect(200);
    assert_eq!(
        db.dropped_transactions(),
        before,
        "a message and its answer"
    );
}
