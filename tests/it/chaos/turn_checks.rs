//! What must hold between what clients remember of their turns and what is there: functions over data, each
//! of which answers what breaks its rule.

use std::collections::HashMap;

use super::turn_history::{
    Conversation, Disposition, EndedTurn, Line, ReceivedEvent, SentMessage, TurnHistory, TurnsState,
};
use crate::support::servers::model::echo_of;

/// Everything that is wrong, in words.
pub fn violations(history: &TurnHistory, state: &TurnsState) -> Vec<String> {
    let mut found = history.faults.clone();
    for conversation in &state.conversations {
        let asked = |one: &&SentMessage| one.conversation == conversation.id;
        let asked: Vec<&SentMessage> = history.asked.iter().filter(asked).collect();
        found.extend(messages(&asked, conversation));
        found.extend(order(&asked, conversation));
        found.extend(
            conversation
                .turns
                .iter()
                .flat_map(|turn| told(turn, conversation)),
        );
    }
    for asked in &history.asked {
        let there = |one: &Conversation| one.id == asked.conversation;
        let acknowledged = !matches!(asked.became, Disposition::Unknown | Disposition::Refused);
        if acknowledged && !state.conversations.iter().any(there) {
            found.push(format!("the conversation is gone: {asked:?}"));
        }
    }
    for seen in &history.seen {
        let there = state
            .conversations
            .iter()
            .find(|one| one.id == seen.conversation);
        let events = there.map_or(&[][..], |one| &one.events);
        if let Some(differs) = first_difference(&seen.events, events) {
            found.push(format!("{}: whoever watched {differs}", seen.conversation));
        }
    }
    found
}

/// Every acknowledged message is in the transcript once, with the one answer that its sender was given, or
/// with a reason why there is none. One in doubt is there at most once, a refused one never.
fn messages(asked: &[&SentMessage], conversation: &Conversation) -> Vec<String> {
    let mut found = Vec::new();
    let mut spoken: HashMap<&str, Vec<&Line>> = HashMap::new();
    for line in conversation
        .transcript
        .iter()
        .filter(|line| line.role == "user")
    {
        spoken.entry(&line.text).or_default().push(line);
    }
    for asked in asked {
        let lines = spoken.remove(asked.text.as_str()).unwrap_or_default();
        let allowed = match asked.became {
            Disposition::Answered { .. } => 1..=1,
            // One that was ended while it waited never enters the transcript.
            Disposition::Ended { .. } | Disposition::Unknown => 0..=1,
            Disposition::Refused => 0..=0,
        };
        if !allowed.contains(&lines.len()) {
            found.push(format!("{} times there: {asked:?}", lines.len()));
        }
        for line in lines {
            found.extend(answered(asked, line, conversation));
        }
    }
    found.extend(spoken.keys().map(|text| format!("nobody said {text}")));
    found
}

fn answered(asked: &SentMessage, line: &Line, conversation: &Conversation) -> Vec<String> {
    let mut found = Vec::new();
    let of_turn = |other: &&Line| other.turn == line.turn && other.role == "assistant";
    let answers: Vec<&Line> = conversation.transcript.iter().filter(of_turn).collect();
    let turn = conversation.turns.iter().find(|turn| turn.id == line.turn);
    let Some(turn) = turn else {
        return vec![format!("said in no turn: {asked:?}")];
    };
    match turn.state.as_str() {
        "completed" => {
            if answers.len() != 1 || answers[0].text != echo_of(&asked.text) {
                found.push(format!("answered with {answers:?}: {asked:?}"));
            }
        }
        "failed" | "cancelled" | "interrupted" if turn.reason.is_some() => {
            if answers.len() > 1 {
                found.push(format!("answered with {answers:?}: {asked:?}"));
            }
        }
        _ => found.push(format!("{turn:?} is left over: {asked:?}")),
    }
    match &asked.became {
        Disposition::Answered { turn: told, answer } => {
            let same = answers.len() == 1 && answers[0].text == *answer && *told == turn.id;
            if !same || turn.state != "completed" {
                found.push(format!("{turn:?} says {answers:?}, not as told: {asked:?}"));
            }
        }
        Disposition::Ended { turn: told } => {
            if *told != turn.id || turn.state == "completed" {
                found.push(format!("{turn:?} has ended otherwise: {asked:?}"));
            }
        }
        Disposition::Unknown | Disposition::Refused => {}
    }
    found
}

