//! The search for what is left of erased users, a batch at a time. A repeated search, or one after a crash, finds
//! the rows that are still there.

use chrono::{DateTime, Utc};

use crate::domain::people::erasure::{ERASED, Erasure};
use crate::error::Result;
use crate::ids::{IdentityId, SessionId, TurnId, UserId};
use crate::store::TenantTx;
use crate::store::db::idempotency::RequestName;
use crate::store::people::erased_summaries;

/// Stores an erasure for the search.
pub async fn insert(tx: &mut TenantTx, erasure: &Erasure) -> Result<()> {
    sqlx::query(
        "insert into erased_people (tenant_id, user_id, merged_ids, identity_ids, names, erased_at)
         values ($1, $2, $3, $4, $5, $6)",
    )
    .bind(tx.tenant_id())
    .bind(erasure.user_id)
    .bind(&erasure.merged_ids)
    .bind(&erasure.identity_ids)
    .bind(&erasure.names)
    .bind(erasure.erased_at)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// An erasure whose search is due.
#[derive(Debug)]
pub struct DueErasure {
    pub erasure: Erasure,
    /// When this search started, which can be some runs ago.
    pub began_at: DateTime<Utc>,
    /// The last stored answer that the search opened.
    pub opened_to: Option<RequestName>,
}

/// Claims an erasure that was never searched, or one from before `settled`, which needs a second search. The one whose
/// last attempt is longest ago comes first.
pub async fn claim_due(
    tx: &mut TenantTx,
    settled: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Result<Option<DueErasure>> {
    #[derive(sqlx::FromRow)]
    struct Row {
        user_id: UserId,
        merged_ids: Vec<UserId>,
        identity_ids: Vec<IdentityId>,
        names: Vec<String>,
        erased_at: DateTime<Utc>,
        began_at: DateTime<Utc>,
        opened_to: Option<Vec<String>>,
    }
    let row: Option<Row> = sqlx::query_as(
        "update erased_people
            set tried_at = $3, began_at = coalesce(began_at, $3)
          where tenant_id = $1
            and user_id = (select user_id
                             from erased_people
                            where tenant_id = $1
                              and (looked_at is null or erased_at <= $2)
                            order by tried_at nulls first, erased_at, user_id
                            limit 1)
      returning user_id, merged_ids, identity_ids, names, erased_at, began_at, opened_to",
    )
    .bind(tx.tenant_id())
    .bind(settled)
    .bind(now)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|row| DueErasure {
        erasure: Erasure {
            user_id: row.user_id,
            merged_ids: row.merged_ids,
            identity_ids: row.identity_ids,
            names: row.names,
            erased_at: row.erased_at,
        },
        began_at: row.began_at,
        opened_to: row.opened_to.and_then(|parts| {
            let [principal, route, key] = parts.try_into().ok()?;
            Some(RequestName {
                principal,
                route,
                key,
            })
        }),
    }))
}

