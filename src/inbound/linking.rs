//! `/link`, `/unlink` and `/sethome`: only where nobody else reads. A code that was shown elsewhere is void.

use chrono::TimeDelta;

use super::{After, CommandAnswer, Done, Message, Sender};
use crate::app::App;
use crate::domain::bridge::chat_text::chat_text;
use crate::domain::bridge::command::{Command, Link};
use crate::domain::people::user::KnownIdentity;
use crate::error::{Code, Error, Result};
use crate::people::{self, NewHomeChannel, Redeem};
use crate::store::TenantTx;
use crate::store::conversation::slot_aliases::{self, Continuation};
use crate::store::identity_links::pending_links;
use crate::store::people::identities;

/// How long a preview waits for its confirmation.
const CONFIRMED_WITHIN: TimeDelta = TimeDelta::minutes(2);

/// What is said where others read: no code, no name, no title.
pub fn refuse_in_public() -> Done {
    let answer = refused(Code::PrivateChatRequired);
    Done::Answered(Box::new(answer), After::default())
}

/// Who would be joined by a code; looked at in a transaction that is not committed, after an attempt was
/// charged.
pub enum Preview {
    Joins(Vec<String>),
    Refused(Code),
}

/// Looks what a code would do. Whoever calls drops `tx`.
pub async fn preview(
    app: &App,
    tx: &mut TenantTx,
    speaker: &Sender,
    code: &str,
) -> Result<Preview> {
    let redeem = Redeem {
        code,
        identity: &speaker.identity,
        namespace: speaker.namespace,
        dry_run: true,
    };
    match people::redeem(app, tx, &speaker.actor, &redeem).await {
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

/// Does what is asked, and says whether the outbox has something new.
pub async fn run(
    app: &App,
    tx: &mut TenantTx,
    speaker: &Sender,
    message: &Message<'_>,
    command: &Command,
) -> Result<(CommandAnswer, bool)> {
    match command {
        Command::Link(Link::Show) => show(app, tx, speaker).await.map(|answer| (answer, false)),
        Command::Link(Link::Code(code)) => {
            let answer = remember(app, tx, speaker, code, message.preview.as_ref()).await?;
            Ok((answer, false))
        }
        Command::Link(Link::Yes) => join(app, tx, speaker).await,
        Command::Unlink => part(app, tx, speaker).await,
        Command::SetHome => {
            let access = speaker.access();
            let new = NewHomeChannel {
                user_id: speaker.user_id,
                platform: speaker.identity.name.platform(),
                identity: Some(&speaker.identity.name),
                chat: message.chat,
            };
            people::put_home_channel(app, tx, &speaker.actor, &access, &new).await?;
            let text = "You will be reached here on this platform.";
            Ok((CommandAnswer::saying(text), false))
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
        | Command::NotYet(_) => Err(Error::internal(anyhow::anyhow!("no command about linking"))),
    }
}

async fn show(app: &App, tx: &mut TenantTx, speaker: &Sender) -> Result<CommandAnswer> {
    let known = KnownIdentity {
        id: speaker.identity.id,
        user_id: speaker.user_id,
    };
    match people::mint(app, tx, &speaker.actor, &known, None).await {
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

/// Keeps a good code until it is confirmed.
async fn remember(
    app: &App,
    tx: &mut TenantTx,
    speaker: &Sender,
    code: &str,
    preview: Option<&Preview>,
) -> Result<CommandAnswer> {
    let names = match preview {
        Some(Preview::Joins(names)) => names,
        Some(Preview::Refused(code)) => return Ok(refused(*code)),
        None => return Err(Error::internal(anyhow::anyhow!("a code was not looked at"))),
    };
    let context = context(tx, speaker);
    let sealed = app.keyring.seal(&context, code.as_bytes())?;
    let until = app.clock.now() + CONFIRMED_WITHIN;
    pending_links::put(tx, speaker.identity.id, &sealed, until).await?;
    Ok(CommandAnswer::saying(format!(
        "This would make one person of: {}. Write /link yes within two minutes to do it.",
        names.join(", ")
    )))
}

fn context(tx: &TenantTx, speaker: &Sender) -> String {
    format!("pending_links/{}/{}", tx.tenant_id(), speaker.identity.id)
}

async fn join(app: &App, tx: &mut TenantTx, speaker: &Sender) -> Result<(CommandAnswer, bool)> {
    let now = app.clock.now();
    tx.mark().await?;
    let Some(sealed) = pending_links::take(tx, speaker.identity.id, now).await? else {
        let text = "There is nothing to confirm. Write /link and the code of your other account.";
        return Ok((CommandAnswer::saying(text), false));
    };
    let code = app
        .keyring
        .open(&context(tx, speaker), &sealed)
        .map_err(Error::internal)?;
    let code = String::from_utf8(code).map_err(Error::internal)?;
    let redeem = Redeem {
        code: &code,
        identity: &speaker.identity,
        namespace: speaker.namespace,
        dry_run: false,
    };
    match people::redeem(app, tx, &speaker.actor, &redeem).await {
        Ok(redeemed) => {
            let mut text = "Done: your accounts are one person now.".to_owned();
            if let Some(link) = &redeemed.session {
                let continuation = slot_aliases::find_continuation(tx, link).await?;
                text.push_str(&what_goes_on(&continuation));
            }
            Ok((CommandAnswer::saying(text), true))
        }
        // The answer is committed; the code, which was taken, is good as before.
        Err(error) if error.code.status() < 500 => {
            tx.roll_back_to_mark().await?;
            Ok((refused(error.code), false))
        }
        Err(error) => Err(error),
    }
}

/// Which conversation the accounts share now: the other one is out of sight, and not lost.
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

async fn part(app: &App, tx: &mut TenantTx, speaker: &Sender) -> Result<(CommandAnswer, bool)> {
    let access = speaker.access();
    let id = speaker.identity.id;
    match people::unlink(app, tx, &speaker.actor, &access, id).await {
        Ok(_) => {
            let text = "Done: this account is on its own now. What only it said came along.";
            Ok((CommandAnswer::saying(text), true))
        }
        Err(error) if error.code.status() < 500 => Ok((refused(error.code), false)),
        Err(error) => Err(error),
    }
}
