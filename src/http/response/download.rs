//! Answers that are written while they are read: a page and a transaction at a time, so that a client who
//! reads slowly holds no connection to the database.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::web::Bytes;
use actix_web::{rt, web};
use futures_util::stream;
use tokio::sync::SemaphorePermit;
use tracing::Instrument;

use super::slow_readers::{Patience, WatchedBody};
use crate::app::App;
use crate::error::{Error, Result};
use crate::fair_queue::Permit;
use crate::http::auth::conversation::CallerContext;
use crate::http::auth::credential::RawCredential;
use crate::retry::Backoff;
use crate::store::TenantTx;
use crate::streams::CheckedCredential;

/// How long a page is tried again that the database has no connection for, and the bounds of the pauses between.
const MAX_BUSY: Duration = Duration::from_secs(15);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(4);

/// For whom the pages are.
pub struct Pages {
    pub app: web::Data<App>,
    pub context: CallerContext,
    pub credential: Arc<CheckedCredential>,
    _place: Permit,
}

impl Pages {
    /// Waits until the tenant may have another download.
    pub async fn open(
        app: web::Data<App>,
        context: CallerContext,
        credential: RawCredential,
    ) -> Result<Self> {
        Ok(Self {
            _place: app.shares.download(context.tenant_id()).await?,
            credential: credential.share(&app),
            app,
            context,
        })
    }

    /// Waits for a turn to read: however many download leave connections to the rest. Held until the page
    /// is read.
    pub async fn turn(app: &App) -> Result<SemaphorePermit<'_>> {
        app.export_permits.acquire().await.map_err(Error::internal)
    }

    /// Checks the credential and whose account it is again, and begins. What is under way for minutes should outlive a moment
    /// without the database.
    pub async fn begin(&self) -> Result<TenantTx> {
        let since = Instant::now();
        let mut backoff = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
        loop {
            let begun = match self.credential.check(&self.app.verifiers).await {
                Ok(()) => self.begin_present().await,
                Err(error) => Err(error),
            };
            match begun {
                Err(error) if error.is_transient() && since.elapsed() < MAX_BUSY => {}
                Ok(_) | Err(_) => return begun,
            }
            tokio::time::sleep(backoff.next_pause()).await;
        }
    }

    async fn begin_present(&self) -> Result<TenantTx> {
        let mut tx = self.context.begin(&self.app.db).await?;
        self.context.check_present(&mut tx).await?;
        Ok(tx)
    }

    pub fn log_broken_off(&self, error: &Error) {
        tracing::warn!(
            tenant = %self.context.tenant_id(),
            code = error.code.as_str(),
            cause = error.cause.as_ref().map(|cause| format!("{cause:#}")),
            "export aborted"
        );
    }
}

/// The bytes of a download: `chunk` answers the next, and what comes after them, if anything does. An
/// error breaks the answer off, and so does the end of its credential, or a client that does not read.
pub fn stream<D, F>(
    credential: Arc<CheckedCredential>,
    download: D,
    chunk: impl Fn(D) -> F + Copy + 'static,
) -> WatchedBody
where
    D: 'static,
    F: Future<Output = Result<(Bytes, Option<D>)>> + 'static,
{
    let chunks = stream::try_unfold(Some(download), move |download| async move {
        match download {
            // As a task of its own it comes to its end, also when nobody polls the answer any more.
            Some(download) => rt::spawn(chunk(download).in_current_span())
                .await
                .map_err(Error::internal)?
                .map(Some),
            None => Ok(None),
        }
    });
    let refused = async move { credential.refused().await };
    WatchedBody::new(chunks, Patience::endless(), refused)
}
