//! The contract's table of keys, and what must hold for every id anyone could think of.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::ids::UserId;

const POLICY: KeyPolicy<'_> = KeyPolicy {
    agent: "main",
    dm_scope: DmScope::PerChannelPeer,
    linked_sessions: LinkedSessions::Shared,
    group_scope: GroupScope::PerMember,
};

fn identity(text: &str) -> IdentityName {
    text.parse().unwrap()
}

fn chat(kind: ChatType, id: &str, thread: Option<&str>, scope: Option<&str>) -> Chat {
    Chat {
        kind,
        id: (!id.is_empty()).then(|| id.to_owned()),
        thread_id: thread.map(str::to_owned),
        scope: scope.map(str::to_owned),
    }
}

fn keys(policy: KeyPolicy<'_>, speaker: &IdentityName, linked: bool, chat: &Chat) -> Vec<String> {
    let speaker = KeySender {
        identity: speaker,
        user_id: UserId::from_uuid(uuid::Uuid::from_u128(7)),
        linked,
    };
    let place = chat_key(policy, speaker, chat);
    [place.key].into_iter().chain(place.otherwise).collect()
}

#[test]
fn the_table_of_the_contract() {
    let user = format!(
        "agent:main:user:{}",
        UserId::from_uuid(uuid::Uuid::from_u128(7))
    );
    let per_peer = KeyPolicy {
        dm_scope: DmScope::PerPeer,
        ..POLICY
    };
    let main = KeyPolicy {
        dm_scope: DmScope::Main,
        ..POLICY
    };
    let separate = KeyPolicy {
        linked_sessions: LinkedSessions::Separate,
        ..POLICY
    };
    let separate_per_peer = KeyPolicy {
        linked_sessions: LinkedSessions::Separate,
        ..per_peer
    };
    let shared = KeyPolicy {
        group_scope: GroupScope::Shared,
        ..POLICY
    };
    let group = chat(ChatType::Group, "-100", None, None);
    let channel = chat(ChatType::Channel, "C1", None, None);
    let thread = chat(ChatType::Thread, "C1", Some("1.5"), None);
    let topic = chat(ChatType::Group, "-100", Some("9"), None);
    let other_bot = chat(ChatType::Dm, "", None, Some("bot2"));
    let rows: [(KeyPolicy<'_>, &str, bool, &Chat, &[&str]); 20] = [
        (POLICY, "telegram:5", true, &Chat::DM, &[&user]),
        (per_peer, "slack@T1:U1", true, &Chat::DM, &[&user]),
        (main, "slack@T1:U1", true, &Chat::DM, &[&user]),
        (
            POLICY,
            "telegram:5",
            false,
            &Chat::DM,
            &["agent:main:telegram:dm:5"],
        ),
        (
            POLICY,
            "slack@T1:U1",
            false,
            &Chat::DM,
            &["agent:main:slack@T1:dm:U1"],
        ),
        (
            POLICY,
            "telegram:5",
            false,
            &other_bot,
            &["agent:main:telegram@bot2:dm:5"],
        ),
        (
            per_peer,
            "telegram:5",
            false,
            &Chat::DM,
            &["agent:main:dm:5", "agent:main:telegram:dm:5"],
        ),
        (
            per_peer,
            "irc@b:bob",
            false,
            &Chat::DM,
            &["agent:main:dm:bob", "agent:main:irc@b:dm:bob"],
        ),
        (
            main,
            "telegram:5",
            false,
            &Chat::DM,
            &["agent:main:main", "agent:main:telegram:dm:5"],
        ),
        (
            separate,
            "telegram:5",
            true,
            &Chat::DM,
            &["agent:main:telegram:dm:5"],
        ),
        (
            separate_per_peer,
            "telegram:5",
            true,
            &Chat::DM,
            &["agent:main:telegram:dm:5"],
        ),
        (
            POLICY,
            "telegram:5",
            false,
            &group,
            &["agent:main:telegram:group:-100:5"],
        ),
        (
            POLICY,
            "telegram:5",
            true,
            &group,
            &["agent:main:telegram:group:-100:5"],
        ),
        (
            POLICY,
            "slack@T1:U1",
            false,
            &channel,
            &["agent:main:slack@T1:group:C1:U1"],
        ),
        (
            shared,
            "telegram:5",
            false,
            &group,
            &["agent:main:telegram:group:-100"],
        ),
        (
            shared,
            "telegram:5",
            true,
            &group,
            &["agent:main:telegram:group:-100"],
        ),
        (
            POLICY,
            "slack@T1:U1",
            false,
            &thread,
            &["agent:main:slack@T1:thread:C1:1.5"],
        ),
        (
            shared,
            "telegram:5",
            false,
            &topic,
            &["agent:main:telegram:thread:-100:9"],
        ),
        (
            POLICY,
            "matrix:@ann:x",
            false,
            &Chat::DM,
            &["agent:main:matrix:dm:@ann%3Ax"],
        ),
        (
            POLICY,
            "web:50% é",
            false,
            &Chat::DM,
            &["agent:main:web:dm:50%25%20%C3%A9"],
        ),
    ];
    for (policy, speaker, linked, chat, expected) in rows {
        let built = keys(policy, &identity(speaker), linked, chat);
        assert_eq!(built, expected, "{speaker} {linked} {chat:?}");
    }
}

#[test]
fn long_keys_end_in_a_hash_and_stay_apart() {
    let long = |end: &str| identity(&format!("web:{}{end}", "x".repeat(250)));
    let [a] = keys(POLICY, &long("a"), false, &Chat::DM)
        .try_into()
        .unwrap();
    let [b] = keys(POLICY, &long("b"), false, &Chat::DM)
        .try_into()
        .unwrap();
    assert_eq!((a.len(), b.len()), (256, 256));
    assert_ne!(a, b);
    assert_eq!(a.rfind('~'), Some(256 - 23));
    // Whoever takes the visible end of that key as an id has another key.
    let forged = a.strip_prefix("agent:main:web:dm:").unwrap();
    let [other] = keys(
        POLICY,
        &identity(&format!("web:{forged}")),
        false,
        &Chat::DM,
    )
    .try_into()
    .unwrap();
    assert_ne!(other, a);
    assert_eq!(other.len(), 256);
}

fn any_identity() -> impl Strategy<Value = IdentityName> {
    let platform = prop::sample::select(vec!["web", "irc", "telegram", "slack", "a"]);
    let scope = prop::option::of(prop::sample::select(vec!["a", "b", "%3A", "T1"]));
    // Short and full of what keys are made of, so that collisions are near.
    let external = "[a:%~@5]{1,5}|dm|group|main|user|dm:5|a:group:b|x{240,256}";
    (platform, scope, external).prop_map(|(platform, scope, external)| {
        let scope = scope.map(|scope| format!("@{scope}")).unwrap_or_default();
        identity(&format!("{platform}{scope}:{external}"))
    })
}

fn any_chat() -> impl Strategy<Value = Chat> {
    let kind = prop::sample::select(vec![
        ChatType::Dm,
        ChatType::Group,
        ChatType::Channel,
        ChatType::Thread,
    ]);
    let id = "[a:%5]{1,4}";
    (kind, id, id, prop::bool::ANY).prop_map(|(kind, id, thread, topic)| Chat {
        thread_id: (topic || kind == ChatType::Thread).then_some(thread),
        id: Some(id),
        kind,
        scope: None,
    })
}

fn any_policy() -> impl Strategy<Value = KeyPolicy<'static>> {
    let dm = prop::sample::select(vec![
        DmScope::PerChannelPeer,
        DmScope::PerPeer,
        DmScope::Main,
    ]);
    let linked = prop::sample::select(vec![LinkedSessions::Shared, LinkedSessions::Separate]);
    let group = prop::sample::select(vec![GroupScope::PerMember, GroupScope::Shared]);
    (dm, linked, group).prop_map(|(dm_scope, linked_sessions, group_scope)| KeyPolicy {
        agent: "main",
        dm_scope,
        linked_sessions,
        group_scope,
    })
}

