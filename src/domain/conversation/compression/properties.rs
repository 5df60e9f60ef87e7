//! Properties of plans over generated transcripts: repeated ids, open calls, notices between results, groups of
//! hundreds of messages, messages larger than any window.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::budget::{Pressure, TokenLimits};
use super::generated::{TestMessage, budget_of, messages, numbered, outlines_of, transcripts};
use super::outline::Outline;
use super::plan::{Plan, PlanRequest, Refusal, Saving, Tail, plan, plan_of};
use super::shortening::{rendered_tokens, shorten_through, shortening_of};
use super::transcript::Transcript;
use crate::domain::conversation::message::{MessageKind, Role};

fn requests() -> impl Strategy<Value = PlanRequest> {
    let pressure = prop_oneof![Just(Pressure::Threshold), Just(Pressure::HardLimit)];
    let budget = (1000_u32..200_000, 0.0..1.2).prop_map(|(window, fixed): (u32, f64)| {
        budget_of(window, (f64::from(window) * fixed) as i64)
    });
    let by_tokens = (budget, pressure).prop_map(|(budget, pressure)| {
        let tail = Tail::Tokens(budget.limits(pressure));
        (tail, budget.largest_summary, Saving::Fifth)
    });
    let by_hand = (prop::bool::ANY, 0_usize..60, 1_i64..500).prop_map(|(users, count, summary)| {
        let tail = if users {
            Tail::FromUsers(count)
        } else {
            Tail::Messages(count)
        };
        (tail, summary, Saving::Any)
    });
    let kind = prop_oneof![3 => by_tokens, 2 => by_hand];
    (kind, prop::bool::ANY, 0_i64..100).prop_map(|((tail, summary_tokens, saving), runs, mark)| {
        PlanRequest {
            tail,
            summary_tokens,
            saving,
            // The test puts the number of the last message of a user here.
            running_since: runs.then_some(0),
            shortened_through: mark,
        }
    })
}

/// For each result the message that called: the nearest one with its id.
fn callers(source: &[TestMessage]) -> Vec<(i64, i64)> {
    let mut latest = HashMap::new();
    let mut pairs = Vec::new();
    for message in source {
        for id in &message.call_ids {
            latest.insert(*id, message.outline.seq);
        }
        if let Some(caller) = message.result_id.and_then(|id| latest.get(&id)) {
            pairs.push((*caller, message.outline.seq));
        }
    }
    pairs
}

fn last_users(rows: &[Outline]) -> Option<usize> {
    rows.iter().rposition(Outline::is_users)
}

/// What every plan promises.
fn check(source: &[TestMessage], request: &PlanRequest, plan: &Plan) {
    let rows = outlines_of(source);
    let all: Vec<i64> = plan.head.iter().chain(&plan.tail).copied().collect();
    assert!(all.is_sorted_by(|a, b| a < b), "order: {all:?}");
    let kept: HashSet<i64> = all.iter().copied().collect();
    let head = rows.iter().take_while(|row| row.role == Role::System);
    let head: Vec<i64> = head.map(|row| row.seq).collect();
    assert_eq!(plan.head, head);
    for (caller, result) in callers(source) {
        let (caller_stays, result_stays) = (kept.contains(&caller), kept.contains(&result));
        assert_eq!(caller_stays, result_stays, "{caller} {result}");
    }
    let last = last_users(&rows);
    assert!(last.is_none_or(|index| kept.contains(&rows[index].seq)));
    let is_summary = |row: &&Outline| row.kind == MessageKind::Summary;
    assert!(
        !rows
            .iter()
            .filter(is_summary)
            .any(|row| kept.contains(&row.seq))
    );
    let tokens = |rows: &mut dyn Iterator<Item = &Outline>| -> i64 {
        rows.map(|row| rendered_tokens(row, request.shortened_through))
            .sum()
    };
    let kept_tokens = tokens(&mut rows.iter().filter(|row| kept.contains(&row.seq)));
    assert_eq!(plan.tokens_before, tokens(&mut rows.iter()));
    assert_eq!(plan.tokens_after, kept_tokens + request.summary_tokens);
    assert_eq!(plan.summarised + plan.kept(), rows.len() as i64);
    match request.saving {
        Saving::Any => assert!(plan.tokens_after < plan.tokens_before.max(256)),
        Saving::Fifth => assert!(plan.tokens_after * 5 <= plan.tokens_before * 4),
    }
    check_tail(&rows, request, plan, &kept);
    // Of the running turn: its messages of users, and all from its newest complete group on.
    if let Some(since) = request.running_since {
        let results = callers(source).into_iter().map(|(caller, _)| caller);
        let is_complete = |message: &&TestMessage| {
            let seq = message.outline.seq;
            let calls = message.call_ids.len();
            seq > since && calls > 0 && results.clone().filter(|id| *id == seq).count() >= calls
        };
        let newest = source
            .iter()
            .rfind(is_complete)
            .map(|message| message.outline.seq);
        let stays = |row: &&Outline| {
            newest.is_some_and(|newest| row.seq >= newest) || (row.seq >= since && row.is_users())
        };
        assert!(rows.iter().filter(stays).all(|row| kept.contains(&row.seq)));
    }
}

