//! The answer to an inbound message. It is stored as it is sent, so that a retry gets the same.

use serde::{Deserialize, Serialize};

use super::{CommandAnswer, InboundTurn};
use crate::domain::people::access::Access;
use crate::domain::turn::ResetInfo;
use crate::ids::{TurnId, UserId};

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct InboundResponse {
    pub turn_id: Option<TurnId>,
    pub session_key: Option<String>,
    pub session_id: Option<String>,
    pub conversation_id: Option<String>,
    pub user_id: UserId,
    /// The answer; null where it comes as a delivery, or where there is none.
    pub reply: Option<ReplyResponse>,
    /// What the service itself has to say.
    pub notices: Vec<Notice>,
    pub reset: Option<ResetInfo>,
    /// Always null: offers are not here yet.
    #[schema(value_type = Option<Object>)]
    pub offer: Option<()>,
    /// Whether the message was received before.
    pub duplicate: bool,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ReplyResponse {
    pub text: String,
}

/// Something that the service itself says beside the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Notice {
    pub code: String,
    pub text: String,
}

impl InboundResponse {
    /// To a message that has no answer.
    pub(super) fn empty(user_id: UserId, duplicate: bool) -> Self {
        Self {
            turn_id: None,
            session_key: None,
            session_id: None,
            conversation_id: None,
            user_id,
            reply: None,
            notices: Vec::new(),
            reset: None,
            offer: None,
            duplicate,
        }
    }

    pub(super) fn of_command(answer: CommandAnswer, user_id: UserId, duplicate: bool) -> Self {
        Self {
            session_key: answer.session_key,
            session_id: answer.session_id,
            conversation_id: answer.conversation_id,
            reply: Some(ReplyResponse { text: answer.text }),
            notices: answer.notices,
            reset: answer.reset,
            ..Self::empty(user_id, duplicate)
        }
    }

    /// To a message with a turn, without the turn's answer.
    pub(super) fn of_turn(inbound: &InboundTurn, access: &Access) -> Self {
        let turn = &inbound.turn;
        Self {
            turn_id: Some(turn.id),
            session_key: turn.session_info.session_key.clone(),
            session_id: Some(turn.name.public_session_id(turn.session_id, access)),
            conversation_id: Some(turn.name.public_id(access)),
            reset: turn.session_info.reset.clone(),
            ..Self::empty(inbound.user_id, inbound.is_duplicate)
        }
    }
}
