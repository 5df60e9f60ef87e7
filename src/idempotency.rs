//! Retries that change nothing: the first answer to a request with an `Idempotency-Key` is stored in
//! the transaction of its effect, and given again to whoever repeats the request.

use std::sync::atomic::Ordering;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::app::App;
use crate::crypto;
use crate::error::{Code, Error, Result};
use crate::ids::{TenantId, TurnId};
use crate::store::TenantTx;
use crate::store::db::idempotency::{self, RequestName, StoredAnswer};
use crate::store::db::jobs;

/// How long a first answer is given again.
pub const KEPT: TimeDelta = TimeDelta::hours(24);
/// How long the secrets in it are.
pub const SECRETS_KEPT: TimeDelta = TimeDelta::minutes(10);

/// What the hash of a key is made for, and how one begins.
const KEY: &str = "idempotency/key";
const HASHED: &str = "h:";

/// The job that forgets what is no longer kept.
pub const EXPIRY_JOB: &str = "expire_answers";

/// Plans that job for the tenant of `tx`: from then on it runs for good, and in time for secrets that
/// are stored now.
pub async fn plan_expiry(tx: &mut TenantTx, now: DateTime<Utc>) -> Result<()> {
    jobs::insert(tx, EXPIRY_JOB, now + SECRETS_KEPT).await
}

/// An answer that can be stored: its members, and apart those that are secret.
pub struct Answer {
    pub status: u16,
    pub body: Map<String, Value>,
    pub secrets: Map<String, Value>,
}

impl Answer {
    pub fn new(status: u16, response: &impl Serialize) -> Result<Self> {
        let value = serde_json::to_value(response).map_err(Error::internal)?;
        let Value::Object(body) = value else {
            return Err(Error::internal(anyhow::anyhow!("an answer is no object")));
        };
        Ok(Self {
            status,
            body,
            secrets: Map::new(),
        })
    }

    /// Marks `member` as secret: it is replayed for ten minutes, then null.
    pub fn with_secret(mut self, member: &str) -> Self {
        if let Some(value) = self.body.get_mut(member) {
            self.secrets.insert(member.to_owned(), value.take());
        }
        self
    }

    /// What the client gets. A secret that is no longer replayed is null.
    pub fn into_body(self) -> Value {
        let mut body = self.body;
        body.extend(self.secrets);
        Value::Object(body)
    }
}

pub enum Outcome {
    Fresh(Answer),
    Replayed(Answer),
}

impl Outcome {
    pub fn replayed(self) -> Self {
        match self {
            Self::Fresh(answer) | Self::Replayed(answer) => Self::Replayed(answer),
        }
    }
}

/// A retryable request: its name, and a hash of what it asks.
pub struct Request {
    name: RequestName,
    /// The name as the client chose it.
    named: String,
    /// The other forms of the name's key under which the first answer may lie.
    other_keys: Vec<String>,
    hash: [u8; 32],
}

impl Request {
    /// `key` is what the client chose. It may tell something, an order number for example: a keyed hash of it is
    /// stored. Nodes that are older than this store and look for the text itself, so as long as one lives the text
    /// is stored; and whatever is stored is found, also under an older secret key.
    pub fn new(app: &App, principal: String, route: String, key: String, hash: [u8; 32]) -> Self {
        let named = [principal.as_str(), route.as_str(), key.as_str()].join("\0");
        let macs = app.keyring.every_mac(KEY, named.as_bytes());
        let mut forms = macs
            .into_iter()
            .map(|mac| format!("{HASHED}{}", URL_SAFE_NO_PAD.encode(mac)));
        let newest = forms.next();
        let mut other_keys: Vec<String> = forms.collect();
        let stored = match newest {
            Some(newest) if app.hashes_names.load(Ordering::Relaxed) => {
                other_keys.push(key);
                newest
            }
            newest => {
                other_keys.extend(newest);
                key
            }
        };
        let name = RequestName {
            principal,
            route,
            key: stored,
        };
        Self {
            name,
            named,
            other_keys,
            hash,
        }
    }

    /// The same for all forms of the name.
    fn lock_name(&self, tenant_id: TenantId) -> i64 {
        let named = format!("{tenant_id}\0{}", self.named);
        let hash = crypto::sha256(named.as_bytes());
        let (first, _) = hash.split_at(8);
        i64::from_be_bytes(first.try_into().unwrap_or_default())
    }
}

/// What an earlier request of the same name came to.
pub enum Earlier {
    Turn(TurnId),
    Answer(Answer),
}

/// Runs `work` in `tx` and commits, or answers what the first such request was answered. When `work`
/// fails nothing is stored: the client may mend the cause and use the key again.
pub async fn once(
    app: &App,
    mut tx: TenantTx,
    request: &Request,
    work: impl AsyncFnOnce(&mut TenantTx) -> Result<Answer>,
) -> Result<Outcome> {
    match find_earlier(app, &mut tx, request).await? {
        Some(Earlier::Answer(answer)) => return Ok(Outcome::Replayed(answer)),
        Some(Earlier::Turn(_)) => return Err(unfit()),
        None => {}
    }
    let answer = work(&mut tx).await?;
    note_answer(app, &mut tx, request, &answer).await?;
    tx.commit().await?;
    Ok(Outcome::Fresh(answer))
}

