//! What a compression keeps: a pure plan over the outline of a transcript. It parts no tool call from
//! its result, and never takes the last thing a person said.

use std::collections::HashSet;

use crate::domain::conversation::message::{MessageKind, Role};
use crate::error::{Code, Error, Result};

pub const MAX_KEEP_LAST: u32 = 1000;
/// Below this a summary may well be larger than what it stands for, and it does not matter.
const SMALL: i64 = 256;

/// What the plan needs to know of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    pub seq: i64,
    pub role: Role,
    pub kind: MessageKind,
    pub tokens: i64,
    pub tool_call_ids: Vec<String>,
    pub tool_call_id: Option<String>,
}

/// How much there is in the whole transcript.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    pub messages: i64,
    pub tokens: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// System messages at the beginning: they stay in front of the summary.
    pub head: Vec<i64>,
    /// What follows the summary.
    pub tail: Vec<i64>,
    pub summarised: i64,
    pub tokens_before: i64,
    pub tokens_after: i64,
}

impl Plan {
    pub fn kept(&self) -> i64 {
        (self.head.len() + self.tail.len()) as i64
    }
}

/// Plans to keep the last `keep_last` messages, and a summary of `summary_tokens` for the rest. Of a long
/// transcript `messages` may leave out the middle, as far as nothing there can be kept.
pub fn plan(
    messages: &[Outline],
    totals: Totals,
    keep_last: usize,
    summary_tokens: i64,
) -> Result<Plan> {
    let refuse = |detail: &str| Err(Error::new(Code::NothingToCompress, detail));
    if totals.messages == 0 {
        return refuse("the session has no messages");
    }
    let head_length = messages
        .iter()
        .take_while(|message| message.role == Role::System)
        .count();
    let (head, rest) = messages.split_at(head_length);
    let kept = kept_of(rest, keep_last);
    let tokens = |messages: &[Outline]| messages.iter().map(|m| m.tokens).sum::<i64>();
    let tail: Vec<Outline> = rest
        .iter()
        .filter(|message| kept.contains(&message.seq))
        .cloned()
        .collect();
    let tokens_after = tokens(head) + summary_tokens + tokens(&tail);
    if tokens_after >= totals.tokens.max(SMALL) {
        return refuse("the summary and what is kept are not smaller than the session");
    }
    Ok(Plan {
        head: head.iter().map(|message| message.seq).collect(),
        summarised: totals.messages - (head.len() + tail.len()) as i64,
        tail: tail.into_iter().map(|message| message.seq).collect(),
        tokens_before: totals.tokens,
        tokens_after,
    })
}

/// The tail, grown so that it parts no call from its results, and the last message of a person.
fn kept_of(messages: &[Outline], keep_last: usize) -> HashSet<i64> {
    let mut start = messages.len().saturating_sub(keep_last);
    // A result at the edge draws its call in, which may have earlier results of its own.
    loop {
        let wanted: HashSet<&str> = messages[start..]
            .iter()
            .filter_map(|message| message.tool_call_id.as_deref())
            .collect();
        let call = messages[..start].iter().rposition(|message| {
            let calls = |id: &String| wanted.contains(id.as_str());
            message.tool_call_ids.iter().any(calls)
        });
        match call {
            Some(place) => start = place,
            None => break,
        }
    }
    // A person's last message is not a tool's result, so it can be kept from before the tail alone.
    let person =
        |message: &&Outline| message.role == Role::User && message.kind == MessageKind::Normal;
    let last_person = messages
        .iter()
        .rev()
        .find(person)
        .map(|message| message.seq);
    let tail = messages[start..].iter().map(|message| message.seq);
    tail.chain(last_person).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `u`, `a`, `s`: user, assistant, system; `c1` calls tool 1, `r1` is its result; `S` is a summary.
    fn transcript(text: &str) -> Vec<Outline> {
        text.split_whitespace()
            .enumerate()
            .map(|(place, word)| {
                let id = Some(word[1..].to_owned()).filter(|id| !id.is_empty());
                let (role, kind) = match &word[..1] {
                    "u" => (Role::User, MessageKind::Normal),
                    "S" => (Role::User, MessageKind::Summary),
                    "s" => (Role::System, MessageKind::Normal),
                    "r" => (Role::Tool, MessageKind::Normal),
                    _ => (Role::Assistant, MessageKind::Normal),
                };
                Outline {
                    seq: place as i64 + 1,
                    role,
                    kind,
                    tokens: 100,
                    tool_call_ids: id
                        .clone()
                        .filter(|_| word.starts_with('c'))
                        .into_iter()
                        .collect(),
                    tool_call_id: id.filter(|_| word.starts_with('r')),
                }
            })
            .collect()
    }

    fn planned(messages: &[Outline], keep_last: usize, summary_tokens: i64) -> Result<Plan> {
        let totals = Totals {
            messages: messages.len() as i64,
            tokens: messages.iter().map(|message| message.tokens).sum(),
        };
        plan(messages, totals, keep_last, summary_tokens)
    }

    fn check(text: &str, keep_last: usize, head: &[i64], tail: &[i64]) {
        let plan = planned(&transcript(text), keep_last, 10).unwrap();
        assert_eq!(
            (plan.head.as_slice(), plan.tail.as_slice()),
            (head, tail),
            "{text} {keep_last}"
        );
        let count = text.split_whitespace().count() as i64;
        assert_eq!(plan.summarised, count - plan.kept(), "{text}");
        assert_eq!(plan.tokens_before, count * 100, "{text}");
        assert_eq!(plan.tokens_after, plan.kept() * 100 + 10, "{text}");
    }

    #[test]
    fn the_tail_is_kept_and_with_it_the_last_message_of_a_person() {
        check("u a u a", 2, &[], &[3, 4]);
        check("u a u a", 1, &[], &[3, 4]);
        check("u a u a", 0, &[], &[3]);
        check("S u a a a", 1, &[], &[2, 5]);
        check("s s u a u a", 1, &[1, 2], &[5, 6]);
        check("S a a a", 1, &[], &[4]);
    }

    #[test]
    fn a_call_is_never_parted_from_its_results() {
        check("u c1 r1 a u", 3, &[], &[2, 3, 4, 5]);
        check("u c1 c2 r1 r2 u", 2, &[], &[2, 3, 4, 5, 6]);
        check("u a c1 r1 a u", 2, &[], &[5, 6]);
    }

    #[test]
    fn what_would_not_get_smaller_is_refused() {
        let long = transcript("u a u a u a");
        let code =
            |messages: &[Outline], keep, tokens| planned(messages, keep, tokens).unwrap_err().code;
        assert_eq!(code(&[], 0, 1), Code::NothingToCompress);
        assert_eq!(code(&long, 6, 1), Code::NothingToCompress);
        assert_eq!(code(&long, 2, 400), Code::NothingToCompress);
        assert!(planned(&long, 2, 399).is_ok());
        assert!(
            planned(&transcript("u"), 0, 50).is_ok(),
            "small ones may be"
        );
    }
}
