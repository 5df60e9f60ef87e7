//! From an identity to the tip of its conversation, in one statement: the sender, the agent's policy, and
//! every slot that the message could belong to. `domain::conversation::session_key` chooses the slot.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session::SessionHandle;
use crate::domain::conversation::session_key::{possible_keys, user_key_prefix};
use crate::domain::people::access::Namespace;
use crate::domain::people::identity::IdentityName;
use crate::domain::tenant::agent::{AgentSpec, DmScope};
use crate::error::{Error, Result};
use crate::ids::{IdentityId, SessionId, SlotId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::access_sql::access_columns;
use crate::store::conversation::tips::read_name;

/// Public for the bench, which runs it beside the service, and for the test that reads its plan. The
/// statement builds the keys before it searches names by them: under row-level security Postgres uses an
/// index only with values that no function could leak, as `replace` might. `$1` tenant, `$2` platform, `$3`
/// scope, `$4` external id, `$5` agent, `$6` keys, `$7` prefix of a user's key, `$8` the caller's namespace.
pub const RESOLVE: &str = concat!(
    "
  with sender as materialized (
    select i.id as identity_id, i.user_id as sender_user_id, u.shared_since is not null as linked, u.time_zone,
           p.last_seen_at, p.slot_id as seen_slot_id,
           $6::text[] || ($7::text || replace(i.user_id::text, '-', '')) as keys
      from identities i
      join users u
        on u.tenant_id = $1
       and u.id = i.user_id
      left join identity_presence p
        on p.tenant_id = $1
       and p.identity_id = i.id
     where i.tenant_id = $1
       and i.platform = $2
       and i.scope = $3
       and i.external_id = $4
  )
  select sender.identity_id, sender.sender_user_id, sender.linked, sender.time_zone, sender.last_seen_at,
         sender.seen_slot_id,
         tenant.settings ->> 'dm_scope' as dm_scope, a.spec,
         k.id as slot_id, k.key as slot_key, k.user_id as slot_user_id, k.last_user_at as chosen_at,
         c.id as conversation_id, c.namespace, c.client_id, c.user_id, t.id as session_id, t.next_seq,
         t.last_user_at, ",
    access_columns!(hidden_from: "$8"),
    " as hidden
    from sender
    join tenants tenant
      on tenant.id = $1
    left join agents a
      on a.tenant_id = $1
     and a.name = $5
    left join slot_names n
      on n.tenant_id = $1
     and n.namespace = '00000000-0000-0000-0000-000000000000'
     and n.key = any (sender.keys)
     and n.slot_id = n.home_slot_id
    left join slots k
      on k.tenant_id = $1
     and k.id = n.slot_id
    left join conversations c
      on c.tenant_id = $1
     and c.id = k.conversation_id
    left join lateral (
           with recursive tip as (
             select s.id, s.depth, s.next_seq, s.last_user_at
               from sessions s
              where s.tenant_id = $1
                and s.id = c.tip_session_id
              union all
             select s.id, s.depth, s.next_seq, s.last_user_at
               from tip
               join sessions s
                 on s.tenant_id = $1
                and s.chain_parent_id = tip.id
                and s.undone_at is null
           )
           select id, next_seq, last_user_at
             from tip
            order by depth desc
            limit 1) t
      on true"
);

/// The sender of a message, with every slot that the message could belong to.
#[derive(Debug)]
pub struct SenderSlots {
    pub identity_id: IdentityId,
    pub user_id: UserId,
    pub linked: bool,
    pub time_zone: Option<String>,
    pub dm_scope: Option<DmScope>,
    /// `None`: the agent does not exist.
    pub agent: Option<AgentSpec>,
    pub last_seen: Option<(DateTime<Utc>, Option<SlotId>)>,
    pub slots: Vec<CandidateSlot>,
}

/// A slot and its current session.
#[derive(Debug)]
pub struct CandidateSlot {
    pub slot_id: SlotId,
    pub key: String,
    pub user_id: Option<UserId>,
    /// When a user last chose the current session.
    pub chosen_at: DateTime<Utc>,
    pub current: Option<SlotTip>,
}

#[derive(Debug)]
pub struct SlotTip {
    pub link: SessionHandle,
    pub last_seq: i64,
    pub last_user_at: DateTime<Utc>,
}

pub async fn find(
    tx: &mut TenantTx,
    identity: &IdentityName,
    agent: &str,
    chat: &Chat,
    namespace: Namespace,
) -> Result<Option<SenderSlots>> {
    let rows = sqlx::query(RESOLVE)
        .bind(tx.tenant_id())
        .bind(identity.platform().platform())
        .bind(identity.platform().scope().unwrap_or_default())
        .bind(identity.external_id())
        .bind(agent)
        .bind(possible_keys(agent, identity, chat))
        .bind(user_key_prefix(agent))
        .bind(namespace.as_uuid())
        .fetch_all(tx.connection())
        .await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let mut sender = read_sender(first)?;
    for row in &rows {
        sender.slots.extend(read_slot(row)?);
    }
    Ok(Some(sender))
}

fn read_sender(row: &PgRow) -> Result<SenderSlots> {
    let dm_scope: Option<String> = row.try_get("dm_scope")?;
    let dm_scope = dm_scope
        .map(|text| serde_json::from_value(text.into()))
        .transpose()
        .map_err(Error::internal)?;
    let agent: Option<Json<AgentSpec>> = row.try_get("spec")?;
    let last_seen_at: Option<DateTime<Utc>> = row.try_get("last_seen_at")?;
    let seen_slot_id: Option<SlotId> = row.try_get("seen_slot_id")?;
    Ok(SenderSlots {
        identity_id: row.try_get("identity_id")?,
        user_id: row.try_get("sender_user_id")?,
        linked: row.try_get("linked")?,
        time_zone: row.try_get("time_zone")?,
        dm_scope,
        agent: agent.map(|Json(spec)| spec),
        last_seen: last_seen_at.map(|at| (at, seen_slot_id)),
        slots: Vec::new(),
    })
}

fn read_slot(row: &PgRow) -> Result<Option<CandidateSlot>> {
    let Some(slot_id) = row.try_get::<Option<SlotId>, _>("slot_id")? else {
        return Ok(None);
    };
    let session_id: Option<SessionId> = row.try_get("session_id")?;
    let current = match session_id {
        Some(id) => Some(SlotTip {
            link: SessionHandle {
                id,
                name: read_name(row)?,
            },
            last_seq: row.try_get::<i64, _>("next_seq")? - 1,
            last_user_at: row.try_get("last_user_at")?,
        }),
        None => None,
    };
    Ok(Some(CandidateSlot {
        slot_id,
        key: row.try_get("slot_key")?,
        user_id: row.try_get("slot_user_id")?,
        chosen_at: row.try_get("chosen_at")?,
        current,
    }))
}
