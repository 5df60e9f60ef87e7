//! Deliveries on their way out: handed out under a lease, in the order of their chat, one in flight per
//! chat; ended by who has the lease, or handed out again when it runs out.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::types::{Json, Uuid};
use sqlx::{FromRow, Row};

use super::TenantTx;
use crate::domain::chat::Chat;
use crate::domain::delivery::{Delivery, DeliveryKind, MAX_ATTEMPTS, VISIBILITY};
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

struct DeliveryRow(Delivery);

impl FromRow<'_, PgRow> for DeliveryRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        read(row)
            .map(Self)
            .map_err(|error| sqlx::Error::Decode(Box::new(error)))
    }
}

fn read(row: &PgRow) -> Result<Delivery> {
    let chat: Option<Json<Chat>> = row.try_get("chat")?;
    let text: Option<String> = row.try_get("text")?;
    Ok(Delivery {
        id: row.try_get("id")?,
        kind: DeliveryKind::from_column(row.try_get("kind")?)?,
        platform: row.try_get("platform")?,
        scope: row.try_get("scope")?,
        chat_ref: row.try_get("chat_ref")?,
        chat: chat.map(|Json(chat)| chat),
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
    platforms: Vec<String>,
    scopes: Vec<Option<String>>,
    /// Whether it is all of them.
    all: bool,
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

/// Public, as `LEASE` and `END` are, for the bench that runs them beside the service.
pub const TAKE_BACK: &str = "update deliveries
        set state = case when attempt >= $3 then 'dead' else 'pending' end,
            ended_at = case when attempt >= $3 then $2 end,
            lease = null
      where tenant_id = $1
        and state = 'leased'
        and visible_at <= $2";

/// Takes back what was handed out and not ended in time: to be given out again, or given up after the last
/// attempt.
pub async fn take_back(tx: &mut TenantTx, now: DateTime<Utc>) -> Result<u64> {
    let done = sqlx::query(TAKE_BACK)
        .bind(tx.tenant_id())
        .bind(now)
        .bind(MAX_ATTEMPTS)
        .execute(tx.connection())
        .await?;
    Ok(done.rows_affected())
}

pub const LEASE: &str = concat!(
    "with first as (
       select distinct on (d.platform, d.scope, d.chat_ref) d.id, d.visible_at, d.platform, d.scope,
              d.chat_ref
         from deliveries d
        where d.tenant_id = $1
          and d.state = 'pending'
          and ",
    is_covered!(),
    "   order by d.platform, d.scope, d.chat_ref, d.seq
     ), due as (
       select f.id
         from first f
        where f.visible_at <= $6
          and not exists (select 1
                            from deliveries o
                           where o.tenant_id = $1
                             and o.platform = f.platform
                             and o.scope = f.scope
                             and o.chat_ref = f.chat_ref
                             and o.state = 'leased')
        order by f.visible_at
        limit $5
     )
     update deliveries d
        set state = 'leased', lease = gen_random_uuid(), attempt = d.attempt + 1, visible_at = $7
       from due
      where d.tenant_id = $1
        and d.id = due.id
        and d.state = 'pending'
  returning ",
    delivery_columns!()
);

/// Hands out the first delivery of each chat that is due and has none in flight, up to `limit`. Two who ask
/// at once never get the same: the update looks again at what it changes.
pub async fn lease(
    tx: &mut TenantTx,
    covered: &Covered,
    limit: i64,
    now: DateTime<Utc>,
) -> Result<Vec<Delivery>> {
    let rows: Vec<DeliveryRow> = sqlx::query_as(LEASE)
        .bind(tx.tenant_id())
        .bind(covered.all)
        .bind(&covered.platforms)
        .bind(&covered.scopes)
        .bind(limit)
        .bind(now)
        .bind(now + VISIBILITY)
        .fetch_all(tx.connection())
        .await?;
    let mut leased: Vec<Delivery> = rows.into_iter().map(|row| row.0).collect();
    leased.sort_by_key(|delivery| (delivery.created_at, delivery.seq));
    Ok(leased)
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
    /// Not now: again from then on.
    Later {
        at: DateTime<Utc>,
        error: &'a str,
    },
    Dead {
        error: &'a str,
    },
}

pub const END: &str = concat!(
    "with seen as (
       select d.id
         from deliveries d
        where d.tenant_id = $1
          and d.id = $5
          and ",
    is_covered!(),
    "), ended as (
       update deliveries d
          set state = $7, lease = null, visible_at = $8, error = coalesce($9, d.error),
              external_message_id = coalesce($10, d.external_message_id),
              ended_at = case when $7 <> 'pending' then $11 end
         from seen
        where d.tenant_id = $1
          and d.id = seen.id
          and d.state = 'leased'
          and d.lease = $6
    returning d.id
     )
     select exists (select 1 from ended)
       from seen"
);

/// Ends a hand-out, if `lease` is still its name. `None`: there is no such delivery for who asks.
pub async fn end(
    tx: &mut TenantTx,
    covered: &Covered,
    id: DeliveryId,
    lease: Uuid,
    how: End<'_>,
    now: DateTime<Utc>,
) -> Result<Option<bool>> {
    let (state, visible_at, error, external) = match how {
        End::Delivered {
            external_message_id,
        } => ("delivered", now, None, external_message_id),
        End::Later { at, error } => ("pending", at, Some(error), None),
        End::Dead { error } => ("dead", now, Some(error), None),
    };
    let ended: Option<bool> = sqlx::query_scalar(END)
        .bind(tx.tenant_id())
        .bind(covered.all)
        .bind(&covered.platforms)
        .bind(&covered.scopes)
        .bind(id)
        .bind(lease)
        .bind(state)
        .bind(visible_at)
        .bind(error)
        .bind(external)
        .bind(now)
        .fetch_optional(tx.connection())
        .await?;
    Ok(ended)
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

/// Removes what ended before `before`; up to `limit`, and answers how many.
pub async fn delete_ended(tx: &mut TenantTx, before: DateTime<Utc>, limit: i64) -> Result<u64> {
    let done = sqlx::query(
        "delete from deliveries
          where tenant_id = $1
            and id in (select id
                         from deliveries
                        where tenant_id = $1
                          and state in ('delivered', 'dead', 'cancelled')
                          and coalesce(ended_at, created_at) < $2
                        order by id
                        limit $3)",
    )
    .bind(tx.tenant_id())
    .bind(before)
    .bind(limit)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected())
}

/// Lets a dead one be tried again, from its place in the order of its chat.
pub async fn replay(
    tx: &mut TenantTx,
    covered: &Covered,
    id: DeliveryId,
    now: DateTime<Utc>,
) -> Result<Option<Delivery>> {
    let row: Option<DeliveryRow> = sqlx::query_as(concat!(
        "update deliveries d
            set state = 'pending', attempt = 0, visible_at = $6, ended_at = null
          where d.tenant_id = $1
            and d.id = $5
            and d.state = 'dead'
            and ",
        is_covered!(),
        " returning ",
        delivery_columns!()
    ))
    .bind(tx.tenant_id())
    .bind(covered.all)
    .bind(&covered.platforms)
    .bind(&covered.scopes)
    .bind(id)
    .bind(now)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|row| row.0))
}
