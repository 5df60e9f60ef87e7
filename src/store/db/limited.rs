//! A connection on which every statement has a deadline. Postgres cancels slow statements, but not after its host
//! has vanished: then no response arrives, and TCP waits for many minutes.

use std::io;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt, StreamExt};
use sqlx::postgres::{PgConnection, PgQueryResult, PgRow, PgStatement, PgTypeInfo, Postgres};
use sqlx::{Describe, Either, Execute, Executor, SqlStr};
use tokio::time::{Instant, timeout, timeout_at};

/// Longer than the statement timeout of Postgres.
const MAX_WAIT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub struct Limited<'c>(pub &'c mut PgConnection);

/// Callers treat a timeout like an unreachable server.
fn timeout_error() -> sqlx::Error {
    let message = "Postgres did not answer in time";
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, message))
}

async fn limit<T>(query: BoxFuture<'_, sqlx::Result<T>>) -> sqlx::Result<T> {
    timeout(MAX_WAIT, query)
        .await
        .unwrap_or_else(|_| Err(timeout_error()))
}

impl<'c> Executor<'c> for Limited<'c> {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(
        self,
        query: E,
    ) -> BoxStream<'e, sqlx::Result<Either<PgQueryResult, PgRow>>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let deadline = Instant::now() + MAX_WAIT;
        let steps = self.0.fetch_many(query);
        stream::unfold(steps, move |mut steps| async move {
            match timeout_at(deadline, steps.next()).await {
                Ok(step) => step.map(|step| (step, steps)),
                Err(_) => Some((Err(timeout_error()), stream::empty().boxed())),
            }
        })
        .boxed()
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, sqlx::Result<Option<PgRow>>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        limit(self.0.fetch_optional(query)).boxed()
    }

    fn prepare_with<'e>(
        self,
        sql: SqlStr,
        parameters: &'e [PgTypeInfo],
    ) -> BoxFuture<'e, sqlx::Result<PgStatement>>
    where
        'c: 'e,
    {
        limit(self.0.prepare_with(sql, parameters)).boxed()
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, sqlx::Result<Describe<Postgres>>>
    where
        'c: 'e,
    {
        limit(self.0.describe(sql)).boxed()
    }
}
