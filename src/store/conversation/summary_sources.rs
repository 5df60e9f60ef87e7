//! Whose words the summaries of a transcript contain.

use crate::domain::conversation::summary_sources::SummarySources;
use crate::domain::people::erasure::ERASED;
use crate::error::{Error, Result};
use crate::ids::{IdentityId, SessionId};
use crate::store::TenantTx;

/// The sources of a summary that stands for messages of a session up to and including `through`: all who wrote in
/// the session until then, and the sources of the summaries there. Messages that are kept count, too: an answer in the
/// summary can repeat them. Erased messages have nobody's words.
pub async fn find(
    tx: &mut TenantTx,
    session_id: SessionId,
    through: i64,
) -> Result<SummarySources> {
    let (identities, is_complete): (Vec<IdentityId>, bool) = sqlx::query_as(
        "with sources as (
           select m.identity_id
             from messages m
            where m.tenant_id = $1
              and m.session_id = $2
              and m.seq <= $3
              and m.role = 'user'
              and m.kind = 'normal'
              and (m.identity_id is not null or coalesce(m.content::text, '') <> to_json($4::text)::text)
            union
           select unnest(coalesce(m.source_identities, array[null]::uuid[]))
             from messages m
            where m.tenant_id = $1
              and m.session_id = $2
              and m.seq <= $3
              and m.kind = 'summary'
         )
         select coalesce(array_agg(identity_id order by identity_id) filter (where identity_id is not null), '{}'),
                coalesce(bool_and(identity_id is not null), true)
           from sources",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .bind(through)
    .bind(ERASED)
    .fetch_one(tx.connection())
    .await?;
    if is_complete {
        Ok(SummarySources::Complete(identities))
    } else {
        Ok(SummarySources::Partial(identities))
    }
}

/// Stores the sources of a summary, in the transaction that inserts it.
pub async fn update(
    tx: &mut TenantTx,
    (session_id, seq): (SessionId, i64),
    sources: &SummarySources,
) -> Result<()> {
    let done = sqlx::query(
        "update messages
            set source_identities = $4
          where tenant_id = $1
            and session_id = $2
            and seq = $3
            and kind = 'summary'",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .bind(seq)
    .bind(sources.to_column())
    .execute(tx.connection())
    .await?;
    if done.rows_affected() == 1 {
        Ok(())
    } else {
        Err(Error::internal(anyhow::anyhow!("sources of no summary")))
    }
}
