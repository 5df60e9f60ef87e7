//! The session that somebody speaks in, and those they could go on with: in their own chat their own, in a
//! group only that chat's.

use chrono::{DateTime, Utc};

use super::{CommandAnswer, InboundMessage, Sender};
use crate::domain::conversation::session::{Permission, Session, Tip};
use crate::domain::conversation::session_name::{SessionKey, SessionRef};
use crate::domain::people::access::Access;
use crate::domain::turn::ResetInfo;
use crate::domain::values::paging::PageRequest;
use crate::error::{Error, Result};
use crate::ids::SlotId;
use crate::people;
use crate::sessions;
use crate::store::TenantTx;
use crate::store::conversation::conversations::{self, Filter};
use crate::store::conversation::slots;

/// As many as are shown.
const SHOWN: u32 = 10;
/// As many as a title is looked for among.
const SEARCHED: u32 = 200;

pub struct Here {
    pub slot_id: SlotId,
    pub key: SessionKey,
    pub tip: Tip,
    /// With whose eyes the chat's sessions are seen.
    pub access: Access,
    pub reset: Option<ResetInfo>,
    is_private: bool,
    agent: String,
    sender: Sender,
}

impl Here {
    /// Where a message in this chat would go; as with a message, an old session is reset.
    pub async fn find(
        tx: &mut TenantTx,
        sender: &Sender,
        message: &InboundMessage<'_>,
        now: DateTime<Utc>,
    ) -> Result<Self> {
        let asked = people::ResolveRequest {
            identity: &sender.identity.name,
            agent: &message.agent.name,
            chat: message.chat,
            namespace: sender.namespace,
        };
        let resolved = people::resolve(tx, asked, now).await?;
        let resolved = resolved.ok_or_else(|| Error::not_found("user"))?;
        let access = match resolved.session.name.user_id {
            None => sender.shared_access(),
            Some(_) => sender.access(),
        };
        let session = SessionRef::Id(resolved.session.id);
        let tip = sessions::find(tx, &access, &session, Permission::Manage, now).await?;
        Ok(Self {
            slot_id: resolved.slot_id,
            key: SessionKey::built(resolved.session_key),
            tip,
            reset: resolved.reset.map(|(reason, before)| ResetInfo {
                reason: reason.as_str().to_owned(),
                previous_session_id: before.public_id(&access),
            }),
            access,
            is_private: message.is_private(),
            agent: message.agent.name.clone(),
            sender: sender.clone(),
        })
    }

    /// The sessions that can be gone on with, newest first.
    async fn list(&self, tx: &mut TenantTx, limit: u32) -> Result<Vec<Session>> {
        let filter = Filter {
            user_id: self.is_private.then_some(self.sender.user_id),
            slot_id: (!self.is_private).then_some(self.slot_id),
            agent: Some(self.agent.clone()),
            state: None,
            archived: Some(false),
        };
        let page = PageRequest { limit, after: None };
        Ok(conversations::list(tx, &self.access, &filter, &page)
            .await?
            .rows)
    }

    pub async fn show_list(&self, tx: &mut TenantTx) -> Result<String> {
        let listed = self.list(tx, SHOWN).await?;
        let current = self.tip.name.conversation_id;
        let line = |(place, session): (usize, &Session)| {
            let title = session.title.as_deref().unwrap_or("untitled");
            let mark = if session.name.conversation_id == current {
                " (this one)"
            } else {
                ""
            };
            let messages = session.message_count;
            let day = session.last_active_at.format("%Y-%m-%d");
            format!("{}. {title}: {messages} messages, {day}{mark}", place + 1)
        };
        let lines: Vec<String> = listed.iter().enumerate().map(line).collect();
        Ok(if lines.is_empty() {
            "There are no sessions here yet.".to_owned()
        } else {
            format!(
                "{}\nGo on with one: /resume and its number or title.",
                lines.join("\n")
            )
        })
    }

    /// The session that somebody means by a number of the list, an id or a title.
    pub async fn choose(
        &self,
        tx: &mut TenantTx,
        which: &str,
        now: DateTime<Utc>,
    ) -> Result<Option<SessionRef>> {
        if let Ok(number) = which.parse::<usize>() {
            let listed = self.list(tx, SHOWN).await?;
            let chosen = number.checked_sub(1).and_then(|place| listed.get(place));
            return Ok(chosen.map(|session| SessionRef::Id(session.id)));
        }
        let listed = self.list(tx, SEARCHED).await?;
        let titled = |session: &&Session| {
            let title = session.title.as_deref().unwrap_or_default();
            title.to_lowercase() == which.to_lowercase()
        };
        if let Some(session) = listed.iter().find(titled) {
            return Ok(Some(SessionRef::Id(session.id)));
        }
        let Ok(named) = SessionRef::parse(which, "/text") else {
            return Ok(None);
        };
        let Ok(tip) = sessions::find(tx, &self.access, &named, Permission::Manage, now).await
        else {
            return Ok(None);
        };
        let known = slots::has_conversation(tx, self.slot_id, tip.name.conversation_id).await?;
        // In a chat of several, what is not of that chat is not there.
        Ok((self.is_private || known).then_some(SessionRef::Id(tip.session_id)))
    }

    /// The answer of a command, with where things stand after it.
    pub async fn answer(
        &self,
        tx: &mut TenantTx,
        text: impl Into<String>,
        now: DateTime<Utc>,
    ) -> Result<CommandAnswer> {
        let slot = slots::get(tx, &self.access, self.slot_id, now).await?;
        let shown = self.sender.access();
        let current = slot.current;
        let current = current.as_ref();
        Ok(CommandAnswer {
            session_key: Some(slot.key.clone()),
            session_id: current.map(|c| c.name.public_session_id(c.session_id, &shown)),
            conversation_id: current.map(|c| c.name.public_id(&shown)),
            reset: self.reset.clone(),
            ..CommandAnswer::saying(text)
        })
    }
}