fn check_tail(rows: &[Outline], request: &PlanRequest, plan: &Plan, kept: &HashSet<i64>) {
    let stays = |row: &Outline| row.kind == MessageKind::Summary || kept.contains(&row.seq);
    let may_drop_images = match request.tail {
        Tail::Tokens(limits) => {
            assert!(plan.tokens_after <= limits.most);
            if plan.tokens_after > limits.target {
                let least = Tail::Tokens(TokenLimits {
                    target: 0,
                    ..limits
                });
                let least = super::plan::plan(
                    rows,
                    &PlanRequest {
                        tail: least,
                        ..*request
                    },
                );
                assert_eq!(Some(plan), least.as_ref().ok(), "only what has to stay");
            }
            limits.pressure == Pressure::HardLimit
        }
        Tail::Messages(count) => {
            assert!(rows[rows.len().saturating_sub(count)..].iter().all(stays));
            false
        }
        Tail::FromUsers(count) => {
            let users = rows.iter().rev().filter(|row| row.is_users());
            if let Some(first) = count.checked_sub(1).and_then(|n| users.clone().nth(n)) {
                assert!(rows.iter().filter(|row| row.seq >= first.seq).all(stays));
            }
            false
        }
    };
    let Some(last) = last_users(rows) else {
        return;
    };
    if !may_drop_images {
        assert!(rows[last..].iter().filter(|row| row.has_image).all(stays));
    }
}

fn check_refusal(rows: &[Outline], request: &PlanRequest, refusal: Refusal) {
    match (refusal, request.tail) {
        (Refusal::Empty, _) => assert!(rows.is_empty()),
        (Refusal::NothingOld, _) => assert_eq!(request.saving, Saving::Fifth),
        (Refusal::NoSaving { before, after }, _) => match request.saving {
            Saving::Any => assert!(after >= before.max(256)),
            Saving::Fifth => assert!(after * 5 > before * 4),
        },
        (Refusal::OverTarget { after, most }, Tail::Tokens(limits)) => {
            assert!(after > most && most == limits.most);
        }
        (Refusal::Exhausted { needed, hard }, Tail::Tokens(limits)) => {
            let all: i64 = rows.iter().map(|row| i64::from(row.tokens)).sum();
            assert!(needed > hard && hard == limits.hard && needed <= all);
        }
        (Refusal::OverTarget { .. } | Refusal::Exhausted { .. }, _) => panic!("{refusal}"),
    }
}

/// Plans and checks, with the last message of a user as the beginning of the running turn.
fn planned(source: &[TestMessage], request: &PlanRequest) -> Result<Plan, Refusal> {
    let rows = outlines_of(source);
    let newest = last_users(&rows).map(|index| rows[index].seq);
    let request = PlanRequest {
        running_since: request.running_since.and(newest),
        ..*request
    };
    let result = plan(&rows, &request);
    match &result {
        Ok(plan) => check(source, &request, plan),
        Err(refusal) => check_refusal(&rows, &request, *refusal),
    }
    result
}

