//! Joining two people: everything that refers to the one comes to refer to the other. Whoever calls
//! holds both people and their slots. The row of the one who is no more goes last, and its foreign keys
//! refuse that while anything was forgotten.

use chrono::{DateTime, Utc};

use crate::domain::identity_links::MergeCounts;
use crate::error::Result;
use crate::ids::UserId;
use crate::store::TenantTx;

/// What a merge of `from` would move.
pub async fn count(tx: &mut TenantTx, from: UserId) -> Result<MergeCounts> {
    let (identities, session_keys, conversations, home_channels, grants) = sqlx::query_as(
        "select (select count(*) from identities where tenant_id = $1 and user_id = $2),
                (select count(*) from slots where tenant_id = $1 and user_id = $2),
                (select count(*)
                   from conversations
                  where tenant_id = $1
                    and user_id = $2
                    and deleted_at is null),
                (select count(*) from home_channels where tenant_id = $1 and user_id = $2),
                (select count(*) from conversation_grants where tenant_id = $1 and user_id = $2)",
    )
    .bind(tx.tenant_id())
    .bind(from)
    .fetch_one(tx.connection())
    .await?;
    Ok(MergeCounts {
        identities,
        session_keys,
        conversations,
        home_channels,
        grants,
    })
}

/// Holds every slot of these people until `tx` ends.
pub async fn lock_slots(tx: &mut TenantTx, users: &[UserId]) -> Result<()> {
    sqlx::query(
        "select id
           from slots
          where tenant_id = $1
            and user_id = any ($2)
          order by id
            for no key update",
    )
    .bind(tx.tenant_id())
    .bind(users)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Holds every conversation of these people until `tx` ends.
pub async fn lock_conversations(tx: &mut TenantTx, users: &[UserId]) -> Result<()> {
    sqlx::query(
        "select id
           from conversations
          where tenant_id = $1
            and user_id = any ($2)
          order by id
            for no key update",
    )
    .bind(tx.tenant_id())
    .bind(users)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Slots, conversations and their names. A name that both people gave stays the survivor's; what the
/// other called so is still there, by its id.
pub async fn move_conversations(tx: &mut TenantTx, from: UserId, into: UserId) -> Result<()> {
    for statement in [
        "update slots
            set user_id = $3
          where tenant_id = $1
            and user_id = $2",
        "update slot_names n
            set namespace = $3
          where n.tenant_id = $1
            and n.namespace = $2
            and not exists (select 1
                              from slot_names own
                             where own.tenant_id = $1
                               and own.namespace = $3
                               and own.key = n.key)",
        "update conversations c
            set user_id = $3,
                namespace = case
                  when c.namespace = $2
                   and not exists (select 1
                                     from conversations own
                                    where own.tenant_id = $1
                                      and own.namespace = $3
                                      and own.client_id = c.client_id) then $3
                  else c.namespace
                end
          where c.tenant_id = $1
            and c.user_id = $2",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(from)
            .bind(into)
            .execute(tx.connection())
            .await?;
    }
    Ok(())
}

/// The accounts, which are newer to the survivor than what they have.
pub async fn move_identities(
    tx: &mut TenantTx,
    from: UserId,
    into: UserId,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "update identities
            set user_id = $3, linked_at = $4
          where tenant_id = $1
            and user_id = $2",
    )
    .bind(tx.tenant_id())
    .bind(from)
    .bind(into)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Public for the test that reads their plans.
pub const MOVE_BELONGINGS: [&str; 3] = [
        "update home_channels h
            set user_id = $3
          where h.tenant_id = $1
            and h.user_id = $2
            and not exists (select 1
                              from home_channels own
                             where own.tenant_id = $1
                               and own.user_id = $3
                               and own.platform = h.platform)",
        "insert into usage_hourly as own (tenant_id, hour, agent, user_id, model, source, requests, turns,
                                          input_tokens, output_tokens)
         select tenant_id, hour, agent, $3, model, source, requests, turns, input_tokens, output_tokens
           from usage_hourly
          where tenant_id = $1
            and user_id = $2
             on conflict on constraint usage_hourly_pkey do update
            set requests = own.requests + excluded.requests,
                turns = own.turns + excluded.turns,
                input_tokens = own.input_tokens + excluded.input_tokens,
                output_tokens = own.output_tokens + excluded.output_tokens",
        "delete from usage_hourly
          where tenant_id = $1
            and user_id = $2
            and user_id <> $3",
];

/// Home channels where the survivor has none, and what was used.
pub async fn move_belongings(tx: &mut TenantTx, from: UserId, into: UserId) -> Result<()> {
    for statement in MOVE_BELONGINGS {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(from)
            .bind(into)
            .execute(tx.connection())
            .await?;
    }
    Ok(())
}

/// Rights in others' conversations: of two, the one that holds longer. Nobody is a guest at home.
pub async fn move_grants(
    tx: &mut TenantTx,
    from: UserId,
    into: UserId,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "insert into conversation_grants as own (tenant_id, conversation_id, user_id, via, identity_id, created_at,
                                                 expires_at, revoked_at)
         select g.tenant_id, g.conversation_id, $3, g.via, g.identity_id, g.created_at, g.expires_at, g.revoked_at
           from conversation_grants g
           join conversations c
             on c.tenant_id = $1
            and c.id = g.conversation_id
            and c.user_id is distinct from $3
          where g.tenant_id = $1
            and g.user_id = $2
             on conflict on constraint conversation_grants_pkey do update
            set expires_at = excluded.expires_at, revoked_at = null, identity_id = excluded.identity_id
          where excluded.revoked_at is null
            and excluded.expires_at > $4
            and (own.revoked_at is not null or own.expires_at < excluded.expires_at)",
    )
    .bind(tx.tenant_id())
    .bind(from)
    .bind(into)
    .bind(now)
    .execute(tx.connection())
    .await?;
    sqlx::query(
        "delete from conversation_grants g
          using conversations c
          where g.tenant_id = $1
            and g.user_id in ($2, $3)
            and c.tenant_id = $1
            and c.id = g.conversation_id
            and (g.user_id = $2 or c.user_id = $3)",
    )
    .bind(tx.tenant_id())
    .bind(from)
    .bind(into)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The one who is no more: pending codes prove the wrong person, old ids lead to the survivor. Fails
/// while anything still refers to the row.
pub async fn delete_user(
    tx: &mut TenantTx,
    from: UserId,
    into: UserId,
    now: DateTime<Utc>,
) -> Result<()> {
    for statement in [
        "update codes
            set user_id = $3, voided_at = case when consumed_at is null then $4 else voided_at end
          where tenant_id = $1
            and user_id = $2",
        "with flattened as (
           update user_redirects
              set user_id = $3
            where tenant_id = $1
              and user_id = $2
         )
         insert into user_redirects (tenant_id, old_id, user_id, created_at)
         values ($1, $2, $3, $4)",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(from)
            .bind(into)
            .bind(now)
            .execute(tx.connection())
            .await?;
    }
    sqlx::query(
        "delete from users
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(from)
    .execute(tx.connection())
    .await?;
    Ok(())
}
