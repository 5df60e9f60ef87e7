//! The database roles: `migrate` creates them if it may, and `serve` checks its own before the first request.

use secrecy::{ExposeSecret, SecretString};
use sqlx::{AssertSqlSafe, PgConnection};
use url::Url;

use crate::crypto;

/// Has every grant and policy; the service's login is a member.
pub const SERVICE_ROLE: &str = "throughline_service";
/// Owns the functions that read before a tenant is entered.
pub const DEFINER_ROLE: &str = "throughline_definer";

#[derive(sqlx::FromRow)]
struct RoleFacts {
    superuser: bool,
    bypasses: bool,
    owns_tables: bool,
    is_service: bool,
}

/// Row-level security does not bind a superuser, a BYPASSRLS role or (without FORCE) an owner.
pub async fn refuse_unsafe_role(service: &mut PgConnection) -> anyhow::Result<()> {
    let facts: RoleFacts = sqlx::query_as(
        "select r.rolsuper as superuser,
                r.rolbypassrls as bypasses,
                exists (select 1
                          from pg_class c
                         where c.relnamespace = 'public'::regnamespace
                           and c.relkind in ('r', 'p', 'v', 'm')
                           and pg_has_role(current_user, c.relowner, 'member')) as owns_tables,
                exists (select 1
                          from pg_roles s
                         where s.rolname = $1
                           and pg_has_role(current_user, s.oid, 'usage')) as is_service
           from pg_roles r
          where r.rolname = current_user",
    )
    .bind(SERVICE_ROLE)
    .fetch_one(service)
    .await?;
    let refusal = if facts.superuser {
        "is a superuser"
    } else if facts.bypasses {
        "bypasses row-level security"
    } else if facts.owns_tables {
        "owns the tables"
    } else if !facts.is_service {
        "is not a member of throughline_service; run `throughline migrate`"
    } else {
        return Ok(());
    };
    anyhow::bail!(
        "the role of THROUGHLINE_DATABASE_URL {refusal}: the service refuses to run as it"
    )
}

/// A statement that creates a missing role or grant: without the password for display, and as it is run.
struct RoleStatement {
    redacted: String,
    sql: String,
}

/// Creates the missing roles. If it may not, the error contains the SQL for an administrator.
pub async fn ensure(owner: &mut PgConnection, service_url: &SecretString) -> anyhow::Result<()> {
    let login = login_of(service_url)?;
    let missing = missing_statements(owner, &login).await?;
    if missing.is_empty() {
        return Ok(());
    }
    let may_create: bool = sqlx::query_scalar(
        "select rolsuper or rolcreaterole from pg_roles where rolname = current_user",
    )
    .fetch_one(&mut *owner)
    .await?;
    if !may_create {
        let sql: Vec<String> = missing
            .into_iter()
            .map(|missing| missing.redacted)
            .collect();
        anyhow::bail!(
            "the role of THROUGHLINE_MIGRATE_DATABASE_URL may not create roles; \
             have an administrator run this in the database, then migrate again:\n{}",
            sql.join("\n")
        );
    }
    for statement in missing {
        sqlx::raw_sql(AssertSqlSafe(statement.sql))
            .execute(&mut *owner)
            .await
            // The statement may contain a password.
            .map_err(|error| anyhow::anyhow!("{}: {error}", statement.redacted))?;
    }
    Ok(())
}

struct Login {
    name: String,
    password: String,
}

fn login_of(url: &SecretString) -> anyhow::Result<Login> {
    let url = Url::parse(url.expose_secret())
        .map_err(|_| anyhow::anyhow!("THROUGHLINE_DATABASE_URL is not a URL"))?;
    let decode = |text: &str| {
        percent_encoding::percent_decode_str(text)
            .decode_utf8()
            .map(|text| text.into_owned())
    };
    Ok(Login {
        name: decode(url.username())?,
        password: decode(url.password().unwrap_or_default())?,
    })
}

async fn missing_statements(
    owner: &mut PgConnection,
    login: &Login,
) -> anyhow::Result<Vec<RoleStatement>> {
    let mut missing = Vec::new();
    for role in [SERVICE_ROLE, DEFINER_ROLE] {
        if !role_exists(owner, role).await? {
            let sql = format!("create role {role} nologin;");
            missing.push(RoleStatement {
                redacted: sql.clone(),
                sql,
            });
        }
    }
    // The owner transfers functions to the definer, so it must be a member.
    let owner_name: String = sqlx::query_scalar("select current_user::text")
        .fetch_one(&mut *owner)
        .await?;
    if !is_member(owner, &owner_name, DEFINER_ROLE).await? {
        let sql = format!("grant {DEFINER_ROLE} to {};", quote_ident(&owner_name));
        missing.push(RoleStatement {
            redacted: sql.clone(),
            sql,
        });
    }
    let name = quote_ident(&login.name);
    if !role_exists(owner, &login.name).await? {
        let create = |password: &str| {
            format!(
                "create role {name} login password {} nosuperuser nobypassrls nocreatedb nocreaterole;",
                quote_literal(password)
            )
        };
        let password = if login.password.is_empty() {
            crypto::random_secret()?
        } else {
            login.password.clone()
        };
        missing.push(RoleStatement {
            redacted: create("the password in THROUGHLINE_DATABASE_URL"),
            sql: create(&password),
        });
    }
    if !is_member(owner, &login.name, SERVICE_ROLE).await? {
        let sql = format!("grant {SERVICE_ROLE} to {name};");
        missing.push(RoleStatement {
            redacted: sql.clone(),
            sql,
        });
    }
    Ok(missing)
}

async fn role_exists(connection: &mut PgConnection, role: &str) -> anyhow::Result<bool> {
    Ok(
        sqlx::query_scalar("select exists (select 1 from pg_roles where rolname = $1)")
            .bind(role)
            .fetch_one(connection)
            .await?,
    )
}

async fn is_member(
    connection: &mut PgConnection,
    member: &str,
    role: &str,
) -> anyhow::Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from pg_roles m
                          join pg_roles r on pg_has_role(m.oid, r.oid, 'usage')
                         where m.rolname = $1
                           and r.rolname = $2)",
    )
    .bind(member)
    .bind(role)
    .fetch_one(connection)
    .await?)
}

pub(in crate::store) fn quote_ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A string literal with the same value under any `standard_conforming_strings`.
pub(in crate::store) fn quote_literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_passwords_cannot_break_out_of_their_quotes() {
        assert_eq!(quote_ident(r#"a"b"#), r#""a""b""#);
        assert_eq!(quote_literal(r"a'b\c"), r"E'a''b\\c'");
    }
}
