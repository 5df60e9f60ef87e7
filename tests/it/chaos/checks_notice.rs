//! The checks pass what is right, and notice each way in which it could be wrong.

use serde_json::{Value, json};

use super::checks::violations;
use super::history::{History, Outcome, Sent};
use super::load::KEEP_LAST;
use super::state::{self, Chain, Reader, Row, State};
use crate::support::conversations::user_message;
use crate::support::{Fields, Tenant, World};

type Damage = fn(&mut History, &mut State);

/// What could be wrong, and how the checks tell it.
const DAMAGES: [(&str, Damage, &str); 21] = [
    ("a message is lost", lose, "0 times there"),
    ("a message is doubled", double, "2 times there"),
    ("two messages change places", swap, "at 4 in"),
    (
        "messages stand in another order",
        reorder,
        "a-2 stands behind a-3",
    ),
    (
        "a message in doubt is doubled",
        |history, state| {
            double(history, state);
            sent(history, "a-2").outcome = Outcome::Unknown;
        },
        "2 times there",
    ),
    (
        "a refused message is there",
        |history, _| sent(history, "a-2").outcome = Outcome::Refused,
        "1 times there",
    ),
    (
        "a message is in another link",
        |history, state| {
            let seq = original(state, "a-2").seq;
            let session_id = chain(state).tip.clone();
            sent(history, "a-2").outcome = Outcome::Acknowledged { session_id, seq };
        },
        "at 4 in",
    ),
    (
        "a message is in an undone link",
        |_, state| chain(state).links[3].undone = true,
        "undone with own messages",
    ),
    (
        "there is what nobody sent",
        |history, _| history.sent.retain(|sent| sent.text != "a-2"),
        "nobody sent a-2",
    ),
    (
        "numbers have a gap",
        |_, state| original(state, "a-3").seq += 1,
        "the numbers are [1, 2, 3, 4, 6]",
    ),
    (
        "a number is there twice",
        |_, state| original(state, "a-3").seq -= 1,
        "the numbers are [1, 2, 3, 4, 4]",
    ),
    (
        "the next number is wrong",
        |_, state| chain(state).links[0].next_seq += 1,
        "next_seq is 7, not 6",
    ),
    (
        "messages are counted wrongly",
        |_, state| chain(state).links[0].message_count += 1,
        "message_count is 6, not 5",
    ),
    (
        "tokens are counted wrongly",
        |_, state| chain(state).links[3].token_count += 1,
        "token_count is",
    ),
    (
        "a parent ended without its child",
        |_, state| {
            chain(state).links.pop();
        },
        "0 children, Some(\"compression\")",
    ),
    (
        "a parent has two children",
        |_, state| {
            let mut other = chain(state).links[3].clone();
            other.id = "ses_other".to_owned();
            chain(state).links.push(other);
        },
        "2 children, Some(\"compression\")",
    ),
    (
        "the tip is not open",
        |_, state| chain(state).links[3].state = "ended".to_owned(),
        "is ended, None",
    ),
    (
        "the conversation points to an older link",
        |_, state| chain(state).tip = chain(state).id.clone(),
        "the tip is not the last link",
    ),
    (
        "a copy is not what its original is",
        |_, state| chain(state).links[3].rows[2].text.push('!'),
        "is no copy of",
    ),
    (
        "something was said after the summary was made",
        |_, state| {
            let mut late = original(state, "a-3").clone();
            late.seq += 1;
            chain(state).links[0].rows.push(late);
        },
        "does not keep its parent's last",
    ),
    (
        "an id leads elsewhere",
        |_, state| chain(state).shown[0].tips[0].1 = "status 404".to_owned(),
        "node 0 leads to status 404",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn the_checks_notice_each_damage() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let history = talk(&world, &tenant).await;
    let reader = Reader {
        client: &world.client,
        nodes: vec![world.url("")],
        key: &tenant.key,
    };
    let state = state::read(&reader, &mut world.superuser().await, &history).await;
    assert_eq!(violations(&history, &state), Vec::<String>::new());
    let depths = state.chains[0].links.iter().map(|link| link.depth);
    assert_eq!(depths.collect::<Vec<_>>(), [0, 1, 2, 2], "as damaged below");
    for (what, damage, told) in DAMAGES {
        let mut history = history.clone();
        let mut state = state.clone();
        damage(&mut history, &mut state);
        let found = violations(&history, &state);
        assert!(
            found.iter().any(|violation| violation.contains(told)),
            "{what}: {found:#?}"
        );
    }
}

/// A conversation with two compressions, and one between them that was taken back.
async fn talk(world: &World, tenant: &Tenant) -> History {
    let beginning = json!([{"role": "system", "content": "rules"}, user_message("begin")]);
    let made = world
        .session(&tenant.key, json!({"messages": beginning}))
        .await;
    let id = made.id();
    let mut history = History::default();
    history.sent.push(Sent::first("rules", &id, 1));
    history.sent.push(Sent::first("begin", &id, 2));
    let learn = |history: &mut History, learnt: &Value| {
        let learnt = learnt.as_str().unwrap().to_owned();
        history.learnt.push((id.clone(), learnt));
    };
    learn(&mut history, &json!(id));
    for step in ["a-1", "a-2", "a-3", "+", "a-4", "a-5", "+", "-", "+", "a-6"] {
        match step {
            "+" => {
                let body = json!({"summary": "so far", "keep_last": KEEP_LAST});
                let tip = world
                    .get(&tenant.key, &format!("/v1/sessions/{id}/tip"))
                    .await;
                let tip = tip.text("session_id");
                let done = world.compress(&tenant.key, &tip, body).await.expect(201);
                learn(&mut history, &done["session_id"]);
            }
            "-" => {
                let path = format!("/v1/sessions/{id}/uncompress");
                world.post(&tenant.key, &path, json!({})).await.expect(200);
            }
            text => {
                let reply = world
                    .append(&tenant.key, &id, json!([user_message(text)]))
                    .await;
                let body = reply.expect(201);
                let at = history.sent.len() as u64 * 2;
                let mut sent = Sent::new(text.to_owned(), &id, at);
                sent.settled_at = at + 1;
                sent.outcome = Outcome::Acknowledged {
                    session_id: body.text("session_id").to_owned(),
                    seq: body.number("/messages/0/seq"),
                };
                history.sent.push(sent);
            }
        }
    }
    history
}

fn sent<'a>(history: &'a mut History, text: &str) -> &'a mut Sent {
    let mut all = history.sent.iter_mut();
    all.find(|sent| sent.text == text).unwrap()
}

