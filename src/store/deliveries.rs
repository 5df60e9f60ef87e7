//! Deliveries on their way out: handed out under a lease, in the order of their chat, one in flight per
//! chat; ended by who has the lease, or handed out again when it runs out.

use chrono::TimeDelta;
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

/// Locks chats that are due. Each platform and scope is a range of one index, so a backlog elsewhere costs
/// nothing. Whoever works on a chat in this moment makes it due again, or has leased what there is: it is
/// passed over and never waited for.
///
/// Public, as `LEASE`, `LOCK_CHAT` and `END` are, for the bench that runs them beside the service.
pub const LOCK_DUE: &str = "with recursive platforms as (
       (select c.platform
          from chats c
         where $2
           and c.tenant_id = $1
           and c.due_at is not null
         order by c.platform
         limit 1)
        union all
       select n.platform
         from platforms p
        cross join lateral (select c.platform
                              from chats c
                             where c.tenant_id = $1
                               and c.due_at is not null
                               and c.platform > p.platform
                             order by c.platform
                             limit 1) n
     ), asked as (
       select platform, null as scope
         from platforms
        union
       select k.platform, k.scope
         from unnest($3::text[], $4::text[]) as k (platform, scope)
     ), places as (
       select a.platform, f.scope, a.scope is null as whole
         from asked a
        cross join lateral (select c.scope
                              from chats c
                             where c.tenant_id = $1
                               and c.platform = a.platform
                               and c.scope >= coalesce(a.scope, '')
                               and c.due_at is not null
                             order by c.scope
                             limit 1) f
        where a.scope is null
           or a.scope = f.scope
        union
       select p.platform, n.scope, true
         from places p
        cross join lateral (select c.scope
                              from chats c
                             where c.tenant_id = $1
                               and c.platform = p.platform
                               and c.scope > p.scope
                               and c.due_at is not null
                             order by c.scope
                             limit 1) n
        where p.whole
     )
     select f.platform, f.scope, f.chat_ref
       from (select distinct platform, scope from places) p
      cross join lateral (select c.platform, c.scope, c.chat_ref, c.due_at
                            from chats c
                           where c.tenant_id = $1
                             and c.platform = p.platform
                             and c.scope = p.scope
                             and c.due_at <= now()
                           order by c.due_at
                           limit $5
                             for no key update skip locked) f
      order by f.due_at
      limit $5";

/// Of each locked chat: leases its first delivery, unless one is in flight or it is too early; takes back one
/// whose lease has expired; and writes when to look at the chat again. A delivery that an unlink or an
/// erasure holds is left alone.
pub const LEASE: &str = concat!(
    "with found as (
       select c.platform, c.scope, c.chat_ref, f.id as leased_id, f.visible_at as leased_until,
              f.attempt >= $5 as is_last, h.seq < f.seq as is_overtaken,
              h.id as first_id, h.visible_at as first_at
         from unnest($2::text[], $3::text[], $4::text[]) as c (platform, scope, chat_ref)
         left join lateral (select d.id, d.seq, d.visible_at, d.attempt
                              from deliveries d
                             where d.tenant_id = $1
                               and d.platform = c.platform
                               and d.scope = c.scope
                               and d.chat_ref = c.chat_ref
                               and d.state = 'leased') f
           on true
         left join lateral (select d.id, d.seq, d.visible_at
                              from deliveries d
                             where d.tenant_id = $1
                               and d.platform = c.platform
                               and d.scope = c.scope
                               and d.chat_ref = c.chat_ref
                               and d.state = 'pending'
                             order by d.seq
                             limit 1) h
           on true
     ), decided as (
       select platform, scope, chat_ref, coalesce(leased_id, first_id) as id,
              coalesce(leased_until, first_at) as at,
              case
                when coalesce(leased_until, first_at) is null then 'none'
                when coalesce(leased_until, first_at) > now() then 'wait'
                when is_last then 'dead'
                when is_overtaken then 'pending'
                else 'leased'
              end as becomes
         from found
     ), held as (
       select d.id
         from deliveries d
        where d.tenant_id = $1
          and d.id in (select id from decided where becomes in ('dead', 'pending', 'leased'))
          and d.state in ('pending', 'leased')
          for no key update skip locked
     ), planned as (
       update chats c
          set due_at = case
                when n.becomes = 'none' then null
                when n.becomes = 'wait' then n.at
                when n.becomes = 'leased' and held.id is not null then now() + $6
                else now()
              end
         from decided n
         left join held
           on held.id = n.id
        where c.tenant_id = $1
          and c.platform = n.platform
          and c.scope = n.scope
          and c.chat_ref = n.chat_ref
     ), freed as (
       update deliveries d
          set state = n.becomes, lease = null, ended_at = case when n.becomes = 'dead' then now() end
         from decided n
         join held
           on held.id = n.id
        where d.tenant_id = $1
          and d.id = n.id
          and n.becomes in ('dead', 'pending')
     )
     update deliveries d
        set state = 'leased', lease = gen_random_uuid(), attempt = d.attempt + 1, visible_at = now() + $6
       from decided n
       join held
         on held.id = n.id
      where d.tenant_id = $1
        and d.id = n.id
        and n.becomes = 'leased'
  returning ",
    delivery_columns!()
);