fn unfit() -> Error {
    Error::internal(anyhow::anyhow!("a stored request came to something else"))
}

/// What an earlier request of this name came to; `None` if this is the first, whose turn or answer has to be
/// noted in the same transaction.
pub async fn find_earlier(
    app: &App,
    tx: &mut TenantTx,
    request: &Request,
) -> Result<Option<Earlier>> {
    let now = app.clock.now();
    idempotency::lock(tx, request.lock_name(tx.tenant_id())).await?;
    let name = &request.name;
    let other_keys = &request.other_keys;
    if idempotency::claim(tx, name, other_keys, request.hash, now, now - KEPT).await? {
        return Ok(None);
    }
    let stored = idempotency::find(tx, name, other_keys).await?;
    let gone = || {
        Error::internal(anyhow::anyhow!(
            "a stored request vanished while it was read"
        ))
    };
    let stored = stored.ok_or_else(gone)?;
    check_hash(&stored, request)?;
    if let Some(turn_id) = stored.turn_id {
        return Ok(Some(Earlier::Turn(turn_id)));
    }
    let answer = open(app, tx, request, stored)?;
    Ok(Some(Earlier::Answer(answer)))
}

/// The turn that an earlier request of this name became; `None` if this is the first, whose turn has to be
/// noted in the same transaction.
pub async fn find_turn(app: &App, tx: &mut TenantTx, request: &Request) -> Result<Option<TurnId>> {
    match find_earlier(app, tx, request).await? {
        Some(Earlier::Turn(turn_id)) => Ok(Some(turn_id)),
        Some(Earlier::Answer(_)) => Err(unfit()),
        None => Ok(None),
    }
}

/// Stores the answer to a request whose name this transaction has claimed.
pub async fn note_answer(
    app: &App,
    tx: &mut TenantTx,
    request: &Request,
    answer: &Answer,
) -> Result<()> {
    let context = context(tx, &request.name);
    let seal = |part: &Map<String, Value>| -> Result<Vec<u8>> {
        let plain = serde_json::to_vec(part).map_err(Error::internal)?;
        Ok(app.keyring.seal(&context, &plain)?)
    };
    let body = seal(&answer.body)?;
    let secrets = if answer.secrets.is_empty() {
        None
    } else {
        plan_expiry(tx, app.clock.now()).await?;
        Some(seal(&answer.secrets)?)
    };
    let status = i16::try_from(answer.status).map_err(Error::internal)?;
    idempotency::update_answer(tx, &request.name, status, &body, secrets.as_deref()).await
}

pub async fn note_turn(tx: &mut TenantTx, request: &Request, turn_id: TurnId) -> Result<()> {
    idempotency::update_turn(tx, &request.name, turn_id).await
}

fn check_hash(stored: &StoredAnswer, request: &Request) -> Result<()> {
    if stored.request_hash == request.hash {
        Ok(())
    } else {
        let detail = "this Idempotency-Key was used with another request";
        Err(Error::new(Code::IdempotencyConflict, detail))
    }
}

fn open(app: &App, tx: &TenantTx, request: &Request, stored: StoredAnswer) -> Result<Answer> {
    let StoredAnswer {
        key,
        status: Some(status),
        answer_enc: Some(answer),
        secrets_enc,
        created_at,
        ..
    } = stored
    else {
        return Err(unfit());
    };
    let name = RequestName {
        key,
        ..request.name.clone()
    };
    let context = context(tx, &name);
    let open = |sealed: &[u8]| -> Result<Map<String, Value>> {
        let plain = app
            .keyring
            .open(&context, sealed)
            .map_err(Error::internal)?;
        serde_json::from_slice(&plain).map_err(Error::internal)
    };
    let fresh_enough = created_at > app.clock.now() - SECRETS_KEPT;
    let secrets = match secrets_enc.filter(|_| fresh_enough) {
        Some(sealed) => open(&sealed)?,
        None => Map::new(),
    };
    Ok(Answer {
        status: u16::try_from(status).map_err(Error::internal)?,
        body: open(&answer)?,
        secrets,
    })
}

/// Forgets those answers to keys that acted for nobody of which `tells` is true: `limit` of them are opened,
/// those after `after`. Answers the last one, as long as there may be more.
pub async fn forget_telling(
    app: &App,
    tx: &mut TenantTx,
    after: Option<&RequestName>,
    limit: i64,
    tells: impl Fn(&str) -> bool,
) -> Result<Option<RequestName>> {
    let stored = idempotency::list_without_user(tx, after, limit).await?;
    let more = stored.len() as i64 == limit;
    let mut last = None;
    for (name, stored) in stored {
        // What no key of ours opens any more is never replayed, and runs out by itself.
        let plain = stored
            .answer_enc
            .and_then(|sealed| app.keyring.open(&context(tx, &name), &sealed).ok());
        if plain.is_some_and(|plain| tells(&String::from_utf8_lossy(&plain))) {
            idempotency::delete(tx, &name).await?;
        }
        last = Some(name);
    }
    Ok(last.filter(|_| more))
}

/// Binds a stored answer to its row.
fn context(tx: &TenantTx, name: &RequestName) -> String {
    format!(
        "idempotency/{}/{}/{}/{}",
        tx.tenant_id(),
        name.principal,
        name.route,
        name.key
    )
}
