//! Use case of what bridges bring in: one call resolves who speaks and where, takes the message once, does
//! what a command asks, or lets the agent answer. Everything up to the acknowledgement is one transaction of
//! the caller's.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;

use crate::agent_runtime::Agent;
use crate::app::App;
use crate::domain::bridge::chat::Chat;
use crate::domain::bridge::chat_text::chat_text;
use crate::domain::bridge::command::Command;
use crate::domain::bridge::delivery::{Address, ReplyTo, ReplyVia};
use crate::domain::bridge::inbound;
use crate::domain::conversation::session::{ConversationHandle, Permission};
use crate::domain::conversation::session_name::SessionRef;
use crate::domain::people::access::{Access, Namespace};
use crate::domain::people::user::Identity;
use crate::domain::tenant::agent::{ChatType, GroupScope, OnBusy};
use crate::domain::turn::{ResetInfo, Turn, TurnInput};
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::{BootId, TurnId, UserId};
use crate::sessions;
use crate::store::TenantTx;
use crate::store::bridge::inbound_receipts::{self, ReceiptName};
use crate::store::bridge::replies;
use crate::store::turn::turns as rows;
use crate::turns::{self, Accepted, RunnableTurn, Target, TurnRequest};

mod commands;
mod here;
mod linking;

pub use linking::{Preview, preview};

/// How long a message is remembered: until then it is taken once.
pub const REMEMBERED: TimeDelta = TimeDelta::days(30);

/// Who brings a message in, and for whom.
#[derive(Debug, Clone)]
pub struct Sender {
    pub identity: Identity,
    pub user_id: UserId,
    pub namespace: Namespace,
    /// The credential and the account, for retries.
    pub principal: String,
    /// The credential, for the audit.
    pub actor: String,
}

impl Sender {
    /// With the rights of the person.
    fn access(&self) -> Access {
        Access {
            namespace: self.namespace,
            ..Access::of_bridge_key(self.user_id, Some(self.identity.clone()), false)
        }
    }

    /// As the service sees a chat of several, which belongs to nobody: whoever speaks there may move it.
    fn viewer_of_shared(&self) -> Access {
        Access {
            namespace: self.namespace,
            ..Access::of_service(self.user_id, self.identity.clone())
        }
    }
}

/// A message as it was brought.
pub struct Message<'a> {
    pub chat: &'a Chat,
    pub address: &'a Address,
    pub text: &'a str,
    pub attachments: &'a [Value],
    pub message_id: Option<&'a str>,
    pub sent_at: Option<DateTime<Utc>>,
    pub display_name: Option<&'a str>,
    pub agent: Arc<Agent>,
    pub on_busy: Option<OnBusy>,
    /// Whether somebody waits for the answer.
    pub waits: bool,
    /// What the code of a `/link` would do.
    pub preview: Option<Preview>,
}

impl Message<'_> {
    fn is_private(&self) -> bool {
        self.chat.kind == ChatType::Dm
    }

    /// Whether several people speak in one session here.
    fn is_shared(&self) -> bool {
        match self.chat.kind {
            ChatType::Dm => false,
            ChatType::Thread => true,
            ChatType::Group | ChatType::Channel => {
                self.agent.spec.group_scope == GroupScope::Shared
            }
        }
    }
}

/// Something that the service itself says beside the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Notice {
    pub code: String,
    pub text: String,
}

/// What a command did. Kept, so that the same message has the same answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CommandAnswer {
    pub text: String,
    pub notices: Vec<Notice>,
    pub session_key: Option<String>,
    pub session_id: Option<String>,
    pub conversation_id: Option<String>,
    pub reset: Option<ResetInfo>,
}

impl CommandAnswer {
    fn saying(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            notices: Vec::new(),
            session_key: None,
            session_id: None,
            conversation_id: None,
            reset: None,
        }
    }

    fn with_notice(mut self, code: Code) -> Self {
        self.notices.push(Notice {
            code: code.as_str().to_owned(),
            text: chat_text(code).to_owned(),
        });
        self
    }
}

/// What has to be done after the commit.
#[derive(Debug, Default)]
pub struct After {
    /// Turns that were asked to stop, and the nodes to tell.
    pub stopped: Vec<(TurnId, Option<BootId>)>,
    /// A turn that is this node's to run, and that nobody waits for.
    pub next: Option<Box<RunnableTurn>>,
    /// Whether the outbox has something new.
    pub delivers: bool,
}

/// What a command came to.
pub enum Done {
    Answered(Box<CommandAnswer>, After),
    /// The last message is answered anew.
    Again(TurnInput),
}

/// What was taken in before under the same name.
pub enum Before {
    Turn(TurnId),
    Command(CommandAnswer),
    /// Nothing came of it but that it is known.
    Nothing,
}

fn name<'a>(speaker: &Sender, message: &Message<'a>) -> Option<ReceiptName<'a>> {
    Some(ReceiptName {
        address: message.address,
        identity_id: speaker.identity.id,
        message_id: message.message_id?,
        sent_at: message.sent_at,
    })
}

/// Takes a message, or answers what became of it when it was taken before. A twin waits until that is known.
pub async fn claim(
    app: &App,
    tx: &mut TenantTx,
    speaker: &Sender,
    message: &Message<'_>,
) -> Result<Option<Before>> {
    let Some(name) = name(speaker, message) else {
        return Ok(None);
    };
    let now = app.clock.now();
    if inbound_receipts::claim(tx, name, now, now - REMEMBERED).await? {
        return Ok(None);
    }
    let known = inbound_receipts::find(tx, name).await?;
    let gone = || Error::internal(anyhow::anyhow!("a receipt vanished while it was read"));
    let known = known.ok_or_else(gone)?;
    if let Some(turn_id) = known.turn_id {
        return Ok(Some(Before::Turn(turn_id)));
    }
    let Some(sealed) = known.answer_enc else {
        return Ok(Some(Before::Nothing));
    };
    let plain = app.keyring.open(&context(tx, name), &sealed);
    let plain = plain.map_err(Error::internal)?;
    let answer = serde_json::from_slice(&plain).map_err(Error::internal)?;
    Ok(Some(Before::Command(answer)))
}

