//! The credentials of open streams and long polls: each is checked once for all its streams on this node.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use tokio::time::Instant;

use super::{BATCH, Verdict, lock};
use crate::auth::{self, PresentedCredential, Verifiers};
use crate::error::{Code, Error, Result};

/// All credentials of open streams on this node.
#[derive(Default)]
pub struct Credentials {
    open: Arc<Mutex<HashMap<PresentedCredential, Weak<CheckedCredential>>>>,
}

pub struct CheckedCredential {
    open: Arc<Mutex<HashMap<PresentedCredential, Weak<CheckedCredential>>>>,
    presented: PresentedCredential,
    verdict: Verdict,
}

impl Credentials {
    /// Adds a credential that was just accepted.
    pub fn open(&self, presented: &PresentedCredential) -> Arc<CheckedCredential> {
        // Before the guard, so that it is dropped after it: the last one to drop a credential takes the lock.
        let existing;
        let mut open = lock(&self.open);
        existing = open.get(presented).and_then(Weak::upgrade);
        if let Some(credential) = &existing
            && !credential.verdict.is_refused()
        {
            return credential.clone();
        }
        let credential = Arc::new(CheckedCredential {
            open: self.open.clone(),
            presented: presented.clone(),
            verdict: Verdict::new(),
        });
        open.insert(presented.clone(), Arc::downgrade(&credential));
        credential
    }

    /// Checks all of them.
    pub async fn renew(&self, verifiers: &Verifiers) {
        let open: Vec<Arc<CheckedCredential>> = lock(&self.open)
            .values()
            .filter_map(Weak::upgrade)
            .collect();
        for credentials in open.chunks(BATCH) {
            // A stream that reads meanwhile checks again.
            let _busy = check(verifiers, credentials).await;
        }
    }
}

impl CheckedCredential {
    pub fn read(&self) -> Result<()> {
        self.verdict.read()
    }

    pub async fn refused(&self) {
        self.verdict.refused().await;
    }

    /// Fails if the credential is not accepted now, however fresh the last verdict is.
    pub async fn check_now(self: &Arc<Self>, verifiers: &Verifiers) -> Result<()> {
        let checked = check(verifiers, std::slice::from_ref(self)).await;
        self.read().and(checked)
    }

    /// Fails if the credential is no longer accepted. Checks only if the last verdict is stale.
    pub async fn check(self: &Arc<Self>, verifiers: &Verifiers) -> Result<()> {
        if self.verdict.is_fresh() {
            return self.read();
        }
        self.check_now(verifiers).await
    }
}

impl Drop for CheckedCredential {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        let gone = |credential: &Weak<CheckedCredential>| credential.strong_count() == 0;
        if open.get(&self.presented).is_some_and(gone) {
            open.remove(&self.presented);
        }
    }
}

/// Fails if one could not be checked because its tenant is busy.
async fn check(verifiers: &Verifiers, credentials: &[Arc<CheckedCredential>]) -> Result<()> {
    let began = Instant::now();
    let presented: Vec<&PresentedCredential> =
        credentials.iter().map(|one| &one.presented).collect();
    let checked: Vec<Result<(), Error>> = auth::recheck(verifiers, &presented).await;
    let mut outcome = Ok(());
    for (credential, checked) in credentials.iter().zip(checked) {
        if let Err(error) = &checked
            && error.code == Code::Busy
        {
            outcome = Err(Error::busy(error.detail.clone()));
        }
        credential.verdict.set(began, checked);
    }
    outcome
}
