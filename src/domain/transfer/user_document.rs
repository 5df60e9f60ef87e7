//! The document with all data of a user, written in parts, so that it never has to fit in memory. It
//! contains no secret: link codes without their text.

use chrono::{DateTime, NaiveDate, Utc};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::grant::GrantVia;
use crate::domain::conversation::message::{Content, Message, MessageKind, Role};
use crate::domain::conversation::slot::SlotKind;
use crate::domain::identity_links::MoveKind;
use crate::domain::people::access::Access;
use crate::domain::people::home_channel::HomeChannel;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::presence::Presence;
use crate::domain::people::user::{IdentityRecord, User};
use crate::domain::transfer::document::Document;
use crate::domain::transfer::export::write_open;
use crate::error::{Error, Result};
use crate::ids::{DeliveryId, IdentityId, SessionId, UserId};

const FORMAT: &str = "throughline.person";
const VERSION: u32 = 1;

/// All data of a user.
#[derive(utoipa::ToSchema)]
#[schema(as = PersonDocument)]
pub struct UserDocument {
    /// `throughline.person`.
    pub format: String,
    pub version: u32,
    pub exported_at: DateTime<Utc>,
    pub user: UserProfile,
    pub identities: Vec<UserIdentity>,
    /// Ids of the users that were merged into this one.
    pub merged_user_ids: Vec<UserId>,
    pub home_channels: Vec<UserHomeChannel>,
    pub presence: Vec<UserPresence>,
    pub session_keys: Vec<UserSessionKey>,
    /// The user's grants in conversations of others, and grants of others in the user's conversations.
    pub grants: Vec<UserGrant>,
    /// Link codes of the user. Their text is not stored.
    pub codes: Vec<UserCode>,
    /// The history of the user's identities.
    pub moves: Vec<UserMove>,
    pub deliveries: Vec<UserDelivery>,
    /// Monthly sums.
    pub usage: Vec<UserUsage>,
    /// Each can be imported unchanged. A conversation that was deleted during the export ends early, and
    /// its `signature` is null.
    pub conversations: Vec<Document>,
    /// The user's messages in conversations of others.
    pub messages_elsewhere: Vec<UserMessage>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonProfile)]
pub struct UserProfile {
    pub id: UserId,
    pub external_id: Option<String>,
    pub display_name: Option<String>,
    pub time_zone: Option<String>,
    /// The time since which all platforms share one key.
    pub linked_since: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonIdentity)]
pub struct UserIdentity {
    pub id: IdentityId,
    #[schema(value_type = IdentityName)]
    pub identity: String,
    pub raw: String,
    pub issuer: Option<String>,
    pub imported: bool,
    pub linked_at: DateTime<Utc>,
    pub created_at: DateTime<Utc>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonHomeChannel)]
pub struct UserHomeChannel {
    pub platform: PlatformScope,
    #[schema(value_type = IdentityName)]
    pub identity: String,
    pub chat: Chat,
    pub updated_at: DateTime<Utc>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonPresence)]
pub struct UserPresence {
    #[schema(value_type = IdentityName)]
    pub identity: String,
    pub last_seen_at: Option<DateTime<Utc>>,
    pub session_key: Option<String>,
    pub session_id: Option<String>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonSessionKey)]
pub struct UserSessionKey {
    pub session_key: String,
    /// All names of the key.
    pub names: Vec<String>,
    pub kind: SlotKind,
    pub agent: String,
    /// The current conversation.
    pub conversation_id: Option<SessionId>,
    pub generation: i64,
    pub created_at: DateTime<Utc>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonGrant)]
pub struct UserGrant {
    pub conversation_id: SessionId,
    /// The user who may read and write there.
    pub user_id: UserId,
    pub via: GrantVia,
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
    pub revoked_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonCode)]
pub struct UserCode {
    pub purpose: String,
    /// The identity in whose chat it was created.
    pub identity_id: IdentityId,
    pub platform: Option<String>,
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
    pub consumed_at: Option<DateTime<Utc>>,
    pub voided_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonMove)]
pub struct UserMove {
    pub identity_id: IdentityId,
    pub from_user_id: UserId,
    pub to_user_id: UserId,
    pub kind: MoveKind,
    pub reason: Option<String>,
    /// The names of the user that was merged.
    #[schema(value_type = Option<Object>)]
    pub profile: Option<Value>,
    pub created_at: DateTime<Utc>,
    pub undo_until: Option<DateTime<Utc>>,
    pub undone_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonDelivery)]
