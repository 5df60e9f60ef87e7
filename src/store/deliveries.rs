//! Deliveries on their way out: ended by who has the lease (`delivery_leases.rs` hands them out), listed when they
//! are dead, and replayed.

use chrono::TimeDelta;
use sqlx::postgres::PgRow;
use sqlx::types::{Json, Uuid};
use sqlx::{FromRow, Row};

use super::TenantTx;
use crate::domain::chat::Chat;
use crate::domain::delivery::{Delivery, DeliveryKind};
use crate::domain::paging::{Page, PageRequest, Position};
use crate::domain::platform::PlatformScope;
use crate::error::Result;
use crate::ids::DeliveryId;

macro_rules! delivery_columns {
    () => {
        "d.id, d.kind, d.platform, d.scope, d.chat_ref, d.payload ->> 'text' as text, d.session_id,
         d.conversation_id, d.turn_id, d.in_reply_to, d.seq, d.attempt, d.lease, d.error, d.created_at,
         (select c.chat
            from chats c
           where c.tenant_id = $1
             and c.platform = d.platform
             and c.scope = d.scope
             and c.chat_ref = d.chat_ref) as chat,
         (select i.platform || case when i.scope = '' then '' else '@' || i.scope end || ':' || i.external_id
            from identities i
           where i.tenant_id = $1
             and i.id = d.identity_id) as identity"
    };
}
pub(super) use delivery_columns;

/// A delivery as those see it who only list it: also one whose chat cannot be read.
struct DeliveryRow(Delivery);

impl FromRow<'_, PgRow> for DeliveryRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let chat = read_chat(row).unwrap_or_default();
        read(row, chat)
            .map(Self)
            .map_err(|error| sqlx::Error::Decode(Box::new(error)))
    }
}

pub(super) fn read_chat(row: &PgRow) -> sqlx::Result<Option<Chat>> {
    let chat: Option<Json<Chat>> = row.try_get("chat")?;
    Ok(chat.map(|Json(chat)| chat))
}

pub(super) fn read(row: &PgRow, chat: Option<Chat>) -> Result<Delivery> {
    let text: Option<String> = row.try_get("text")?;
    Ok(Delivery {
        id: row.try_get("id")?,
        kind: DeliveryKind::from_column(row.try_get("kind")?)?,
        platform: row.try_get("platform")?,
        scope: row.try_get("scope")?,
        chat_ref: row.try_get("chat_ref")?,
        chat,
        identity: row.try_get("identity")?,
        text: text.unwrap_or_default(),
        session_id: row.try_get("session_id")?,
        conversation_id: row.try_get("conversation_id")?,
        turn_id: row.try_get("turn_id")?,
        in_reply_to: row.try_get("in_reply_to")?,
        seq: row.try_get("seq")?,
        attempt: row.try_get("attempt")?,
        lease: row.try_get("lease")?,
        error: row.try_get("error")?,
        created_at: row.try_get("created_at")?,
    })
}

/// Which deliveries somebody may see: of these platforms; a platform without a scope is all its scopes.
#[derive(Debug, Clone)]
pub struct Covered {
    pub(super) platforms: Vec<String>,
    pub(super) scopes: Vec<Option<String>>,
    /// Whether it is all of them.
    pub(super) all: bool,
}

impl Covered {
    pub fn all() -> Self {
        Self {
            platforms: Vec::new(),
            scopes: Vec::new(),
            all: true,
        }
    }

    pub fn of(platforms: &[PlatformScope]) -> Self {
        let name = |one: &PlatformScope| one.platform().to_owned();
        let scope = |one: &PlatformScope| one.scope().map(str::to_owned);
        Self {
            platforms: platforms.iter().map(name).collect(),
            scopes: platforms.iter().map(scope).collect(),
            all: false,
        }
    }
}

/// `$2` says whether all, `$3` and `$4` which platforms and scopes.
macro_rules! is_covered {
    () => {
        "($2 or exists (select 1
                          from unnest($3::text[], $4::text[]) as k (platform, scope)
                         where k.platform = d.platform
                           and (k.scope is null or k.scope = d.scope)))"
    };
}

/// Locks the chat of a delivery. The chat is looked up by its whole key, for each delivery on its own: a join would
/// leave it to statistics, and they are old while a tenant grows, whether all chats are read for it.
///
/// Public, as `END` is, for the bench that runs them beside the service.
pub const LOCK_CHAT: &str = concat!(
    "select c.platform, c.scope, c.chat_ref, c.ended_seq
       from deliveries d
      cross join lateral (select c.platform, c.scope, c.chat_ref, c.ended_seq
                            from chats c
                           where c.tenant_id = $1
                             and c.platform = d.platform
                             and c.scope = d.scope
                             and c.chat_ref = d.chat_ref
                             for no key update) c
      where d.tenant_id = $1
        and d.id = $5
        and ",
    is_covered!()
);

/// A chat whose row is locked.
#[derive(sqlx::FromRow)]
struct LockedChat {
    platform: String,
    scope: String,
    chat_ref: String,
    /// Every delivery up to this number has ended.
    ended_seq: i64,
}

/// Locks the chat of a delivery, before it is changed. `None`: there is no such delivery for who asks.
async fn lock_chat(
    tx: &mut TenantTx,
    covered: &Covered,
    id: DeliveryId,
) -> Result<Option<LockedChat>> {
    Ok(sqlx::query_as(LOCK_CHAT)
        .bind(tx.tenant_id())
        .bind(covered.all)
        .bind(&covered.platforms)
        .bind(&covered.scopes)
        .bind(id)
        .fetch_optional(tx.connection())
        .await?)
}

