//! What clients remember of their own doing: data, for the checks.

/// What became of a message, as far as its writer knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Acknowledged { session_id: String, seq: i64 },
    Refused,
    Unknown,
}

/// A message that a client tried to write. Its text is like no other.
#[derive(Debug, Clone)]
pub struct Sent {
    pub text: String,
    /// The first id of the conversation.
    pub conversation: String,
    /// When it was first sent, by the clients' common count of events.
    pub sent_at: u64,
    /// When its writer knew what had become of it.
    pub settled_at: u64,
    pub outcome: Outcome,
    /// Tries that ended without an answer.
    pub doubts: u32,
    /// The acknowledgement was that of an earlier try.
    pub replayed: bool,
}

impl Sent {
    pub fn new(text: String, conversation: &str, sent_at: u64) -> Self {
        Self {
            text,
            conversation: conversation.to_owned(),
            sent_at,
            settled_at: u64::MAX,
            outcome: Outcome::Unknown,
            doubts: 0,
            replayed: false,
        }
    }

    /// What a conversation began with.
    pub fn first(text: &str, conversation: &str, seq: i64) -> Self {
        let session_id = conversation.to_owned();
        Self {
            settled_at: 0,
            outcome: Outcome::Acknowledged { session_id, seq },
            ..Self::new(text.to_owned(), conversation, 0)
        }
    }

    pub fn is_acknowledged(&self) -> bool {
        matches!(self.outcome, Outcome::Acknowledged { .. })
    }
}

#[derive(Debug, Clone, Default)]
pub struct History {
    pub sent: Vec<Sent>,
    /// Each id that a client was ever given, behind the first id of its conversation.
    pub learnt: Vec<(String, String)>,
    /// Answers that nothing excuses.
    pub faults: Vec<String>,
}

impl History {
    pub fn count(&self, of: impl Fn(&Sent) -> bool) -> usize {
        self.sent.iter().filter(|sent| of(sent)).count()
    }
}
