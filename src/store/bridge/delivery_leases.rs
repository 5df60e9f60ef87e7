//! Hands deliveries out: under a lease, in the order of their chat, one in flight per chat, and again when the
//! lease runs out.

use sqlx::Row;

use super::deliveries::{self, CoveredPlatforms, DeliveryEnd, delivery_columns, read, read_chat};
use crate::domain::bridge::delivery::{Delivery, LEASE_TTL, MAX_ATTEMPTS};
use crate::error::{Error, Result};
use crate::ids::DeliveryId;
use crate::store::TenantTx;

/// Locks chats that are due. Each platform and scope is a range of one index, so a backlog elsewhere costs
/// nothing. A transaction that works on a chat in this moment makes it due again, or has leased what there is: the chat is
/// passed over and never waited for. Only what is leased is locked, one by one; a few more are looked at, because
/// others who fetch at the same time have some of the first.
///
/// Public, as `LEASE` is, for the bench that runs them beside the service.
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
       from (select o.platform, o.scope, o.chat_ref, o.due_at
               from (select distinct platform, scope from places) p
              cross join lateral (select c.platform, c.scope, c.chat_ref, c.due_at
                                    from chats c
                                   where c.tenant_id = $1
                                     and c.platform = p.platform
                                     and c.scope = p.scope
                                     and c.due_at <= now()
                                   order by c.due_at
                                   limit $5::bigint * 4) o
              order by o.due_at
              limit $5::bigint * 4) d
      cross join lateral (select c.platform, c.scope, c.chat_ref
                            from chats c
                           where c.tenant_id = $1
                             and c.platform = d.platform
                             and c.scope = d.scope
                             and c.chat_ref = d.chat_ref
                             and c.due_at <= now()
                             for no key update skip locked) f
      order by d.due_at
      limit $5";

/// Of a locked chat: leases its first delivery, unless one is in flight or it is too early; takes back one
/// whose lease has expired; and writes when to look at the chat again. A delivery that an unlink or an
/// erasure holds is left alone.
///
/// Every row is looked up by values, and one chat at a time. Joined for many chats at once it was planned again for
/// every number of chats, and read all rows of a tenant of whom statistics did not know yet. For the same reason
/// `held` compares the state in a way that no index of open deliveries answers.
pub const LEASE: &str = concat!(
    "with found as (
       select f.id as leased_id, f.visible_at as leased_until, f.attempt >= $5 as is_last,
              h.seq < f.seq as is_overtaken, h.id as first_id, h.visible_at as first_at,
              coalesce(least(f.seq, h.seq), c.next_seq) - 1 as ended_seq
         from chats c
         left join lateral (select d.id, d.seq, d.visible_at, d.attempt
                              from deliveries d
                             where d.tenant_id = $1
                               and d.platform = $2
                               and d.scope = $3
                               and d.chat_ref = $4
                               and d.state = 'leased'
                             limit 1) f
           on true
         left join lateral (select d.id, d.seq, d.visible_at
                              from deliveries d
                             where d.tenant_id = $1
                               and d.platform = $2
                               and d.scope = $3
                               and d.chat_ref = $4
                               and d.seq > c.ended_seq
                               and d.state = 'pending'
                             order by d.seq
                             limit 1) h
           on true
        where c.tenant_id = $1
          and c.platform = $2
          and c.scope = $3
          and c.chat_ref = $4
     ), decided as (
       select ended_seq, coalesce(leased_id, first_id) as id, coalesce(leased_until, first_at) as at,
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
          and d.id = (select id from decided where becomes in ('dead', 'pending', 'leased'))
          and d.state not in ('delivered', 'dead', 'cancelled')
          for no key update skip locked
     ), planned as (
       update chats c
          set due_at = case
                when n.becomes = 'none' then null
                when n.becomes = 'wait' then n.at
                when n.becomes = 'leased' and exists (select 1 from held) then now() + $6
                else now()
              end,
              ended_seq = n.ended_seq
         from decided n
        where c.tenant_id = $1
          and c.platform = $2
          and c.scope = $3
          and c.chat_ref = $4
     )
     update deliveries d
        set state = n.becomes,
            lease = case when n.becomes = 'leased' then gen_random_uuid() end,
            attempt = d.attempt + case when n.becomes = 'leased' then 1 else 0 end,
            visible_at = case when n.becomes = 'leased' then now() + $6 else d.visible_at end,
            ended_at = case when n.becomes = 'dead' then now() end
       from decided n
      where d.tenant_id = $1
        and d.id = (select id from held)
  returning d.state, ",
    delivery_columns!()
);

/// Hands out the first delivery of each chat that is due and has none in flight, up to `limit`. Leases are by
/// the clock of the database, which all nodes share. One that cannot be read is dead, so that it holds up no other.
pub async fn lease(
    tx: &mut TenantTx,
    covered: &CoveredPlatforms,
    limit: i64,
) -> Result<Vec<Delivery>> {
    let due: Vec<(String, String, String)> = sqlx::query_as(LOCK_DUE)
        .bind(tx.tenant_id())
        .bind(covered.all)
        .bind(&covered.platforms)
        .bind(&covered.scopes)
        .bind(limit)
        .fetch_all(tx.connection())
        .await?;
    let mut leased = Vec::with_capacity(due.len());
    for (platform, scope, chat_ref) in &due {
        let row = sqlx::query(LEASE)
            .bind(tx.tenant_id())
            .bind(platform)
            .bind(scope)
            .bind(chat_ref)
            .bind(MAX_ATTEMPTS)
            .bind(LEASE_TTL)
            .fetch_optional(tx.connection())
            .await?;
        let Some(row) = row else { continue };
        if row.try_get::<&str, _>("state")? != "leased" {
            continue;
        }
        match read_chat(&row)
            .map_err(Error::from)
            .and_then(|chat| read(&row, chat))
        {
            Ok(delivery) => leased.push(delivery),
            Err(error) => {
                let id: DeliveryId = row.try_get("id")?;
                let lease = row.try_get("lease")?;
                tracing::error!(tenant = %tx.tenant_id(), delivery = %id, cause = ?error.cause, "unreadable delivery moved to dead letters");
                let error = "unreadable";
                deliveries::end(tx, covered, id, lease, DeliveryEnd::DeadLetter { error }).await?;
            }
        }
    }
    leased.sort_by_key(|delivery| (delivery.created_at, delivery.seq));
    Ok(leased)
}