/// How often it was given out; `None`: there is no such delivery for who asks.
pub async fn find_attempt(
    tx: &mut TenantTx,
    covered: &Covered,
    id: DeliveryId,
) -> Result<Option<i32>> {
    Ok(sqlx::query_scalar(concat!(
        "select d.attempt
           from deliveries d
          where d.tenant_id = $1
            and d.id = $5
            and ",
        is_covered!()
    ))
    .bind(tx.tenant_id())
    .bind(covered.all)
    .bind(&covered.platforms)
    .bind(&covered.scopes)
    .bind(id)
    .fetch_optional(tx.connection())
    .await?)
}

/// What becomes of a delivery that somebody has.
#[derive(Debug, Clone, Copy)]
pub enum End<'a> {
    Delivered {
        external_message_id: Option<&'a str>,
    },
    /// Not now: again after that.
    Later {
        after: TimeDelta,
        error: &'a str,
    },
    Dead {
        error: &'a str,
    },
}

/// The chat is due again, if anything is left in it. Only a leased delivery has a lease.
pub const END: &str = "with ended as (
       update deliveries d
          set state = $4, lease = null, visible_at = now() + $5, error = coalesce($6, d.error),
              external_message_id = coalesce($7, d.external_message_id),
              ended_at = case when $4 <> 'pending' then now() end
        where d.tenant_id = $1
          and d.id = $2
          and d.lease = $3
    returning d.id
     ), planned as (
       update chats c
          set due_at = case
                when $4 = 'pending'
                  or exists (select 1
                               from deliveries o
                              where o.tenant_id = $1
                                and o.platform = $8
                                and o.scope = $9
                                and o.chat_ref = $10
                                and o.seq > $11
                                and o.state in ('pending', 'leased')
                                and o.id <> $2) then now()
              end
        where c.tenant_id = $1
          and c.platform = $8
          and c.scope = $9
          and c.chat_ref = $10
          and exists (select 1 from ended)
     )
     select exists (select 1 from ended)";

/// Ends a hand-out, if `lease` is still its name. `None`: there is no such delivery for who asks.
pub async fn end(
    tx: &mut TenantTx,
    covered: &Covered,
    id: DeliveryId,
    lease: Uuid,
    how: End<'_>,
) -> Result<Option<bool>> {
    let Some(chat) = lock_chat(tx, covered, id).await? else {
        return Ok(None);
    };
    let (state, after, error, external) = match how {
        End::Delivered {
            external_message_id,
        } => ("delivered", TimeDelta::zero(), None, external_message_id),
        End::Later { after, error } => ("pending", after, Some(error), None),
        End::Dead { error } => ("dead", TimeDelta::zero(), Some(error), None),
    };
    let ended: bool = sqlx::query_scalar(END)
        .bind(tx.tenant_id())
        .bind(id)
        .bind(lease)
        .bind(state)
        .bind(after)
        .bind(error)
        .bind(external)
        .bind(&chat.platform)
        .bind(&chat.scope)
        .bind(&chat.chat_ref)
        .bind(chat.ended_seq)
        .fetch_one(tx.connection())
        .await?;
    Ok(Some(ended))
}

/// Those that were given up, newest first.
pub async fn list_dead(
    tx: &mut TenantTx,
    covered: &Covered,
    page: &PageRequest,
) -> Result<Page<Delivery>> {
    let rows: Vec<DeliveryRow> = sqlx::query_as(concat!(
        "select ",
        delivery_columns!(),
        " from deliveries d
         where d.tenant_id = $1
           and d.state = 'dead'
           and ",
        is_covered!(),
        "  and ($5::timestamptz is null or (d.created_at, d.id) < ($5, $6))
         order by d.created_at desc, d.id desc
         limit $7"
    ))
    .bind(tx.tenant_id())
    .bind(covered.all)
    .bind(&covered.platforms)
    .bind(&covered.scopes)
    .bind(page.after.map(|after| after.created_at))
    .bind(page.after.map(|after| after.id))
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    let rows = rows.into_iter().map(|row| row.0).collect();
    Ok(Page::cut(rows, page, |delivery: &Delivery| Position {
        created_at: delivery.created_at,
        id: delivery.id.as_uuid(),
    }))
}

/// Lets a dead one be tried again, from its place in the order of its chat.
pub async fn replay(
    tx: &mut TenantTx,
    covered: &Covered,
    id: DeliveryId,
) -> Result<Option<Delivery>> {
    let Some(chat) = lock_chat(tx, covered, id).await? else {
        return Ok(None);
    };
    let row: Option<DeliveryRow> = sqlx::query_as(concat!(
        "with replayed as (
           update deliveries d
              set state = 'pending', attempt = 0, visible_at = now(), ended_at = null
            where d.tenant_id = $1
              and d.id = $2
              and d.state = 'dead'
        returning d.*
         ), planned as (
           update chats c
              set due_at = now(), ended_seq = least(c.ended_seq, r.seq - 1)
             from replayed r
            where c.tenant_id = $1
              and c.platform = $3
              and c.scope = $4
              and c.chat_ref = $5
         )
         select ",
        delivery_columns!(),
        " from replayed d"
    ))
    .bind(tx.tenant_id())
    .bind(id)
    .bind(&chat.platform)
    .bind(&chat.scope)
    .bind(&chat.chat_ref)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|row| row.0))
}