fn chain(state: &mut State) -> &mut Chain {
    &mut state.chains[0]
}

fn original<'a>(state: &'a mut State, text: &str) -> &'a mut Row {
    let links = chain(state).links.iter_mut();
    let mut rows = links.flat_map(|link| link.rows.iter_mut());
    rows.find(|row| row.text == text && row.copied_from.is_none())
        .unwrap()
}

/// As if its commit had been lost.
fn lose(_: &mut History, state: &mut State) {
    let tip = &mut chain(state).links[3];
    let lost = tip.rows.pop().unwrap();
    tip.next_seq -= 1;
    tip.message_count -= 1;
    tip.token_count -= lost.tokens;
}

/// As if a retry had written it again.
fn double(_: &mut History, state: &mut State) {
    let mut again = original(state, "a-2").clone();
    let tip = &mut chain(state).links[3];
    (again.session_id, again.seq) = (tip.id.clone(), tip.next_seq);
    tip.next_seq += 1;
    tip.message_count += 1;
    tip.token_count += again.tokens;
    tip.rows.push(again);
}

fn swap(_: &mut History, state: &mut State) {
    original(state, "a-2").text = "swapped".to_owned();
    original(state, "a-3").text = "a-2".to_owned();
    original(state, "swapped").text = "a-3".to_owned();
}

/// The acknowledgements tell the same wrong places.
fn reorder(history: &mut History, state: &mut State) {
    swap(history, state);
    let second = sent(history, "a-2").outcome.clone();
    let third = std::mem::replace(&mut sent(history, "a-3").outcome, second);
    sent(history, "a-2").outcome = third;
}
