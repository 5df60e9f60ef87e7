//! What `/v1/deliveries` takes and answers.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::deliveries::LeasedDelivery;
use crate::domain::bridge::chat::Chat;
use crate::domain::bridge::delivery::{Delivery, DeliveryKind};
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::{DeliveryId, SessionId, TurnId};

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct DeliveryResponse {
    pub id: DeliveryId,
    pub kind: DeliveryKind,
    pub platform: String,
    pub scope: Option<String>,
    pub chat: Option<Chat>,
    /// The identity that it is for: `platform:external_id`.
    pub identity: Option<String>,
    /// Null for a key that may not read it.
    pub text: Option<String>,
    pub session_id: Option<SessionId>,
    pub conversation_id: Option<SessionId>,
    pub turn_id: Option<TurnId>,
    /// The platform's id of the message that it answers.
    pub in_reply_to: Option<String>,
    /// Its place in its chat.
    pub seq: i64,
    pub attempt: i32,
    /// To acknowledge or reject it; null where it is not leased.
    pub lease: Option<String>,
    /// The bridge's error when it could not be sent.
    pub error: Option<String>,
    pub created_at: DateTime<Utc>,
}

impl DeliveryResponse {
    pub fn new(delivery: Delivery) -> Self {
        Self {
            id: delivery.id,
            kind: delivery.kind,
            platform: delivery.platform,
            scope: Some(delivery.scope).filter(|scope| !scope.is_empty()),
            chat: delivery.chat,
            identity: delivery.identity,
            text: Some(delivery.text),
            session_id: delivery.session_id,
            conversation_id: delivery.conversation_id,
            turn_id: delivery.turn_id,
            in_reply_to: delivery.in_reply_to,
            seq: delivery.seq,
            attempt: delivery.attempt,
            lease: delivery.lease.map(|lease| lease.simple().to_string()),
            error: delivery.error,
            created_at: delivery.created_at,
        }
    }

    pub fn without_text(delivery: Delivery) -> Self {
        Self {
            text: None,
            ..Self::new(delivery)
        }
    }
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AckRequest {
    #[schema(min_length = 32, max_length = 36, pattern = "^[0-9a-f-]+$")]
    pub lease: String,
    /// The platform's id of the message that was sent.
    #[schema(min_length = 1, max_length = 256)]
    pub external_message_id: Option<String>,
}

impl AckRequest {
    pub fn check(&self) -> Result<()> {
        let id = self.external_message_id.as_deref();
        if id.is_some_and(|id| !(1..=256).contains(&id.chars().count())) {
            let error = FieldError::new("/external_message_id", "must have 1 to 256 characters");
            return Err(Error::fields(Code::InvalidRequest, vec![error]));
        }
        Ok(())
    }
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NackRequest {
    #[schema(min_length = 32, max_length = 36, pattern = "^[0-9a-f-]+$")]
    pub lease: String,
    /// Why it could not be sent.
    #[schema(max_length = 500)]
    pub error: String,
    /// Whether to try again later; otherwise it is dead.
    pub retry: bool,
}

pub fn read_lease(id: DeliveryId, text: &str) -> Result<LeasedDelivery> {
    let lease = text.parse().map_err(|_| {
        let error = FieldError::new("/lease", "is not a lease");
        Error::fields(Code::InvalidRequest, vec![error])
    })?;
    Ok(LeasedDelivery { id, lease })
}