fn context(tx: &TenantTx, name: ReceiptName<'_>) -> String {
    let address = name.address;
    let place = [&address.platform, &address.scope, &address.chat_ref].map(String::as_str);
    inbound_receipts::seal_context(tx.tenant_id(), place, name.identity_id, name.message_id)
}

/// Lets the agent answer: the turn is accepted in `tx`.
pub async fn ask(
    app: &App,
    tx: &mut TenantTx,
    speaker: &Sender,
    message: &Message<'_>,
    input: TurnInput,
) -> Result<Accepted> {
    let reply_to = ReplyTo {
        address: message.address.clone(),
        identity_id: speaker.identity.id,
        message_id: message.message_id.map(str::to_owned),
    };
    let via = if message.waits {
        ReplyVia::Waiting
    } else {
        ReplyVia::Delivery
    };
    let said = serde_json::to_vec(&input.messages).map_err(Error::internal)?;
    let access = speaker.access();
    let asked = TurnRequest {
        access: &access,
        place: Target::Chat {
            identity: speaker.identity.clone(),
            chat: message.chat.clone(),
        },
        agent: message.agent.clone(),
        input,
        principal: &speaker.principal,
        hash: crate::crypto::sha256(&said),
        is_retry: false,
        on_busy: message.on_busy,
        reply: Some((reply_to, via)),
    };
    let accepted = turns::accept(app, tx, asked, app.clock.now()).await?;
    if let Some(name) = name(speaker, message) {
        inbound_receipts::update(tx, name, Some(accepted.turn_id), None, None).await?;
    }
    Ok(accepted)
}

/// What a message says to the agent.
pub fn input(message: &Message<'_>, text: &str, speaker: &Sender) -> Result<TurnInput> {
    let own_name = speaker.identity.name.external_id();
    let shared = message.is_shared();
    let speaks = shared.then(|| message.display_name.unwrap_or(own_name));
    let content = inbound::content(text, message.attachments, speaks).map_err(|error| {
        let error = FieldError::new("/attachments", error.to_string());
        Error::fields(Code::InvalidRequest, vec![error])
    })?;
    Ok(TurnInput::said([content]))
}

/// Does what a command asks, in `tx`, and keeps the answer.
pub async fn command(
    app: &App,
    tx: &mut TenantTx,
    speaker: &Sender,
    message: &Message<'_>,
    command: &Command,
) -> Result<Done> {
    let done = if command.is_private() && !message.is_private() {
        linking::refuse_in_public()
    } else {
        commands::run(app, tx, speaker, message, command).await?
    };
    if let (Done::Answered(answer, _), Some(name)) = (&done, name(speaker, message)) {
        let plain = serde_json::to_vec(answer).map_err(Error::internal)?;
        let sealed = app.keyring.seal(&context(tx, name), &plain)?;
        inbound_receipts::update(tx, name, None, Some(&sealed), None).await?;
    }
    Ok(done)
}

/// A changed message: one that still waits is replaced, any other that was brought is only kept. Answers its
/// turn.
pub async fn edit(
    app: &App,
    tx: &mut TenantTx,
    speaker: &Sender,
    message: &Message<'_>,
    input: &TurnInput,
) -> Result<Option<TurnId>> {
    let Some(name) = name(speaker, message) else {
        let error = FieldError::new("/message_id", "says which message is changed");
        return Err(Error::invalid(vec![error]));
    };
    // Of a message that was never brought there is nothing to change; it may still come.
    let Some(known) = inbound_receipts::find(tx, name).await? else {
        return Ok(None);
    };
    let turn_id = known.turn_id;
    if let Some(turn_id) = turn_id {
        find_before(app, tx, speaker, turn_id).await?;
        let replaced = replies::update_queued(tx, turn_id, input).await?;
        if replaced {
            return Ok(Some(turn_id));
        }
    }
    let kept = serde_json::to_value(&input.messages).map_err(Error::internal)?;
    inbound_receipts::update(tx, name, None, None, Some(&kept)).await?;
    Ok(turn_id)
}

/// The turn of a message that was taken before, and the name of its conversation, if that is still there for
/// who brought it: whose it is, may have changed.
pub async fn find_before(
    app: &App,
    tx: &mut TenantTx,
    speaker: &Sender,
    turn_id: TurnId,
) -> Result<(Turn, ConversationHandle)> {
    let turn = rows::get(tx, turn_id).await?;
    let session = SessionRef::Id(turn.conversation_id);
    let everyone = speaker.viewer_of_shared();
    let now = app.clock.now();
    let tip = sessions::find(tx, &everyone, &session, Permission::Participate, now).await?;
    if tip.owner.user_id.is_some() {
        tip.owner
            .check(&speaker.access(), Permission::Participate)?;
    }
    Ok((turn, tip.name))
}

/// How long somebody may wait for an answer, from when the turn was accepted.
const PATIENCE: TimeDelta = TimeDelta::seconds(55);

/// How much longer somebody waits for a turn that was accepted at `accepted`.
pub fn patience_left(accepted: DateTime<Utc>, now: DateTime<Utc>) -> std::time::Duration {
    (accepted + PATIENCE - now).to_std().unwrap_or_default()
}
