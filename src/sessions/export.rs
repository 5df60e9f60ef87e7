//! Reads a whole conversation, a page at a time. Its end is fixed when the export begins: later messages are not
//! in it. A slow reader holds no transaction.

use std::collections::VecDeque;

use chrono::{DateTime, Utc};

use super::{audit_export, find};
use crate::app::App;
use crate::domain::conversation::session::{ConversationHandle, Permission, Tip};
use crate::domain::conversation::session_name::{SessionRef, session_not_found};
use crate::domain::people::access::Access;
use crate::domain::transfer::document::MessagePosition;
use crate::domain::transfer::export::{Head, LinkHead, Piece};
use crate::error::{Code, Error, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::chains::{self, ChainMessage, ChainSession};
use crate::store::conversation::sessions;

/// Pieces of a page: the first size, the smallest and the largest. Large pieces make a page smaller.
pub const FIRST_PAGE: usize = 16;
const MIN_PAGE: usize = 4;
const MAX_PAGE: usize = 200;
/// The size that a page should not exceed by much.
const PAGE_BYTES: usize = 1024 * 1024;
/// Links per query.
const LINKS: i64 = 100;

/// The progress of one export.
pub struct Export {
    pub head: Head,
    name: ConversationHandle,
    /// The last link as it was when the export began.
    tip: SessionId,
    tip_depth: i32,
    tip_last_seq: i64,
    /// Links that were listed and not begun, and the depth of the last one listed.
    pending: VecDeque<ChainSession>,
    listed_depth: i32,
    /// The link that is being read, and the last message that was read of it.
    current: Option<(ChainSession, i64)>,
    /// The number of pieces in the next page.
    page: usize,
}

/// Begins the export of the conversation of the link `session`, and audits it.
pub async fn export(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    session: &SessionRef,
) -> Result<Export> {
    let now = app.clock.now();
    let tip = find(tx, access, session, Permission::Manage, now).await?;
    audit_export(app, tx, actor, access, &tip).await?;
    begin(tx, access, tip, now).await
}

/// Exports a conversation as part of a user's export, which has an audit entry of its own.
pub async fn export_unaudited(
    tx: &mut TenantTx,
    access: &Access,
    conversation_id: SessionId,
    now: DateTime<Utc>,
) -> Result<Export> {
    let session = SessionRef::Id(conversation_id);
    let tip = find(tx, access, &session, Permission::Manage, now).await?;
    begin(tx, access, tip, now).await
}

async fn begin(tx: &mut TenantTx, access: &Access, tip: Tip, now: DateTime<Utc>) -> Result<Export> {
    let first = sessions::get(tx, access, tip.name.conversation_id).await?;
    let tip_last_seq = tip.last_seq();
    Ok(Export {
        head: Head {
            id: tip.name.conversation_id,
            public_id: tip.name.public_id(access),
            title: first.title,
            agent: tip.agent,
            created_at: first.created_at,
            exported_at: now,
        },
        name: tip.name,
        tip: tip.session_id,
        tip_depth: tip.depth,
        tip_last_seq,
        pending: VecDeque::new(),
        listed_depth: -1,
        current: None,
        page: FIRST_PAGE,
    })
}

impl Export {
    /// The next pieces, with one page of messages at most; none at the end. Fails if the conversation is no longer
    /// visible to `access`, or was changed by an undo since the export began.
    pub async fn next(
        &mut self,
        tx: &mut TenantTx,
        access: &Access,
        now: DateTime<Utc>,
    ) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        while pieces.len() < self.page {
            if self.current.is_none() && !self.begin_link(tx, access, &mut pieces).await? {
                break;
            }
            self.read_link(tx, &mut pieces).await?;
        }
        self.page = next_page(self.page, pieces.iter().map(size).sum());
        // After the read: a change that was committed before it is visible here.
        let end = SessionRef::Id(self.tip);
        let seen = find(tx, access, &end, Permission::Manage, now).await?;
        if seen.requested_undone {
            Err(Error::new(
                Code::PreconditionFailed,
                "the newest compression was undone meanwhile",
            ))
        } else {
            Ok(pieces)
        }
    }

    /// Goes to the next link; false if there is none.
    async fn begin_link(
        &mut self,
        tx: &mut TenantTx,
        access: &Access,
        pieces: &mut Vec<Piece>,
    ) -> Result<bool> {
        if self.pending.is_empty() && self.listed_depth < self.tip_depth {
            let chain = self.name.conversation_id;
            let tip = (self.tip, self.tip_depth);
            let links = chains::list_sessions(tx, chain, tip, self.listed_depth, LINKS).await?;
            let gap = links
                .iter()
                .zip(self.listed_depth + 1..)
                .any(|(link, depth)| link.depth != depth);
            self.listed_depth += links.len() as i32;
            if gap || links.is_empty() {
                return Err(incomplete());
            }
            self.pending.extend(links);
        }
        let Some(mut link) = self.pending.pop_front() else {
            return Ok(false);
        };
        if link.id == self.tip {
            link.last_seq = self.tip_last_seq;
        }
        pieces.push(Piece::Link(LinkHead {
            public_id: self.name.public_session_id(link.id, access),
            depth: link.depth,
            created_at: link.created_at,
            compression: link.compression.clone(),
        }));
        self.current = Some((link, 0));
        Ok(true)
    }

    /// Reads the current link as far as the page has room, and leaves it at its end.
    async fn read_link(&mut self, tx: &mut TenantTx, pieces: &mut Vec<Piece>) -> Result<()> {
        let Some((link, read)) = self.current.take() else {
            return Ok(());
        };
        let room = self.page.saturating_sub(pieces.len()) as i64;
        let wanted = (link.last_seq - read).min(room);
        let chain = self.name.conversation_id;
        let span = (read, link.last_seq);
        let messages = chains::list_messages(tx, chain, link.id, span, wanted).await?;
        if messages.len() as i64 != wanted {
            return Err(incomplete());
        }
        for message in messages {
            pieces.push(match original_of(link.depth, &message) {
                Some(from) => Piece::Copy {
                    seq: message.message.seq,
                    from,
                },
                None => Piece::Original(Box::new(message.message)),
            });
        }
        if read + wanted < link.last_seq {
            self.current = Some((link, read + wanted));
        }
        Ok(())
    }
}

