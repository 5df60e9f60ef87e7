//! Operations of operators and users in a tenant with millions of rows, which SQL generates: the duration of each
//! operation for its client, and every statement of it over the goal, from the log of Postgres.
//!
//! `TURNS` and `DELIVERIES` set their numbers.

#![allow(
    clippy::disallowed_methods,
    reason = "it calls the service from outside, as its clients do"
)]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use sqlx::types::Uuid;
use sqlx::{AssertSqlSafe, PgConnection};

mod database;
mod dev;

use dev::Dev;

/// The goal of each statement.
const GOAL: Duration = Duration::from_millis(100);
const TURNS_EACH: u64 = 100;

fn main() -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) {
        println!("Only a release build gives useful figures: cargo bench --bench large_tenant");
        return Ok(ExitCode::SUCCESS);
    }
    let turns = number("TURNS", 10_000_000)?;
    let deliveries = number("DELIVERIES", 5_000_000)?;
    println!("$ cargo bench --bench large_tenant   # {turns} turns, {deliveries} deliveries");
    let dev = Dev::start("large-tenant")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(measure(&dev, turns, deliveries));
    dev.stop()?;
    let slow = outcome?;
    println!("\nstatements over {} ms: {slow}", GOAL.as_millis());
    Ok(if slow == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn number(name: &str, default: u64) -> anyhow::Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} is a number")),
        Err(_) => Ok(default),
    }
}

struct Bench<'a> {
    dev: &'a Dev,
    client: Client,
    superuser: PgConnection,
    log: PathBuf,
    slow: usize,
}

async fn measure(dev: &Dev, turns: u64, deliveries: u64) -> anyhow::Result<usize> {
    let mut bench = Bench {
        dev,
        client: Client::new(),
        superuser: database::superuser(dev).await?,
        log: find(&dev.dir, "postgres.log").context("no log of Postgres")?,
        slow: 0,
    };
    let [ada, bob, eve] = ["telegram:1", "telegram:2", "discord:1"];
    let mut sessions = Vec::new();
    for identity in [ada, bob, eve] {
        let body = json!({"identity": identity, "text": "hi", "message_id": "1", "wait": true});
        let response = bench.call(Method::POST, "/v1/inbound", body).await?;
        sessions.push(
            response["session_id"]
                .as_str()
                .context("no session")?
                .to_owned(),
        );
    }
    // One more delivery for each of two users, which stays pending.
    for identity in [ada, bob] {
        let body = json!({"identity": identity, "text": "later", "message_id": "2", "wait": false});
        bench.call(Method::POST, "/v1/inbound", body).await?;
    }
    bench
        .wait_for("select count(*) from deliveries where state = 'pending'", 2)
        .await?;
    bench.generate(turns, deliveries).await?;
    println!("\n{:<40} {:>10}", "operation", "ms");
    bench.run_operations(&sessions, [ada, eve]).await?;
    Ok(bench.slow)
}

