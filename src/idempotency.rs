//! Idempotent retries: the first answer to a request with an `Idempotency-Key` is stored in the transaction of its
//! effect, and replayed to a repeated request. `once` is an operation: it commits. All other functions are steps.

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

/// How long an answer is replayed.
pub const ANSWER_RETENTION: TimeDelta = TimeDelta::hours(24);
/// How long the secrets in it are replayed.
pub const SECRET_RETENTION: TimeDelta = TimeDelta::minutes(10);

/// The context of a key's hash, and the prefix of a hash.
const KEY: &str = "idempotency/key";
const HASHED: &str = "h:";

/// The job that deletes expired answers.
pub const EXPIRY_JOB: &str = "expire_answers";

/// Plans that job for the tenant of `tx`: from then on it runs for good, and in time for secrets that are stored
/// now.
pub async fn plan_expiry(tx: &mut TenantTx, now: DateTime<Utc>) -> Result<()> {
    jobs::insert(tx, EXPIRY_JOB, now + SECRET_RETENTION).await
}

/// An answer that can be stored. Its secret members are apart.
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

    /// The body for the client. A secret that is no longer replayed is null.
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
    /// The other forms of the key under which the first answer may be stored.
    other_keys: Vec<String>,
    hash: [u8; 32],
}

impl Request {
    /// `key` is the client's. It may contain information, an order number for example: a keyed hash of it is stored.
    /// Older nodes store and search the text itself, so the text is stored as long as one of them is alive. Both forms
    /// are found, also under an older secret key.
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

/// The result of an earlier request of the same name.
pub enum EarlierResult {
    Turn(TurnId),
    Answer(Answer),
}

/// Runs `work` in `tx` and commits, or replays the answer to the first such request. When `work` fails nothing is
/// stored: the client may fix the cause and use the key again.
pub async fn once(
    app: &App,
    mut tx: TenantTx,
    request: &Request,
    work: impl AsyncFnOnce(&mut TenantTx) -> Result<Answer>,
) -> Result<Outcome> {
    match find_earlier(app, &mut tx, request).await? {
        Some(EarlierResult::Answer(answer)) => return Ok(Outcome::Replayed(answer)),
        Some(EarlierResult::Turn(_)) => return Err(wrong_kind()),
        None => {}
    }
    let answer = work(&mut tx).await?;
    note_answer(app, &mut tx, request, &answer).await?;
    tx.commit().await?;
    Ok(Outcome::Fresh(answer))
}

fn wrong_kind() -> Error {
    Error::internal(anyhow::anyhow!(
        "a stored request has another kind of result"
    ))
}

/// The result of an earlier request of this name; `None` if this is the first one. Its turn or answer must then be
/// noted in the same transaction.
pub async fn find_earlier(
    app: &App,
    tx: &mut TenantTx,
    request: &Request,
) -> Result<Option<EarlierResult>> {
    let now = app.clock.now();
    idempotency::lock(tx, request.lock_name(tx.tenant_id())).await?;
    let name = &request.name;
    let other_keys = &request.other_keys;
    if idempotency::claim(
        tx,
        name,
        other_keys,
        request.hash,
        now,
        now - ANSWER_RETENTION,
    )
    .await?
    {
        return Ok(None);
    }
    let stored = idempotency::find(tx, name, other_keys).await?;
    let stored = stored.ok_or_else(|| {
        Error::internal(anyhow::anyhow!(
            "a stored request vanished while it was read"
        ))
    })?;
    check_hash(&stored, request)?;
    if let Some(turn_id) = stored.turn_id {
        return Ok(Some(EarlierResult::Turn(turn_id)));
    }
    let answer = open(app, tx, request, stored)?;
    Ok(Some(EarlierResult::Answer(answer)))
}

/// The turn of an earlier request of this name; `None` if this is the first one. Its turn must then be noted in the
/// same transaction.
pub async fn find_turn(app: &App, tx: &mut TenantTx, request: &Request) -> Result<Option<TurnId>> {
    match find_earlier(app, tx, request).await? {
        Some(EarlierResult::Turn(turn_id)) => Ok(Some(turn_id)),
        Some(EarlierResult::Answer(_)) => Err(wrong_kind()),
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
        return Err(wrong_kind());
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
    let fresh_enough = created_at > app.clock.now() - SECRET_RETENTION;
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

/// Deletes those answers to keys without an acting user for which `mentions` is true. Opens `limit` of them, from
/// `after` on. Returns the last one as long as there may be more.
pub async fn delete_mentions(
    app: &App,
    tx: &mut TenantTx,
    after: Option<&RequestName>,
    limit: i64,
    mentions: impl Fn(&str) -> bool,
) -> Result<Option<RequestName>> {
    let stored = idempotency::list_without_user(tx, after, limit).await?;
    let more = stored.len() as i64 == limit;
    let mut last = None;
    for (name, stored) in stored {
        // An answer that no configured key opens is never replayed, and expires.
        let plain = stored
            .answer_enc
            .and_then(|sealed| app.keyring.open(&context(tx, &name), &sealed).ok());
        if plain.is_some_and(|plain| mentions(&String::from_utf8_lossy(&plain))) {
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
