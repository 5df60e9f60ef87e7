//! What a user reads in a chat about an error: plain sentences, apart from the titles of the API's errors.

use crate::error::Code;

/// The reason of a turn whose answer has no text; it is no code of an error.
pub const EMPTY_ANSWER: &str = "empty_answer";

const FALLBACK: &str = "Something went wrong. Please try again later.";

/// A row for each code that a command or a failed turn can bring into a chat.
const TEXTS: &[(Code, &str)] = &[
    (
        Code::PrivateChatRequired,
        "This only works in a direct chat with me.",
    ),
    (
        Code::CodeNotFound,
        "That code is not good any more. Please ask for a new one.",
    ),
    (
        Code::ProofRequired,
        "Please show a new code in your other chat first.",
    ),
    (
        Code::AlreadyLinked,
        "These two accounts are already linked.",
    ),
    (
        Code::MergeRequired,
        "Only an administrator can link these two accounts.",
    ),
    (
        Code::TooManyIdentities,
        "You have too many linked accounts already.",
    ),
    (
        Code::TooManyMerges,
        "You have linked too many accounts today. Please try again tomorrow.",
    ),
    (
        Code::TooManyAttempts,
        "There were too many wrong codes. Please try again later.",
    ),
    (
        Code::TooManyCodes,
        "You have too many open codes. Use one of them, or wait until they expire.",
    ),
    (
        Code::LastIdentity,
        "This is your only account here, so there is nothing to unlink.",
    ),
    (
        Code::OlderIdentity,
        "You can only unlink the account you write from, or a newer one.",
    ),
    (
        Code::Conflict,
        "Something changed at the same moment. Please try again.",
    ),
    (
        Code::ContextLengthExceeded,
        "This conversation is too long for me. Please start a new one with /new.",
    ),
    (
        Code::UpstreamRefused,
        "The model did not accept this conversation.",
    ),
    (
        Code::UpstreamBusy,
        "The model is very busy. Please try again in a moment.",
    ),
    (
        Code::UpstreamFailed,
        "The model is not working right now. Please try again later.",
    ),
    (
        Code::UpstreamTimeout,
        "The model took too long. Please try again.",
    ),
    (
        Code::TooManyToolRounds,
        "I needed too many steps. Please ask for something smaller.",
    ),
    (
        Code::ModelNotFound,
        "This assistant is not available any more.",
    ),
    (Code::NotFound, "This assistant is not available any more."),
    (
        Code::LoopDetected,
        "This assistant is not set up correctly.",
    ),
    (
        Code::TurnAbandoned,
        "I was interrupted several times. Please send your message again.",
    ),
    (
        Code::TooManyCalls,
        "Too many people are writing right now. Please try again in a moment.",
    ),
    (
        Code::RateLimited,
        "There were too many messages. Please try again in a moment.",
    ),
    (Code::TenantSuspended, "This assistant is paused."),
    (
        Code::Unavailable,
        "I am not available right now. Please try again in a moment.",
    ),
    (Code::Timeout, "That took too long. Please try again."),
];

/// A sentence for the user whose command or message failed with `code`.
pub fn chat_text(code: Code) -> &'static str {
    let row = TEXTS.iter().find(|(of, _)| *of == code);
    row.map_or(FALLBACK, |(_, text)| text)
}

/// Why there is no answer, by the reason that is stored with the turn.
pub fn no_answer_text(reason: &str) -> String {
    let why = match Code::parse(reason) {
        Some(code) => chat_text(code),
        None if reason == EMPTY_ANSWER => "The assistant said nothing.",
        None => FALLBACK,
    };
    format!("I could not answer your message. {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_sentence_and_no_code_has_two() {
        for code in Code::ALL {
            let text = chat_text(*code);
            assert!(text.ends_with('.') && text.len() < 100, "{text}");
            assert_ne!(text, code.title());
            assert!(TEXTS.iter().filter(|(of, _)| of == code).count() < 2);
        }
    }

    #[test]
    fn the_reason_of_a_failed_turn_becomes_a_sentence() {
        for (reason, why) in [
            ("upstream_timeout", "The model took too long."),
            (EMPTY_ANSWER, "The assistant said nothing."),
            ("of another version", "Something went wrong."),
        ] {
            assert!(no_answer_text(reason).contains(why), "{reason}");
        }
    }
}