pub struct UserDelivery {
    pub id: DeliveryId,
    pub kind: String,
    pub platform: String,
    pub scope: Option<String>,
    pub chat: String,
    pub identity_id: IdentityId,
    /// The content.
    #[schema(value_type = Object)]
    pub payload: Value,
    pub state: String,
    pub created_at: DateTime<Utc>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonUsage)]
pub struct UserUsage {
    /// The first day of the month.
    pub month: NaiveDate,
    pub source: String,
    pub agent: Option<String>,
    pub model: Option<String>,
    pub requests: i64,
    pub turns: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = PersonMessage)]
pub struct UserMessage {
    pub conversation_id: SessionId,
    pub session_id: SessionId,
    pub seq: i64,
    pub role: Role,
    pub kind: MessageKind,
    #[schema(value_type = Option<Content>)]
    pub content: Option<Box<RawValue>>,
    pub identity: Option<String>,
    pub platform: Option<String>,
    pub token_count: i32,
    pub created_at: DateTime<Utc>,
}

impl UserMessage {
    pub fn new(conversation_id: SessionId, message: Message) -> Self {
        Self {
            conversation_id,
            session_id: message.session_id,
            seq: message.seq,
            role: message.role,
            kind: message.kind,
            content: message.content,
            identity: message.identity,
            platform: message.platform,
            token_count: message.token_count,
            created_at: message.created_at,
        }
    }

    pub fn size(&self) -> usize {
        self.content.as_ref().map_or(0, |text| text.get().len())
    }
}

/// The members before the long lists.
#[derive(Serialize)]
pub struct Head {
    format: &'static str,
    version: u32,
    exported_at: DateTime<Utc>,
    user: UserProfile,
    identities: Vec<UserIdentity>,
    merged_user_ids: Vec<UserId>,
    home_channels: Vec<UserHomeChannel>,
    presence: Vec<UserPresence>,
}

impl Head {
    pub fn new(user: User, exported_at: DateTime<Utc>) -> Self {
        Self {
            format: FORMAT,
            version: VERSION,
            exported_at,
            user: UserProfile {
                id: user.id,
                external_id: user.external_id,
                display_name: user.display_name,
                time_zone: user.time_zone,
                linked_since: user.shared_since,
                created_at: user.created_at,
            },
            identities: Vec::new(),
            merged_user_ids: Vec::new(),
            home_channels: Vec::new(),
            presence: Vec::new(),
        }
    }

    pub fn with_identities(mut self, records: Vec<IdentityRecord>, merged: Vec<UserId>) -> Self {
        let identity = |record: IdentityRecord| UserIdentity {
            id: record.id,
            identity: record.name.to_string(),
            raw: record.raw,
            issuer: record.issuer,
            imported: record.imported,
            linked_at: record.linked_at,
            created_at: record.created_at,
        };
        self.identities = records.into_iter().map(identity).collect();
        self.merged_user_ids = merged;
        self
    }

    pub fn with_channels_and_presence(
        mut self,
        homes: Vec<HomeChannel>,
        presence: Vec<Presence>,
        access: &Access,
    ) -> Self {
        let home = |home: HomeChannel| UserHomeChannel {
            platform: home.platform,
            identity: home.identity.name.to_string(),
            chat: home.chat,
            updated_at: home.updated_at,
        };
        let presence_of = |one: Presence| UserPresence {
            identity: one.identity.name.to_string(),
            last_seen_at: one.last_seen_at,
            session_key: one.session_key,
            session_id: one.session.map(|session| session.public_id(access)),
        };
        self.home_channels = homes.into_iter().map(home).collect();
        self.presence = presence.into_iter().map(presence_of).collect();
        self
    }
}

/// Writes the lists of the document, one after the other.
pub struct UserDocumentWriter {
    after_item: bool,
}

impl UserDocumentWriter {
    /// Writes the head, and the beginning of the first list.
    pub fn begin(head: &Head, list: &str, out: &mut Vec<u8>) -> Result<Self> {
        write_open(head, list, out)?;
        Ok(Self { after_item: false })
    }

    pub fn item(&mut self, item: &impl Serialize, out: &mut Vec<u8>) -> Result<()> {
        self.next(out);
        serde_json::to_writer(out, item).map_err(Error::internal)
    }

    /// Writes the separator before an item that the caller writes.
    pub fn next(&mut self, out: &mut Vec<u8>) {
        if self.after_item {
            out.push(b',');
        }
        out.push(b'\n');
        self.after_item = true;
    }

    /// Ends a list and starts another.
    pub fn list(&mut self, list: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(format!("],\n\"{list}\":[").as_bytes());
        self.after_item = false;
    }

    pub fn end(self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"]}\n");
    }
}
