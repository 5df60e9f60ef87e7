//! What must hold between what clients remember and what is there: functions over data, each of which
//! answers what breaks its rule. They must be able to fail, which `checks_notice` shows.

use std::collections::HashMap;

use super::history::{History, Outcome, Sent};
use super::load::KEEP_LAST;
use super::state::{Chain, Link, Row, State};

/// Everything that is wrong, in words.
pub fn violations(history: &History, state: &State) -> Vec<String> {
    let mut found = history.faults.clone();
    found.extend(messages(history, state));
    for chain in &state.chains {
        found.extend(order(history, chain));
        found.extend(chain.links.iter().flat_map(numbers));
        found.extend(one_line(chain));
        found.extend(chain.links.iter().flat_map(|link| birth(chain, link)));
        found.extend(shown(chain));
    }
    found
}

/// Every acknowledged message is there once and where its acknowledgement said, one in doubt at most
/// once, a refused one never, and none that nobody sent. Copies do not count.
fn messages(history: &History, state: &State) -> Vec<String> {
    let mut found = Vec::new();
    let mut places: HashMap<&str, Vec<(&Chain, &Link, &Row)>> = HashMap::new();
    for chain in &state.chains {
        for link in &chain.links {
            for row in link.rows.iter().filter(|row| is_said(row)) {
                let place = (chain, link, row);
                places.entry(&row.text).or_default().push(place);
            }
        }
    }
    for sent in &history.sent {
        let places = places.remove(sent.text.as_str()).unwrap_or_default();
        let allowed = match sent.outcome {
            Outcome::Acknowledged { .. } => 1..=1,
            Outcome::Unknown => 0..=1,
            Outcome::Refused => 0..=0,
        };
        if !allowed.contains(&places.len()) {
            found.push(format!("{} times there: {sent:?}", places.len()));
        }
        for (chain, link, row) in places {
            if chain.id != sent.conversation || link.undone {
                found.push(format!("in {} of {}: {sent:?}", link.id, chain.id));
            }
            if let Outcome::Acknowledged { session_id, seq } = &sent.outcome
                && (&link.id, row.seq) != (session_id, *seq)
            {
                found.push(format!("at {} in {}: {sent:?}", row.seq, link.id));
            }
        }
    }
    found.extend(places.keys().map(|text| format!("nobody sent {text}")));
    for (conversation, _) in &history.learnt {
        if !state.chains.iter().any(|chain| chain.id == *conversation) {
            found.push(format!("the conversation {conversation} is gone"));
        }
    }
    found
}

fn is_said(row: &Row) -> bool {
    row.kind == "normal" && row.copied_from.is_none()
}

/// What was acknowledged before another was sent stands before it, whoever wrote the two. That orders the
/// messages of each writer, who sends one at a time.
fn order(history: &History, chain: &Chain) -> Vec<String> {
    let by_text: HashMap<&str, &Sent> = history
        .sent
        .iter()
        .map(|sent| (sent.text.as_str(), sent))
        .collect();
    let mut found = Vec::new();
    let mut first_settled: Option<&Sent> = None;
    let said = live(chain).into_iter().flat_map(|link| &link.rows);
    let said: Vec<&Row> = said.filter(|row| is_said(row)).collect();
    for row in said.into_iter().rev() {
        let Some(sent) = by_text.get(row.text.as_str()) else {
            continue;
        };
        if let Some(later) = first_settled.filter(|later| later.settled_at < sent.sent_at) {
            found.push(format!("{} stands behind {}", later.text, sent.text));
        }
        let earlier = |first: &Sent| sent.settled_at < first.settled_at;
        if sent.is_acknowledged() && first_settled.is_none_or(earlier) {
            first_settled = Some(sent);
        }
    }
    found
}

/// Numbers have no gap and no double, and the counters say what the rows say.
fn numbers(link: &Link) -> Vec<String> {
    let mut found = Vec::new();
    let seqs: Vec<i64> = link.rows.iter().map(|row| row.seq).collect();
    if seqs != (1..=seqs.len() as i64).collect::<Vec<_>>() {
        found.push(format!("{}: the numbers are {seqs:?}", link.id));
    }
    let counted = |row: &&Row| link.depth == 0 || row.copied_from.is_none();
    let expected = [
        ("next_seq", link.next_seq, seqs.len() as i64 + 1),
        (
            "message_count",
            link.message_count,
            link.rows.iter().filter(counted).count() as i64,
        ),
        (
            "token_count",
            link.token_count,
            link.rows.iter().map(|row| row.tokens).sum(),
        ),
    ];
    for (name, has, rows) in expected {
        if has != rows {
            found.push(format!("{}: {name} is {has}, not {rows}", link.id));
        }
    }
    found
}

fn live(chain: &Chain) -> Vec<&Link> {
    chain.links.iter().filter(|link| !link.undone).collect()
}

