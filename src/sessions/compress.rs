//! Compression: the next link of a chain, and the undo. The parent's end and its child become visible together or
//! not at all, and concurrent requests get one and the same child.

use std::time::Instant;

use chrono::{DateTime, Utc};

use super::append::append_first;
use super::find;
use crate::domain::conversation::compression::plan::{
    MAX_KEEP_LAST, Plan, PlanRequest, Saving, Tail, plan,
};
use crate::domain::conversation::message;
use crate::domain::conversation::session::{CompressionRecord, Permission, Session, Tip};
use crate::domain::conversation::session_name::{SessionRef, session_not_found};
use crate::domain::people::access::Access;
use crate::domain::turn::session_busy;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::messages::{self, Copy, CopySelection};
use crate::store::conversation::sessions::NewChild;
use crate::store::conversation::{conversations, sessions};
use crate::store::turn::turns;

pub struct Compress {
    pub summary: String,
    pub keep_last: Option<u32>,
    /// Reports the compression without doing it.
    pub preview: bool,
}

#[derive(Debug)]
pub struct CompressionResult {
    /// The child; `None` for a preview.
    pub child: Option<SessionId>,
    pub parent: SessionId,
    pub record: CompressionRecord,
    /// Whether this call created the child.
    pub made: bool,
    pub tip: Tip,
}

/// Replaces all but the last messages with a summary.
pub async fn compress(
    tx: &mut TenantTx,
    access: &Access,
    session: &SessionRef,
    request: &Compress,
    now: DateTime<Utc>,
) -> Result<CompressionResult> {
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
    // The named link may have been compressed meanwhile, or earlier with no message since. The caller then gets the
    // existing child: retries and concurrent requests end with one id.
    let has_moved = tip.session_id != seen.session_id && tip.depth > seen.depth;
    let is_repeated =
        tip.requested_id != tip.session_id && !tip.requested_undone && tip.is_fresh_child();
    if has_moved || is_repeated {
        let child = if has_moved {
            sessions::find_child(tx, seen.session_id).await?
        } else {
            Some(tip.session_id)
        };
        return existing_child(tx, access, child.unwrap_or(tip.session_id), tip).await;
    }
    let summary = message::summary(&request.summary);
    let plan_request = PlanRequest {
        tail: Tail::Messages(keep_last as usize),
        summary_tokens: i64::from(summary.tokens()),
        saving: Saving::Any,
        running_since: None,
        shortened_through: 0,
    };
    if request.preview {
        let plan = plan_for(tx, tip.session_id, &plan_request).await?;
        return Ok(CompressionResult {
            child: None,
            parent: tip.session_id,
            record: plan.record(None, started.elapsed()),
            made: false,
            tip,
        });
    }
    check_idle(tx, &tip).await?;
    // Before the plan: nobody can append to it after that.
    if !sessions::end_as_parent(tx, tip.session_id, now).await? {
        return Err(Error::internal(anyhow::anyhow!("a locked tip is no tip")));
    }
    let plan = plan_for(tx, tip.session_id, &plan_request).await?;
    let record = plan.record(None, started.elapsed());
    let child = NewChild {
        id: SessionId::generate(),
        parent_id: tip.session_id,
        record: &record,
    };
    sessions::insert_child(tx, &child, now).await?;
    copy(tx, &tip, child.id, &plan.head).await?;
    append_first(tx, access, child.id, std::slice::from_ref(&summary), now).await?;
    copy(tx, &tip, child.id, &plan.tail).await?;
    sessions::update_born_seq(tx, child.id).await?;
    conversations::update_tip(tx, tip.name.conversation_id, child.id).await?;
    Ok(CompressionResult {
        child: Some(child.id),
        parent: tip.session_id,
        record,
        made: true,
        tip,
    })
}

async fn plan_for(tx: &mut TenantTx, session_id: SessionId, request: &PlanRequest) -> Result<Plan> {
    let outline = messages::list_outline(tx, session_id).await?;
    Ok(plan(&outline, request)?)
}

async fn copy(tx: &mut TenantTx, tip: &Tip, to: SessionId, seqs: &[i64]) -> Result<()> {
    if seqs.is_empty() {
        return Ok(());
    }
    let copy = Copy {
        from: tip.session_id,
        to,
        selection: CopySelection::Seqs(seqs),
        counted: false,
    };
    messages::copy(tx, &copy).await
}

/// The tip does not move while a turn writes to it.
async fn check_idle(tx: &mut TenantTx, tip: &Tip) -> Result<()> {
    match turns::find_active(tx, tip.name.conversation_id).await? {
        Some(turn_id) => Err(session_busy(turn_id)),
        None => Ok(()),
    }
}

async fn existing_child(
    tx: &mut TenantTx,
    access: &Access,
    child: SessionId,
    tip: Tip,
) -> Result<CompressionResult> {
    let without_record =
        || Error::internal(anyhow::anyhow!("a compressed link without its record"));
    let link: Session = sessions::get(tx, access, child).await?;
    Ok(CompressionResult {
        child: Some(child),
        parent: link.parent.ok_or_else(without_record)?.id,
        record: link.compression.ok_or_else(without_record)?,
        made: false,
        tip,
    })
}

/// Undoes the newest compression, if no message was added since. Returns the session that is the tip again. A
/// second undo of the same child changes nothing.
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
    if tip.requested_undone || tip.depth < seen.depth {
        return Ok(tip.session_id);
    }
    if tip.depth == 0 {
        let detail = "no compression made this session";
        return Err(Error::new(Code::NotCompressed, detail));
    }
    check_idle(tx, &tip).await?;
    let parent = sessions::undo_child(tx, tip.session_id, now)
        .await?
        .ok_or_else(|| {
            let detail = "it can only be undone while no message was added since";
            Error::new(Code::HasNewMessages, detail)
        })?;
    conversations::update_tip(tx, tip.name.conversation_id, parent).await?;
    Ok(parent)
}
