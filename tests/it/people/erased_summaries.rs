//! A summary with words of an erased person is erased wherever it is: in old links, undone ones and branches, and where
//! nobody knows whose words it has. The conversation goes on.

use serde_json::{Value, json};
use throughline::domain::conversation::summary_sources::SummarySources;
use throughline::ids::IdentityId;

use crate::support::conversations::uuid_of_session;
use crate::support::data::erasure::{first_pass, mentions, settle};
use crate::support::data::summaries::compress_with_sources;
use crate::support::{Fields, Scene};

const ADA: &str = "telegram:ada";
const BOB: &str = "telegram:bob";
const SECRET: &str = "canary of ada";
const SUMMARY: &str = "they spoke of the canary of ada";

async fn say(b: &Scene, thread: &str, identity: &str, text: &str) -> Value {
    let chat = json!({"type": "thread", "id": "C", "thread_id": thread});
    let body = json!({"identity": identity, "chat": chat, "text": text});
    b.send(body).await.expect(200)
}

/// A thread in which both speak, Bob last.
async fn thread(b: &Scene, name: &str) -> String {
    let begun = say(b, name, ADA, SECRET).await;
    say(b, name, BOB, "of bob").await;
    say(b, name, BOB, "and more of bob").await;
    begun.text("session_id").to_owned()
}

async fn post(b: &Scene, session: &str, action: &str, body: Value) -> Value {
    let path = format!("/v1/sessions/{session}/{action}");
    let reply = b.world.post(&b.tenant.key, &path, body).await;
    reply.expect_success();
    serde_json::from_str(&reply.body).unwrap()
}

async fn compress(b: &Scene, session: &str, summary: &str) -> String {
    let done = post(b, session, "compress", json!({ "summary": summary })).await;
    done.text("session_id").to_owned()
}

async fn branch(b: &Scene, session: &str) -> String {
    post(b, session, "branch", json!({})).await.id()
}

async fn summaries(b: &Scene, session: &str) -> Vec<String> {
    let path = format!("/v1/sessions/{session}/messages?exact=true");
    let messages = b.world.walk(&b.tenant.key, &path).await;
    let is_summary = |message: &&Value| message["kind"] == "summary";
    let summaries = messages.iter().filter(is_summary);
    summaries
        .map(|message| message.text("content").to_owned())
        .collect()
}

/// A copy of a summary that was being made while the first search went on.
const LATE_COPY: &str = "insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, created_at,
                           source_identities)
     select tenant_id, id, 1000 + next_seq, 'user', 'summary', to_json($3::text), 1, now(), $4
       from sessions
      where tenant_id = $1 and id = $2";

