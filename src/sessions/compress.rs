//! The next link of a chain, and the way back. The parent's end and its child appear together or not at
//! all, and however many ask at once get one child.

use std::time::Instant;

use chrono::{DateTime, Utc};

use super::append::put_first;
use super::find;
use crate::domain::conversation::message;
use crate::domain::conversation::session::{CompressionRecord, Permission, Session, Tip};
use crate::domain::conversation::session_name::{SessionRef, session_not_found};
use crate::domain::people::access::Access;
use crate::domain::tenant::compression_settings::{MAX_KEEP_LAST, Plan, Totals, plan};
use crate::domain::turn::session_busy;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::messages::{self, Chosen, Copy};
use crate::store::conversation::sessions::{NewChild, Taken};
use crate::store::conversation::{conversations, sessions};
use crate::store::turn::turns;

/// System messages that may stand at the beginning.
const HEAD: i64 = 16;
/// How far before the kept tail the call of a kept result is looked for.
const BEFORE_TAIL: i64 = 256;

pub struct Compress {
    pub summary: String,
    pub keep_last: Option<u32>,
    /// Only tell what would become of it.
    pub preview: bool,
}

#[derive(Debug)]
pub struct Compressed {
    /// The child; none for a preview.
    pub child: Option<SessionId>,
    pub parent: SessionId,
    pub record: CompressionRecord,
    /// Whether this call made the child.
    pub made: bool,
    pub tip: Tip,
}

/// Puts a summary in the place of all but the last messages.
pub async fn compress(
    tx: &mut TenantTx,
    access: &Access,
    session: &SessionRef,
    request: &Compress,
    now: DateTime<Utc>,
) -> Result<Compressed> {
    let keep_last = request.keep_last.unwrap_or(0);
    if keep_last > MAX_KEEP_LAST {
        let detail = format!("must be at most {MAX_KEEP_LAST}");
        return Err(Error::invalid(vec![FieldError::new("/keep_last", detail)]));
    }
    let started = Instant::now();
    let seen = find(tx, access, session, Permission::Manage, now).await?;
    conversations::lock(tx, seen.name.conversation_id)
        .await?
        .ok_or_else(session_not_found)?;
    let tip = find(tx, access, session, Permission::Manage, now).await?;
    // Whoever asked for a link that was compressed meanwhile, or before and nothing was said since, gets
    // the child that is there: retries and racers end with one id.
    let moved_on = tip.session_id != seen.session_id && tip.depth > seen.depth;
    let late = tip.asked_id != tip.session_id && !tip.asked_undone && tip.is_fresh_child();
    if moved_on || late {
        let child = if moved_on {
            sessions::find_child(tx, seen.session_id).await?
        } else {
            Some(tip.session_id)
        };
        return already_made(tx, access, child.unwrap_or(tip.session_id), tip).await;
    }
    let summary = message::summary(&request.summary);
    if request.preview {
        let taken = Taken {
            last_seq: tip.last_seq(),
            token_count: tip.token_count,
        };
        let plan = plan_for(tx, &tip, taken, keep_last, summary.tokens()).await?;
        return Ok(Compressed {
            child: None,
            parent: tip.session_id,
            record: record(&plan, started),
            made: false,
            tip,
        });
    }
    refuse_while_busy(tx, &tip).await?;
    let taken = sessions::end_as_parent(tx, tip.session_id, now)
        .await?
        .ok_or_else(|| Error::internal(anyhow::anyhow!("a locked tip is no tip")))?;
    let plan = plan_for(tx, &tip, taken, keep_last, summary.tokens()).await?;
    let record = record(&plan, started);
    let child = NewChild {
        id: SessionId::generate(),
        parent_id: tip.session_id,
        record: &record,
    };
    sessions::insert_child(tx, &child, now).await?;
    copy(tx, &tip, child.id, &plan.head).await?;
    put_first(tx, access, child.id, std::slice::from_ref(&summary), now).await?;
    copy(tx, &tip, child.id, &plan.tail).await?;
    sessions::update_born(tx, child.id).await?;
    conversations::update_tip(tx, tip.name.conversation_id, child.id).await?;
    Ok(Compressed {
        child: Some(child.id),
        parent: tip.session_id,
        record,
        made: true,
        tip,
    })
}

async fn plan_for(
    tx: &mut TenantTx,
    tip: &Tip,
    taken: Taken,
    keep_last: u32,
    summary_tokens: i32,
) -> Result<Plan> {
    let tail = i64::from(keep_last) + BEFORE_TAIL;
    let outline = messages::outline(tx, tip.session_id, HEAD, tail).await?;
    let totals = Totals {
        messages: taken.last_seq,
        tokens: taken.token_count,
    };
    plan(
        &outline,
        totals,
        keep_last as usize,
        i64::from(summary_tokens),
    )
}

fn record(plan: &Plan, started: Instant) -> CompressionRecord {
    CompressionRecord {
        summarised: plan.summarised,
        kept: plan.kept(),
        tokens_before: plan.tokens_before,
        tokens_after: plan.tokens_after,
        model: None,
        duration_ms: i64::try_from(started.elapsed().as_millis()).unwrap_or(i64::MAX),
    }
}

async fn copy(tx: &mut TenantTx, tip: &Tip, to: SessionId, seqs: &[i64]) -> Result<()> {
    if seqs.is_empty() {
        return Ok(());
    }
    let copy = Copy {
        from: tip.session_id,
        to,
        chosen: Chosen::Seqs(seqs),
        counted: false,
    };
    messages::copy(tx, &copy).await
}

/// The end of a conversation stays where it is while a turn writes there.
async fn refuse_while_busy(tx: &mut TenantTx, tip: &Tip) -> Result<()> {
    match turns::find_active(tx, tip.name.conversation_id).await? {
        Some(turn_id) => Err(session_busy(turn_id)),
        None => Ok(()),
    }
}

async fn already_made(
    tx: &mut TenantTx,
    access: &Access,
    child: SessionId,
    tip: Tip,
) -> Result<Compressed> {
    let broken = || Error::internal(anyhow::anyhow!("a compressed link without its record"));
    let link: Session = sessions::get(tx, access, child).await?;
    Ok(Compressed {
        child: Some(child),
        parent: link.parent.ok_or_else(broken)?.id,
        record: link.compression.ok_or_else(broken)?,
        made: false,
        tip,
    })
}

/// Takes the newest compression back while nothing was said since. Answers the session that is the tip
/// again. Asking again for a child that was undone changes nothing.
pub async fn uncompress(
    tx: &mut TenantTx,
    access: &Access,
    session: &SessionRef,
    now: DateTime<Utc>,
) -> Result<SessionId> {
    let seen = find(tx, access, session, Permission::Manage, now).await?;
    conversations::lock(tx, seen.name.conversation_id)
        .await?
        .ok_or_else(session_not_found)?;
    let tip = find(tx, access, session, Permission::Manage, now).await?;
    if tip.asked_undone || tip.depth < seen.depth {
        return Ok(tip.session_id);
    }
    if tip.depth == 0 {
        let detail = "no compression made this session";
        return Err(Error::new(Code::NotCompressed, detail));
    }
    refuse_while_busy(tx, &tip).await?;
    let parent = sessions::undo_child(tx, tip.session_id, now)
        .await?
        .ok_or_else(|| {
            let detail = "it can only be undone while there are no messages after it";
            Error::new(Code::HasNewMessages, detail)
        })?;
    conversations::update_tip(tx, tip.name.conversation_id, parent).await?;
    Ok(parent)
}
