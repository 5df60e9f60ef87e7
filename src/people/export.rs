//! Everything of a person as one document, written while it is read, a page and a transaction at a time:
//! whoever reads slowly holds nothing. What goes away meanwhile is not in it.

use std::collections::VecDeque;

use serde::Serialize;
use uuid::Uuid;

use crate::app::App;
use crate::audit;
use crate::domain::people::access::{Access, Visibility};
use crate::domain::people::user::User;
use crate::domain::tenant::audit::{Action, Entry};
use crate::domain::transfer::document::DocumentSignature;
use crate::domain::transfer::export::JsonWriter;
use crate::domain::transfer::user_document::{Head, UserDocumentWriter};
use crate::error::{Code, Error, Result};
use crate::ids::{IdentityId, SessionId, UserId};
use crate::sessions::{self, Export};
use crate::store::TenantTx;
use crate::store::people::user_records::{self, RowPosition};
use crate::store::people::{home_channels, identities, presence, users};

/// Records and ids that are looked up at once.
const PAGE: i64 = 200;
/// A page has at least so many bytes, or is the work of so many steps: a person can have thousands of short
/// conversations.
const ENOUGH: usize = 256 * 1024;
const STEPS: usize = 50;
/// Before everything.
const START: RowPosition = (Uuid::nil(), Uuid::nil());

/// How far the reading of a person has come.
pub struct UserExport {
    user_id: UserId,
    stage: Stage,
    /// None at the end.
    writer: Option<UserDocumentWriter>,
}

enum Stage {
    Records(Records, RowPosition),
    Conversations(Conversations),
    /// The accounts whose messages are to be read, and the place after which those of the first are; with
    /// how many may be read next.
    Elsewhere(VecDeque<IdentityId>, Option<(SessionId, i64)>, usize),
}

/// The lists of records, in their order.
#[derive(Clone, Copy)]
enum Records {
    SessionKeys,
    Grants,
    Codes,
    Moves,
    Deliveries,
    Usage,
}

impl Records {
    const fn list(self) -> &'static str {
        match self {
            Self::SessionKeys => "session_keys",
            Self::Grants => "grants",
            Self::Codes => "codes",
            Self::Moves => "moves",
            Self::Deliveries => "deliveries",
            Self::Usage => "usage",
        }
    }

    const fn next(self) -> Option<Self> {
        match self {
            Self::SessionKeys => Some(Self::Grants),
            Self::Grants => Some(Self::Codes),
            Self::Codes => Some(Self::Moves),
            Self::Moves => Some(Self::Deliveries),
            Self::Deliveries => Some(Self::Usage),
            Self::Usage => None,
        }
    }
}

#[derive(Default)]
struct Conversations {
    /// Found and not begun, and the last that was found.
    ahead: VecDeque<SessionId>,
    last: Option<SessionId>,
    /// The one that is being written.
    current: Option<Box<(Export, JsonWriter)>>,
}

/// Begins to read a person, whom the caller may export, and tells the audit if that is not the person.
/// Answers the beginning of the document as well.
pub async fn export(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    user: User,
) -> Result<(UserExport, Vec<u8>)> {
    let user_id = user.id;
    let now = app.clock.now();
    let accounts = identities::list(tx, user_id).await?;
    let merged = users::list_merged(tx, user_id).await?;
    let homes = home_channels::list(tx, user_id).await?;
    let heard = presence::list(tx, access, user_id).await?;
    let head = Head::new(user, now)
        .with_identities(accounts, merged)
        .with_channels_and_presence(homes, heard, access);
    if access.reach == Visibility::Tenant {
        let entry = Entry::new(actor, Action::UserExport, &user_id);
        audit::append(&app.keyring, tx, entry, now).await?;
    }
    let mut out = Vec::new();
    let first = Records::SessionKeys;
    let writer = UserDocumentWriter::begin(&head, first.list(), &mut out)?;
    let export = UserExport {
        user_id,
        stage: Stage::Records(first, START),
        writer: Some(writer),
    };
    Ok((export, out))
}

impl UserExport {
    /// The next bytes, and whether they are the last. Fails when the person is no longer there.
    pub async fn next(
        &mut self,
        app: &App,
        tx: &mut TenantTx,
        access: &Access,
    ) -> Result<(Vec<u8>, bool)> {
        let Some(mut writer) = self.writer.take() else {
            return Ok((Vec::new(), true));
        };
        let mut out = Vec::new();
        let mut ended = false;
        for _ in 0..STEPS {
            ended = self.step((app, access), tx, &mut writer, &mut out).await?;
            if ended || out.len() >= ENOUGH {
                break;
            }
        }
        // After the reading: whoever is erased while they are read has nothing left, and is not complete.
        let there = users::find(tx, self.user_id).await?;
        if there.is_none_or(|user| user.id != self.user_id) {
            return Err(Error::not_found("user"));
        }
        if ended {
            writer.end(&mut out)
        } else {
            self.writer = Some(writer)
        }
        Ok((out, ended))
    }

