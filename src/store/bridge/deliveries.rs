//! Deliveries on their way out: ended by who has the lease (`delivery_leases.rs` hands them out), listed when they
//! are dead, and replayed.

use chrono::TimeDelta;
use sqlx::postgres::PgRow;
use sqlx::types::{Json, Uuid};
use sqlx::{FromRow, Row};

use crate::domain::bridge::chat::Chat;
use crate::domain::bridge::delivery::{Delivery, DeliveryKind};
use crate::domain::people::platform::PlatformScope;
use crate::domain::values::paging::{Page, PageRequest, Position};
use crate::error::Result;
use crate::ids::DeliveryId;
use crate::store::TenantTx;

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
pub(in crate::store) use delivery_columns;

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

pub(in crate::store) fn read_chat(row: &PgRow) -> sqlx::Result<Option<Chat>> {
    let chat: Option<Json<Chat>> = row.try_get("chat")?;
    Ok(chat.map(|Json(chat)| chat))
}

pub(in crate::store) fn read(row: &PgRow, chat: Option<Chat>) -> Result<Delivery> {
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
pub struct CoveredPlatforms {
    pub(in crate::store) platforms: Vec<String>,
    pub(in crate::store) scopes: Vec<Option<String>>,
    /// Whether it is all of them.
    pub(in crate::store) all: bool,
}

impl CoveredPlatforms {
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

/// How often it was given out; `None`: there is no such delivery for who asks.
pub async fn find_attempt(
    tx: &mut TenantTx,
    covered: &CoveredPlatforms,
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

/// How a lease of a delivery ends.
#[derive(Debug, Clone, Copy)]
pub enum DeliveryEnd<'a> {
    Delivered {
        external_message_id: Option<&'a str>,
    },
    /// It is pending again, and due after this time.
    Later {
        after: TimeDelta,
        error: &'a str,
    },
    DeadLetter {
        error: &'a str,
    },
}

/// Ends a delivery and says when its chat is due again: now, if anything else is open in it. The chat is changed
/// first, as by all others. Another transaction that had it meanwhile may have left something that this statement cannot see yet:
/// then the chat's row is at another place, and is due too. Each row is found by values and not by a join, which
/// would read all chats of a tenant of whom statistics do not know yet. Only a leased delivery has a lease.
///
/// Public for the bench that runs it beside the service.
pub const END: &str = concat!(
    "with delivery as (
       select d.platform, d.scope, d.chat_ref, d.seq, d.lease = $6 as is_leased
         from deliveries d
        where d.tenant_id = $1
          and d.id = $5
          and ",
    is_covered!(),
    "), chat as (
       select c.ctid as place, c.platform, c.scope, c.chat_ref, c.ended_seq
         from chats c
        where c.tenant_id = $1
          and c.platform = (select platform from delivery where is_leased)
          and c.scope = (select scope from delivery)
          and c.chat_ref = (select chat_ref from delivery)
     ), planned as (
       update chats c
          set due_at = case
                when $7 = 'pending'
                  or c.ctid <> (select place from chat)
                  or exists (select 1
                               from deliveries o
                              where o.tenant_id = $1
                                and o.platform = (select platform from chat)
                                and o.scope = (select scope from chat)
                                and o.chat_ref = (select chat_ref from chat)
                                and o.seq > (select ended_seq from chat)
                                and o.state in ('pending', 'leased')
                                and o.id <> $5) then now()
              end
        where c.tenant_id = $1
          and c.platform = (select platform from chat)
          and c.scope = (select scope from chat)
          and c.chat_ref = (select chat_ref from chat)
    returning c.chat_ref
     ), ended as (
       update deliveries d
          set state = $7, lease = null, visible_at = now() + $8, error = coalesce($9, d.error),
              external_message_id = coalesce($10, d.external_message_id),
              ended_at = case when $7 <> 'pending' then now() end
        where d.tenant_id = $1
          and d.id = $5
          and d.lease = $6
          and exists (select 1 from planned)
    returning d.id
     )
     select exists (select 1 from ended)
       from delivery"
);

/// What `end` came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndOutcome {
    Applied,
    /// The delivery was leased again, or has ended.
    StaleLease,
    /// There is no such delivery for this key.
    Missing,
}

/// Ends the lease of a delivery.
pub async fn end(
    tx: &mut TenantTx,
    covered: &CoveredPlatforms,
    id: DeliveryId,
    lease: Uuid,
    end: DeliveryEnd<'_>,
) -> Result<EndOutcome> {
    let (state, after, error, external) = match end {
        DeliveryEnd::Delivered {
            external_message_id,
        } => ("delivered", TimeDelta::zero(), None, external_message_id),
        DeliveryEnd::Later { after, error } => ("pending", after, Some(error), None),
        DeliveryEnd::DeadLetter { error } => ("dead", TimeDelta::zero(), Some(error), None),
    };
    let ended: Option<bool> = sqlx::query_scalar(END)
        .bind(tx.tenant_id())
        .bind(covered.all)
        .bind(&covered.platforms)
        .bind(&covered.scopes)
        .bind(id)
        .bind(lease)
        .bind(state)
        .bind(after)
        .bind(error)
        .bind(external)
        .fetch_optional(tx.connection())
        .await?;
    Ok(match ended {
        Some(true) => {
            // The next of its chat can go.
            tx.notify_deliveries();
            EndOutcome::Applied
        }
        Some(false) => EndOutcome::StaleLease,
        None => EndOutcome::Missing,
    })
}

/// Dead deliveries, newest first.
pub async fn list_dead_letters(
    tx: &mut TenantTx,
    covered: &CoveredPlatforms,
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
pub async fn replay_dead_letter(
    tx: &mut TenantTx,
    covered: &CoveredPlatforms,
    id: DeliveryId,
) -> Result<Option<Delivery>> {
    let chat: Option<(String, String, String)> = sqlx::query_as(concat!(
        "select c.platform, c.scope, c.chat_ref
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
    ))
    .bind(tx.tenant_id())
    .bind(covered.all)
    .bind(&covered.platforms)
    .bind(&covered.scopes)
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    let Some((platform, scope, chat_ref)) = chat else {
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
    .bind(platform)
    .bind(scope)
    .bind(chat_ref)
    .fetch_optional(tx.connection())
    .await?;
    if row.is_some() {
        tx.notify_deliveries();
    }
    Ok(row.map(|row| row.0))
}