/// What a key stands for: no two of these may be spelled alike.
type Meaning = (SlotKind, Option<UserId>, String);

/// Plays messages in the order they come, as the store does: the first who needs a key has it.
fn play(messages: &[(KeyPolicy<'_>, IdentityName, Chat)]) -> HashMap<String, Meaning> {
    let mut people: HashMap<String, UserId> = HashMap::new();
    let mut slots: HashMap<String, Meaning> = HashMap::new();
    for (policy, identity, chat) in messages {
        let owner = people
            .entry(identity.to_string())
            .or_insert_with(UserId::generate);
        let speaker = KeySender {
            identity,
            user_id: *owner,
            linked: false,
        };
        let place = chat_key(*policy, speaker, chat);
        let about = match place.kind {
            SlotKind::Dm => identity.to_string(),
            SlotKind::Group | SlotKind::Thread | SlotKind::Client => {
                let member = place.owner.map(|_| identity.to_string());
                format!(
                    "{} {:?} {:?} {member:?}",
                    chat.platform_of(identity),
                    chat.id,
                    (place.kind == SlotKind::Thread).then_some(&chat.thread_id)
                )
            }
        };
        let meaning = (place.kind, place.owner, about);
        let free_or_own = |key: &String| {
            slots
                .get(key)
                .is_none_or(|there| (there.0, there.1) == (meaning.0, meaning.1))
        };
        let key = [Some(place.key), place.otherwise]
            .into_iter()
            .flatten()
            .find(free_or_own);
        let key = key.expect("nobody else can have all keys of an account");
        let there = slots.entry(key).or_insert_with(|| meaning.clone());
        if place.kind != SlotKind::Dm {
            assert_eq!(*there, meaning, "one key for two chats");
        }
    }
    slots
}

proptest! {
    #[test]
    fn two_people_never_share_a_dm_key_and_no_id_forges_another_key(
        messages in prop::collection::vec((any_policy(), any_identity(), any_chat()), 1..40)
    ) {
        let slots = play(&messages);
        for (policy, identity, chat) in &messages {
            let speaker = KeySender { identity, user_id: UserId::generate(), linked: false };
            let place = chat_key(*policy, speaker, chat);
            for key in [Some(place.key), place.otherwise].into_iter().flatten() {
                prop_assert!(key.len() <= 256 && key.bytes().all(|byte| byte.is_ascii_graphic()));
                // The key of an account or a chat is never used for anything else.
                if let Some((kind, _, about)) = slots.get(&key) {
                    prop_assert_eq!(*kind, place.kind);
                    let own = key == Keys::new("main", identity, chat).per_channel_peer();
                    if own {
                        prop_assert_eq!(about, &identity.to_string());
                    }
                }
            }
        }
    }

    #[test]
    fn linked_accounts_have_one_dm_key_and_groups_stay_where_they_are(
        (one, other) in (any_identity(), any_identity()),
        policy in any_policy(),
        chat in any_chat(),
    ) {
        let user_id = UserId::generate();
        let speak = |identity| KeySender { identity, user_id, linked: true };
        let here = chat_key(policy, speak(&one), &chat);
        let there = chat_key(policy, speak(&other), &chat);
        let is_dm = here.kind == SlotKind::Dm;
        if is_dm && policy.linked_sessions == LinkedSessions::Shared {
            prop_assert_eq!(&here, &there);
        } else if one.platform() != other.platform() {
            prop_assert_ne!(&here.key, &there.key);
        }
        let unlinked = KeySender { linked: false, ..speak(&one) };
        if !is_dm {
            prop_assert_eq!(here, chat_key(policy, unlinked, &chat));
        }
    }

    #[test]
    fn every_key_of_an_account_is_among_the_possible_ones(
        policy in any_policy(),
        identity in any_identity(),
        chat in any_chat(),
        linked in prop::bool::ANY,
    ) {
        let user_id = UserId::generate();
        let place = chat_key(policy, KeySender { identity: &identity, user_id, linked }, &chat);
        let mut possible = possible_keys("main", &identity, &chat);
        possible.push(user_key("main", user_id));
        for key in [Some(place.key), place.otherwise].into_iter().flatten() {
            prop_assert!(possible.contains(&key));
        }
    }
}
