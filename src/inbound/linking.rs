//! `/link`, `/unlink` and `/sethome`, which work only in a DM. A code that was shown elsewhere is void.

use chrono::TimeDelta;

use super::{CommandAnswer, CommandResult, InboundMessage, Sender};
use crate::app::App;
use crate::domain::bridge::chat_text::chat_text;
use crate::domain::bridge::command::{Command, LinkCommand};
use crate::domain::people::user::IdentityOwner;
use crate::error::{Code, Error, Result};
use crate::people::{self, NewHomeChannel, RedeemRequest};
use crate::store::TenantTx;
use crate::store::conversation::slot_aliases::{self, Continuation};
use crate::store::identity_links::pending_links;
use crate::store::people::identities;

/// How long a code waits for its confirmation.
const CONFIRM_WITHIN: TimeDelta = TimeDelta::minutes(2);

/// The answer where others read: it shows no code, name or title.
pub fn refuse_in_public() -> CommandResult {
    let answer = CommandAnswer::saying("This is only done in a direct chat with me.")
        .with_notice(Code::PrivateChatRequired);
    CommandResult::Answered(Box::new(answer), None)
}

/// The identities that a code would join; found in a transaction that is rolled back, after an attempt was charged.
pub enum Preview {
    Joins(Vec<String>),
    Refused(Code),
}

/// Finds what a code would do. The caller drops `tx`.
pub async fn preview(app: &App, tx: &mut TenantTx, sender: &Sender, code: &str) -> Result<Preview> {
    let redeem = RedeemRequest {
        code,
        identity: &sender.identity,
        namespace: sender.namespace,
        dry_run: true,
    };
    match people::redeem(app, tx, &sender.actor, &redeem).await {
        Ok(redeemed) => {
            let mut names = Vec::new();
            for user_id in [redeemed.merge.into, redeemed.merge.from] {
                let accounts = identities::list(tx, user_id).await?;
                names.extend(accounts.iter().map(|one| one.name.to_string()));
            }
            Ok(Preview::Joins(names))
        }
        Err(error) if error.code.status() < 500 => Ok(Preview::Refused(error.code)),
        Err(error) => Err(error),
    }
}

pub async fn run(
    app: &App,
    tx: &mut TenantTx,
    sender: &Sender,
    message: &InboundMessage<'_>,
    command: &Command,
) -> Result<CommandAnswer> {
    match command {
        Command::Link(LinkCommand::Show) => show(app, tx, sender).await,
        Command::Link(LinkCommand::Code(code)) => {
            store_code(app, tx, sender, code, message.preview.as_ref()).await
        }
        Command::Link(LinkCommand::Yes) => confirm(app, tx, sender).await,
        Command::Unlink => unlink(app, tx, sender).await,
        Command::SetHome => {
            let access = sender.access();
            let new = NewHomeChannel {
                user_id: sender.user_id,
                platform: sender.identity.name.platform(),
                identity: Some(&sender.identity.name),
                chat: message.chat,
            };
            people::put_home_channel(app, tx, &sender.actor, &access, &new).await?;
            let text = "You will be reached here on this platform.";
            Ok(CommandAnswer::saying(text))
        }
        Command::New { .. }
        | Command::Reset
        | Command::Resume { .. }
        | Command::Sessions
        | Command::Branch { .. }
        | Command::Title { .. }
        | Command::Undo { .. }
        | Command::Retry
        | Command::Status
        | Command::Stop
        | Command::Help
        | Command::Reserved(_) => Err(Error::internal(anyhow::anyhow!("no command about linking"))),
    }
}

async fn show(app: &App, tx: &mut TenantTx, sender: &Sender) -> Result<CommandAnswer> {
    let known = IdentityOwner {
        id: sender.identity.id,
        user_id: sender.user_id,
    };
    match people::mint(app, tx, &sender.actor, &known, None).await {
        Ok((code, _)) => Ok(CommandAnswer::saying(format!(
            "Your code is {}. It is good for ten minutes, once. In the direct chat of your other account, write: /link {}",
            code.as_str(),
            code.as_str()
        ))),
        Err(error) if error.code == Code::TooManyCodes => Ok(refused(error.code)),
        Err(error) => Err(error),
    }
}

fn refused(code: Code) -> CommandAnswer {
    CommandAnswer::saying(chat_text(code)).with_notice(code)
}

/// Stores a good code until it is confirmed.
async fn store_code(
    app: &App,
    tx: &mut TenantTx,
    sender: &Sender,
    code: &str,
    preview: Option<&Preview>,
) -> Result<CommandAnswer> {
    let names = match preview {
        Some(Preview::Joins(names)) => names,
        Some(Preview::Refused(code)) => return Ok(refused(*code)),
        None => return Err(Error::internal(anyhow::anyhow!("a code was not looked at"))),
    };
    let context = context(tx, sender);
    let sealed = app.keyring.seal(&context, code.as_bytes())?;
    let until = app.clock.now() + CONFIRM_WITHIN;
    pending_links::upsert(tx, sender.identity.id, &sealed, until).await?;
    Ok(CommandAnswer::saying(format!(
        "This would make one person of: {}. Write /link yes within two minutes to do it.",
        names.join(", ")
    )))
}

fn context(tx: &TenantTx, sender: &Sender) -> String {
    format!("pending_links/{}/{}", tx.tenant_id(), sender.identity.id)
}

async fn confirm(app: &App, tx: &mut TenantTx, sender: &Sender) -> Result<CommandAnswer> {
    let now = app.clock.now();
    tx.mark().await?;
    let Some(sealed) = pending_links::claim(tx, sender.identity.id, now).await? else {
        let text = "There is nothing to confirm. Write /link and the code of your other account.";
        return Ok(CommandAnswer::saying(text));
    };
    let code = app
        .keyring
        .open(&context(tx, sender), &sealed)
        .map_err(Error::internal)?;
    let code = String::from_utf8(code).map_err(Error::internal)?;
    let redeem = RedeemRequest {
        code: &code,
        identity: &sender.identity,
        namespace: sender.namespace,
        dry_run: false,
    };
    match people::redeem(app, tx, &sender.actor, &redeem).await {
        Ok(redeemed) => {
            let mut text = "Done: your accounts are one person now.".to_owned();
            if let Some(link) = &redeemed.session {
                let continuation = slot_aliases::find_continuation(tx, link).await?;
                text.push_str(&what_goes_on(&continuation));
            }
            Ok(CommandAnswer::saying(text))
        }
        // The answer is committed, and the code, which was claimed, is good as before.
        Err(error) if error.code.status() < 500 => {
            tx.roll_back_to_mark().await?;
            Ok(refused(error.code))
        }
        Err(error) => Err(error),
    }
}

/// Which conversation the identities share now. The other one is out of sight, and not lost.
fn what_goes_on(continuation: &Continuation) -> String {
    let Some(platform) = &continuation.platform else {
        return String::new();
    };
    let platform = platform.split('@').next().unwrap_or_default();
    let rest = if continuation.has_others {
        "; the other conversation is in /sessions."
    } else {
        "."
    };
    format!(" We go on with what was said last on {platform}{rest}")
}

async fn unlink(app: &App, tx: &mut TenantTx, sender: &Sender) -> Result<CommandAnswer> {
    let access = sender.access();
    let id = sender.identity.id;
    match people::unlink(app, tx, &sender.actor, &access, id).await {
        Ok(_) => {
            let text = "Done: this account is on its own now. What only it said came along.";
            Ok(CommandAnswer::saying(text))
        }
        Err(error) if error.code.status() < 500 => Ok(refused(error.code)),
        Err(error) => Err(error),
    }
}
