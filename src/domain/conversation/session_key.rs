//! The keys that the service builds: which slot a message belongs to, from who speaks, where, and what
//! the agent's policy says. A pure function, and the only place that spells such a key.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::crypto;
use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session_name::MAX_NAME;
use crate::domain::conversation::slot::SlotKind;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::agent::{AgentSpec, ChatType, DmScope, GroupScope, LinkedSessions};
use crate::ids::UserId;

const HASH_CHARS: usize = 22;

/// What an agent decides about its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyPolicy<'a> {
    pub agent: &'a str,
    pub dm_scope: DmScope,
    pub linked_sessions: LinkedSessions,
    pub group_scope: GroupScope,
}

impl<'a> KeyPolicy<'a> {
    /// The agent's own policy; the tenant's DM scope where the agent has none.
    pub fn for_agent(agent: &'a str, spec: &AgentSpec, tenant: Option<DmScope>) -> Self {
        Self {
            agent,
            dm_scope: spec.dm_scope.or(tenant).unwrap_or(DmScope::PerChannelPeer),
            linked_sessions: spec.linked_sessions,
            group_scope: spec.group_scope,
        }
    }
}

/// Who speaks.
#[derive(Debug, Clone, Copy)]
pub struct KeySender<'a> {
    pub identity: &'a IdentityName,
    pub user_id: UserId,
    /// Whether the user is or was linked.
    pub linked: bool,
}

/// The slot of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatKey {
    pub kind: SlotKind,
    /// The person it belongs to; a shared chat belongs to nobody.
    pub owner: Option<UserId>,
    pub key: String,
    /// The key to take when the slot of the first one is another person's.
    pub otherwise: Option<String>,
}

/// Where a message of `speaker` in `chat` belongs.
pub fn chat_key(policy: KeyPolicy<'_>, speaker: KeySender<'_>, chat: &Chat) -> ChatKey {
    let keys = Keys::new(policy.agent, speaker.identity, chat);
    let own = Some(speaker.user_id);
    match chat_kind(chat) {
        ChatType::Dm => {
            let shared = speaker.linked && policy.linked_sessions == LinkedSessions::Shared;
            let (key, otherwise) = match (shared, speaker.linked, policy.dm_scope) {
                (true, _, _) => (user_key(policy.agent, speaker.user_id), None),
                (false, true, _) | (false, false, DmScope::PerChannelPeer) => {
                    (keys.per_channel_peer(), None)
                }
                (false, false, DmScope::PerPeer) => {
                    (keys.per_peer(), Some(keys.per_channel_peer()))
                }
                (false, false, DmScope::Main) => (keys.main(), Some(keys.per_channel_peer())),
            };
            ChatKey {
                kind: SlotKind::Dm,
                owner: own,
                key,
                otherwise,
            }
        }
        ChatType::Group | ChatType::Channel => {
            let (owner, key) = match policy.group_scope {
                GroupScope::PerMember => (own, keys.member()),
                GroupScope::Shared => (None, keys.group()),
            };
            ChatKey {
                kind: SlotKind::Group,
                owner,
                key,
                otherwise: None,
            }
        }
        ChatType::Thread => ChatKey {
            kind: SlotKind::Thread,
            owner: None,
            key: keys.thread(),
            otherwise: None,
        },
    }
}

/// Every key that `chat_key` could answer for an unlinked speaker, whatever the policy: so that one
/// statement can look for all of them. A linked speaker's is `user_key`.
pub fn possible_keys(agent: &str, identity: &IdentityName, chat: &Chat) -> Vec<String> {
    let keys = Keys::new(agent, identity, chat);
    match chat_kind(chat) {
        ChatType::Dm => vec![keys.per_channel_peer(), keys.per_peer(), keys.main()],
        ChatType::Group | ChatType::Channel => vec![keys.member(), keys.group()],
        ChatType::Thread => vec![keys.thread()],
    }
}

/// The one slot of a linked person, on all platforms.
pub fn user_key(agent: &str, user_id: UserId) -> String {
    format!("{}{}", user_key_prefix(agent), user_id.as_uuid().simple())
}

/// A user's key up to the digits of the id.
pub fn user_key_prefix(agent: &str) -> String {
    format!("agent:{agent}:user:{}_", UserId::PREFIX)
}

/// A group with topics is told apart by them.
fn chat_kind(chat: &Chat) -> ChatType {
    match (chat.kind, &chat.thread_id) {
        (ChatType::Group | ChatType::Channel, Some(_)) => ChatType::Thread,
        (kind, _) => kind,
    }
}

struct Keys<'a> {
    agent: &'a str,
    platform: String,
    peer: String,
    chat: String,
    thread: String,
}

impl<'a> Keys<'a> {
    fn new(agent: &'a str, identity: &IdentityName, chat: &Chat) -> Self {
        let encode_some = |id: &Option<String>| id.as_deref().map(encode).unwrap_or_default();
        Self {
            agent,
            platform: encode_platform(&chat.platform_of(identity)),
            peer: encode(identity.external_id()),
            chat: encode_some(&chat.id),
            thread: encode_some(&chat.thread_id),
        }
    }

    fn per_channel_peer(&self) -> String {
        bounded(format!(
            "agent:{}:{}:dm:{}",
            self.agent, self.platform, self.peer
        ))
    }

    fn per_peer(&self) -> String {
        bounded(format!("agent:{}:dm:{}", self.agent, self.peer))
    }

    fn main(&self) -> String {
        bounded(format!("agent:{}:main", self.agent))
    }

    fn group(&self) -> String {
        bounded(format!(
            "agent:{}:{}:group:{}",
            self.agent, self.platform, self.chat
        ))
    }

    fn member(&self) -> String {
        let agent = self.agent;
        let platform = &self.platform;
        bounded(format!(
            "agent:{agent}:{platform}:group:{}:{}",
            self.chat, self.peer
        ))
    }

    fn thread(&self) -> String {
        let agent = self.agent;
        let platform = &self.platform;
        bounded(format!(
            "agent:{agent}:{platform}:thread:{}:{}",
            self.chat, self.thread
        ))
    }
}

fn encode_platform(platform: &PlatformScope) -> String {
    match platform.scope() {
        Some(scope) => format!("{}@{}", platform.platform(), encode(scope)),
        None => platform.platform().to_owned(),
    }
}

/// Keys are visible ASCII, and a colon parts them: whatever could break that is percent-encoded.
pub fn encode(id: &str) -> String {
    let mut encoded = String::with_capacity(id.len());
    for byte in id.bytes() {
        match byte {
            b':' | b'%' => encoded.push_str(&format!("%{byte:02X}")),
            byte if byte.is_ascii_graphic() => encoded.push(char::from(byte)),
            byte => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

/// A key that is too long keeps its beginning and ends in a hash of the whole. One that happens to look
/// like that is hashed too, so that no id can spell the key of another.
fn bounded(key: String) -> String {
    let kept = MAX_NAME - HASH_CHARS - 1;
    let looks_hashed = key.len() == MAX_NAME && key.as_bytes().get(kept) == Some(&b'~');
    if key.len() <= MAX_NAME && !looks_hashed {
        return key;
    }
    let hash = URL_SAFE_NO_PAD.encode(crypto::sha256(key.as_bytes()));
    // Everything in a key is ASCII, so any place is a boundary.
    format!("{}~{}", &key[..kept], &hash[..HASH_CHARS])
}

#[cfg(test)]
#[path = "session_key_tests.rs"]
mod tests;
