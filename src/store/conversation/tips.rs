//! From any session of a chain to the chain's tip: the one query behind every endpoint that takes a session id.
//! Its cost does not grow with the chain.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::access_sql::access_columns;
use crate::domain::conversation::session::{
    ConversationHandle, EndReason, Ownership, SessionState, Tip,
};
use crate::domain::conversation::session_name::SessionRef;
use crate::domain::people::access::{Access, Namespace, Visibility};
use crate::error::Result;
use crate::ids::UserId;
use crate::store::TenantTx;

/// From the requested session to the tip: the conversation's hint (`tip_session_id`), and from there any newer
/// session. The transaction that inserts a session moves the hint, so the walk takes no step. The walk, not the
/// hint, guarantees the right result. `$3` is the caller's namespace, `$4` the user whose grants count, `$5` now.
macro_rules! to_the_tip {
    ($requested:literal) => {
        concat!(
            "with recursive requested as (",
            $requested,
            "), tip as (
               select h.id, h.depth
                 from requested r
                 join conversations c
                   on c.tenant_id = $1
                  and c.id = r.conversation_id
                  and c.deleted_at is null
                 join sessions h
                   on h.tenant_id = $1
                  and h.id = c.tip_session_id
                union all
               select n.id, n.depth
                 from tip t
                 join sessions n
                   on n.tenant_id = $1
                  and n.chain_parent_id = t.id
                  and n.undone_at is null
             )
             select r.id as requested_id, r.depth as requested_depth,
                    r.undone_at is not null as requested_undone,
                    s.id, s.depth, s.chain_parent_id, s.state, s.end_reason, s.next_seq, s.born_seq,
                    s.token_count, s.last_user_at, s.conversation_id, c.namespace, c.client_id, c.user_id,
                    c.agent, c.slot_id, k.key as session_key, ",
            access_columns!(namespace: "$3", user: "$4", now: "$5"),
            " from requested r
               join sessions s
                 on s.tenant_id = $1
                and s.id = (select id from tip order by depth desc limit 1)
               join conversations c
                 on c.tenant_id = $1
                and c.id = s.conversation_id
               left join slots k
                 on k.tenant_id = $1
                and k.id = c.slot_id"
        )
    };
}

/// Public for the test that reads its plan.
pub const TIP_BY_ID: &str = to_the_tip!(
    "select s.id, s.depth, s.undone_at, s.conversation_id
       from sessions s
      where s.tenant_id = $1
        and s.id = $2"
);
/// The caller's own names come first; then, for a user, the service's names for conversations of that user.
const TIP_BY_NAME: &str = to_the_tip!(
    "select s.id, s.depth, s.undone_at, s.conversation_id
       from conversations n
       join sessions s
         on s.tenant_id = $1
        and s.id = n.id
      where n.tenant_id = $1
        and n.client_id = $2
        and (n.namespace = $3
             or (n.namespace = '00000000-0000-0000-0000-000000000000' and n.user_id = $4))
        and n.deleted_at is null
      order by n.namespace = $3 desc
      limit 1"
);

/// The tip of the chain of `session`, with the columns that decide the caller's rights there.
pub async fn find(
    tx: &mut TenantTx,
    access: &Access,
    session: &SessionRef,
    now: DateTime<Utc>,
) -> Result<Option<Tip>> {
    let query = match session {
        SessionRef::Id(_) => sqlx::query(TIP_BY_ID),
        SessionRef::Name(_) => sqlx::query(TIP_BY_NAME),
    };
    let query = query.bind(tx.tenant_id());
    let query = match session {
        SessionRef::Id(id) => query.bind(*id),
        SessionRef::Name(name) => query.bind(name.as_str().to_owned()),
    };
    let row = query
        .bind(access.namespace.as_uuid())
        .bind(grantee(access))
        .bind(now)
        .fetch_optional(tx.connection())
        .await?;
    row.map(|row| read_tip(&row)).transpose()
}

/// The user whose grants count for `access`.
pub(in crate::store) fn grantee(access: &Access) -> Option<UserId> {
    match access.visibility {
        Visibility::User(user_id) => Some(user_id),
        Visibility::Tenant | Visibility::Service => None,
    }
}

fn read_tip(row: &PgRow) -> Result<Tip> {
    let state: String = row.try_get("state")?;
    let end_reason: Option<String> = row.try_get("end_reason")?;
    Ok(Tip {
        requested_id: row.try_get("requested_id")?,
        requested_depth: row.try_get("requested_depth")?,
        requested_undone: row.try_get("requested_undone")?,
        session_id: row.try_get("id")?,
        depth: row.try_get("depth")?,
        parent_id: row.try_get("chain_parent_id")?,
        state: SessionState::from_column(&state)?,
        end_reason: end_reason
            .as_deref()
            .map(EndReason::from_column)
            .transpose()?,
        next_seq: row.try_get("next_seq")?,
        born_seq: row.try_get("born_seq")?,
        token_count: row.try_get("token_count")?,
        last_user_at: row.try_get("last_user_at")?,
        name: read_name(row)?,
        owner: read_owner(row)?,
        agent: row.try_get("agent")?,
        slot_id: row.try_get("slot_id")?,
    })
}

pub(in crate::store) fn read_name(row: &PgRow) -> Result<ConversationHandle> {
    Ok(ConversationHandle {
        conversation_id: row.try_get("conversation_id")?,
        namespace: Namespace::from_uuid(row.try_get("namespace")?),
        client_id: row.try_get("client_id")?,
        user_id: row.try_get("user_id")?,
        hidden: row.try_get("hidden")?,
    })
}

pub(in crate::store) fn read_owner(row: &PgRow) -> Result<Ownership> {
    Ok(Ownership {
        user_id: row.try_get("user_id")?,
        session_key: row.try_get("session_key")?,
        granted: row.try_get("granted")?,
    })
}
