//! The order of the queue, and which requests are not overtaken.

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;

use super::*;

const WAITING: usize = 32;

/// A queue whose tenants may have three quarters of it.
fn queue(total: usize) -> FairQueue {
    FairQueue::new(Size {
        total,
        tenant_max: total - total / 4,
        turns_reserve: total / 8,
        tenant_waiting: WAITING,
    })
}

fn tenant() -> Holder {
    Holder::Tenant(TenantId::generate())
}

fn id_of(tenant: Holder) -> TenantId {
    match tenant {
        Holder::Service => unreachable!(),
        Holder::Tenant(id) | Holder::TenantTurns(id) => id,
    }
}

type Acquiring<'a> = LocalBoxFuture<'a, Result<Permit, Refusal>>;

/// Requests one part, and polls once.
fn ask(queue: &FairQueue, holder: Holder) -> Result<Permit, Acquiring<'_>> {
    ask_for(queue, holder, 1)
}

fn ask_for(queue: &FairQueue, holder: Holder, amount: usize) -> Result<Permit, Acquiring<'_>> {
    let mut acquiring = queue.acquire(holder, amount).boxed_local();
    match (&mut acquiring).now_or_never() {
        Some(permit) => Ok(permit.ok().unwrap()),
        None => Err(acquiring),
    }
}

fn is_granted(acquiring: &mut Acquiring<'_>) -> Option<Permit> {
    acquiring.now_or_never().map(|permit| permit.ok().unwrap())
}

#[test]
fn no_tenant_has_all_connections_and_the_service_may() {
    let queue = queue(4);
    let noisy = tenant();
    let held: Vec<Permit> = (0..3).map(|_| ask(&queue, noisy).ok().unwrap()).collect();
    let waiting = ask(&queue, noisy).err().unwrap();
    assert!(queue.is_crowded(id_of(noisy)));
    let other = ask(&queue, tenant()).ok().unwrap();
    drop((other, held, waiting));
    assert_eq!(queue.in_use(), 0);
    let all: Vec<Permit> = (0..4)
        .map(|_| ask(&queue, Holder::Service).ok().unwrap())
        .collect();
    assert_eq!(all.len(), queue.in_use());
    drop(all);
    assert!(queue.shared.state().holders.is_empty());
}

#[test]
fn the_tenant_with_the_fewest_connections_is_next() {
    let queue = queue(4);
    let noisy = tenant();
    let busy = tenant();
    let quiet = tenant();
    let mut of_noisy: Vec<Permit> = (0..3).map(|_| ask(&queue, noisy).ok().unwrap()).collect();
    let of_busy = ask(&queue, busy).ok().unwrap();
    let mut noisy_waits = ask(&queue, noisy).err().unwrap();
    let mut busy_waits = ask(&queue, busy).err().unwrap();
    let mut quiet_waits = ask(&queue, quiet).err().unwrap();
    drop(of_noisy.pop());
    assert!(is_granted(&mut noisy_waits).is_none());
    assert!(is_granted(&mut busy_waits).is_none());
    let of_quiet = is_granted(&mut quiet_waits).unwrap();
    drop(of_quiet);
    assert!(is_granted(&mut noisy_waits).is_none());
    let second = is_granted(&mut busy_waits).unwrap();
    drop((second, of_busy));
    assert!(is_granted(&mut noisy_waits).is_some());
}

#[test]
fn who_stops_waiting_leaves_the_place_to_the_next() {
    let queue = queue(1);
    let one = tenant();
    let other = tenant();
    let held = ask(&queue, one).ok().unwrap();
    let gone = ask(&queue, one).err().unwrap();
    let granted_and_gone = ask(&queue, other).err().unwrap();
    let mut last = ask(&queue, one).err().unwrap();
    drop(gone);
    drop(held);
    assert!(is_granted(&mut last).is_none());
    drop(granted_and_gone);
    assert!(is_granted(&mut last).is_some());
}

#[test]
fn a_tenant_has_a_share_of_those_who_wait() {
    let queue = queue(1);
    let noisy = tenant();
    let quiet = tenant();
    let _held = ask(&queue, noisy).ok().unwrap();
    let waiting: Vec<_> = (0..WAITING)
        .map(|_| ask(&queue, noisy).err().unwrap())
        .collect();
    let refused = queue.acquire(noisy, 1).now_or_never();
    assert!(matches!(refused, Some(Err(Refusal::Full))));
    assert!(ask(&queue, quiet).is_err());
    drop(waiting);
    assert!(ask(&queue, noisy).is_err());
}

#[test]
fn a_closed_queue_refuses_those_who_wait_and_those_who_come() {
    let queue = queue(1);
    let held = ask(&queue, Holder::Service).ok().unwrap();
    let waiting = ask(&queue, Holder::Service).err().unwrap();
    queue.close();
    assert!(matches!(waiting.now_or_never(), Some(Err(Refusal::Closed))));
    let refused = queue.acquire(Holder::Service, 1).now_or_never();
    assert!(matches!(refused, Some(Err(Refusal::Closed))));
    assert!(queue.until_empty().now_or_never().is_none());
    drop(held);
    assert!(queue.until_empty().now_or_never().is_some());
}