/// Hands out the first delivery of each chat that is due and has none in flight, up to `limit`. Leases are by
/// the clock of the database, which all nodes share.
pub async fn lease(tx: &mut TenantTx, covered: &Covered, limit: i64) -> Result<Vec<Delivery>> {
    let due: Vec<(String, String, String)> = sqlx::query_as(LOCK_DUE)
        .bind(tx.tenant_id())
        .bind(covered.all)
        .bind(&covered.platforms)
        .bind(&covered.scopes)
        .bind(limit)
        .fetch_all(tx.connection())
        .await?;
    if due.is_empty() {
        return Ok(Vec::new());
    }
    let column =
        |of: fn(&(String, String, String)) -> &str| -> Vec<&str> { due.iter().map(of).collect() };
    let rows: Vec<DeliveryRow> = sqlx::query_as(LEASE)
        .bind(tx.tenant_id())
        .bind(column(|chat| &chat.0))
        .bind(column(|chat| &chat.1))
        .bind(column(|chat| &chat.2))
        .bind(MAX_ATTEMPTS)
        .bind(VISIBILITY)
        .fetch_all(tx.connection())
        .await?;
    let mut leased: Vec<Delivery> = rows.into_iter().map(|row| row.0).collect();
    leased.sort_by_key(|delivery| (delivery.created_at, delivery.seq));
    Ok(leased)
}

pub const LOCK_CHAT: &str = concat!(
    "select d.attempt
       from deliveries d
       join chats c
         on c.tenant_id = $1
        and c.platform = d.platform
        and c.scope = d.scope
        and c.chat_ref = d.chat_ref
      where d.tenant_id = $1
        and d.id = $5
        and ",
    is_covered!(),
    "   for no key update of c"
);

/// Locks the chat of a delivery, before it is changed. False: there is no such delivery for who asks.
async fn lock_chat(tx: &mut TenantTx, covered: &Covered, id: DeliveryId) -> Result<bool> {
    let found: Option<i32> = sqlx::query_scalar(LOCK_CHAT)
        .bind(tx.tenant_id())
        .bind(covered.all)
        .bind(&covered.platforms)
        .bind(&covered.scopes)
        .bind(id)
        .fetch_optional(tx.connection())
        .await?;
    Ok(found.is_some())
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

/// The chat is due again, if anything is left in it.
pub const END: &str = "with ended as (
       update deliveries d
          set state = $4, lease = null, visible_at = now() + $5, error = coalesce($6, d.error),
              external_message_id = coalesce($7, d.external_message_id),
              ended_at = case when $4 <> 'pending' then now() end
        where d.tenant_id = $1
          and d.id = $2
          and d.state = 'leased'
          and d.lease = $3
    returning d.id
     ), planned as (
       update chats c
          set due_at = case
                when $4 = 'pending'
                  or exists (select 1
                               from deliveries o
                              where o.tenant_id = $1
                                and o.platform = c.platform
                                and o.scope = c.scope
                                and o.chat_ref = c.chat_ref
                                and o.state in ('pending', 'leased')
                                and o.id not in (select id from ended)) then now()
              end
         from deliveries d
        where d.tenant_id = $1
          and d.id = $2
          and c.tenant_id = $1
          and c.platform = d.platform
          and c.scope = d.scope
          and c.chat_ref = d.chat_ref
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
    if !lock_chat(tx, covered, id).await? {
        return Ok(None);
    }
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
    if !lock_chat(tx, covered, id).await? {
        return Ok(None);
    }
    let row: Option<DeliveryRow> = sqlx::query_as(concat!(
        "with planned as (
           update chats c
              set due_at = now()
             from deliveries o
            where o.tenant_id = $1
              and o.id = $2
              and o.state = 'dead'
              and c.tenant_id = $1
              and c.platform = o.platform
              and c.scope = o.scope
              and c.chat_ref = o.chat_ref
         )
         update deliveries d
            set state = 'pending', attempt = 0, visible_at = now(), ended_at = null
          where d.tenant_id = $1
            and d.id = $2
            and d.state = 'dead'
      returning ",
        delivery_columns!()
    ))
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|row| row.0))
}
