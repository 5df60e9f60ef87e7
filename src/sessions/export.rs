//! Reading a whole conversation, a page at a time. Its end is decided when the reading begins: what is
//! said later is not in it. Whoever reads slowly holds no transaction.

use std::collections::VecDeque;

use chrono::{DateTime, Utc};

use super::{find, note_export};
use crate::app::App;
use crate::domain::conversation::session::{ConversationHandle, Permission, Tip};
use crate::domain::conversation::session_name::{SessionRef, session_not_found};
use crate::domain::people::access::Access;
use crate::domain::transfer::document::MessagePosition;
use crate::domain::transfer::export::{Head, LinkHead, Piece};
use crate::error::{Code, Error, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::chains::{self, ChainMessage, Link};
use crate::store::conversation::sessions;

/// How many pieces a page has: the first, the least and the most; where they are large, fewer.
pub const FIRST_PAGE: usize = 16;
const LEAST_PAGE: usize = 4;
const MOST_PAGE: usize = 200;
/// What a page should not have much more of.
const PAGE_BYTES: usize = 1024 * 1024;
/// Links that are looked up at once.
const LINKS: i64 = 100;

/// How far the reading of a conversation has come.
pub struct Export {
    pub head: Head,
    name: ConversationHandle,
    /// The last link as it was when the reading began.
    tip: SessionId,
    tip_depth: i32,
    tip_last_seq: i64,
    /// Links that are not begun yet, and the depth of the last that was looked up.
    ahead: VecDeque<Link>,
    looked_up: i32,
    /// The link that is being read, and its last message that was.
    current: Option<(Link, i64)>,
    /// How many pieces the next page may have.
    page: usize,
}

/// Begins to read the conversation that `session` is a link of, and tells the audit.
pub async fn export(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    session: &SessionRef,
) -> Result<Export> {
    let now = app.clock.now();
    let tip = find(tx, access, session, Permission::Manage, now).await?;
    note_export(app, tx, actor, access, &tip).await?;
    begin(tx, access, tip, now).await
}

/// The same for whoever exports a whole person: that has an entry of its own.
pub async fn export_quietly(
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
            shown_id: tip.name.shown(access),
            title: first.title,
            agent: tip.agent,
            created_at: first.created_at,
            exported_at: now,
        },
        name: tip.name,
        tip: tip.session_id,
        tip_depth: tip.depth,
        tip_last_seq,
        ahead: VecDeque::new(),
        looked_up: -1,
        current: None,
        page: FIRST_PAGE,
    })
}

impl Export {
    /// The next pieces, with a page of messages at most; none at the end. Fails when the conversation is
    /// no longer there for `access`, or no longer what it was when the reading began.
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
        // After the reading: what was changed before it, is seen here.
        let end = SessionRef::Id(self.tip);
        let seen = find(tx, access, &end, Permission::Manage, now).await?;
        if seen.asked_undone {
            Err(Error::new(
                Code::PreconditionFailed,
                "the newest compression was undone in the meantime",
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
        if self.ahead.is_empty() && self.looked_up < self.tip_depth {
            let chain = self.name.conversation_id;
            let tip = (self.tip, self.tip_depth);
            let links = chains::list_links(tx, chain, tip, self.looked_up, LINKS).await?;
            let gap = links
                .iter()
                .zip(self.looked_up + 1..)
                .any(|(link, depth)| link.depth != depth);
            self.looked_up += links.len() as i32;
            if gap || links.is_empty() {
                return Err(incomplete());
            }
            self.ahead.extend(links);
        }
        let Some(mut link) = self.ahead.pop_front() else {
            return Ok(false);
        };
        if link.id == self.tip {
            link.last_seq = self.tip_last_seq;
        }
        pieces.push(Piece::Link(LinkHead {
            shown_id: self.name.shown_link(link.id, access),
            depth: link.depth,
            created_at: link.created_at,
            compression: link.compression.clone(),
        }));
        self.current = Some((link, 0));
        Ok(true)
    }

    /// Reads on in the current link, as far as there is room, and leaves it at its end.
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

/// Where in this chain the original of a copy is. What a first link was born with is its own.
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

/// How many the next page may have after one of `page` pieces with so many bytes.
pub fn next_page(page: usize, bytes: usize) -> usize {
    let page = match bytes {
        bytes if bytes > PAGE_BYTES => page / 4,
        bytes if bytes < PAGE_BYTES / 4 => page * 2,
        _ => page,
    };
    page.clamp(LEAST_PAGE, MOST_PAGE)
}

/// Rows went away while they were read: a job is erasing them.
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
