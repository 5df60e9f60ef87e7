//! Unlinking and summaries: an identity takes no conversation along whose summary can have words of others.

use serde_json::{Value, json};
use throughline::domain::conversation::summary_sources::SummarySources;

use crate::support::conversations::user_message;
use crate::support::data::summaries::{compress_with_sources, set_sources};
use crate::support::data::two_platforms::TwoPlatforms;
use crate::support::transfer::imported;
use crate::support::{Fields, Scene};

/// A session of the linked user with what each says there, the identity on the web last.
async fn talk(two: &TwoPlatforms, lines: &[(&str, &str)]) -> String {
    let world = &two.world;
    let session = world.session(&two.ada.token, json!({})).await;
    for (platform, text) in lines {
        match *platform {
            "web" => say_on_web(two, &session.id(), text).await,
            _ => {
                let id = &session["id"];
                world
                    .write_in(&two.bridge_key, "telegram:5", id, text)
                    .await;
            }
        }
    }
    session.id()
}

async fn say_on_web(two: &TwoPlatforms, session: &str, text: &str) {
    let said = two
        .world
        .append(&two.ada.token, session, json!([user_message(text)]));
    said.await.expect(201);
}

/// Compresses to a summary that a caller gave.
async fn compress(two: &TwoPlatforms, session: &str) -> String {
    let body = json!({"summary": "what they agreed on"});
    let done = two.world.compress(&two.tenant.key, session, body).await;
    done.expect(201).text("session_id").to_owned()
}

