//! Messages of platforms: one call resolves the sender and the chat, takes the message once, runs a slash command or
//! lets the agent answer. Everything up to the acknowledgement is one transaction.
//!
//! Operations: `receive`, and `Received::finish`, which waits. The functions of this file are steps.

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
use crate::ids::{TurnId, UserId};
use crate::sessions;
use crate::store::TenantTx;
use crate::store::bridge::inbound_receipts::{self, ReceiptName};
use crate::store::bridge::replies;
use crate::store::turn::turns as rows;
use crate::turns::{self, Accepted, AcceptedTurn, RunnableTurn, Target, TurnRequest};

mod commands;
mod here;
mod linking;
mod receive;
mod response;
mod wait;

pub use linking::Preview;
use linking::preview;
pub use receive::{InboundCaller, Received, receive};
pub use response::{InboundResponse, Notice};

/// How long the receipt of a message is stored: until then a second copy of the message is recognised.
pub const RECEIPT_RETENTION: TimeDelta = TimeDelta::days(30);

/// The identity that sent a message, and the credential that brought it.
#[derive(Debug, Clone)]
pub struct Sender {
    pub identity: Identity,
    pub user_id: UserId,
    pub namespace: Namespace,
    /// The credential and the identity, for retries.
    pub principal: String,
    /// The credential, for the audit.
    pub actor: String,
}

impl Sender {
    /// The user's own rights.
    fn access(&self) -> Access {
        Access {
            namespace: self.namespace,
            ..Access::of_bridge_key(self.user_id, Some(self.identity.clone()), false)
        }
    }

    /// The rights in a shared chat, which has no owner: each sender may change its session.
    fn shared_access(&self) -> Access {
        Access {
            namespace: self.namespace,
            ..Access::of_service(self.user_id, self.identity.clone())
        }
    }
}

/// A message as its bridge sent it.
pub struct InboundMessage<'a> {
    pub chat: &'a Chat,
    pub address: &'a Address,
    pub text: &'a str,
    pub attachments: &'a [Value],
    pub message_id: Option<&'a str>,
    pub sent_at: Option<DateTime<Utc>>,
    pub display_name: Option<&'a str>,
    pub agent: Arc<Agent>,
    pub on_busy: Option<OnBusy>,
    /// Whether the agent was addressed, in a chat of several users.
    pub mentioned: Option<bool>,
    /// Whether it changes a message that was sent before.
    pub is_edit: bool,
    /// Whether the caller waits for the answer.
    pub waits: bool,
    /// What the code of a `/link` would do.
    pub preview: Option<Preview>,
}

impl InboundMessage<'_> {
    fn is_private(&self) -> bool {
        self.chat.kind == ChatType::Dm
    }

    /// Whether several users share one session here.
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

/// The turn of a message.
#[derive(Debug, Clone)]
pub struct InboundTurn {
    pub turn: AcceptedTurn,
    /// The sender's user when it was accepted.
    pub user_id: UserId,
    pub is_duplicate: bool,
}

/// What a command answered. It is stored, so that the same message gets the same answer.
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

pub enum CommandResult {
    /// And the turn that starts because of it: `start` it after the commit.
    Answered(Box<CommandAnswer>, Option<Box<RunnableTurn>>),
    /// The agent answers the last message again.
    AskAgain(TurnInput),
}

/// The result of an earlier message of the same name.
enum EarlierMessage {
    Turn(TurnId),
    Command(CommandAnswer),
    Unanswered,
}

fn receipt_name<'a>(sender: &Sender, message: &InboundMessage<'a>) -> Option<ReceiptName<'a>> {
    Some(ReceiptName {
        address: message.address,
        identity_id: sender.identity.id,
        message_id: message.message_id?,
        sent_at: message.sent_at,
    })
}

/// Claims a message, or answers the result of its first copy. A second copy waits here until that is
/// committed.
async fn claim(
    app: &App,
    tx: &mut TenantTx,
    sender: &Sender,
    message: &InboundMessage<'_>,
) -> Result<Option<EarlierMessage>> {
    let Some(name) = receipt_name(sender, message) else {
        return Ok(None);
    };
    let now = app.clock.now();
    if inbound_receipts::claim(tx, name, now, now - RECEIPT_RETENTION).await? {
        return Ok(None);
    }
    let Some(receipt) = inbound_receipts::find(tx, name).await? else {
        let detail = "a receipt vanished while it was read";
        return Err(Error::internal(anyhow::anyhow!(detail)));
    };
    if let Some(turn_id) = receipt.turn_id {
        return Ok(Some(EarlierMessage::Turn(turn_id)));
    }
    let Some(sealed) = receipt.answer_enc else {
        return Ok(Some(EarlierMessage::Unanswered));
    };
    let plain = app.keyring.open(&context(tx, name), &sealed);
    let plain = plain.map_err(Error::internal)?;
    let answer = serde_json::from_slice(&plain).map_err(Error::internal)?;
    Ok(Some(EarlierMessage::Command(answer)))
}

