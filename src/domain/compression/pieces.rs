//! Cuts a transcript of any length into pieces of one request each, while it is read: only the piece at hand
//! is in memory. The summary of a piece is updated by the request of the next one. A tool call and its
//! results are in one piece, unless they are larger than one.

use super::source::{Author, SourceMessage};

/// A part of a transcript, in order; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    messages: Vec<SourceMessage>,
    tokens: u64,
}

impl Piece {
    pub fn messages(&self) -> &[SourceMessage] {
        &self.messages
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The same messages in smaller pieces, where a model takes no piece of this size.
    pub fn split(self, limit: u64) -> Vec<Self> {
        let mut pieces = Pieces::new(limit);
        let mut complete = Vec::new();
        for message in self.messages {
            complete.extend(pieces.push(message));
        }
        complete.extend(pieces.finish());
        complete
    }
}

/// Messages in order, and their tokens.
#[derive(Debug, Default)]
struct Run {
    messages: Vec<SourceMessage>,
    tokens: u64,
}

impl Run {
    fn push(&mut self, message: SourceMessage) {
        self.tokens += message.tokens();
        self.messages.push(message);
    }

    fn append(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.messages.extend(other.messages);
    }

    fn into_piece(self) -> Option<Piece> {
        let Self { messages, tokens } = self;
        (!messages.is_empty()).then_some(Piece { messages, tokens })
    }
}

/// The piece at hand.
#[derive(Debug)]
pub struct Pieces {
    /// The most tokens of a piece.
    limit: u64,
    /// Whole groups.
    piece: Run,
    /// A message, or a call and the results that directly follow it. Ids do not matter: servers repeat them.
    group: Run,
}

impl Pieces {
    pub fn new(limit: u64) -> Self {
        Self {
            limit,
            piece: Run::default(),
            group: Run::default(),
        }
    }

    /// Adds the next message, and returns the pieces that are complete: none, mostly.
    pub fn push(&mut self, mut message: SourceMessage) -> Vec<Piece> {
        message.shorten(self.limit);
        let mut complete = Vec::new();
        let answers_call = message.author() == Author::Tool
            && self.group.messages.first().is_some_and(can_have_results);
        if !answers_call {
            complete.extend(self.close_group());
        } else if self.group.tokens + message.tokens() > self.limit {
            // The group is larger than a piece. Its next results go on in a group of their own.
            complete.extend(std::mem::take(&mut self.piece).into_piece());
            complete.extend(std::mem::take(&mut self.group).into_piece());
        }
        self.group.push(message);
        complete
    }

    /// The rest.
    pub fn finish(mut self) -> Vec<Piece> {
        let full = self.close_group();
        full.into_iter().chain(self.piece.into_piece()).collect()
    }

