//! The summaries that contain words of an erased user. Those whose sources are known are found by identity, wherever
//! they are. Those whose sources are unknown are searched for in the conversations where the user wrote, and in the
//! branches of these.

use crate::domain::people::erasure::ERASED;
use crate::error::Result;
use crate::ids::{IdentityId, SessionId, UserId};
use crate::store::TenantTx;

/// Public for the test that reads its plan.
pub const LIST_KNOWN: &str = "select session_id, seq
           from summary_sources
          where tenant_id = $1
            and identity_id = $2
          order by session_id, seq
          limit $3";

/// Blanks up to `limit` summaries with the identity among their sources: in all links, undone ones and branches, too.
/// Returns their number. A blanked summary has nobody's words, so no later search finds it.
pub async fn blank_known(tx: &mut TenantTx, identity_id: IdentityId, limit: i64) -> Result<u64> {
    let summaries: Vec<(SessionId, i64)> = sqlx::query_as(LIST_KNOWN)
        .bind(tx.tenant_id())
        .bind(identity_id)
        .bind(limit)
        .fetch_all(tx.connection())
        .await?;
    let (sessions, seqs): (Vec<SessionId>, Vec<i64>) = summaries.into_iter().unzip();
    let done = sqlx::query(
        "update messages m
            set content = to_json($4::text), tool_calls = null, tool_call_id = null, extra = null,
                source_identities = '{}'
           from unnest($2::uuid[], $3::bigint[]) as s (session_id, seq)
          where m.tenant_id = $1
            and m.session_id = s.session_id
            and m.seq = s.seq",
    )
    .bind(tx.tenant_id())
    .bind(sessions)
    .bind(seqs)
    .bind(ERASED)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected())
}

/// Remembers the conversations of these sessions for the search.
pub async fn insert_conversations(
    tx: &mut TenantTx,
    user_id: UserId,
    sessions: &[SessionId],
) -> Result<()> {
    sqlx::query(
        "with wrote_in as (
           select distinct s.conversation_id as id
             from sessions s
            where s.tenant_id = $1
              and s.id = any ($3)
         )
         update erased_people e
            set conversation_ids = array(select unnest(e.conversation_ids) union select id from wrote_in)
          where e.tenant_id = $1
            and e.user_id = $2
            and exists (select 1 from wrote_in where id <> all (e.conversation_ids))",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(sessions)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// `conversations as tree`: those in `$2`, their branches, the branches of these, and so on.
macro_rules! with_branches {
    ($($then:literal),+) => {
        concat!(
            "with recursive tree as (
               select c.id
                 from conversations c
                where c.tenant_id = $1
                  and c.id = any ($2)
                union
               select b.conversation_id
                 from tree t
                 join sessions s
                   on s.tenant_id = $1
                  and s.conversation_id = t.id
                 join sessions b
                   on b.tenant_id = $1
                  and b.origin_id = s.id
                  and b.edge = 'branch'
             ) ",
            $($then),+
        )
    };
}

/// Remembers the branches of the user's own conversations that belong to others: these conversations are deleted
/// before the search begins.
pub async fn insert_branches(
    tx: &mut TenantTx,
    user_id: UserId,
    conversations: &[SessionId],
) -> Result<()> {
    sqlx::query(with_branches!(
        "update erased_people
            set conversation_ids = array(select id from tree where id <> all ($2))
          where tenant_id = $1
            and user_id = $3"
    ))
    .bind(tx.tenant_id())
    .bind(conversations)
    .bind(user_id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The next conversation of the search.
pub async fn find_next(tx: &mut TenantTx, user_id: UserId) -> Result<Option<SessionId>> {
    Ok(sqlx::query_scalar(
        "select c.id
           from erased_people e,
                unnest(e.conversation_ids) as c (id)
          where e.tenant_id = $1
            and e.user_id = $2
            and (e.searched_to is null or c.id > e.searched_to)
          order by c.id
          limit 1",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_optional(tx.connection())
    .await?)
}

pub async fn update_progress(tx: &mut TenantTx, user_id: UserId, to: SessionId) -> Result<()> {
    sqlx::query(
        "update erased_people
            set searched_to = $3
          where tenant_id = $1
            and user_id = $2",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(to)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The sessions of a conversation, undone ones too, and of its branches.
pub async fn list_sessions(
    tx: &mut TenantTx,
    conversation_id: SessionId,
) -> Result<Vec<SessionId>> {
    Ok(sqlx::query_scalar(with_branches!(
        "select s.id
           from tree t
           join sessions s
             on s.tenant_id = $1
            and s.conversation_id = t.id
          order by s.id"
    ))
    .bind(tx.tenant_id())
    .bind([conversation_id].as_slice())
    .fetch_all(tx.connection())
    .await?)
}

/// Blanks the summaries of these sessions whose sources are unknown.
pub async fn blank_unknown(tx: &mut TenantTx, sessions: &[SessionId]) -> Result<()> {
    sqlx::query(
        "update messages
            set content = to_json($3::text), tool_calls = null, tool_call_id = null, extra = null,
                source_identities = '{}'
          where tenant_id = $1
            and session_id = any ($2)
            and kind = 'summary'
            and source_identities is null",
    )
    .bind(tx.tenant_id())
    .bind(sessions)
    .bind(ERASED)
    .execute(tx.connection())
    .await?;
    Ok(())
}
