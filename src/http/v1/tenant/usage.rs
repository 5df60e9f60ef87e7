//! `/v1/usage`: a tenant's usage, by the hour.

use actix_web::{HttpResponse, get, web};
use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::domain::tenant::usage::{UsageGroup, hour_of};
use crate::domain::values::timestamp;
use crate::error::{Code, Error, FieldError, Result};
use crate::http::auth::keys::Reader;
use crate::http::request::extract::Query;
use crate::http::request::paging::{ListName, ListResponse};
use crate::ids::UserId;
use crate::store;
use crate::store::tenant::usage::{UsageFilter, UsageRow};

const MAX_PERIOD: TimeDelta = TimeDelta::days(31);
const DEFAULT_PERIOD: TimeDelta = TimeDelta::days(1);

/// Sums. A member is null if the report is not grouped by it, or if the usage has no such value.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct UsageResponse {
    /// The beginning of the hour.
    pub hour: Option<DateTime<Utc>>,
    /// `api`: requests to this API.
    pub source: Option<String>,
    pub agent: Option<String>,
    pub model: Option<String>,
    pub user_id: Option<UserId>,
    pub requests: i64,
    pub turns: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
}

impl From<UsageRow> for UsageResponse {
    fn from(row: UsageRow) -> Self {
        Self {
            hour: row.hour,
            source: row.source,
            agent: row.agent,
            model: row.model,
            user_id: row.user_id,
            requests: row.requests,
            turns: row.turns,
            input_tokens: row.input_tokens,
            output_tokens: row.output_tokens,
        }
    }
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GetUsageParams {
    /// The first hour is the one of this time. Default: a day before `to`.
    #[serde(default, deserialize_with = "timestamp::optional")]
    from: Option<DateTime<Utc>>,
    /// Covers the hours that begin before this time. Default: now. At most 31 days after `from`.
    #[serde(default, deserialize_with = "timestamp::optional")]
    to: Option<DateTime<Utc>>,
    /// The groups of the report, separated by commas: `hour`, `source`, `agent`, `model`, `user_id`. Default:
    /// all of them.
    #[param(
        pattern = "^(hour|source|agent|model|user_id)(,(hour|source|agent|model|user_id)){0,4}$"
    )]
    group_by: Option<String>,
    limit: Option<u32>,
    cursor: Option<String>,
}

fn wrong(name: &str, detail: &str) -> Error {
    let error = FieldError::new(format!("/query/{name}"), detail);
    Error::fields(Code::InvalidRequest, vec![error])
}

fn filter(params: &GetUsageParams, now: DateTime<Utc>) -> Result<UsageFilter> {
    let (from, to) = usage_period(params.from, params.to, now, DEFAULT_PERIOD)?;
    Ok(UsageFilter {
        from,
        to,
        group_by: groups(params.group_by.as_deref())?,
    })
}

/// The period of `?from=` and `?to=`. Without `from` it begins `default` before `to`.
pub(in crate::http::v1) fn usage_period(
    from: Option<DateTime<Utc>>,
    to: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
    default: TimeDelta,
) -> Result<(DateTime<Utc>, DateTime<Utc>)> {
    let to = to.unwrap_or(now);
    let from = match from {
        Some(from) => from,
        None => to
            .checked_sub_signed(default)
            .ok_or_else(|| wrong("to", "too early"))?,
    };
    if from > to {
        return Err(wrong("from", "must not be after to"));
    }
    if to - from > MAX_PERIOD {
        return Err(wrong("from", "must be at most 31 days before to"));
    }
    Ok((hour_of(from), to))
}

/// In one order, each once: equal reports have equal cursors.
fn groups(text: Option<&str>) -> Result<Vec<UsageGroup>> {
    let Some(text) = text else {
        return Ok(UsageGroup::ALL.to_vec());
    };
    let named: Vec<&str> = text.split(',').collect();
    let is_group = |name: &&str| UsageGroup::ALL.iter().any(|group| group.as_str() == *name);
    if !named.iter().all(is_group) || named.len() > UsageGroup::ALL.len() {
        let detail = "must be some of hour, source, agent, model and user_id, separated by commas";
        return Err(wrong("group_by", detail));
    }
    let wanted = |group: &UsageGroup| named.contains(&group.as_str());
    Ok(UsageGroup::ALL.iter().copied().filter(wanted).collect())
}

/// List the tenant's usage, newest hour first. It is up to date within a few seconds.
#[utoipa::path(
    operation_id = "get_usage",
    tag = "tenant",
    security(("api_key" = ["admin", "read"])),
    params(GetUsageParams),
    responses((status = 200, description = "A page", body = ListResponse<UsageResponse>))
)]
#[get("/usage")]
pub async fn get_usage(
    app: web::Data<App>,
    caller: Reader,
    Query(params): Query<GetUsageParams>,
) -> Result<HttpResponse> {
    let filter = filter(&params, app.clock.now())?;
    let name = ListName::for_key(&caller, list_name(&params, &filter));
    let request = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let mut tx = caller.begin(&app.db).await?;
    let page = store::tenant::usage::list(&mut tx, &filter, &request).await?;
    tx.commit().await?;
    let response = name.close(&app.keyring, page, UsageResponse::from)?;
    Ok(HttpResponse::Ok().json(response))
}

/// Named by the request and not by the resulting period: `now` moves between two pages.
fn list_name(params: &GetUsageParams, filter: &UsageFilter) -> String {
    format!(
        "usage/{:?}/{:?}/{:?}",
        params.from, params.to, filter.group_by
    )
}
