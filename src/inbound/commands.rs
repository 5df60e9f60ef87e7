//! Slash commands: what each of them does. Linking and parting are apart, in `linking`.

use super::here::Here;
use super::linking;
use super::{CommandAnswer, CommandResult, InboundMessage, Sender};
use crate::app::App;
use crate::domain::bridge::command::{Command, help};
use crate::domain::conversation::session::Permission;
use crate::domain::conversation::session_name::SessionRef;
use crate::domain::people::display_name::DisplayName;
use crate::domain::turn::TurnInput;
use crate::error::{Error, Result};
use crate::ids::{IdentityId, SessionId, TurnId};
use crate::sessions::{self, Branch};
use crate::store::TenantTx;
use crate::store::bridge::replies;
use crate::store::conversation::conversations::{self, Change};
use crate::store::people::{identities, users};
use crate::store::turn::turns as rows;
use crate::turns::{self, RunnableTurn};

pub async fn run(
    app: &App,
    tx: &mut TenantTx,
    sender: &Sender,
    message: &InboundMessage<'_>,
    command: &Command,
) -> Result<CommandResult> {
    let answer = match command {
        Command::Help => CommandAnswer::saying(help()),
        Command::Reserved(name) => CommandAnswer::saying(format!("/{name} is not available yet.")),
        Command::Link(_) | Command::Unlink | Command::SetHome => {
            linking::run(app, tx, sender, message, command).await?
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
        | Command::Stop => return run_here(app, tx, sender, message, command).await,
    };
    Ok(CommandResult::Answered(Box::new(answer), None))
}

/// Those that are about the session of this chat.
async fn run_here(
    app: &App,
    tx: &mut TenantTx,
    sender: &Sender,
    message: &InboundMessage<'_>,
    command: &Command,
) -> Result<CommandResult> {
    let now = app.clock.now();
    let sender = &lock_user(tx, sender).await?;
    let here = Here::find(tx, sender, message, now).await?;
    let mut next = None;
    let text = match command {
        Command::New { title } => restart_at(app, tx, &here, title.as_deref()).await?,
        Command::Reset => restart_at(app, tx, &here, None).await?,
        Command::Sessions | Command::Resume { which: None } => here.show_list(tx).await?,
        Command::Resume { which: Some(which) } => resume(app, tx, &here, which).await?,
        Command::Branch { name } => branch(app, tx, &here, name.as_deref()).await?,
        Command::Title { name } => title(tx, &here, name.as_deref()).await?,
        Command::Undo { turns } => undo(app, tx, &here, own(sender, message), *turns).await?,
        Command::Retry => match retry(app, tx, &here, own(sender, message)).await? {
            Ok(input) => return Ok(CommandResult::AskAgain(input)),
            Err(text) => text,
        },
        Command::Stop => stop(app, tx, &here, own(sender, message), &mut next).await?,
        Command::Status => status(tx, &here).await?,
        Command::Help
        | Command::Reserved(_)
        | Command::Link(_)
        | Command::Unlink
        | Command::SetHome => String::new(),
    };
    let answer = here.answer(tx, text, now).await?;
    Ok(CommandResult::Answered(Box::new(answer), next))
}

/// As often as a sender may be linked and unlinked meanwhile.
const ATTEMPTS: usize = 5;

/// The sender with the user that the identity belongs to now, who is held until `tx` ends: nobody links or
/// unlinks the identity while its command runs.
async fn lock_user(tx: &mut TenantTx, sender: &Sender) -> Result<Sender> {
    let mut user_id = sender.user_id;
    tx.mark().await?;
    for _ in 0..ATTEMPTS {
        users::lock(tx, &[user_id]).await?;
        let present = identities::find_user(tx, sender.identity.id).await?;
        let present = present.ok_or_else(|| Error::not_found("user"))?;
        if present == user_id {
            return Ok(Sender {
                user_id,
                ..sender.clone()
            });
        }
        user_id = present;
        // Two users are locked by id: the one that is held is given back first.
        tx.roll_back_to_mark().await?;
    }
    Err(Error::unavailable(
        "the user",
        anyhow::anyhow!("the identity is linked and unlinked repeatedly"),
    ))
}

/// Whose turns a command acts on: in a chat of several, the sender's alone.
fn own(sender: &Sender, message: &InboundMessage<'_>) -> Option<IdentityId> {
    (!message.is_private()).then_some(sender.identity.id)
}

async fn restart_at(
    app: &App,
    tx: &mut TenantTx,
    here: &Here,
    title: Option<&str>,
) -> Result<String> {
    let now = app.clock.now();
    let slot = sessions::reset(tx, &here.access, &here.key, None, now).await?;
    let Some(title) = title else {
        return Ok("A new session has begun.".to_owned());
    };
    let (Ok(title), Some(current)) = (title.parse::<DisplayName>(), slot.current) else {
        return Ok("A new session has begun. The title is one line of up to 100 characters: give it with /title.".to_owned());
    };
    set_title(tx, current.name.conversation_id, &title).await?;
    Ok(format!("A new session has begun: {}.", title.as_str()))
}

async fn set_title(
    tx: &mut TenantTx,
    conversation_id: crate::ids::SessionId,
    title: &DisplayName,
) -> Result<()> {
    let change = Change {
        title: Some(Some(title.as_str().to_owned())),
        archived: None,
        pinned: None,
    };
    conversations::update(tx, conversation_id, &change).await?;
    Ok(())
}

async fn resume(app: &App, tx: &mut TenantTx, here: &Here, which: &str) -> Result<String> {
    let now = app.clock.now();
    let Some(session) = here.choose(tx, which, now).await? else {
        return Ok("There is no such session here. /sessions lists them.".to_owned());
    };
    let moved = sessions::switch(tx, &here.access, &here.key, &session, None, now).await;
    match moved {
        Ok(slot) => {
            let current = slot.current.as_ref();
            let id = current.map(|current| current.session_id);
            let session = match id {
                Some(id) => {
                    Some(crate::store::conversation::sessions::get(tx, &here.access, id).await?)
                }
                None => None,
            };
            let title = session.as_ref().and_then(|session| session.title.clone());
            let messages = session.map_or(0, |session| session.message_count);
            let title = title.unwrap_or_else(|| "untitled".to_owned());
            Ok(format!("Going on with {title}: {messages} messages."))
        }
        Err(error) if error.code.status() == 409 => {
            Ok("That session cannot be gone on with here.".to_owned())
        }
        Err(error) => Err(error),
    }
}

async fn branch(app: &App, tx: &mut TenantTx, here: &Here, name: Option<&str>) -> Result<String> {
    let now = app.clock.now();
    let title = match name.map(str::parse::<DisplayName>) {
        None => None,
        Some(Ok(title)) => Some(title.as_str().to_owned()),
        Some(Err(_)) => {
            return Ok("A name is one line of up to 100 characters.".to_owned());
        }
    };
    let from = SessionRef::Id(here.tip.session_id);
    let request = Branch {
        from_seq: None,
        title,
    };
    let branch = sessions::branch(tx, &here.access, &from, request, now).await?;
    let branch = SessionRef::Id(branch);
    sessions::switch(tx, &here.access, &here.key, &branch, None, now).await?;
    Ok("Going on in a copy. /sessions lists both.".to_owned())
}

async fn title(tx: &mut TenantTx, here: &Here, name: Option<&str>) -> Result<String> {
    let Some(name) = name else {
        let session =
            crate::store::conversation::sessions::get(tx, &here.access, here.tip.session_id)
                .await?;
        return Ok(match session.title {
            Some(title) => format!("This session is called {title}."),
            None => "This session has no title.".to_owned(),
        });
    };
    let Ok(title) = name.parse::<DisplayName>() else {
        return Ok("A title is one line of up to 100 characters.".to_owned());
    };
    set_title(tx, here.tip.name.conversation_id, &title).await?;
    Ok(format!("This session is called {} now.", title.as_str()))
}

const BUSY: &str = "An answer is being written. Wait for it, or /stop it first.";

async fn undo(
    app: &App,
    tx: &mut TenantTx,
    here: &Here,
    own: Option<IdentityId>,
    count: u32,
) -> Result<String> {
    let Some((_, ids)) = undoable(app, tx, here, own, count).await? else {
        return Ok(BUSY.to_owned());
    };
    if ids.is_empty() {
        return Ok("There is nothing to take back.".to_owned());
    }
    let conversation_id = here.tip.name.conversation_id;
    replies::undo(tx, conversation_id, &ids, app.clock.now()).await?;
    Ok(match ids.len() {
        1 => "Your last message and its answer are taken back.".to_owned(),
        count => format!("Your last {count} messages and their answers are taken back."),
    })
}

/// The turns that can be taken back, and the session they are in, of a conversation that is held; `None` while a
/// turn is active.
async fn undoable(
    app: &App,
    tx: &mut TenantTx,
    here: &Here,
    own: Option<IdentityId>,
    count: u32,
) -> Result<Option<(SessionId, Vec<TurnId>)>> {
    let conversation_id = here.tip.name.conversation_id;
    conversations::lock(tx, conversation_id).await?;
    if rows::find_active(tx, conversation_id).await?.is_some() {
        return Ok(None);
    }
    let own = own.as_ref().map(std::slice::from_ref);
    // A compression may have moved the tip while the conversation was waited for.
    let session = SessionRef::Id(here.tip.session_id);
    let now = app.clock.now();
    let tip = sessions::find(tx, &here.access, &session, Permission::Manage, now).await?;
    let turns = replies::list_undoable(tx, tip.session_id, own, i64::from(count)).await?;
    Ok(Some((tip.session_id, turns)))
}

/// Takes the last message back and answers what it said, to be asked again; or why not.
async fn retry(
    app: &App,
    tx: &mut TenantTx,
    here: &Here,
    own: Option<IdentityId>,
) -> Result<Result<TurnInput, String>> {
    let Some((session_id, mut turns)) = undoable(app, tx, here, own, 1).await? else {
        return Ok(Err(BUSY.to_owned()));
    };
    let Some(id) = turns.pop() else {
        return Ok(Err("There is nothing to answer again.".to_owned()));
    };
    let said = replies::list_said(tx, session_id, id).await?;
    let conversation_id = here.tip.name.conversation_id;
    replies::undo(tx, conversation_id, &[id], app.clock.now()).await?;
    Ok(Ok(TurnInput::from_contents(said)))
}

/// Stops what is being written, and what waits.
async fn stop(
    app: &App,
    tx: &mut TenantTx,
    here: &Here,
    own: Option<IdentityId>,
    next: &mut Option<Box<RunnableTurn>>,
) -> Result<String> {
    let conversation_id = here.tip.name.conversation_id;
    conversations::lock(tx, conversation_id).await?;
    let open = rows::list_open(tx, conversation_id).await?;
    let mut stopped = 0;
    // Those that wait first: stopping the one that runs would begin the next.
    for turn in open.iter().rev() {
        if own.is_some() && turn.identity_id != own {
            continue;
        }
        let started = turns::cancel(app, tx, turn, app.clock.now()).await?;
        *next = next.take().or(started.map(Box::new));
        stopped += 1;
    }
    Ok(match stopped {
        0 => "There is nothing to stop.".to_owned(),
        _ => "Stopped.".to_owned(),
    })
}

async fn status(tx: &mut TenantTx, here: &Here) -> Result<String> {
    let session =
        crate::store::conversation::sessions::get(tx, &here.access, here.tip.session_id).await?;
    let conversation_id = here.tip.name.conversation_id;
    let open = rows::list_open(tx, conversation_id).await?.len();
    let title = session.title.as_deref().unwrap_or("untitled");
    Ok(format!(
        "Session {}: {title}.\nMessages: {}. Tokens: about {}. Being answered or waiting: {open}.\nAgent: {}.",
        here.tip.session_id, session.message_count, session.token_count, session.agent,
    ))
}
