//! All data of a user, list by list and page by page, for the user's export. Digests of codes are not part
//! of it.

use chrono::NaiveDate;
use serde_json::Value;
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use crate::domain::conversation::grant::GrantVia;
use crate::domain::conversation::slot::SlotKind;
use crate::domain::identity_links::MoveKind;
use crate::domain::transfer::user_document::{
    UserCode, UserDelivery, UserGrant, UserMessage, UserMove, UserSessionKey, UserUsage,
};
use crate::error::Result;
use crate::ids::{IdentityId, SessionId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::messages::{message_columns, read_message};

/// The end of a page: the ids of its last row.
pub type RowPosition = (Uuid, Uuid);

/// A page of rows in the order of their ids.
async fn page<T>(
    tx: &mut TenantTx,
    sql: &'static str,
    user_id: UserId,
    after: RowPosition,
    limit: i64,
    read: fn(&PgRow) -> Result<T>,
) -> Result<Vec<(RowPosition, T)>> {
    let rows = sqlx::query(sql)
        .bind(tx.tenant_id())
        .bind(user_id)
        .bind(after.0)
        .bind(after.1)
        .bind(limit)
        .fetch_all(tx.connection())
        .await?;
    let with_position = |row: &PgRow| {
        let position = (row.try_get("first_id")?, row.try_get("second_id")?);
        Ok((position, read(row)?))
    };
    rows.iter().map(with_position).collect()
}

pub async fn list_session_keys(
    tx: &mut TenantTx,
    user_id: UserId,
    after: RowPosition,
    limit: i64,
) -> Result<Vec<(RowPosition, UserSessionKey)>> {
    let sql =
        "select k.id as first_id, k.id as second_id, k.key, k.kind, k.agent, k.conversation_id,
                      k.generation, k.created_at,
                      array(select n.key
                              from slot_names n
                             where n.tenant_id = $1
                               and n.slot_id = k.id
                             order by n.key) as names
                 from slots k
                where k.tenant_id = $1
                  and k.user_id = $2
                  and (k.id, k.id) > ($3, $4)
                order by k.id
                limit $5";
    page(tx, sql, user_id, after, limit, |row| {
        Ok(UserSessionKey {
            session_key: row.try_get("key")?,
            names: row.try_get("names")?,
            kind: SlotKind::from_column(row.try_get("kind")?)?,
            agent: row.try_get("agent")?,
            conversation_id: row.try_get("conversation_id")?,
            generation: row.try_get("generation")?,
            created_at: row.try_get("created_at")?,
        })
    })
    .await
}

pub async fn list_grants(
    tx: &mut TenantTx,
    user_id: UserId,
    after: RowPosition,
    limit: i64,
) -> Result<Vec<(RowPosition, UserGrant)>> {
    let sql = "select g.conversation_id as first_id, g.user_id as second_id, g.via, g.created_at,
                      g.expires_at, g.revoked_at
                 from conversation_grants g
                 join conversations c
                   on c.tenant_id = $1
                  and c.id = g.conversation_id
                  and c.deleted_at is null
                where g.tenant_id = $1
                  and (g.user_id = $2 or c.user_id = $2)
                  and (g.conversation_id, g.user_id) > ($3, $4)
                order by g.conversation_id, g.user_id
                limit $5";
    page(tx, sql, user_id, after, limit, |row| {
        Ok(UserGrant {
            conversation_id: row.try_get("first_id")?,
            user_id: row.try_get("second_id")?,
            via: GrantVia::from_column(row.try_get("via")?)?,
            created_at: row.try_get("created_at")?,
            expires_at: row.try_get("expires_at")?,
            revoked_at: row.try_get("revoked_at")?,
        })
    })
    .await
}

pub async fn list_codes(
    tx: &mut TenantTx,
    user_id: UserId,
    after: RowPosition,
    limit: i64,
) -> Result<Vec<(RowPosition, UserCode)>> {
    let sql = "select id as first_id, id as second_id, purpose, minted_by, platform, created_at, expires_at,
                      consumed_at, voided_at
                 from codes
                where tenant_id = $1
                  and user_id = $2
                  and (id, id) > ($3, $4)
                order by id
                limit $5";
    page(tx, sql, user_id, after, limit, |row| {
        Ok(UserCode {
            purpose: row.try_get("purpose")?,
            identity_id: row.try_get("minted_by")?,
            platform: row.try_get("platform")?,
            created_at: row.try_get("created_at")?,
            expires_at: row.try_get("expires_at")?,
            consumed_at: row.try_get("consumed_at")?,
            voided_at: row.try_get("voided_at")?,
        })
    })
    .await
}

pub async fn list_moves(
    tx: &mut TenantTx,
    user_id: UserId,
    after: RowPosition,
    limit: i64,
) -> Result<Vec<(RowPosition, UserMove)>> {
    let sql =
        "select m.id as first_id, m.id as second_id, m.identity_id, m.from_user, m.to_user, m.kind,
                      m.reason, m.profile, m.created_at, m.undo_until, m.undone_at
                 from identities i
                 join identity_moves m
                   on m.tenant_id = $1
                  and m.identity_id = i.id
                where i.tenant_id = $1
                  and i.user_id = $2
                  and (m.id, m.id) > ($3, $4)
                order by m.id
                limit $5";
    page(tx, sql, user_id, after, limit, |row| {
        Ok(UserMove {
            identity_id: row.try_get("identity_id")?,
            from_user_id: row.try_get("from_user")?,
            to_user_id: row.try_get("to_user")?,
            kind: MoveKind::from_column(row.try_get("kind")?)?,
            reason: row.try_get("reason")?,
            profile: row.try_get("profile")?,
            created_at: row.try_get("created_at")?,
            undo_until: row.try_get("undo_until")?,
            undone_at: row.try_get("undone_at")?,
        })
    })
    .await
}

pub async fn list_deliveries(
    tx: &mut TenantTx,
    user_id: UserId,
    after: RowPosition,
    limit: i64,
) -> Result<Vec<(RowPosition, UserDelivery)>> {
    let sql = "select d.id as first_id, d.id as second_id, d.kind, d.platform, d.scope, d.chat_ref,
                      d.identity_id, d.payload, d.state, d.created_at
                 from identities i
                 join deliveries d
                   on d.tenant_id = $1
                  and d.identity_id = i.id
                where i.tenant_id = $1
                  and i.user_id = $2
                  and (d.id, d.id) > ($3, $4)
                order by d.id
                limit $5";
    page(tx, sql, user_id, after, limit, |row| {
        let scope: String = row.try_get("scope")?;
        Ok(UserDelivery {
            id: row.try_get("first_id")?,
            kind: row.try_get("kind")?,
            platform: row.try_get("platform")?,
            scope: Some(scope).filter(|scope| !scope.is_empty()),
            chat: row.try_get("chat_ref")?,
            identity_id: row.try_get("identity_id")?,
            payload: row.try_get::<Value, _>("payload")?,
            state: row.try_get("state")?,
            created_at: row.try_get("created_at")?,
        })
    })
    .await
}

/// The user's usage by the month: few rows.
pub async fn list_usage(tx: &mut TenantTx, user_id: UserId) -> Result<Vec<UserUsage>> {
    #[derive(sqlx::FromRow)]
    struct UsageRow {
        month: NaiveDate,
        source: String,
        agent: Option<String>,
        model: Option<String>,
        requests: i64,
        turns: i64,
        input_tokens: i64,
        output_tokens: i64,
    }
    let rows: Vec<UsageRow> = sqlx::query_as(
        "select date_trunc('month', hour at time zone 'UTC')::date as month, source,
                nullif(agent, '') as agent, nullif(model, '') as model,
                sum(requests)::bigint as requests, sum(turns)::bigint as turns,
                sum(input_tokens)::bigint as input_tokens, sum(output_tokens)::bigint as output_tokens
           from usage_hourly
          where tenant_id = $1
            and user_id = $2
          group by 1, 2, 3, 4
          order by 1, 2, 3, 4",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_all(tx.connection())
    .await?;
    let to_usage = |row: UsageRow| UserUsage {
        month: row.month,
        source: row.source,
        agent: row.agent,
        model: row.model,
        requests: row.requests,
        turns: row.turns,
        input_tokens: row.input_tokens,
        output_tokens: row.output_tokens,
    };
    Ok(rows.into_iter().map(to_usage).collect())
}

/// The user's conversations after `after`, by id.
pub async fn list_conversations(
    tx: &mut TenantTx,
    user_id: UserId,
    after: Option<SessionId>,
    limit: i64,
) -> Result<Vec<SessionId>> {
    Ok(sqlx::query_scalar(
        "select id
           from conversations
          where tenant_id = $1
            and user_id = $2
            and deleted_at is null
            and ($3::uuid is null or id > $3)
          order by id
          limit $4",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(after)
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

/// The messages of an identity in conversations of others, each original once.
pub async fn list_messages_elsewhere(
    tx: &mut TenantTx,
    (user_id, identity_id): (UserId, IdentityId),
    after: Option<(SessionId, i64)>,
    limit: i64,
) -> Result<Vec<UserMessage>> {
    let rows = sqlx::query(concat!(
        "select ",
        message_columns!(),
        ", c.id as conversation_id
           from messages m
          join sessions s
            on s.tenant_id = $1
           and s.id = m.session_id
           and s.undone_at is null
          join conversations c
            on c.tenant_id = $1
           and c.id = s.conversation_id
           and c.deleted_at is null
           and c.user_id is distinct from $2
         where m.tenant_id = $1
           and m.identity_id = $3
           and (m.copied_seq is null or s.depth = 0)
           and ($4::uuid is null or (m.session_id, m.seq) > ($4, $5))
         order by m.session_id, m.seq
         limit $6"
    ))
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(identity_id)
    .bind(after.map(|(session_id, _)| session_id))
    .bind(after.map(|(_, seq)| seq))
    .bind(limit)
    .fetch_all(tx.connection())
    .await?;
    let read = |row: &PgRow| {
        let conversation_id = row.try_get("conversation_id")?;
        Ok(UserMessage::new(conversation_id, read_message(row)?))
    };
    rows.iter().map(read).collect()
}