async fn write_late(b: &Scene, session: &str, sources: Option<Vec<IdentityId>>) {
    sqlx::query(LATE_COPY)
        .bind(b.tenant.uuid())
        .bind(uuid_of_session(session))
        .bind(SUMMARY)
        .bind(sources)
        .execute(&mut b.world.superuser().await)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_summary_with_words_of_an_erased_user_is_erased() {
    let b = Scene::builder()
        .nodes(1)
        .echo()
        .bridge(&["telegram"])
        .build()
        .await;
    let (world, tenant) = (&b.world, &b.tenant);

    // Of known sources: compressed twice, the second time without a message of hers, and branched.
    let first = thread(&b, "1").await;
    let (second, sources) = compress_with_sources(world, tenant, &first, SUMMARY).await;
    assert!(matches!(&sources, SummarySources::Complete(both) if both.len() == 2));
    say(&b, "1", BOB, "later").await;
    say(&b, "1", BOB, "later still").await;
    let (third, again) = compress_with_sources(world, tenant, &second, SUMMARY).await;
    assert_eq!(again, sources);
    let branch_of_known = branch(&b, &third).await;
    // In a link that was undone.
    let undone = thread(&b, "2").await;
    let (undone_child, _) = compress_with_sources(world, tenant, &undone, SUMMARY).await;
    post(&b, &undone, "uncompress", json!({})).await;
    // In a branch whose origin is no more.
    let deleted = thread(&b, "3").await;
    let (tip, _) = compress_with_sources(world, tenant, &deleted, SUMMARY).await;
    let survivor = branch(&b, &tip).await;
    let path = format!("/v1/sessions/{deleted}");
    world.delete(&tenant.key, &path).await.expect_success();
    // Of unknown sources: given by a caller, compressed again, in a branch of a branch.
    let given = thread(&b, "4").await;
    let given_tip = compress(&b, &given, SUMMARY).await;
    let branch_of_given = branch(&b, &given_tip).await;
    let branch_of_branch = branch(&b, &branch_of_given).await;
    say(&b, "4", BOB, "later").await;
    say(&b, "4", BOB, "later still").await;
    let given_again = compress(&b, &given_tip, SUMMARY).await;
    // None of hers: she came later, or never.
    let before = say(&b, "5", BOB, "of bob").await;
    say(&b, "5", BOB, "and more of bob").await;
    let before = before.text("session_id").to_owned();
    let (before_tip, _) = compress_with_sources(world, tenant, &before, "bob alone").await;
    say(&b, "5", ADA, SECRET).await;
    say(&b, "6", BOB, "of bob").await;
    let never = say(&b, "6", BOB, "and more of bob").await;
    let never = compress(&b, never.text("session_id"), "bob alone").await;
    let with_her = [
        &second,
        &third,
        &branch_of_known,
        &undone_child,
        &survivor,
        &given_tip,
        &given_again,
        &branch_of_given,
        &branch_of_branch,
    ];
    for session in with_her {
        assert_eq!(summaries(&b, session).await, [SUMMARY], "{session}");
    }

    let ada = say(&b, "1", ADA, "bye").await.text("user_id").to_owned();
    let identity = world.identity_id(&tenant.key, &json!(ada), ADA).await;
    let id: IdentityId = identity.parse().unwrap();
    let path = format!("/v1/users/{ada}");
    world.delete(&tenant.key, &path).await.expect(202);
    first_pass(world, &[identity]).await;
    write_late(&b, &survivor, Some(vec![id])).await;
    write_late(&b, &branch_of_branch, None).await;
    settle(world).await;

    let words = [SECRET.to_owned(), id.as_uuid().to_string()];
    let left = mentions(world, tenant, &words).await;
    assert!(left.is_empty(), "{left:?}");
    for session in with_her {
        let summaries = summaries(&b, session).await;
        assert!(summaries.iter().all(|text| text == "[erased]"), "{session}");
        assert!(!summaries.is_empty(), "{session}");
    }
    for session in [&before_tip, &never] {
        assert_eq!(summaries(&b, session).await, ["bob alone"], "{session}");
    }

    // It goes on, and is compressed again: of Bob's words alone.
    say(&b, "1", BOB, "and then").await;
    let prompt = b.model.requests().pop().unwrap()["messages"].to_string();
    assert!(prompt.contains("[erased]") && prompt.contains("and then"));
    assert!(!prompt.contains(SECRET));
    for format in ["json", "markdown"] {
        let path = format!("/v1/sessions/{third}/export?format={format}");
        let export = world.get(&tenant.key, &path).await;
        assert_eq!(export.status, 200);
        assert!(export.body.contains("[erased]") && !export.body.contains(SECRET));
    }
    let (_, sources) = compress_with_sources(world, tenant, &third, "bob goes on").await;
    assert!(
        matches!(&sources, SummarySources::Complete(bob) if bob.len() == 1 && bob[0] != id),
        "{sources:?}"
    );
    let undone_tip = compress(&b, &undone, "bob goes on").await;
    assert_eq!(summaries(&b, &undone_tip).await, ["bob goes on"]);
}

/// Her own conversation is deleted with her. A branch of it that belongs to somebody else by now stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_summary_is_erased_in_a_branch_of_the_users_own_conversation() {
    let b = Scene::builder()
        .nodes(1)
        .echo()
        .bridge(&["telegram"])
        .build()
        .await;
    let (world, tenant) = (&b.world, &b.tenant);
    let own = json!({"identity": ADA, "text": SECRET});
    let own = b.send(own).await.expect(200);
    let own_tip = compress(&b, own.text("session_id"), SUMMARY).await;
    let branched = branch(&b, &own_tip).await;
    let bob = say(&b, "1", BOB, "of bob").await;
    sqlx::query(
        "update conversations set user_id = $3, slot_id = null where tenant_id = $1 and id = $2",
    )
    .bind(tenant.uuid())
    .bind(uuid_of_session(&branched))
    .bind(
        bob.text("user_id")
            .parse::<throughline::ids::UserId>()
            .unwrap(),
    )
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    // As if the tail had nothing of hers: only the summary has.
    sqlx::query(
        "delete from messages where tenant_id = $1 and session_id = $2 and kind <> 'summary'",
    )
    .bind(tenant.uuid())
    .bind(uuid_of_session(&branched))
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    let ada = own.text("user_id");
    let identity = world.identity_id(&tenant.key, &json!(ada), ADA).await;
    let path = format!("/v1/users/{ada}");
    world.delete(&tenant.key, &path).await.expect(202);
    first_pass(world, &[identity]).await;
    settle(world).await;
    let left = mentions(world, tenant, &[SECRET.to_owned()]).await;
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(summaries(&b, &branched).await, ["[erased]"]);
}
