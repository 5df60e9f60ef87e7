//! What may be left of people who were erased, and looking for it, a batch at a time. Run twice, or
//! again after a crash, it finds what is still there.

use chrono::{DateTime, Utc};

use crate::domain::people::erasure::{ERASED, Erasure};
use crate::error::Result;
use crate::ids::{IdentityId, TurnId, UserId};
use crate::store::TenantTx;
use crate::store::db::idempotency::RequestName;

/// Remembers what to look for.
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

/// A person to look for.
#[derive(Debug)]
pub struct Due {
    pub erasure: Erasure,
    /// When this look began, which can be some runs ago.
    pub began_at: DateTime<Utc>,
    /// The last stored answer that it opened.
    pub opened_to: Option<RequestName>,
}

/// Takes one whom nobody has looked for yet, or who was erased before `settled` and has to be looked for once more:
/// the one who waits longest since it was last tried.
pub async fn claim_due(
    tx: &mut TenantTx,
    settled: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Result<Option<Due>> {
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
    Ok(row.map(|row| Due {
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

/// Says up to which stored answer the look has come.
pub async fn update_opened(tx: &mut TenantTx, user_id: UserId, to: &RequestName) -> Result<()> {
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

/// When the first of those was erased who are still to be looked for.
pub async fn oldest(tx: &mut TenantTx) -> Result<Option<DateTime<Utc>>> {
    Ok(sqlx::query_scalar(
        "select min(erased_at)
           from erased_people
          where tenant_id = $1",
    )
    .bind(tx.tenant_id())
    .fetch_one(tx.connection())
    .await?)
}

/// Says that they were looked for. The next look begins from the beginning.
pub async fn update_checked(tx: &mut TenantTx, user_id: UserId, now: DateTime<Utc>) -> Result<()> {
    sqlx::query(
        "update erased_people
            set looked_at = $3, began_at = null, tried_at = null, opened_to = null
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

/// Nothing is left of them: forgets what was looked for.
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

/// Public, as the others here are, for the test that reads its plan.
pub const BLANK_MESSAGES: &str = "update messages
            set content = to_json($4::text), tool_calls = null, tool_call_id = null, identity_id = null,
                platform = null, extra = null
          where tenant_id = $1
            and (session_id, seq) in (select session_id, seq
                                        from messages
                                       where tenant_id = $1
                                         and identity_id = $2
                                       order by session_id
                                       limit $3)";

/// Blanks up to `limit` messages that an account wrote, copies included, and answers how many there
/// were. They keep their place: others answered them.
pub async fn blank_messages(tx: &mut TenantTx, identity_id: IdentityId, limit: i64) -> Result<u64> {
    let done = sqlx::query(BLANK_MESSAGES)
        .bind(tx.tenant_id())
        .bind(identity_id)
        .bind(limit)
        .bind(ERASED)
        .execute(tx.connection())
        .await?;
    Ok(done.rows_affected())
}

/// Turns whose events are deleted at once: a turn can have thousands.
const TURNS: i64 = 100;

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

/// Deletes up to `limit` events of the turns that `blank_turns` takes next, and answers how many there were.
pub async fn delete_events(tx: &mut TenantTx, identity_id: IdentityId, limit: i64) -> Result<u64> {
    let done = sqlx::query(DELETE_EVENTS)
        .bind(tx.tenant_id())
        .bind(identity_id)
        .bind(limit)
        .bind(TURNS)
        .execute(tx.connection())
        .await?;
    Ok(done.rows_affected())
}

/// The next turns that an account began in conversations of others.
pub const LIST_TURNS: &str = "select id
           from turns
          where tenant_id = $1
            and identity_id = $2
          order by id
          limit $3";

/// The next turns that were blanked, and whose messages are looked for once more.
pub const LIST_BLANKED_TURNS: &str = "select id
           from turns
          where tenant_id = $1
            and erased_user_id = $2
          order by id
          limit $3";

/// What was said in turns, copies included. Two lists, since each has an index of its own.
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

/// Blanks some of the turns that an account began in conversations of others, whose events are gone, with all that
/// was said in them, and answers how many there were. A turn is blanked whole: a call of a tool without its result,
/// or a result without its call, would be refused by the model's server.
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

/// Looks once more for what was said in some of the turns that were blanked, and forgets whose they were. Answers how
/// many there were.
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

pub const FOLD_USAGE: &str = "with gone as (
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
             from gone
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
           from gone";

/// Gives up to `limit` sums of the person to nobody, and answers how many there were: what was used was used.
pub async fn fold_usage(tx: &mut TenantTx, users: &[UserId], limit: i64) -> Result<u64> {
    let gone: i64 = sqlx::query_scalar(FOLD_USAGE)
        .bind(tx.tenant_id())
        .bind(users)
        .bind(limit)
        .fetch_one(tx.connection())
        .await?;
    Ok(gone.unsigned_abs())
}
