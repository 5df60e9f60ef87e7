//! Whether the reader of an answer that is under way may still read it: its credential, its identity and its right to
//! the conversation, checked while the answer goes on.

use std::sync::Arc;
use std::time::Duration;

use actix_web::web;
use tokio::time::Instant;

use crate::app::App;
use crate::domain::people::access::Visibility;
use crate::error::{Code, Error, Result};
use crate::http::auth::conversation::CallerContext;
use crate::http::auth::credential::RawCredential;
use crate::ids::{SessionId, SlotId};
use crate::retry::Backoff;
use crate::streams::{CheckedCredential, Right, Subject};

/// How often a reader looks at the shared verdict on its rights, which costs nothing.
const RECHECK_EVERY: Duration = Duration::from_secs(1);
/// The bounds of the pauses before a check is repeated that the database did not answer.
pub const FIRST_PAUSE: Duration = Duration::from_millis(500);
pub const MAX_PAUSE: Duration = Duration::from_secs(1);
/// How long a check is repeated for which the tenant has too many requests; then the answer breaks off.
const MAX_BUSY: Duration = Duration::from_secs(15);

/// The reader of an answer that is under way. Its credential and its right are checked together with all others of
/// this node (`streams`).
pub struct Reader {
    pub app: web::Data<App>,
    pub context: CallerContext,
    credential: Arc<CheckedCredential>,
    conversation_id: Option<SessionId>,
    right: Arc<Right>,
    /// Until when the right is not checked before words are sent, because the database did not answer.
    away_until: Option<Instant>,
}

impl Reader {
    pub fn new(
        app: web::Data<App>,
        context: CallerContext,
        credential: RawCredential,
        conversation_id: SessionId,
    ) -> Self {
        Self::of(app, context, credential, Some(conversation_id))
    }

    /// For a call without a session.
    pub fn stateless(
        app: web::Data<App>,
        context: CallerContext,
        credential: RawCredential,
    ) -> Self {
        Self::of(app, context, credential, None)
    }

    fn of(
        app: web::Data<App>,
        context: CallerContext,
        credential: RawCredential,
        conversation_id: Option<SessionId>,
    ) -> Self {
        let subject = Subject::new(context.tenant_id(), &context.access, conversation_id);
        Self {
            credential: credential.share(&app),
            right: app.streams.rights.open(subject),
            app,
            context,
            conversation_id,
            away_until: None,
        }
    }

    /// Only as long as this slot leads to the conversation.
    pub fn through(self, slot_id: Option<SlotId>) -> Self {
        let context = &self.context;
        let subject = Subject::new(context.tenant_id(), &context.access, self.conversation_id);
        Self {
            right: self.app.streams.rights.open(subject.through(slot_id)),
            ..self
        }
    }

    /// When to check next.
    pub fn due(&self) -> Instant {
        Instant::now() + RECHECK_EVERY
    }

    /// Checks credential, identity and the right to the conversation: the database is asked only if the node has not
    /// done so for a while. While the database does not answer the last verdict stands.
    pub async fn check(&mut self) -> Result<()> {
        let credential = &self.credential;
        self.retry_while_busy(async || credential.check(&self.app.verifiers).await)
            .await?;
        if self.right.is_fresh() {
            return self.right.read();
        }
        let now = Instant::now();
        match self
            .retry_while_busy(async || self.check_since(now).await)
            .await
        {
            Err(error) if error.is_outage() => Ok(()),
            checked => checked,
        }
    }

    /// Repeats a check while the tenant is too busy for it: nothing is sent until its outcome is known.
    async fn retry_while_busy(&self, check: impl AsyncFn() -> Result<()>) -> Result<()> {
        let until = Instant::now() + MAX_BUSY;
        let mut backoff = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
        loop {
            match check().await {
                Err(error) if error.code == Code::Busy && Instant::now() < until => {}
                checked => return checked,
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.next_pause()) => {}
                () = self.lost() => {
                    self.credential.read()?;
                    return self.right.read();
                }
            }
        }
    }

    /// Checks the right to what was read at `since`: as it was then or later.
    pub async fn check_since(&self, since: Instant) -> Result<()> {
        let db = &self.app.db;
        let now = self.app.clock.now();
        self.right.check_since(db, since, now).await
    }

    /// Checks at once: before a whole answer is given.
    pub async fn check_before_answer(&mut self) -> Result<()> {
        let credential = &self.credential;
        self.retry_while_busy(async || credential.check_now(&self.app.verifiers).await)
            .await?;
        self.check_before_words().await
    }

    /// Checks the right to all words up to now, before they are sent. What belongs to no user changes hands only by
    /// being deleted, which ends its turn. While the database does not answer, an answer goes on.
    pub async fn check_before_words(&mut self) -> Result<()> {
        let Visibility::User(_) = self.context.access.visibility else {
            return Ok(());
        };
        let now = Instant::now();
        if self.away_until.is_some_and(|until| now < until) {
            return self.right.read();
        }
        match self
            .retry_while_busy(async || self.check_since(now).await)
            .await
        {
            Err(error) if error.is_outage() => {
                self.away_until = Some(Instant::now() + RECHECK_EVERY);
                Ok(())
            }
            checked => checked,
        }
    }

    /// Waits until the reader may not read any more.
    pub async fn lost(&self) {
        tokio::select! {
            () = self.credential.refused() => {}
            () = self.right.refused() => {}
        }
    }

    /// Does something for the reader, until it may not read any more.
    pub async fn during<T>(&self, doing: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = doing => done,
            () = self.lost() => {
                self.credential.read()?;
                self.right.read()?;
                Err(Error::not_found("session"))
            }
        }
    }
}