impl Bench<'_> {
    async fn run_operations(
        &mut self,
        sessions: &[String],
        [ada, eve]: [&str; 2],
    ) -> anyhow::Result<()> {
        self.timed(
            "lease a delivery",
            Method::GET,
            "/v1/deliveries?platform=telegram&limit=1",
            None,
        )
        .await?;
        self.timed("lease 50 deliveries", Method::GET, "/v1/deliveries", None)
            .await?;
        let code = self
            .call(Method::POST, "/v1/link-codes", json!({"identity": ada}))
            .await?;
        let body = json!({"code": code["code"], "identity": eve});
        let linked = self
            .timed("merge", Method::POST, "/v1/link-codes/redeem", Some(body))
            .await?;
        let user = linked["user_id"].as_str().or(linked["user"]["id"].as_str());
        let user = user.context("no user")?.to_owned();
        let path = format!("/v1/users/{user}/identities");
        let identities = self.call(Method::GET, &path, Value::Null).await?;
        let own = identities["data"].as_array().context("no identities")?;
        let of_eve = own.iter().find(|one| one["identity"] == eve);
        let id = of_eve
            .and_then(|one| one["id"].as_str())
            .context("no identity")?;
        let path = format!("/v1/identities/{id}");
        self.timed("unlink", Method::DELETE, &path, None).await?;
        let path = format!("/v1/sessions/{}", sessions[1]);
        self.timed("delete one conversation", Method::DELETE, &path, None)
            .await?;
        self.timed_job("erase its rows", "erase_conversations")
            .await?;
        self.timed_job("expire", "expire_events").await?;
        self.timed_job("expire answers", "expire_answers").await?;
        let tenant = self.dev.ready["tenant_id"].as_str().context("no tenant")?;
        for what in ["suspend", "resume"] {
            let path = format!("/v1/tenants/{tenant}/{what}");
            self.timed(what, Method::POST, &path, Some(json!({})))
                .await?;
        }
        Ok(())
    }

    async fn call(&self, method: Method, path: &str, body: Value) -> anyhow::Result<Value> {
        let text = |name: &str| self.dev.ready[name].as_str().context("not ready");
        let key = if path.starts_with("/v1/tenants") {
            text("operator_key")?
        } else {
            text("api_key")?
        };
        let url = format!("{}{path}", text("url")?);
        let mut request = self.client.request(method, url).bearer_auth(key);
        if !body.is_null() {
            request = request.json(&body);
        }
        let answer = request.send().await?;
        let status = answer.status();
        let text = answer.text().await?;
        ensure!(status.is_success(), "{path}: {status} {text}");
        Ok(serde_json::from_str(&text).unwrap_or_default())
    }

    async fn timed(
        &mut self,
        name: &str,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> anyhow::Result<Value> {
        let logged = self.logged()?;
        let began = Instant::now();
        let answer = self.call(method, path, body.unwrap_or_default()).await?;
        self.report(name, began.elapsed(), logged)?;
        Ok(answer)
    }

    /// Makes a job due, and waits for its end.
    async fn timed_job(&mut self, name: &str, kind: &str) -> anyhow::Result<()> {
        let logged = self.logged()?;
        let began = Instant::now();
        let due = format!(
            "update jobs set run_at = now() where kind = '{kind}' and lease_until is null
                and tenant_id <> '00000000-0000-0000-0000-000000000000'"
        );
        self.execute(&due).await?;
        let left = format!(
            "select count(*) from jobs where kind = '{kind}' and (run_at <= now() or lease_until is not null)
                and tenant_id <> '00000000-0000-0000-0000-000000000000'"
        );
        self.wait_for(&left, 0).await?;
        self.report(name, began.elapsed(), logged)
    }

    fn report(&mut self, name: &str, took: Duration, logged: usize) -> anyhow::Result<()> {
        println!("{name:<40} {:>10.1}", took.as_secs_f64() * 1e3);
        let log = fs::read_to_string(&self.log)?;
        let slow = log.get(logged..).unwrap_or_default();
        for line in slow.lines().filter(|line| line.contains("duration:")) {
            self.slow += 1;
            println!("  slow: {}", line.chars().take(160).collect::<String>());
        }
        Ok(())
    }

    fn logged(&self) -> anyhow::Result<usize> {
        Ok(fs::read_to_string(&self.log)?.len())
    }

    async fn execute(&mut self, sql: &str) -> anyhow::Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
            .execute(&mut self.superuser)
            .await?;
        Ok(())
    }

    async fn wait_for(&mut self, sql: &str, count: i64) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let found: i64 = sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
                .fetch_one(&mut self.superuser)
                .await?;
            if found == count {
                return Ok(());
            }
            ensure!(
                began.elapsed() < Duration::from_secs(300),
                "not done: {sql}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Copies existing rows with other ids. A tenth of the deliveries is pending in chats of its own; some rows of
    /// each table are old enough to expire.
    async fn generate(&mut self, turns: u64, deliveries: u64) -> anyhow::Result<()> {
        let conversations = (turns / TURNS_EACH).max(1);
        let began = Instant::now();
        let tenant = database::tenant_id(self.dev)?.as_uuid();
        let many = conversations;
        // Ascending ids, like those of the service.
        let id = |of: &str, n: &str| {
            format!("('0190000{of}-0000-7000-8000-' || lpad(to_hex({n}), 12, '0'))::uuid")
        };
        let own = |of: &str| id(of, "n");
        let spread = format!("(1 + n % {conversations})");
        let is_pending = format!("{spread} % 10 = 0");
        let copies = [
            Copy::new("users", "true", many).set("id", own("1")),
            Copy::new("identities", "true", many)
                .set("id", own("2"))
                .set("user_id", own("1"))
                .set("external_id", "'x' || n"),
            Copy::new("conversations", "true", many)
                .set("id", own("3"))
                .set("tip_session_id", own("3"))
                .set("user_id", own("1"))
                .set("slot_id", "null"),
            Copy::new("sessions", "true", many)
                .set("id", own("3"))
                .set("conversation_id", own("3")),
            Copy::new("turns", "ended_at is not null", turns)
                .set("id", own("4"))
                .set("turn_no", "n")
                .set("conversation_id", id("3", &spread))
                .set("identity_id", id("2", &spread))
                .set("reply_via", "'returned'"),
            Copy::new("chats", "true", many)
                .set("chat_ref", "'x' || n")
                .set("due_at", "case when n % 10 = 0 then now() end"),
            Copy::new("deliveries", "true", deliveries)
                .set("id", own("5"))
                .set("turn_id", "null")
                .set("seq", "n")
                .set("chat_ref", format!("'x' || {spread}"))
                .set("identity_id", id("2", &spread))
                .set(
                    "state",
                    format!("case when {is_pending} then 'pending' else 'delivered' end"),
                )
                .set(
                    "ended_at",
                    format!("case when not {is_pending} then now() - n % 3000 * interval '15 minutes' end"),
                ),
        ];
        self.execute("set session_replication_role = replica; set synchronous_commit = off")
            .await?;
        for copy in copies {
            let columns: Vec<String> = sqlx::query_scalar(
                "select attname::text
                   from pg_attribute
                  where attrelid = to_regclass($1) and attnum > 0 and not attisdropped and attgenerated = ''
                  order by attnum",
            )
            .bind(copy.table)
            .fetch_all(&mut self.superuser)
            .await?;
            self.execute(&copy.sql(tenant, &columns)).await?;
            println!(
                "{} {}: {} s",
                copy.count,
                copy.table,
                began.elapsed().as_secs()
            );
        }
        self.execute("reset session_replication_role").await?;
        self.execute("vacuum analyze").await?;
        self.execute("checkpoint").await?;
        let log = format!(
            "alter system set log_min_duration_statement = {}",
            GOAL.as_millis()
        );
        self.execute(&log).await?;
        self.execute("select pg_reload_conf()").await?;
        println!("generated in {} s", began.elapsed().as_secs());
        Ok(())
    }
}