/// The live links are one line from the first to the tip: whatever ended by compression has one live
/// child, and only the tip is open.
fn one_line(chain: &Chain) -> Vec<String> {
    let mut found = Vec::new();
    let live = live(chain);
    for link in &chain.links {
        let is_child = |child: &&&Link| child.parent.as_ref() == Some(&link.id);
        let children = live.iter().filter(is_child).count();
        let compressed = link.end_reason.as_deref() == Some("compression");
        if children != usize::from(compressed) {
            let reason = &link.end_reason;
            found.push(format!("{}: {children} children, {reason:?}", link.id));
        }
        let expected = match (link.undone, link.id == chain.tip) {
            (true, _) => ("ended", Some("uncompressed")),
            (false, true) => ("open", None),
            (false, false) => ("ended", Some("compression")),
        };
        if (link.state.as_str(), link.end_reason.as_deref()) != expected {
            let state = &link.state;
            let reason = &link.end_reason;
            found.push(format!("{}: is {state}, {reason:?}", link.id));
        }
    }
    for (place, link) in live.iter().enumerate() {
        let parent = place.checked_sub(1).map(|before| &live[before].id);
        if link.depth != place as i32 || link.parent.as_ref() != parent {
            found.push(format!("{}: not link {place} of one line", link.id));
        }
    }
    let ends = (live.first(), live.last());
    if ends.0.map(|link| &link.id) != Some(&chain.id) {
        found.push(format!("{}: another link is the first", chain.id));
    }
    if ends.1.map(|link| &link.id) != Some(&chain.tip) {
        found.push(format!("{}: the tip is not the last link", chain.id));
    }
    found
}

/// A link is born with one summary, and copies of its parent's rows of which the last are the parent's
/// last. What follows is its own; an undone one has nothing of its own.
fn birth(chain: &Chain, link: &Link) -> Vec<String> {
    let mut found = Vec::new();
    let born = link.rows.iter().take_while(|row| row.seq <= link.born_seq);
    let (copies, made): (Vec<&Row>, Vec<&Row>) = born.partition(|row| row.copied_from.is_some());
    let own: Vec<&Row> = link
        .rows
        .iter()
        .filter(|row| row.seq > link.born_seq)
        .collect();
    if !own.iter().all(|row| is_said(row)) {
        found.push(format!("{}: a copy or a summary as own message", link.id));
    }
    if link.undone && !own.is_empty() {
        found.push(format!("{}: undone with own messages", link.id));
    }
    let Some(parent) = &link.parent else {
        if link.born_seq != 0 {
            found.push(format!("{}: the first was born with something", link.id));
        }
        return found;
    };
    if made.len() != 1 || made[0].kind != "summary" {
        found.push(format!("{}: born with {made:?}", link.id));
    }
    for copy in &copies {
        let original = original(chain, copy);
        let same = |original: &Row| {
            let of = |row: &Row| {
                (
                    row.role.clone(),
                    row.kind.clone(),
                    row.text.clone(),
                    row.tokens,
                )
            };
            original.copied_from.is_none() && of(original) == of(copy)
        };
        if !original.is_some_and(same) {
            found.push(format!("{copy:?} is no copy of {original:?}"));
        }
    }
    // An undone link's parent may have moved on since.
    if link.undone {
        return found;
    }
    let Some(parent) = chain.links.iter().find(|other| other.id == *parent) else {
        return found;
    };
    let origins = |rows: &[&Row]| rows.iter().map(|row| origin(row)).collect::<Vec<_>>();
    let rows: Vec<&Row> = parent.rows.iter().collect();
    let tail = &rows[rows.len().saturating_sub(KEEP_LAST)..];
    if !origins(&copies).ends_with(&origins(tail)) {
        found.push(format!("{}: does not keep its parent's last", link.id));
    }
    let kept = copies.len() as i64;
    if link.compression != Some((kept, rows.len() as i64 - kept)) {
        let said = link.compression;
        found.push(format!("{}: the record says {said:?}, not {kept}", link.id));
    }
    found
}

/// Where a row comes from in the end: from its own place, or its original's.
fn origin(row: &Row) -> (String, i64) {
    let own = || (row.session_id.clone(), row.seq);
    row.copied_from.clone().unwrap_or_else(own)
}

fn original<'a>(chain: &'a Chain, copy: &Row) -> Option<&'a Row> {
    let (session, seq) = copy.copied_from.as_ref()?;
    let link = chain.links.iter().find(|link| link.id == *session)?;
    link.rows.iter().find(|row| row.seq == *seq)
}

/// Every node shows what is there, and every id that was ever given leads to the tip.
fn shown(chain: &Chain) -> Vec<String> {
    let mut found = Vec::new();
    let live = live(chain);
    let lineage: Vec<&String> = live.iter().map(|link| &link.id).collect();
    let whole = live
        .iter()
        .flat_map(|link| link.rows.iter().map(|row| (link.depth, row)));
    let transcript: Vec<&Row> = whole
        .filter(|(depth, row)| *depth == 0 || row.copied_from.is_none())
        .map(|(_, row)| row)
        .collect();
    for (node, shown) in chain.shown.iter().enumerate() {
        if !shown.transcript.iter().eq(transcript.iter().copied()) {
            found.push(format!("{}: node {node} tells it otherwise", chain.id));
        }
        if !shown.lineage.iter().eq(lineage.iter().copied()) {
            found.push(format!("{}: node {node} has another lineage", chain.id));
        }
        for (id, rows) in &shown.exact {
            let link = chain.links.iter().find(|link| link.id == *id);
            if link.map(|link| &link.rows) != Some(rows) {
                found.push(format!("{id}: node {node} shows other rows"));
            }
        }
        for (id, tip) in shown.tips.iter().filter(|(_, tip)| *tip != chain.tip) {
            found.push(format!("{id}: node {node} leads to {tip}"));
        }
    }
    found
}