    /// Moves the group into the piece. Returns the piece before, if the group does not fit into it.
    fn close_group(&mut self) -> Option<Piece> {
        let full = if self.piece.tokens + self.group.tokens > self.limit {
            std::mem::take(&mut self.piece).into_piece()
        } else {
            None
        };
        self.piece.append(std::mem::take(&mut self.group));
        full
    }
}

/// A result is also followed by results, where its group was larger than a piece.
fn can_have_results(message: &SourceMessage) -> bool {
    message.calls_tools() || message.author() == Author::Tool
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::source::StoredMessage;
    use super::*;

    /// `u`, `a`: user, assistant; `c` calls tools, `r` is a result; the number is the length of the text.
    fn transcript(words: &[(char, usize)]) -> Vec<SourceMessage> {
        let calls = json!([{"id": "call_0", "type": "function",
                            "function": {"name": "f", "arguments": "{}"}}]);
        let calls = calls.to_string();
        let message = |(index, (kind, length)): (usize, &(char, usize))| {
            let text = format!("{index}:{}", "x".repeat(*length));
            SourceMessage::read(StoredMessage {
                seq: index as i64 + 1,
                author: match kind {
                    'u' => Author::User,
                    'r' => Author::Tool,
                    _ => Author::Assistant,
                },
                name: None,
                content: Some(json!(text).to_string().as_bytes()),
                tool_calls: (*kind == 'c').then_some(calls.as_bytes()),
            })
        };
        words.iter().enumerate().map(message).collect()
    }

    fn cut(messages: &[SourceMessage], limit: u64) -> Vec<Piece> {
        let mut pieces = Pieces::new(limit);
        let mut complete = Vec::new();
        for message in messages {
            complete.extend(pieces.push(message.clone()));
        }
        complete.extend(pieces.finish());
        complete
    }

    fn check(words: &str, limit: u64, expected: &[&[i64]]) {
        let words: Vec<(char, usize)> = words.chars().map(|kind| (kind, 320)).collect();
        let pieces = cut(&transcript(&words), limit);
        let seqs: Vec<Vec<i64>> = pieces
            .iter()
            .map(|piece| piece.messages().iter().map(SourceMessage::seq).collect())
            .collect();
        assert_eq!(seqs, expected, "{words:?} {limit}");
    }

    #[test]
    fn pieces_are_cut_between_groups() {
        // A message has about a hundred tokens.
        check("uaua", 1000, &[&[1, 2, 3, 4]]);
        check("uaua", 250, &[&[1, 2], &[3, 4]]);
        check("ucru", 250, &[&[1], &[2, 3], &[4]]);
        check("ucrru", 350, &[&[1], &[2, 3, 4], &[5]]);
        // An orphan is a group of its own, and a result joins no message without calls.
        check("urau", 250, &[&[1, 2], &[3, 4]]);
        check("", 250, &[]);
    }

    #[test]
    fn a_group_larger_than_a_piece_goes_on_in_the_next() {
        check("ucrrrrru", 250, &[&[1], &[2, 3], &[4, 5], &[6, 7], &[8]]);
    }

    #[test]
    fn a_message_larger_than_a_piece_is_shortened() {
        let pieces = cut(&transcript(&[('u', 10), ('r', 100_000), ('u', 10)]), 200);
        let huge = &pieces[1].messages()[0];
        assert!(huge.text().contains("characters left out") && huge.tokens() <= 200);
        assert!(huge.text().starts_with("1:xx"));
    }

    #[test]
    fn a_piece_is_split_again() {
        let pieces = cut(
            &transcript(&[('u', 320), ('c', 320), ('r', 320), ('u', 320)]),
            1000,
        );
        let [piece] = pieces.try_into().unwrap();
        let seqs = |piece: &Piece| piece.messages()[0].seq();
        let parts: Vec<i64> = piece.split(250).iter().map(seqs).collect();
        assert_eq!(parts, [1, 2, 4]);
    }

    proptest! {
        #[test]
        fn pieces_contain_every_message_once_and_in_order(
            words in prop::collection::vec((prop::sample::select(vec!['u', 'a', 'c', 'r']), 0_usize..3000), 0..60),
            limit in 20_u64..2000,
        ) {
            let messages = transcript(&words);
            let pieces = cut(&messages, limit);
            let seqs: Vec<i64> = pieces.iter().flat_map(Piece::messages).map(SourceMessage::seq).collect();
            let expected: Vec<i64> = messages.iter().map(SourceMessage::seq).collect();
            prop_assert_eq!(seqs, expected);
            for piece in &pieces {
                prop_assert!(!piece.messages().is_empty());
                prop_assert!(piece.tokens() <= limit, "{} of {}", piece.tokens(), limit);
                let sum: u64 = piece.messages().iter().map(SourceMessage::tokens).sum();
                prop_assert_eq!(piece.tokens(), sum);
            }
            // A piece begins with a result only where the group before it was larger than a piece.
            for pair in pieces.windows(2) {
                let starts_inside = pair[1].messages()[0].author() == Author::Tool
                    && can_have_results(pair[0].messages().last().unwrap());
                if starts_inside {
                    let before = pair[0].messages().iter().rev();
                    let results = before.take_while(|message| message.author() == Author::Tool);
                    let group: u64 = pair[0].messages().iter().rev()
                        .take(results.count() + 1).map(SourceMessage::tokens).sum();
                    prop_assert!(group + pair[1].messages()[0].tokens() > limit);
                }
            }
        }
    }
}
