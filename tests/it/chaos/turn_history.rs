//! What clients remember of their turns, and what is there in the end: data, for the checks.

/// What became of a message, as far as its sender knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disposition {
    Answered {
        turn: String,
        answer: String,
    },
    /// It has no answer, and the reason why is final.
    Ended {
        turn: String,
    },
    /// It was not taken.
    Refused,
    Unknown,
}

/// A message that a client sent. Its text is like no other.
#[derive(Debug, Clone)]
pub struct SentMessage {
    pub text: String,
    pub conversation: String,
    /// When it was first sent, by the clients' common count of events.
    pub sent_at: u64,
    /// When its sender knew what had become of it.
    pub settled_at: u64,
    pub became: Disposition,
    /// Tries that ended without an answer.
    pub doubts: u32,
}

/// An event of a conversation, as somebody was told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedEvent {
    pub id: i64,
    pub name: String,
    pub turn: String,
    pub attempt: i64,
    /// Of a piece of an answer.
    pub text: String,
}

/// All that somebody was told who watched a conversation, coming back whenever the stream broke.
#[derive(Debug, Clone)]
pub struct ReceivedEvents {
    pub conversation: String,
    pub events: Vec<ReceivedEvent>,
}

#[derive(Debug, Clone, Default)]
pub struct TurnHistory {
    pub asked: Vec<SentMessage>,
    pub seen: Vec<ReceivedEvents>,
    /// Answers that nothing excuses.
    pub faults: Vec<String>,
}

impl TurnHistory {
    pub fn count(&self, of: impl Fn(&SentMessage) -> bool) -> usize {
        self.asked.iter().filter(|asked| of(asked)).count()
    }
}

#[derive(Debug, Clone)]
pub struct Line {
    pub role: String,
    pub text: String,
    pub turn: String,
}

#[derive(Debug, Clone)]
pub struct EndedTurn {
    pub id: String,
    pub state: String,
    pub reason: Option<String>,
    pub attempt: i64,
}

#[derive(Debug, Clone)]
pub struct Conversation {
    pub id: String,
    pub transcript: Vec<Line>,
    /// In the order of acceptance.
    pub turns: Vec<EndedTurn>,
    /// Every event there is.
    pub events: Vec<ReceivedEvent>,
}

#[derive(Debug, Clone, Default)]
pub struct TurnsState {
    pub conversations: Vec<Conversation>,
}
