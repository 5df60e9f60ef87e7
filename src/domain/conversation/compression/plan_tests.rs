//! Plans as data.

use super::super::budget::Budget;
use super::super::generated::{budget_of, outlines};
use super::*;

const REQUEST: PlanRequest = PlanRequest {
    tail: Tail::Messages(0),
    summary_tokens: 10,
    saving: Saving::Any,
    running_since: None,
    shortened_through: 0,
};

fn of_100(text: &str, request: &PlanRequest) -> Result<Plan, Refusal> {
    plan(&outlines(text, 100), request)
}

fn check(text: &str, tail: Tail, expected_head: &[i64], expected_tail: &[i64]) {
    let plan = of_100(text, &PlanRequest { tail, ..REQUEST }).unwrap();
    assert_eq!(
        (plan.head.as_slice(), plan.tail.as_slice()),
        (expected_head, expected_tail),
        "{text} {tail:?}"
    );
    let count = text.split_whitespace().count() as i64;
    assert_eq!(plan.summarised, count - plan.kept(), "{text}");
    assert_eq!(plan.tokens_before, count * 100, "{text}");
    assert_eq!(plan.tokens_after, plan.kept() * 100 + 10, "{text}");
}

#[test]
fn the_tail_and_the_last_message_of_a_user_are_kept() {
    check("u a u a", Tail::Messages(2), &[], &[3, 4]);
    check("u a u a", Tail::Messages(1), &[], &[3, 4]);
    check("u a u a", Tail::Messages(0), &[], &[3]);
    check("S u a a a", Tail::Messages(1), &[], &[2, 5]);
    check("s s u a u a", Tail::Messages(1), &[1, 2], &[5, 6]);
    check("S a a a", Tail::Messages(1), &[], &[4]);
    check("S u a S a", Tail::Messages(3), &[], &[2, 3, 5]);
    check("s u a u a u n", Tail::FromUsers(2), &[1], &[4, 5, 6, 7]);
    check("s u a u a u n", Tail::FromUsers(1), &[1], &[6, 7]);
    check("s u a u a u n", Tail::FromUsers(0), &[1], &[6]);
    check("S u a", Tail::FromUsers(2), &[], &[2, 3]);
}

#[test]
fn a_call_is_never_separated_from_its_results() {
    check("u c r a u", Tail::Messages(3), &[], &[2, 3, 4, 5]);
    check("u c c r r u", Tail::Messages(2), &[], &[3, 4, 5, 6]);
    check("u c2 r r u", Tail::Messages(2), &[], &[2, 3, 4, 5]);
    check("u a c r a u", Tail::Messages(2), &[], &[5, 6]);
    check("a u c r c r c r", Tail::Messages(1), &[], &[2, 7, 8]);
    check("a u c n r n", Tail::Messages(2), &[], &[2, 3, 4, 5, 6]);
    check("a a c u r", Tail::FromUsers(1), &[], &[3, 4, 5]);
    // It waits for a result.
    check("u a u c2 r", Tail::Messages(0), &[], &[3, 4, 5]);
    check("u a u c2 r a", Tail::Messages(0), &[], &[3]);
}

#[test]
fn images_since_the_newest_turn_of_a_user_are_kept() {
    check("U a U u a a", Tail::Messages(0), &[], &[3, 4]);
    check("u c R u c R c r a", Tail::Messages(0), &[], &[4, 5, 6]);
}

#[test]
fn of_a_running_turn_its_question_and_its_newest_complete_group_are_kept() {
    let check = |text: &str, since: i64, expected: &[i64]| {
        let running_since = Some(since);
        let request = PlanRequest {
            running_since,
            ..REQUEST
        };
        assert_eq!(of_100(text, &request).unwrap().tail, expected, "{text}");
    };
    check("u a u c r c r c r", 3, &[3, 8, 9]);
    check("u a u u c r c r c2 r", 3, &[3, 4, 7, 8, 9, 10]);
    check("u a u c2 r", 3, &[3, 4, 5]);
    check("c r c r u a", 5, &[5]);
}

fn by_tokens(budget: &Budget, pressure: Pressure) -> PlanRequest {
    PlanRequest {
        tail: Tail::Tokens(budget.limits(pressure)),
        summary_tokens: budget.largest_summary,
        saving: Saving::Fifth,
        ..REQUEST
    }
}