fn context(tx: &TenantTx, name: ReceiptName<'_>) -> String {
    let address = name.address;
    let place = [&address.platform, &address.scope, &address.chat_ref].map(String::as_str);
    inbound_receipts::seal_context(tx.tenant_id(), place, name.identity_id, name.message_id)
}

/// Accepts the message as a turn.
async fn accept(
    app: &App,
    tx: &mut TenantTx,
    sender: &Sender,
    message: &InboundMessage<'_>,
    input: TurnInput,
) -> Result<Accepted> {
    let reply_to = ReplyTo {
        address: message.address.clone(),
        identity_id: sender.identity.id,
        message_id: message.message_id.map(str::to_owned),
    };
    let via = if message.waits {
        ReplyVia::Waiting
    } else {
        ReplyVia::Delivery
    };
    let access = sender.access();
    let request = TurnRequest {
        access: &access,
        target: Target::Chat {
            identity: sender.identity.clone(),
            chat: message.chat.clone(),
        },
        agent: message.agent.clone(),
        input,
        principal: &sender.principal,
        is_retry: false,
        on_busy: message.on_busy,
        reply: Some((reply_to, via)),
    };
    let accepted = turns::accept(app, tx, request, app.clock.now()).await?;
    if let Some(name) = receipt_name(sender, message) {
        inbound_receipts::update(tx, name, Some(accepted.turn_id), None, None).await?;
    }
    Ok(accepted)
}

/// The input of a message's turn.
fn input(message: &InboundMessage<'_>, text: &str, sender: &Sender) -> Result<TurnInput> {
    let own_name = sender.identity.name.external_id();
    let author = message
        .is_shared()
        .then(|| message.display_name.unwrap_or(own_name));
    let content = inbound::content(text, message.attachments, author).map_err(|error| {
        let error = FieldError::new("/attachments", error.to_string());
        Error::fields(Code::InvalidRequest, vec![error])
    })?;
    Ok(TurnInput::from_contents([content]))
}

/// Runs a command, and stores its answer.
async fn command(
    app: &App,
    tx: &mut TenantTx,
    sender: &Sender,
    message: &InboundMessage<'_>,
    command: &Command,
) -> Result<CommandResult> {
    let result = if command.is_private() && !message.is_private() {
        linking::refuse_in_public()
    } else {
        commands::run(app, tx, sender, message, command).await?
    };
    if let (CommandResult::Answered(answer, _), Some(name)) =
        (&result, receipt_name(sender, message))
    {
        let plain = serde_json::to_vec(answer).map_err(Error::internal)?;
        let sealed = app.keyring.seal(&context(tx, name), &plain)?;
        inbound_receipts::update(tx, name, None, Some(&sealed), None).await?;
    }
    Ok(result)
}

/// Changes a message: replaces it while it waits in the queue, and otherwise only stores the change. Answers its turn.
async fn edit(
    app: &App,
    tx: &mut TenantTx,
    sender: &Sender,
    message: &InboundMessage<'_>,
    input: &TurnInput,
) -> Result<Option<TurnId>> {
    let Some(name) = receipt_name(sender, message) else {
        let error = FieldError::new("/message_id", "says which message is changed");
        return Err(Error::invalid(vec![error]));
    };
    // The message itself may still come.
    let Some(receipt) = inbound_receipts::find(tx, name).await? else {
        return Ok(None);
    };
    let turn_id = receipt.turn_id;
    if let Some(turn_id) = turn_id {
        find_earlier_turn(app, tx, sender, turn_id).await?;
        let replaced = replies::update_queued(tx, turn_id, input).await?;
        if replaced {
            return Ok(Some(turn_id));
        }
    }
    let edited = serde_json::to_value(&input.messages).map_err(Error::internal)?;
    inbound_receipts::update(tx, name, None, None, Some(&edited)).await?;
    Ok(turn_id)
}

/// The turn of an earlier copy of a message, and its conversation, if the sender may still take part in that: its
/// owner may have changed.
async fn find_earlier_turn(
    app: &App,
    tx: &mut TenantTx,
    sender: &Sender,
    turn_id: TurnId,
) -> Result<(Turn, ConversationHandle)> {
    let turn = rows::get(tx, turn_id).await?;
    let session = SessionRef::Id(turn.conversation_id);
    let shared = sender.shared_access();
    let now = app.clock.now();
    let tip = sessions::find(tx, &shared, &session, Permission::Participate, now).await?;
    if tip.owner.user_id.is_some() {
        tip.owner.check(&sender.access(), Permission::Participate)?;
    }
    Ok((turn, tip.name))
}
