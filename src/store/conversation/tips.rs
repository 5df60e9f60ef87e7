//! From any id of a chain to its tip: the one query behind every endpoint that takes a session id. Its
//! cost does not grow with the chain.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::domain::conversation::session::{
    ConversationHandle, EndReason, Ownership, SessionState, Tip,
};
use crate::domain::conversation::session_name::SessionRef;
use crate::domain::people::access::{Access, Namespace, Visibility};
use crate::error::Result;
use crate::ids::UserId;
use crate::store::TenantTx;

/// Everything after the session was found: the conversation's hint, and from there whatever is newer.
/// The hint moves in the transaction that makes a link, so the walk takes no step; it is the walk, and
/// not the hint, that makes the answer right.
macro_rules! to_the_tip {
    ($asked:literal) => {
        concat!(
            "with recursive asked as (",
            $asked,
            "), tip as (
               select h.id, h.depth
                 from asked a
                 join conversations c
                   on c.tenant_id = $1
                  and c.id = a.conversation_id
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
             select a.id as requested_id, a.depth as asked_depth, a.undone_at is not null as requested_undone,
                    s.id, s.depth, s.chain_parent_id, s.state, s.end_reason, s.next_seq, s.born_seq,
                    s.token_count, s.last_person_at, s.conversation_id, c.namespace, c.client_id, c.user_id,
                    c.agent, c.slot_id, k.key as session_key,
                    exists (select 1
                              from conversations own
                             where own.tenant_id = $1
                               and own.namespace = $3
                               and own.client_id = c.client_id
                               and c.namespace <> $3) as hidden,
                    exists (select 1
                              from conversation_grants g
                             where g.tenant_id = $1
                               and g.conversation_id = c.id
                               and g.user_id = $4
                               and g.revoked_at is null
                               and g.expires_at > $5) as granted
               from asked a
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
/// A caller's own names come first; then, for a person, the service's names for what is theirs.
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

/// The tip of the chain that `session` is a link of, and what decides the access's rights there.
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
        .bind(person_of(access))
        .bind(now)
        .fetch_optional(tx.connection())
        .await?;
    row.map(|row| read_tip(&row)).transpose()
}

/// Whose grants count for `access`.
pub(in crate::store) fn person_of(access: &Access) -> Option<UserId> {
    match access.reach {
        Visibility::Person(user_id) => Some(user_id),
        Visibility::Tenant | Visibility::Service => None,
    }
}

fn read_tip(row: &PgRow) -> Result<Tip> {
    let state: String = row.try_get("state")?;
    let end_reason: Option<String> = row.try_get("end_reason")?;
    Ok(Tip {
        requested_id: row.try_get("requested_id")?,
        asked_depth: row.try_get("asked_depth")?,
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
        last_person_at: row.try_get("last_person_at")?,
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