fn outcome(budget: &Budget, pressure: Pressure, text: &str) -> Result<Vec<i64>, Refusal> {
    of_100(text, &by_tokens(budget, pressure)).map(|plan| plan.tail)
}

#[test]
fn the_tail_is_what_fits() {
    use Pressure::{HardLimit, Threshold};
    // Of 1,000: a tail of 100, a summary of 100, a target of 250 at the threshold and of 450 at the hard limit.
    let small = budget_of(1000, 0);
    for (pressure, text, expected) in [
        (Threshold, "u a u a u", Ok(vec![5])),
        (Threshold, "u a u a=10 u=10", Ok(vec![4, 5])),
        (Threshold, "u a u=10 a=10 u=10", Ok(vec![3, 4, 5])),
        // The newest group may be larger than the tail.
        (Threshold, "u a a u=10 c=20 r=120", Ok(vec![4, 5, 6])),
        (Threshold, "u a a u=10 c=20 r=121", Ok(vec![4])),
        (HardLimit, "u a a u=10 c=20 r=121", Ok(vec![4, 5, 6])),
        (HardLimit, "u=300 a=300 u=200 a=150", Ok(vec![3, 4])),
        (HardLimit, "u=300 a=300 u=200 a=151", Ok(vec![3])),
        // What has to stay has no target at the hard limit.
        (
            Threshold,
            "u a a u=151",
            Err(Refusal::OverTarget {
                after: 251,
                most: 250,
            }),
        ),
        (HardLimit, "u=900 a u=700", Ok(vec![3])),
        (
            HardLimit,
            "u a u=801",
            Err(Refusal::OverTarget {
                after: 901,
                most: 900,
            }),
        ),
        (
            HardLimit,
            "s=500 u a u=401",
            Err(Refusal::Exhausted {
                needed: 901,
                hard: 900,
            }),
        ),
        (
            Threshold,
            "u a u=9000",
            Err(Refusal::Exhausted {
                needed: 9000,
                hard: 900,
            }),
        ),
        (Threshold, "u=10 a=10", Err(Refusal::NothingOld)),
        (Threshold, "S=900 u=10", Err(Refusal::NothingOld)),
        (
            Threshold,
            "u=30 a=30 u=100",
            Err(Refusal::NoSaving {
                before: 160,
                after: 200,
            }),
        ),
        // Images give way at the hard limit, the oldest first.
        (
            HardLimit,
            "u=10 c R=600 c R=300 c R=100",
            Ok(vec![1, 4, 5, 6, 7]),
        ),
    ] {
        assert_eq!(outcome(&small, pressure, text), expected, "{text}");
    }
    let full = budget_of(1000, 950);
    let refusal = outcome(&full, HardLimit, "u a u=1").unwrap_err();
    assert_eq!(refusal, Refusal::Exhausted { needed: 1, hard: 0 });
}

#[test]
fn shortened_results_count_as_what_the_model_gets() {
    let rows = outlines("u c r=5000 c r=5000 u", 100);
    let request = PlanRequest {
        shortened_through: 3,
        tail: Tail::Messages(1),
        ..REQUEST
    };
    let plan = plan(&rows, &request).unwrap();
    assert_eq!((plan.tokens_before, plan.tokens_after), (5450, 110));
}

#[test]
fn a_plan_that_saves_nothing_is_refused() {
    let refusal = |text: &str, count, summary_tokens| {
        let tail = Tail::Messages(count);
        let request = PlanRequest {
            tail,
            summary_tokens,
            ..REQUEST
        };
        of_100(text, &request).err()
    };
    assert_eq!(refusal("", 0, 1), Some(Refusal::Empty));
    let same = |after| Some(Refusal::NoSaving { before: 600, after });
    assert_eq!(refusal("u a u a u a", 6, 1), same(601));
    assert_eq!(refusal("u a u a u a", 2, 400), same(600));
    assert_eq!(refusal("u a u a u a", 2, 399), None);
    assert_eq!(refusal("u", 0, 50), None, "small transcripts may grow");
    let fifth = |summary_tokens| {
        let request = PlanRequest {
            summary_tokens,
            saving: Saving::Fifth,
            ..REQUEST
        };
        of_100("u a u a u a", &request).is_ok()
    };
    assert!(fifth(380) && !fifth(381));
}
