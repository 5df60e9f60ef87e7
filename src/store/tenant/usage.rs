//! A tenant's usage by the hour. Counts are only ever added.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::domain::tenant::usage::{UsageCounts, UsageGroup, UsageKey};
use crate::domain::values::paging::{Page, PageRequest, Position};
use crate::error::Result;
use crate::ids::UserId;
use crate::store::TenantTx;

/// Adds counts to their rows, in one statement. The names are distinct and sorted, so that two nodes that
/// add to the same rows lock them in one order. Nothing is added for a deleted tenant.
pub async fn upsert(tx: &mut TenantTx, usage: &[(UsageKey, UsageCounts)]) -> Result<()> {
    let hours: Vec<DateTime<Utc>> = usage.iter().map(|(name, _)| name.hour).collect();
    let text = |of: fn(&UsageKey) -> &str| -> Vec<&str> {
        usage.iter().map(|(name, _)| of(name)).collect()
    };
    let users: Vec<Uuid> = usage
        .iter()
        .map(|(name, _)| name.user_id.map_or(Uuid::nil(), |id| id.as_uuid()))
        .collect();
    let sums = |of: fn(&UsageCounts) -> i64| -> Vec<i64> {
        usage.iter().map(|(_, counts)| of(counts)).collect()
    };
    let tenant_id = tx.tenant_id();
    sqlx::query(
        "insert into usage_hourly as u (tenant_id, hour, agent, user_id, model, source,
                                        requests, turns, input_tokens, output_tokens)
         select t.id, n.hour, n.agent, n.user_id, n.model, n.source,
                n.requests, n.turns, n.input_tokens, n.output_tokens
           from tenants t
          cross join unnest($2::timestamptz[], $3::text[], $4::uuid[], $5::text[], $6::text[],
                            $7::bigint[], $8::bigint[], $9::bigint[], $10::bigint[])
             as n (hour, agent, user_id, model, source, requests, turns, input_tokens, output_tokens)
          where t.id = $1
             on conflict on constraint usage_hourly_pkey do update
            set requests = u.requests + excluded.requests,
                turns = u.turns + excluded.turns,
                input_tokens = u.input_tokens + excluded.input_tokens,
                output_tokens = u.output_tokens + excluded.output_tokens
          where u.tenant_id = $1",
    )
    .bind(tenant_id)
    .bind(hours)
    .bind(text(|name| &name.agent))
    .bind(users)
    .bind(text(|name| &name.model))
    .bind(text(|name| name.source.as_str()))
    .bind(sums(|counts| counts.requests))
    .bind(sums(|counts| counts.turns))
    .bind(sums(|counts| counts.input_tokens))
    .bind(sums(|counts| counts.output_tokens))
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The total usage of the hours from `from` until before `to`.
pub async fn get_total(
    tx: &mut TenantTx,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
) -> Result<UsageCounts> {
    let (requests, turns, input_tokens, output_tokens) = sqlx::query_as(
        "select coalesce(sum(requests), 0)::bigint, coalesce(sum(turns), 0)::bigint,
                coalesce(sum(input_tokens), 0)::bigint, coalesce(sum(output_tokens), 0)::bigint
           from usage_hourly
          where tenant_id = $1
            and hour >= $2
            and hour < $3",
    )
    .bind(tx.tenant_id())
    .bind(from)
    .bind(to)
    .fetch_one(tx.connection())
    .await?;
    Ok(UsageCounts {
        requests,
        turns,
        input_tokens,
        output_tokens,
    })
}

/// One row of a report. A column is `None` if the report is not grouped by it, or if it has no value.
#[derive(Debug, sqlx::FromRow)]
pub struct UsageRow {
    pub hour: Option<DateTime<Utc>>,
    pub source: Option<String>,
    pub agent: Option<String>,
    pub model: Option<String>,
    pub user_id: Option<UserId>,
    pub requests: i64,
    pub turns: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
    /// The row's position in the report.
    position_hour: DateTime<Utc>,
    position_id: Uuid,
}

/// The range of a report (the hours from `from` until before `to`) and its grouping.
pub struct UsageFilter {
    pub from: DateTime<Utc>,
    pub to: DateTime<Utc>,
    pub group_by: Vec<UsageGroup>,
}

/// Newest hour first. Rows of one hour have no natural order, so a hash orders them.
pub async fn list(
    tx: &mut TenantTx,
    filter: &UsageFilter,
    page: &PageRequest,
) -> Result<Page<UsageRow>> {
    let groups: Vec<&str> = filter.group_by.iter().map(|group| group.as_str()).collect();
    let rows = sqlx::query_as::<_, UsageRow>(
        "select hour, source, agent, model, user_id, requests, turns, input_tokens, output_tokens,
                position_hour, position_id
           from (select g.*, coalesce(g.hour, 'epoch'::timestamptz) as position_hour,
                        md5(concat_ws('/', g.source, length(g.agent), g.agent, length(g.model), g.model,
                                      g.user_id))::uuid as position_id
                   from (select case when 'hour' = any ($4) then hour end as hour,
                                case when 'source' = any ($4) then source end as source,
                                case when 'agent' = any ($4) then nullif(agent, '') end as agent,
                                case when 'model' = any ($4) then nullif(model, '') end as model,
                                case when 'user_id' = any ($4)
                                     then nullif(user_id, '00000000-0000-0000-0000-000000000000')
                                end as user_id,
                                sum(requests)::bigint as requests,
                                sum(turns)::bigint as turns,
                                sum(input_tokens)::bigint as input_tokens,
                                sum(output_tokens)::bigint as output_tokens
                           from usage_hourly
                          where tenant_id = $1
                            and hour >= $2
                            and hour < $3
                          group by 1, 2, 3, 4, 5) g) positioned
          where $5::timestamptz is null or (position_hour, position_id) < ($5, $6)
          order by position_hour desc, position_id desc
          limit $7",
    )
    .bind(tx.tenant_id())
    .bind(filter.from)
    .bind(filter.to)
    .bind(groups)
    .bind(page.after.map(|after| after.created_at))
    .bind(page.after.map(|after| after.id))
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    Ok(Page::cut(rows, page, |row| Position {
        created_at: row.position_hour,
        id: row.position_id,
    }))
}
