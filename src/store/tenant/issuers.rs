//! Who may sign a tenant's user tokens.

use chrono::{DateTime, Utc};
use serde_json::Value;

use super::tenants::TermsRow;
use crate::domain::tenant::TenantTerms;
use crate::domain::tenant::issuer::{Issuer, KeySource, TokenAlgorithm};
use crate::error::{Code, Error, Result};
use crate::ids::TenantId;
use crate::store::{Db, TenantTx};

#[derive(sqlx::FromRow)]
struct Row {
    name: String,
    iss: String,
    audience: Option<String>,
    platform: String,
    algorithm: String,
    secret_enc: Option<Vec<u8>>,
    jwks: Option<Value>,
    jwks_url: Option<String>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

impl TryFrom<Row> for Issuer {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self> {
        let unknown = || Error::internal(anyhow::anyhow!("an issuer's row breaks its own rules"));
        let keys = match (row.secret_enc, row.jwks, row.jwks_url) {
            (Some(secret), None, None) => KeySource::Secret(secret),
            (None, Some(document), None) => KeySource::Document(document),
            (None, None, Some(url)) => KeySource::Url(url),
            _ => return Err(unknown()),
        };
        Ok(Self {
            name: row.name.parse().map_err(Error::internal)?,
            iss: row.iss,
            audience: row.audience,
            platform: row.platform,
            algorithm: TokenAlgorithm::from_column(&row.algorithm).ok_or_else(unknown)?,
            keys,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

/// The issuers a token may mean, looked up before its tenant is entered.
#[derive(Debug, Clone)]
pub struct FoundIssuers {
    pub issuers: Vec<Issuer>,
    /// `None` where no issuer was found.
    pub terms: Option<TenantTerms>,
}

#[derive(sqlx::FromRow)]
struct FoundRow {
    #[sqlx(flatten)]
    issuer: Row,
    #[sqlx(flatten)]
    terms: TermsRow,
}

pub async fn find_presented(db: &Db, tenant_id: TenantId, iss: &str) -> Result<FoundIssuers> {
    let rows = sqlx::query_as::<_, FoundRow>(
        "select name, iss, audience, platform, algorithm, secret_enc, jwks, jwks_url,
                created_at, updated_at, tenant_state, tenant_limits, allowed_origins
           from find_issuers($1, $2)
          where tenant_id = $1",
    )
    .bind(tenant_id)
    .bind(iss)
    .fetch_all(db.connection().await?.limited())
    .await?;
    let mut issuers = Vec::new();
    let mut terms = None;
    for row in rows {
        issuers.push(row.issuer.try_into()?);
        terms = Some(row.terms.try_into()?);
    }
    Ok(FoundIssuers { issuers, terms })
}

/// Inserts or replaces the issuer of this name. True if it is new.
pub async fn upsert(tx: &mut TenantTx, issuer: &Issuer) -> Result<bool> {
    let (secret, jwks, jwks_url) = match &issuer.keys {
        KeySource::Secret(sealed) => (Some(sealed), None, None),
        KeySource::Document(document) => (None, Some(document), None),
        KeySource::Url(url) => (None, None, Some(url)),
    };
    let inserted = sqlx::query_scalar(
        "insert into issuers as i (tenant_id, name, iss, audience, platform, algorithm,
                                   secret_enc, jwks, jwks_url, created_at, updated_at)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $10)
             on conflict on constraint issuers_pkey do update
            set iss = excluded.iss, audience = excluded.audience, platform = excluded.platform,
                algorithm = excluded.algorithm, secret_enc = excluded.secret_enc,
                jwks = excluded.jwks, jwks_url = excluded.jwks_url, updated_at = excluded.updated_at
          where i.tenant_id = $1
      returning xmax = 0",
    )
    .bind(tx.tenant_id())
    .bind(issuer.name.as_str())
    .bind(&issuer.iss)
    .bind(&issuer.audience)
    .bind(&issuer.platform)
    .bind(issuer.algorithm.as_str())
    .bind(secret)
    .bind(jwks)
    .bind(jwks_url)
    .bind(issuer.updated_at)
    .fetch_one(tx.connection())
    .await;
    inserted.map_err(|error| match violated(&error) {
        Some("issuers_platform_once") => {
            Error::new(Code::PlatformTaken, "another issuer covers this platform")
        }
        Some("issuers_iss_once") => Error::new(
            Code::IssuerTaken,
            "this issuer and audience are registered under another name",
        ),
        _ => error.into(),
    })
}

fn violated(error: &sqlx::Error) -> Option<&str> {
    error.as_database_error()?.constraint()
}

pub async fn find(tx: &mut TenantTx, name: &str) -> Result<Option<Issuer>> {
    sqlx::query_as::<_, Row>(
        "select name, iss, audience, platform, algorithm, secret_enc, jwks, jwks_url, created_at, updated_at
           from issuers
          where tenant_id = $1
            and name = $2",
    )
    .bind(tx.tenant_id())
    .bind(name)
    .fetch_optional(tx.connection())
    .await?
    .map(Issuer::try_from)
    .transpose()
}

/// All of them, by name: a tenant has a handful.
pub async fn list(tx: &mut TenantTx) -> Result<Vec<Issuer>> {
    sqlx::query_as::<_, Row>(
        "select name, iss, audience, platform, algorithm, secret_enc, jwks, jwks_url, created_at, updated_at
           from issuers
          where tenant_id = $1
          order by name",
    )
    .bind(tx.tenant_id())
    .fetch_all(tx.connection())
    .await?
    .into_iter()
    .map(Issuer::try_from)
    .collect()
}

pub async fn count(tx: &mut TenantTx) -> Result<i64> {
    Ok(sqlx::query_scalar(
        "select count(*)
           from issuers
          where tenant_id = $1",
    )
    .bind(tx.tenant_id())
    .fetch_one(tx.connection())
    .await?)
}

pub async fn delete(tx: &mut TenantTx, name: &str) -> Result<bool> {
    let done = sqlx::query(
        "delete from issuers
          where tenant_id = $1
            and name = $2",
    )
    .bind(tx.tenant_id())
    .bind(name)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Whether one of `platforms` has an issuer.
pub async fn any_vouches_for(tx: &mut TenantTx, platforms: &[String]) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from issuers
                         where tenant_id = $1
                           and platform = any ($2))",
    )
    .bind(tx.tenant_id())
    .bind(platforms)
    .fetch_one(tx.connection())
    .await?)
}