/// The position of a copy's original in this chain. Messages that a first link was created with are its own.
fn original_of(depth: i32, message: &ChainMessage) -> Option<MessagePosition> {
    let (_, seq) = message.message.copied_from.filter(|_| depth > 0)?;
    message
        .copied_depth
        .map(|link| MessagePosition { link, seq })
}

fn size(piece: &Piece) -> usize {
    match piece {
        Piece::Original(message) => {
            let texts = [&message.content, &message.tool_calls];
            texts
                .into_iter()
                .flatten()
                .map(|text| text.get().len())
                .sum()
        }
        Piece::Link(_) | Piece::Copy { .. } => 0,
    }
}

/// The size of the page after one of `page` pieces and so many bytes.
pub fn next_page(page: usize, bytes: usize) -> usize {
    let page = match bytes {
        bytes if bytes > PAGE_BYTES => page / 4,
        bytes if bytes < PAGE_BYTES / 4 => page * 2,
        _ => page,
    };
    page.clamp(MIN_PAGE, MAX_PAGE)
}

/// Rows disappeared during the read: a job is erasing them.
fn incomplete() -> Error {
    Error {
        cause: Some(anyhow::anyhow!("a conversation was not there to its end")),
        ..session_not_found()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_grows_while_messages_are_small_and_shrinks_when_they_are_not() {
        for (page, bytes, next) in [
            (50, 1000, 100),
            (150, 1000, 200),
            (100, PAGE_BYTES / 2, 100),
            (200, 50 * PAGE_BYTES, 50),
            (8, 8 * PAGE_BYTES, 4),
        ] {
            assert_eq!(next_page(page, bytes), next, "{page} {bytes}");
        }
    }
}