#[test]
fn one_who_waits_for_much_is_not_overtaken_by_those_who_ask_for_little() {
    let queue = queue(100);
    let one = tenant();
    let other = tenant();
    let third = tenant();
    let held = ask_for(&queue, one, 60).ok().unwrap();
    let mut much = ask_for(&queue, other, 50).err().unwrap();
    let mut little = ask_for(&queue, third, 10).err().unwrap();
    assert!(queue.try_acquire(third, 10).is_none());
    drop(held);
    let much = is_granted(&mut much).unwrap();
    let little = is_granted(&mut little).unwrap();
    assert_eq!(queue.in_use(), 60);
    drop((much, little));
    assert!(queue.shared.state().holders.is_empty());
}

#[test]
fn one_who_waits_for_its_own_share_holds_up_no_other_tenant() {
    let queue = queue(100);
    let noisy = tenant();
    let quiet = tenant();
    let held = ask_for(&queue, noisy, 70).ok().unwrap();
    let mut waits = ask_for(&queue, noisy, 500).err().unwrap();
    let of_quiet = ask_for(&queue, quiet, 20).ok().unwrap();
    assert!(is_granted(&mut waits).is_none());
    drop(held);
    let all_of_its_share = is_granted(&mut waits).unwrap();
    assert_eq!(queue.in_use(), 75 + 20);
    drop((all_of_its_share, of_quiet));
    assert_eq!(queue.in_use(), 0);
}

#[test]
fn those_behind_one_who_leaves_move_up() {
    let queue = queue(100);
    let one = tenant();
    let other = tenant();
    let _held = ask_for(&queue, one, 60).ok().unwrap();
    let much = ask_for(&queue, other, 50).err().unwrap();
    let mut little = ask_for(&queue, other, 10).err().unwrap();
    drop(much);
    assert!(is_granted(&mut little).is_some());
}

#[test]
fn the_service_is_next_before_tenants_while_it_has_less_than_half() {
    let queue = queue(4);
    let one = tenant();
    let held = ask(&queue, one).ok().unwrap();
    let mut held = vec![held, ask(&queue, one).ok().unwrap()];
    let of_service = ask(&queue, Holder::Service).ok().unwrap();
    let _of_other = ask(&queue, tenant()).ok().unwrap();
    let mut tenants_wait: Vec<_> = (0..8)
        .map(|_| ask(&queue, tenant()).err().unwrap())
        .collect();
    let mut service_waits: Vec<_> = (0..2)
        .map(|_| ask(&queue, Holder::Service).err().unwrap())
        .collect();
    drop(held.pop());
    let second = is_granted(&mut service_waits[0]).expect("the service comes first");
    drop(held.pop());
    assert!(is_granted(&mut service_waits[1]).is_none());
    let of_tenant = is_granted(&mut tenants_wait[0]).expect("tenants keep half");
    drop(of_service);
    let third = is_granted(&mut service_waits[1]);
    assert!(third.is_some());
    drop((second, of_tenant));
}

#[test]
fn the_service_may_wait_however_many_of_it_do() {
    let queue = queue(1);
    let _held = ask(&queue, tenant()).ok().unwrap();
    let waiting: Vec<_> = (0..=WAITING)
        .map(|_| ask(&queue, Holder::Service))
        .collect();
    assert!(waiting.iter().all(Result::is_err));
    let next = queue.acquire(Holder::Service, 1).now_or_never();
    assert!(next.is_none(), "it waits too");
}

#[test]
fn turns_come_before_the_requests_of_their_tenant_and_beyond_their_share() {
    let queue = queue(8);
    let noisy = tenant();
    let turns = Holder::TenantTurns(id_of(noisy));
    let mut held: Vec<Permit> = (0..6).map(|_| ask(&queue, noisy).ok().unwrap()).collect();
    let mut requests: Vec<_> = (0..WAITING)
        .map(|_| ask(&queue, noisy).err().unwrap())
        .collect();
    let reserve = ask(&queue, turns).ok().unwrap();
    let mut turn_waits = ask(&queue, turns).err().unwrap();
    let other = ask(&queue, tenant()).ok().expect("no tenant has all");
    drop(held.pop());
    let second = is_granted(&mut turn_waits).expect("before the requests");
    assert!(is_granted(&mut requests[0]).is_none());
    drop((reserve, second));
    assert!(is_granted(&mut requests[0]).is_some());
    drop(other);
}

#[test]
fn turns_are_not_behind_other_tenants_for_what_requests_of_their_own_have() {
    let queue = queue(8);
    let noisy = tenant();
    let mut held: Vec<Permit> = (0..6).map(|_| ask(&queue, noisy).ok().unwrap()).collect();
    let of_quiet: Vec<Permit> = (0..2)
        .map(|_| ask(&queue, tenant()).ok().unwrap())
        .collect();
    let mut quiet: Vec<_> = (0..8)
        .map(|_| ask(&queue, tenant()).err().unwrap())
        .collect();
    let mut turn = ask(&queue, Holder::TenantTurns(id_of(noisy)))
        .err()
        .unwrap();
    drop(held.pop());
    assert!(is_granted(&mut turn).is_some());
    assert!(is_granted(&mut quiet[0]).is_some());
    drop(of_quiet);
}

#[test]
fn who_asks_at_once_for_more_than_it_may_have_gets_all_that_it_may_have() {
    let queue = queue(100);
    let one = tenant();
    let all = queue.try_acquire(one, 500).expect("all of its share");
    assert_eq!(queue.in_use(), 75);
    assert!(queue.try_acquire(one, 1).is_none());
    drop(all);
    assert_eq!(queue.in_use(), 0);
}