/// A branch in which the identity on the web goes on alone.
async fn branch(two: &TwoPlatforms, session: &str) -> String {
    let path = format!("/v1/sessions/{session}/branch");
    let made = two.world.post(&two.ada.token, &path, json!({})).await;
    let branch = made.expect(201).id();
    say_on_web(two, &branch, "on my own").await;
    branch
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlinked_identity_takes_no_branch_along_whose_summary_has_words_of_others() {
    let two = TwoPlatforms::new().await;
    let linked = two.link().await;
    let both = [("telegram", "of telegram"), ("web", "of web")];
    let alone = [("web", "of web"), ("web", "and so on")];

    let known = talk(&two, &both).await;
    let (world, tenant) = (&two.world, &two.tenant);
    let (tip, sources) = compress_with_sources(world, tenant, &known, "of both").await;
    let SummarySources::Complete(identities) = &sources else {
        panic!("{sources:?}")
    };
    assert_eq!(identities.len(), 2);
    let known = branch(&two, &tip).await;
    // The summary of a summary, in the branch of a branch.
    let (tip, again) = compress_with_sources(world, tenant, &known, "of both, again").await;
    assert_eq!(again, sources, "also of those whose messages are not there");
    let twice = branch(&two, &tip).await;

    let given = talk(&two, &both).await;
    let given = compress(&two, &given).await;
    let given = branch(&two, &given).await;
    // A caller's summary may say anything, wherever it stands; and it makes the next one unknown.
    let given_alone = talk(&two, &alone).await;
    let tip = compress(&two, &given_alone).await;
    say_on_web(&two, &tip, "on and on").await;
    let (_, sources) = compress_with_sources(world, tenant, &tip, "and on").await;
    let web_id = two.web_id(&linked).await;
    let only_web = vec![web_id.parse().unwrap()];
    assert_eq!(sources, SummarySources::Partial(only_web.clone()));
    let summary = json!({"seq": 1, "role": "user", "kind": "summary", "content": "imported"});
    let document = json!({"links": [{"messages": [summary]}]});
    let import = imported(world, &two.ada.token, &document).await.id();
    say_on_web(&two, &import, "on my own").await;
    let staying = [&known, &twice, &given, &given_alone, &import];

    // What only the identity wrote, and the service summarised, goes with it.
    let own = talk(&two, &alone).await;
    let (tip, sources) = compress_with_sources(world, tenant, &own, "of web").await;
    assert_eq!(sources, SummarySources::Complete(only_web));
    let own_branch = branch(&two, &tip).await;
    let going = [&own, &own_branch];

    let unlinked = two.unlink(&web_id).await.expect(200);
    for (sessions, status, user) in [
        (&staying[..], 404, &linked["user_id"]),
        (&going[..], 200, &unlinked["user_id"]),
    ] {
        for session in sessions {
            let path = format!("/v1/sessions/{session}");
            let owner = two.world.get(&two.tenant.key, &path).await.expect(200);
            assert_eq!(&owner["user_id"], user, "{session}");
            for part in ["", "/messages", "/export"] {
                let reply = two.on_web(&format!("{path}{part}")).await;
                assert_eq!(reply.status, status, "{path}{part}");
            }
        }
    }
    let listed = two.world.walk(&two.ada.token, "/v1/sessions").await;
    let listed: Vec<String> = listed.iter().map(Fields::id).collect();
    for session in staying {
        assert!(!listed.contains(session), "{session}");
    }
    assert!(listed.contains(&own_branch));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_summary_of_messages_without_an_identity_has_unknown_sources() {
    let two = TwoPlatforms::new().await;
    two.link().await;
    let session = talk(&two, &[("web", "of web")]).await;
    let (key, world) = (&two.tenant.key, &two.world);
    let nobodys = json!([user_message("of nobody"), user_message("once more")]);
    world.append(key, &session, nobodys).await.expect(201);
    let (_, sources) = compress_with_sources(world, &two.tenant, &session, "of some").await;
    let SummarySources::Partial(identities) = sources else {
        panic!("{sources:?}")
    };
    assert_eq!(identities.len(), 1);
    let stored: i64 = sqlx::query_scalar("select count(*) from summary_sources")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    assert_eq!(stored, 0, "a summary of unknown sources is nobody's");
}

/// The command, where two linked identities speak in the chat itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_branch_by_command_stays_where_its_summary_has_words_of_others() {
    let b = Scene::builder()
        .nodes(1)
        .echo()
        .bridge(&["telegram", "slack", "discord"])
        .build()
        .await;
    let (world, admin) = (&b.world, &b.tenant.key);
    b.reply_to("telegram:5", "hello").await;
    let linked = world.link(&b.bridge_key, "telegram:5", "slack:5").await;
    b.reply_to("telegram:5", "of telegram").await;
    let begun = json!({"identity": "slack:5", "text": "of slack"});
    let begun = b.send(begun).await.expect(200);
    let parent = begun.text("session_id");
    let body = json!({"summary": "of both"});
    let done = world.compress(admin, parent, body).await.expect(201);
    set_sources(world, &b.tenant, parent, done.text("session_id")).await;
    b.reply_to("slack:5", "/branch mine").await;
    let said = json!({"identity": "slack:5", "text": "on my own"});
    let branch = b.send(said).await.expect(200)["session_id"].clone();
    assert_ne!(branch, done["session_id"]);
    let writers: Vec<Value> = b
        .messages(&branch)
        .await
        .iter()
        .filter(|message| message["role"] == "user" && message["kind"] == "normal")
        .map(|message| message["identity"].clone())
        .collect();
    assert_eq!(
        writers,
        ["slack:5", "slack:5"],
        "the others are in the summary"
    );

    let slack = world
        .identity_id(admin, &linked["user_id"], "slack:5")
        .await;
    world
        .delete(admin, &format!("/v1/identities/{slack}"))
        .await
        .expect(200);
    let path = format!("/v1/sessions/{}", branch.as_str().unwrap());
    let owner = world.get(admin, &path).await.expect(200);
    assert_eq!(owner["user_id"], linked["user_id"]);
    let request = world
        .request(reqwest::Method::GET, &path, &b.bridge_key)
        .header("x-throughline-identity", "slack:5");
    let reply = crate::support::Reply::of(request).await;
    reply.expect_problem(404, "session_not_found");
}