/// The next link: head, summary, tail.
fn child_of(source: &[TestMessage], plan: &Plan, summary_tokens: i64) -> Vec<TestMessage> {
    let copies = |seqs: &[i64]| -> Vec<TestMessage> {
        let is_copied = |message: &&TestMessage| seqs.contains(&message.outline.seq);
        source.iter().filter(is_copied).cloned().collect()
    };
    let tokens = i32::try_from(summary_tokens).unwrap();
    let summary = TestMessage::new(Role::User, MessageKind::Summary, tokens);
    let mut child = copies(&plan.head);
    child.push(summary);
    child.extend(copies(&plan.tail));
    numbered(child)
}

proptest! {
    #[test]
    fn a_plan_keeps_what_it_promises(source in transcripts(), request in requests()) {
        let _ = planned(&source, &request);
    }

    #[test]
    fn five_compressions_keep_it_too(
        source in transcripts(),
        later in prop::collection::vec(messages(30), 5),
        request in requests(),
    ) {
        let mut source = source;
        for later in later {
            source.extend(later);
            source = numbered(source);
            if let Ok(plan) = planned(&source, &request) {
                source = child_of(&source, &plan, request.summary_tokens);
            }
        }
    }

    #[test]
    fn a_shortening_saves_what_it_says(source in transcripts(), window in 1000_u32..50_000) {
        let rows = outlines_of(&source);
        let budget = budget_of(window, 0);
        let tokens = |mark: i64| rows.iter().map(|row| rendered_tokens(row, mark)).sum::<i64>();
        if let Some(shortening) = shorten_through(&rows, &budget, 0) {
            prop_assert_eq!(tokens(0) - tokens(shortening.through), shortening.saved);
            prop_assert!(shortening.saved * 10 >= budget.window);
            prop_assert_eq!(shorten_through(&rows, &budget, shortening.through), None);
            let newest = rows.iter().rfind(|row| row.calls > 0);
            let is_short = |row: &Outline| {
                rendered_tokens(row, shortening.through) < i64::from(row.tokens)
            };
            let last = last_users(&rows).unwrap_or(0);
            prop_assert!(!rows[last..].iter().any(|row| row.has_image && is_short(row)));
            let last = rows.last().unwrap();
            prop_assert!(newest.is_none_or(|row| row.seq <= last.seq && !is_short(last)));
        }
    }
}

/// The reads of a plan over `count` messages that repeat a pattern.
fn reads(pattern: &str, count: usize, request: &PlanRequest) -> usize {
    let text = [pattern, " "].concat().repeat(count);
    let text: Vec<&str> = text.split_whitespace().take(count).collect();
    let rows = super::generated::outlines(&text.join(" "), 50);
    let transcript = Transcript::new(&rows, 0);
    let _ = plan_of(&transcript, request);
    let _ = shortening_of(&transcript, &budget_of(1_000_000, 0), 0);
    transcript.reads()
}

#[test]
fn a_plan_reads_each_message_a_few_times() {
    let budget = budget_of(10_000_000, 0);
    let by_tokens = Tail::Tokens(budget.limits(Pressure::HardLimit));
    let group = format!("c200 {}", "r ".repeat(400));
    for pattern in [
        "u a",
        "u",
        "s",
        "c r",
        "c",
        "R",
        "U c R n R",
        "c n",
        "N",
        "c u n",
        "c9 u u u u",
        "S",
        &group,
    ] {
        for tail in [by_tokens, Tail::Messages(5000), Tail::FromUsers(5000)] {
            let request = PlanRequest {
                tail,
                summary_tokens: 10,
                saving: Saving::Fifth,
                running_since: Some(1),
                shortened_through: 0,
            };
            let reads = reads(pattern, 10_000, &request);
            assert!(reads <= 30 * 10_000, "{pattern} {tail:?}: {reads}");
        }
    }
    // All follow one call.
    let request = PlanRequest {
        tail: by_tokens,
        summary_tokens: 10,
        saving: Saving::Fifth,
        running_since: None,
        shortened_through: 0,
    };
    let one_call = format!("c {}", "n u ".repeat(5000));
    assert!(reads(&one_call, 10_000, &request) <= 30 * 10_000);
}