    /// Writes on where it is; true if there is nothing left.
    async fn step(
        &mut self,
        (app, access): (&App, &Access),
        tx: &mut TenantTx,
        writer: &mut UserDocumentWriter,
        out: &mut Vec<u8>,
    ) -> Result<bool> {
        match &mut self.stage {
            Stage::Records(records, after) => {
                let records = *records;
                let after = *after;
                let last = write_records(tx, self.user_id, (records, after), writer, out);
                self.stage = match (last.await?, records.next()) {
                    (Some(last), _) => Stage::Records(records, last),
                    (None, Some(next)) => {
                        writer.list(next.list(), out);
                        Stage::Records(next, START)
                    }
                    (None, None) => {
                        writer.list("conversations", out);
                        Stage::Conversations(Conversations::default())
                    }
                };
                Ok(false)
            }
            Stage::Conversations(conversations) => {
                let reader = Reader {
                    app,
                    access,
                    user_id: self.user_id,
                };
                let more = conversations.write(tx, &reader, writer, out);
                if !more.await? {
                    writer.list("messages_elsewhere", out);
                    let accounts = identities::list(tx, self.user_id).await?;
                    let accounts = accounts.iter().map(|account| account.id).collect();
                    self.stage = Stage::Elsewhere(accounts, None, sessions::FIRST_PAGE);
                }
                Ok(false)
            }
            Stage::Elsewhere(accounts, after, page) => match accounts.front().copied() {
                Some(account) => {
                    let of = (self.user_id, account);
                    let limit = *page as i64;
                    let messages =
                        user_records::list_messages_elsewhere(tx, of, *after, limit).await?;
                    for message in &messages {
                        writer.item(message, out)?;
                    }
                    let bytes = messages.iter().map(|message| message.size()).sum();
                    *after = messages.last().map(|last| (last.session_id, last.seq));
                    if (messages.len() as i64) < limit {
                        accounts.pop_front();
                        *after = None;
                    }
                    *page = sessions::next_page(*page, bytes);
                    Ok(false)
                }
                None => Ok(true),
            },
        }
    }
}

/// Writes a page of records. Answers where it ended, unless that was the last.
async fn write_records(
    tx: &mut TenantTx,
    user_id: UserId,
    (records, after): (Records, RowPosition),
    writer: &mut UserDocumentWriter,
    out: &mut Vec<u8>,
) -> Result<Option<RowPosition>> {
    match records {
        Records::SessionKeys => {
            let rows = user_records::list_session_keys(tx, user_id, after, PAGE).await?;
            write_page(&rows, writer, out)
        }
        Records::Grants => {
            let rows = user_records::list_grants(tx, user_id, after, PAGE).await?;
            write_page(&rows, writer, out)
        }
        Records::Codes => {
            let rows = user_records::list_codes(tx, user_id, after, PAGE).await?;
            write_page(&rows, writer, out)
        }
        Records::Moves => {
            let rows = user_records::list_moves(tx, user_id, after, PAGE).await?;
            write_page(&rows, writer, out)
        }
        Records::Deliveries => {
            let rows = user_records::list_deliveries(tx, user_id, after, PAGE).await?;
            write_page(&rows, writer, out)
        }
        Records::Usage => {
            for row in user_records::list_usage(tx, user_id).await? {
                writer.item(&row, out)?;
            }
            Ok(None)
        }
    }
}

fn write_page<T: Serialize>(
    rows: &[(RowPosition, T)],
    writer: &mut UserDocumentWriter,
    out: &mut Vec<u8>,
) -> Result<Option<RowPosition>> {
    for (_, row) in rows {
        writer.item(row, out)?;
    }
    let more = rows.len() as i64 == PAGE;
    Ok(rows.last().map(|(place, _)| *place).filter(|_| more))
}

/// For whom conversations are read, and whose.
struct Reader<'a> {
    app: &'a App,
    access: &'a Access,
    user_id: UserId,
}

impl Conversations {
    /// Writes on; false if all are written.
    async fn write(
        &mut self,
        tx: &mut TenantTx,
        reader: &Reader<'_>,
        writer: &mut UserDocumentWriter,
        out: &mut Vec<u8>,
    ) -> Result<bool> {
        let now = reader.app.clock.now();
        if self.current.is_none() && !self.begin(tx, reader, writer, out).await? {
            return Ok(false);
        }
        let Some(mut current) = self.current.take() else {
            return Ok(true);
        };
        match current.0.next(tx, reader.access, now).await {
            Ok(pieces) if pieces.is_empty() => {
                let keyring = &reader.app.keyring;
                let tenant_id = tx.tenant_id();
                let sign = |digest: &[u8; 32]| DocumentSignature::make(keyring, tenant_id, digest);
                current.1.end(sign, out)?;
            }
            Ok(pieces) => {
                for piece in &pieces {
                    current.1.piece(piece, out)?;
                }
                self.current = Some(current);
            }
            Err(error) if went_away(&error) => current.1.end_early(out)?,
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Goes to the next conversation that is still there; false if there is none. `current` stays empty
    /// if the one that was looked up has gone.
    async fn begin(
        &mut self,
        tx: &mut TenantTx,
        reader: &Reader<'_>,
        writer: &mut UserDocumentWriter,
        out: &mut Vec<u8>,
    ) -> Result<bool> {
        if self.ahead.is_empty() {
            let found = user_records::list_conversations(tx, reader.user_id, self.last, PAGE);
            self.ahead.extend(found.await?);
            self.last = self.ahead.back().copied().or(self.last);
        }
        let Some(id) = self.ahead.pop_front() else {
            return Ok(false);
        };
        let now = reader.app.clock.now();
        match sessions::export_quietly(tx, reader.access, id, now).await {
            Ok(export) => {
                writer.next(out);
                let document = JsonWriter::begin(&export.head, out)?;
                self.current = Some(Box::new((export, document)));
                Ok(true)
            }
            Err(error) if went_away(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// Whether a conversation was deleted, given to someone else or taken back while it was read.
fn went_away(error: &Error) -> bool {
    matches!(error.code, Code::SessionNotFound | Code::PreconditionFailed)
}
