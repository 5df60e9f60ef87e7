//! The checks of turns pass what is right, and notice each way in which it could be wrong.

use super::turn_checks::violations;
use super::turn_history::{
    Conversation, Disposition, EndedTurn, Line, ReceivedEvent, ReceivedEvents, SentMessage,
    TurnHistory, TurnsState,
};
use crate::support::servers::model::echo_of;

type Damage = fn(&mut TurnHistory, &mut TurnsState);

fn conversation(state: &mut TurnsState) -> &mut Conversation {
    &mut state.conversations[0]
}

/// What could be wrong, and how the checks tell it.
const DAMAGES: [(&str, Damage, &str); 15] = [
    (
        "a message is lost with its answer",
        |_, state| drop(conversation(state).transcript.drain(2..4)),
        "0 times there",
    ),
    (
        "an answer is lost",
        |_, state| drop(conversation(state).transcript.remove(3)),
        "answered with []",
    ),
    (
        "a message is doubled",
        |_, state| {
            let doubled: Vec<Line> = conversation(state).transcript[2..4].to_vec();
            conversation(state).transcript.extend(doubled);
        },
        "2 times there",
    ),
    (
        "an answer is doubled",
        |_, state| {
            let doubled = conversation(state).transcript[3].clone();
            conversation(state).transcript.insert(4, doubled);
        },
        "answered with",
    ),
    (
        "an answer is another's",
        |_, state| conversation(state).transcript[3].text = echo_of("m-0"),
        "answered with",
    ),
    (
        "a client was told another answer",
        |history, _| {
            let turn = "t-1".to_owned();
            let answer = "something".to_owned();
            history.asked[1].became = Disposition::Answered { turn, answer };
        },
        "not as told",
    ),
    (
        "turns change places",
        |_, state| conversation(state).transcript.rotate_left(2),
        "not in the order of acceptance",
    ),
    (
        "turns were accepted in another order than they were sent",
        |_, state| {
            conversation(state).transcript.rotate_left(2);
            conversation(state).turns.rotate_left(1);
        },
        "m-0 stands behind m-1",
    ),
    (
        "a refused message is there",
        |history, _| history.asked[1].became = Disposition::Refused,
        "1 times there",
    ),
    (
        "there is what nobody said",
        |history, _| drop(history.asked.remove(1)),
        "nobody said m-1",
    ),
    (
        "a turn is left over",
        |_, state| conversation(state).turns[1].state = "running".to_owned(),
        "is left over",
    ),
    (
        "whoever watched missed an event",
        |history, _| drop(history.seen[0].events.remove(3)),
        "whoever watched saw",
    ),
    (
        "whoever watched was told twice",
        |history, _| {
            let twice = history.seen[0].events[3].clone();
            history.seen[0].events.insert(3, twice);
        },
        "whoever watched saw",
    ),
    (
        "a new attempt is not told",
        |history, state| {
            let told = |event: &ReceivedEvent| event.name != "message.discarded";
            conversation(state).events.retain(told);
            history.seen[0].events.retain(told);
        },
        "in attempt 1",
    ),
    (
        "what was told is not what was stored",
        |history, state| {
            conversation(state).events[2].text.clear();
            history.seen[0].events[2].text.clear();
        },
        "and stored",
    ),
];

fn told(id: i64, turn: usize, attempt: i64, name: &str, text: &str) -> ReceivedEvent {
    ReceivedEvent {
        id,
        name: name.to_owned(),
        turn: format!("t-{turn}"),
        attempt,
        text: text.to_owned(),
    }
}

/// Three messages, the last of which was begun anew.
fn right() -> (TurnHistory, TurnsState) {
    let mut asked = vec![];
    let mut transcript = vec![];
    let mut turns = vec![];
    let mut events = vec![];
    for number in 0..3 {
        let turn = format!("t-{number}");
        let text = format!("m-{number}");
        let answer = echo_of(&text);
        let attempt = if number == 2 { 2 } else { 1 };
        let line = |role: &str, text: &str| Line {
            role: role.to_owned(),
            text: text.to_owned(),
            turn: turn.clone(),
        };
        transcript.extend([line("user", &text), line("assistant", &answer)]);
        let mut happened = vec![("turn.started", 1, ""), ("message.created", 1, "")];
        if attempt == 2 {
            happened.extend([("message.delta", 1, "you"), ("message.discarded", 2, "")]);
        }
        happened.extend([
            ("message.delta", attempt, answer.as_str()),
            ("message.created", attempt, ""),
            ("turn.completed", attempt, ""),
        ]);
        for (name, attempt, text) in happened {
            events.push(told(events.len() as i64 + 1, number, attempt, name, text));
        }
        turns.push(EndedTurn {
            id: turn.clone(),
            state: "completed".to_owned(),
            reason: None,
            attempt,
        });
        asked.push(SentMessage {
            text,
            conversation: "c-1".to_owned(),
            sent_at: number as u64 * 2,
            settled_at: number as u64 * 2 + 1,
            became: Disposition::Answered { turn, answer },
            doubts: 0,
        });
    }
    let seen = ReceivedEvents {
        conversation: "c-1".to_owned(),
        events: events.clone(),
    };
    let history = TurnHistory {
        asked,
        seen: vec![seen],
        faults: Vec::new(),
    };
    let conversation = Conversation {
        id: "c-1".to_owned(),
        transcript,
        turns,
        events,
    };
    let conversations = vec![conversation];
    (history, TurnsState { conversations })
}

#[test]
fn the_checks_of_turns_notice_what_is_wrong_and_nothing_else() {
    let (history, state) = right();
    assert_eq!(violations(&history, &state), Vec::<String>::new());
    for (what, damage, told) in DAMAGES {
        let (mut history, mut state) = right();
        damage(&mut history, &mut state);
        let found = violations(&history, &state);
        assert!(
            found.iter().any(|one| one.contains(told)),
            "{what}: {found:?}"
        );
    }
    let (mut history, state) = right();
    history.faults.push("a fault".to_owned());
    assert_eq!(violations(&history, &state), ["a fault"]);
    history.faults.clear();
    assert!(!violations(&history, &TurnsState::default()).is_empty());
}