/// Stores the search's progress: the last stored answer that it opened.
pub async fn update_progress(tx: &mut TenantTx, user_id: UserId, to: &RequestName) -> Result<()> {
    sqlx::query(
        "update erased_people
            set opened_to = array[$3, $4, $5]
          where tenant_id = $1
            and user_id = $2",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(&to.principal)
    .bind(&to.route)
    .bind(&to.key)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The time of the oldest erasure that is not finished.
pub async fn find_oldest(tx: &mut TenantTx) -> Result<Option<DateTime<Utc>>> {
    Ok(sqlx::query_scalar(
        "select min(erased_at)
           from erased_people
          where tenant_id = $1",
    )
    .bind(tx.tenant_id())
    .fetch_one(tx.connection())
    .await?)
}

/// Records that a search is complete. The next search starts from the beginning.
pub async fn update_searched(tx: &mut TenantTx, user_id: UserId, now: DateTime<Utc>) -> Result<()> {
    sqlx::query(
        "update erased_people
            set looked_at = $3, began_at = null, tried_at = null, opened_to = null, searched_to = null
          where tenant_id = $1
            and user_id = $2",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Deletes a finished erasure: nothing is left of the user.
pub async fn delete(tx: &mut TenantTx, user_id: UserId) -> Result<()> {
    sqlx::query(
        "delete from erased_people
          where tenant_id = $1
            and user_id = $2",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Public, like the other statements here, for the test that reads its plan.
pub const BLANK_MESSAGES: &str = "update messages
            set content = to_json($4::text), tool_calls = null, tool_call_id = null, identity_id = null,
                platform = null, extra = null
          where tenant_id = $1
            and (session_id, seq) in (select session_id, seq
                                        from messages
                                       where tenant_id = $1
                                         and identity_id = $2
                                       order by session_id
                                       limit $3)
      returning session_id";

/// Blanks up to `limit` messages of a user's identity, copies included. Returns their number. The messages keep their
/// place: others answered them. The erasure remembers their conversations, for the search for summaries.
pub async fn blank_messages(
    tx: &mut TenantTx,
    identity_id: IdentityId,
    user_id: UserId,
    limit: i64,
) -> Result<u64> {
    let mut sessions: Vec<SessionId> = sqlx::query_scalar(BLANK_MESSAGES)
        .bind(tx.tenant_id())
        .bind(identity_id)
        .bind(limit)
        .bind(ERASED)
        .fetch_all(tx.connection())
        .await?;
    let blanked = sessions.len() as u64;
    sessions.sort_unstable();
    sessions.dedup();
    erased_summaries::insert_conversations(tx, user_id, &sessions).await?;
    Ok(blanked)
}

/// The most turns whose events one statement deletes: a turn can have thousands.
const MAX_TURNS: i64 = 100;

pub const DELETE_EVENTS: &str = "delete from events
          where tenant_id = $1
            and (conversation_id, seq) in (select e.conversation_id, e.seq
                                             from (select id
                                                     from turns
                                                    where tenant_id = $1
                                                      and identity_id = $2
                                                    order by id
                                                    limit $4) t
                                            cross join lateral (select conversation_id, seq
                                                                  from events
                                                                 where tenant_id = $1
                                                                   and turn_id = t.id
                                                                 order by seq
                                                                 limit $3) e
                                            order by t.id, e.seq
                                            limit $3)";

/// Deletes up to `limit` events of the turns that `blank_turns` blanks next. Returns their number.
pub async fn delete_events(tx: &mut TenantTx, identity_id: IdentityId, limit: i64) -> Result<u64> {
    let done = sqlx::query(DELETE_EVENTS)
        .bind(tx.tenant_id())
        .bind(identity_id)
        .bind(limit)
        .bind(MAX_TURNS)
        .execute(tx.connection())
        .await?;
    Ok(done.rows_affected())
}

/// The next turns that an identity started in conversations of others.
pub const LIST_TURNS: &str = "select id
           from turns
          where tenant_id = $1
            and identity_id = $2
          order by id
          limit $3";

/// The next blanked turns, whose messages are searched a second time.
pub const LIST_BLANKED_TURNS: &str = "select id
           from turns
          where tenant_id = $1
            and erased_user_id = $2
          order by id
          limit $3";

/// Blanks the messages of turns, copies included. Two lists, since each has an index of its own.
pub const BLANK_TURN_MESSAGES: &str = "update messages
            set content = to_json($3::text), tool_calls = null, tool_call_id = null, identity_id = null,
                platform = null, extra = null
          where tenant_id = $1
            and (session_id, seq) in (select session_id, seq
                                        from messages
                                       where tenant_id = $1
                                         and turn_id = any ($2)
                                         and step is not null
                                       union all
                                      select session_id, seq
                                        from messages
                                       where tenant_id = $1
                                         and turn_id = any ($2)
                                         and step is null)
            and (coalesce(content::text, '') <> to_json($3::text)::text
                 or tool_calls is not null
                 or tool_call_id is not null
                 or extra is not null)";

pub const BLANK_TURNS: &str = "update turns
            set input = json_build_object('messages', '[]'::json), session_info = '{}', principal = '', request_hash = '',
                calls = null, detail = null, identity_id = null, platform = null, reply_to = null, reply_via = null,
                erased_user_id = $3
          where tenant_id = $1
            and id = any ($2)";

/// Blanks turns that an identity started in conversations of others, with all their messages. Returns their number.
/// Their events must be deleted before. A turn is blanked as a whole: the model's server would refuse a tool call
/// without its result, or a result without its call.
pub async fn blank_turns(
    tx: &mut TenantTx,
    identity_id: IdentityId,
    user_id: UserId,
    limit: i64,
) -> Result<u64> {
    let turns: Vec<TurnId> = sqlx::query_scalar(LIST_TURNS)
        .bind(tx.tenant_id())
        .bind(identity_id)
        .bind(limit)
        .fetch_all(tx.connection())
        .await?;
    blank_messages_of(tx, &turns).await?;
    let done = sqlx::query(BLANK_TURNS)
        .bind(tx.tenant_id())
        .bind(turns)
        .bind(user_id)
        .execute(tx.connection())
        .await?;
    Ok(done.rows_affected())
}

/// Blanks the messages of blanked turns a second time, and removes the erased user from those turns. Returns their
/// number.
pub async fn forget_turns(tx: &mut TenantTx, user_id: UserId, limit: i64) -> Result<u64> {
    let turns: Vec<TurnId> = sqlx::query_scalar(LIST_BLANKED_TURNS)
        .bind(tx.tenant_id())
        .bind(user_id)
        .bind(limit)
        .fetch_all(tx.connection())
        .await?;
    blank_messages_of(tx, &turns).await?;
    let done = sqlx::query(
        "update turns
            set erased_user_id = null
          where tenant_id = $1
            and id = any ($2)",
    )
    .bind(tx.tenant_id())
    .bind(turns)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected())
}

async fn blank_messages_of(tx: &mut TenantTx, turns: &[TurnId]) -> Result<()> {
    sqlx::query(BLANK_TURN_MESSAGES)
        .bind(tx.tenant_id())
        .bind(turns)
        .bind(ERASED)
        .execute(tx.connection())
        .await?;
    Ok(())
}

pub const FOLD_USAGE: &str = "with deleted as (
           delete from usage_hourly
            where tenant_id = $1
              and (user_id, hour, agent, model, source) in (select user_id, hour, agent, model, source
                                                              from usage_hourly
                                                             where tenant_id = $1
                                                               and user_id = any ($2)
                                                             order by user_id, hour
                                                             limit $3)
        returning hour, agent, model, source, requests, turns, input_tokens, output_tokens
         ), added as (
           insert into usage_hourly as own (tenant_id, hour, agent, user_id, model, source, requests, turns,
                                            input_tokens, output_tokens)
           select $1, hour, agent, '00000000-0000-0000-0000-000000000000', model, source, sum(requests),
                  sum(turns), sum(input_tokens), sum(output_tokens)
             from deleted
            group by hour, agent, model, source
            order by hour, source, agent, model
               on conflict on constraint usage_hourly_pkey do update
              set requests = own.requests + excluded.requests,
                  turns = own.turns + excluded.turns,
                  input_tokens = own.input_tokens + excluded.input_tokens,
                  output_tokens = own.output_tokens + excluded.output_tokens
            where own.tenant_id = $1
         )
         select count(*)
           from deleted";

/// Moves up to `limit` usage rows of the users to no user, since the tenant's totals must stay. Returns their number.
pub async fn fold_usage(tx: &mut TenantTx, users: &[UserId], limit: i64) -> Result<u64> {
    let deleted: i64 = sqlx::query_scalar(FOLD_USAGE)
        .bind(tx.tenant_id())
        .bind(users)
        .bind(limit)
        .fetch_one(tx.connection())
        .await?;
    Ok(deleted.unsigned_abs())
}