/// Copies of one row of a table, numbered by `n`.
struct Copy {
    table: &'static str,
    which: &'static str,
    count: u64,
    changes: HashMap<&'static str, String>,
}

impl Copy {
    fn new(table: &'static str, which: &'static str, count: u64) -> Self {
        Self {
            table,
            which,
            count,
            changes: HashMap::new(),
        }
    }

    fn set(mut self, column: &'static str, expression: impl Into<String>) -> Self {
        self.changes.insert(column, expression.into());
        self
    }

    fn sql(&self, tenant: Uuid, columns: &[String]) -> String {
        let value = |column: &String| match self.changes.get(column.as_str()) {
            Some(expression) => expression.clone(),
            None => format!("o.{column}"),
        };
        let values: Vec<String> = columns.iter().map(value).collect();
        let table = self.table;
        let which = self.which;
        let count = self.count;
        format!(
            "insert into {table} ({})
             select {}
               from (select * from {table} where tenant_id = '{tenant}' and {which} limit 1) o
              cross join generate_series(1, {count}) n",
            columns.join(", "),
            values.join(", ")
        )
    }
}

fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path());
    let (dirs, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let here = files.into_iter().find(|path| path.ends_with(name));
    here.or_else(|| dirs.iter().find_map(|dir| find(dir, name)))
}