/// Turns speak in the order of their acceptance, each question before its answer; and what was settled
/// before something else was sent stands before it.
fn order(asked: &[&SentMessage], conversation: &Conversation) -> Vec<String> {
    let mut found = Vec::new();
    let place = |id: &str| conversation.turns.iter().position(|turn| turn.id == id);
    let places: Vec<Option<usize>> = conversation
        .transcript
        .iter()
        .map(|line| place(&line.turn))
        .collect();
    if !places.is_sorted() {
        found.push(format!(
            "{}: not in the order of acceptance",
            conversation.id
        ));
    }
    for two in conversation.transcript.windows(2) {
        let goes_on =
            two[0].role == "user" && two[1].role == "assistant" && two[0].turn == two[1].turn;
        let begins = two[1].role == "user" && two[0].turn != two[1].turn;
        if !goes_on && !begins {
            found.push(format!("{}: {two:?} follow each other", conversation.id));
        }
    }
    let by_text: HashMap<&str, &&SentMessage> = asked
        .iter()
        .map(|asked| (asked.text.as_str(), asked))
        .collect();
    let mut first_settled: Option<&SentMessage> = None;
    for line in conversation.transcript.iter().rev() {
        let Some(asked) = by_text.get(line.text.as_str()) else {
            continue;
        };
        if let Some(later) = first_settled.filter(|later| later.settled_at < asked.sent_at) {
            found.push(format!("{} stands behind {}", later.text, asked.text));
        }
        let earlier = |first: &SentMessage| asked.settled_at < first.settled_at;
        let is_known = !matches!(asked.became, Disposition::Unknown | Disposition::Refused);
        if is_known && first_settled.is_none_or(earlier) {
            first_settled = Some(asked);
        }
    }
    found
}

/// The events of a turn: attempts follow one another, each told as void before the next, the pieces of the
/// last are the answer, and one end comes last. None is left active.
fn told(turn: &EndedTurn, conversation: &Conversation) -> Vec<String> {
    let mut found = Vec::new();
    let events: Vec<&ReceivedEvent> = conversation
        .events
        .iter()
        .filter(|one| one.turn == turn.id)
        .collect();
    let ends: Vec<&&ReceivedEvent> = events.iter().filter(|one| is_end(&one.name)).collect();
    let expected = format!("turn.{}", turn.state);
    if ends.len() != 1 || ends[0].name != expected || events.last() != ends.last().copied() {
        found.push(format!("{turn:?} has the ends {ends:?}"));
    }
    let mut attempt = 1;
    for event in &events {
        if event.name == "message.discarded" {
            attempt += 1;
        }
        if event.attempt != attempt {
            found.push(format!("in attempt {attempt}: {event:?}"));
        }
    }
    if attempt != turn.attempt {
        found.push(format!("{attempt} attempts were told of {turn:?}"));
    }
    let last = events.iter().filter(|one| one.attempt == turn.attempt);
    let pieces: String = last.map(|one| one.text.as_str()).collect();
    let answer = conversation
        .transcript
        .iter()
        .find(|line| line.turn == turn.id && line.role == "assistant");
    let answer = answer.map_or("", |line| line.text.as_str());
    if pieces != answer {
        found.push(format!("told {pieces:?} and stored {answer:?}: {turn:?}"));
    }
    found
}

fn is_end(name: &str) -> bool {
    [
        "turn.completed",
        "turn.failed",
        "turn.cancelled",
        "turn.interrupted",
    ]
    .contains(&name)
}

/// Where what somebody saw is not what there is.
fn first_difference(seen: &[ReceivedEvent], events: &[ReceivedEvent]) -> Option<String> {
    let place = seen
        .iter()
        .zip(events)
        .position(|(one, other)| one != other);
    match place {
        Some(place) => Some(format!("saw {:?} for {:?}", seen[place], events[place])),
        None if seen.len() < events.len() => Some(format!("missed {:?}", events[seen.len()])),
        None if seen.len() > events.len() => Some(format!("also saw {:?}", seen[events.len()])),
        None => None,
    }
}
