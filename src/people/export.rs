//! Exports everything of a user as one document. It is written while it is read, one page and one transaction
//! at a time, so that a slow reader holds nothing. Rows that are deleted meanwhile are not in it.

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

/// Records and ids per query.
const PAGE: i64 = 200;
/// A page ends after so many bytes or so many steps: a user can have thousands of short conversations.
const PAGE_BYTES: usize = 256 * 1024;
const PAGE_STEPS: usize = 50;
/// The position before the first row.
const START: RowPosition = (Uuid::nil(), Uuid::nil());

/// The progress of one export.
pub struct UserExport {
    user_id: UserId,
    stage: Stage,
    /// `None` at the end.
    writer: Option<UserDocumentWriter>,
}

enum Stage {
    Records(Records, RowPosition),
    Conversations(Conversations),
    /// The identities whose messages are still to be read, the position reached for the first of them, and the
    /// size of the next page.
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
    /// Conversations that were found and not begun, and the last one found.
    pending: VecDeque<SessionId>,
    last: Option<SessionId>,
    /// The conversation that is being written.
    current: Option<Box<(Export, JsonWriter)>>,
}

/// Begins the export of a user that the caller may export. An export by anyone else than the user is audited.
/// Returns the beginning of the document as well.
pub async fn export(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    user: User,
) -> Result<(UserExport, Vec<u8>)> {
    let user_id = user.id;
    let now = app.clock.now();
    let identities = identities::list(tx, user_id).await?;
    let merged = users::list_merged(tx, user_id).await?;
    let channels = home_channels::list(tx, user_id).await?;
    let presences = presence::list(tx, access, user_id).await?;
    let head = Head::new(user, now)
        .with_identities(identities, merged)
        .with_channels_and_presence(channels, presences, access);
    if access.visibility == Visibility::Tenant {
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
    /// The next bytes, and whether they are the last. Fails if the user no longer exists.
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
        for _ in 0..PAGE_STEPS {
            ended = self.step((app, access), tx, &mut writer, &mut out).await?;
            if ended || out.len() >= PAGE_BYTES {
                break;
            }
        }
        // After the read: a user who was erased meanwhile has no rows left, and the document would be incomplete.
        let current = users::find(tx, self.user_id).await?;
        if current.is_none_or(|user| user.id != self.user_id) {
            return Err(Error::not_found("user"));
        }
        if ended {
            writer.end(&mut out)
        } else {
            self.writer = Some(writer)
        }
        Ok((out, ended))
    }

    /// Writes the next part; true if nothing is left.
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
                    let identities = identities::list(tx, self.user_id).await?;
                    let identities = identities.iter().map(|identity| identity.id).collect();
                    self.stage = Stage::Elsewhere(identities, None, sessions::FIRST_PAGE);
                }
                Ok(false)
            }
            Stage::Elsewhere(identities, after, page) => match identities.front().copied() {
                Some(identity_id) => {
                    let of = (self.user_id, identity_id);
                    let limit = *page as i64;
                    let messages =
                        user_records::list_messages_elsewhere(tx, of, *after, limit).await?;
                    for message in &messages {
                        writer.item(message, out)?;
                    }
                    let bytes = messages.iter().map(|message| message.size()).sum();
                    *after = messages.last().map(|last| (last.session_id, last.seq));
                    if (messages.len() as i64) < limit {
                        identities.pop_front();
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

/// Writes a page of records. Returns its last position; `None` if it was the last page.
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
    Ok(rows.last().map(|(position, _)| *position).filter(|_| more))
}

/// What conversations are read with: the reader's access, and the user they belong to.
struct Reader<'a> {
    app: &'a App,
    access: &'a Access,
    user_id: UserId,
}

impl Conversations {
    /// Writes the next part; false if all conversations are written.
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
            Err(error) if is_gone(&error) => current.1.end_early(out)?,
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Goes to the next conversation that still exists; false if there is none. `current` stays `None` if the
    /// conversation was deleted after it was listed.
    async fn begin(
        &mut self,
        tx: &mut TenantTx,
        reader: &Reader<'_>,
        writer: &mut UserDocumentWriter,
        out: &mut Vec<u8>,
    ) -> Result<bool> {
        if self.pending.is_empty() {
            let found = user_records::list_conversations(tx, reader.user_id, self.last, PAGE);
            self.pending.extend(found.await?);
            self.last = self.pending.back().copied().or(self.last);
        }
        let Some(id) = self.pending.pop_front() else {
            return Ok(false);
        };
        let now = reader.app.clock.now();
        match sessions::export_unaudited(tx, reader.access, id, now).await {
            Ok(export) => {
                writer.next(out);
                let document = JsonWriter::begin(&export.head, out)?;
                self.current = Some(Box::new((export, document)));
                Ok(true)
            }
            Err(error) if is_gone(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// Whether a conversation was deleted, given to another user or undone while it was read.
fn is_gone(error: &Error) -> bool {
    matches!(error.code, Code::SessionNotFound | Code::PreconditionFailed)
}
