//! Something of which a node has only so much, shared among tenants: connections, memory, descriptors. The next free
//! part goes to the tenant that has the least, and of its requests to the one that has waited longest. No tenant has
//! all of it, so that one whose requests hold theirs for long leaves some to the others.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use crate::ids::TenantId;

/// Who asks for a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holder {
    /// What belongs to no tenant: credentials, jobs, heartbeats, the operator. Not bounded by a share.
    Service,
    Tenant(TenantId),
}

impl From<Option<TenantId>> for Holder {
    fn from(tenant_id: Option<TenantId>) -> Self {
        tenant_id.map_or(Self::Service, Self::Tenant)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue is closed.
    Closed,
    /// Too many requests of this tenant wait already.
    Full,
}

/// How much there is.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub total: usize,
    /// Of one tenant.
    pub tenant_max: usize,
    /// Requests of one tenant that may wait; one more is refused at once.
    pub tenant_waiting: usize,
}

#[derive(Clone)]
pub struct FairQueue {
    shared: Arc<Shared>,
}

struct Shared {
    size: Size,
    state: Mutex<State>,
    /// Notified when a part is released.
    released: Notify,
}

#[derive(Default)]
struct State {
    in_use: usize,
    /// Of all holders.
    waiting: usize,
    closed: bool,
    next_ticket: u64,
    holders: HashMap<Holder, Use>,
}

/// What one holder has and waits for. There is an entry only while that is something.
#[derive(Default)]
struct Use {
    in_use: usize,
    /// By ticket, the oldest first.
    waiting: VecDeque<Ticket>,
}

struct Ticket {
    number: u64,
    amount: usize,
    grant: oneshot::Sender<()>,
}

impl FairQueue {
    pub fn new(size: Size) -> Self {
        Self {
            shared: Arc::new(Shared {
                size,
                state: Mutex::default(),
                released: Notify::new(),
            }),
        }
    }

    /// A part; waits for its turn. Who asks for more than it may have gets all that it may have.
    pub async fn acquire(&self, holder: Holder, amount: usize) -> Result<Place, Refusal> {
        let amount = amount.min(self.shared.most(holder));
        let mut waiting = {
            let mut state = self.shared.state();
            if state.closed {
                return Err(Refusal::Closed);
            }
            if self.shared.grant_at_once(&mut state, holder, amount) {
                drop(state);
                return Ok(self.place(holder, amount));
            }
            let number = state.next_ticket;
            let queue = &mut state.holders.entry(holder).or_default().waiting;
            if queue.len() >= self.shared.size.tenant_waiting {
                return Err(Refusal::Full);
            }
            let (grant, granted) = oneshot::channel();
            queue.push_back(Ticket {
                number,
                amount,
                grant,
            });
            state.next_ticket += 1;
            state.waiting += 1;
            // One that waits for less than those before it may be the next.
            self.shared.grant_next(&mut state);
            Waiting {
                shared: self.shared.clone(),
                holder,
                number,
                amount,
                granted,
                is_over: false,
            }
        };
        let granted = (&mut waiting.granted).await;
        waiting.is_over = true;
        match granted {
            Ok(()) => Ok(self.place(holder, amount)),
            // Only `close` drops the other end.
            Err(_) => Err(Refusal::Closed),
        }
    }

    /// A part, if there is one now.
    pub fn try_acquire(&self, holder: Holder, amount: usize) -> Option<Place> {
        let mut state = self.shared.state();
        let granted = !state.closed && self.shared.grant_at_once(&mut state, holder, amount);
        drop(state);
        granted.then(|| self.place(holder, amount))
    }

    fn place(&self, holder: Holder, amount: usize) -> Place {
        Place {
            shared: self.shared.clone(),
            holder,
            amount,
        }
    }

    pub fn in_use(&self) -> usize {
        self.shared.state().in_use
    }

    /// Whether the holder has most of what it may have: then its requests likely wait for each other.
    pub fn is_crowded(&self, holder: Holder) -> bool {
        let state = self.shared.state();
        let in_use = state.holders.get(&holder).map_or(0, |held| held.in_use);
        in_use * 2 > self.shared.size.tenant_max
    }

    /// Nobody gets a part any more, and those who wait are refused.
    pub fn close(&self) {
        let mut state = self.shared.state();
        state.closed = true;
        state.waiting = 0;
        for held in state.holders.values_mut() {
            held.waiting.clear();
        }
    }

    pub fn is_closed(&self) -> bool {
        self.shared.state().closed
    }

    /// Returns when nothing is in use.
    pub async fn emptied(&self) {
        loop {
            let released = self.shared.released.notified();
            if self.in_use() == 0 {
                return;
            }
            released.await;
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a holder may have at most.
    fn most(&self, holder: Holder) -> usize {
        match holder {
            Holder::Service => self.size.total,
            Holder::Tenant(_) => self.size.tenant_max,
        }
    }

    fn may_have(&self, holder: Holder, held: usize, amount: usize) -> bool {
        held + amount <= self.most(holder)
    }

    /// Whoever waits comes first, unless it waits for its own share alone.
    fn grant_at_once(&self, state: &mut State, holder: Holder, amount: usize) -> bool {
        let held = state.holders.get(&holder);
        let (in_use, waits) =
            held.map_or((0, false), |held| (held.in_use, !held.waiting.is_empty()));
        let fits =
            state.in_use + amount <= self.size.total && self.may_have(holder, in_use, amount);
        let granted = fits && !waits && self.next(state).is_none();
        if granted {
            state.grant(holder, amount);
        }
        granted
    }

    /// Who is next, and for how much: of those who wait for more than their own share.
    fn next(&self, state: &State) -> Option<(Holder, usize)> {
        if state.waiting == 0 {
            return None;
        }
        let eligible = state.holders.iter().filter_map(|(holder, held)| {
            let first = held.waiting.front()?;
            let may = self.may_have(*holder, held.in_use, first.amount);
            may.then_some((held.in_use, first.number, *holder, first.amount))
        });
        let next = eligible.min_by_key(|(in_use, number, ..)| (*in_use, *number));
        next.map(|(_, _, holder, amount)| (holder, amount))
    }

    fn release(&self, holder: Holder, amount: usize) {
        let mut state = self.state();
        state.in_use -= amount;
        if let Some(held) = state.holders.get_mut(&holder) {
            held.in_use -= amount;
        }
        self.grant_next(&mut state);
        state.forget_if_idle(holder);
        drop(state);
        self.released.notify_waiters();
    }

    /// Grants what is free until the next does not fit, who then is not overtaken.
    fn grant_next(&self, state: &mut State) {
        while let Some((holder, amount)) = self.next(state) {
            if state.in_use + amount > self.size.total {
                return;
            }
            let held = state.holders.get_mut(&holder);
            let Some(ticket) = held.and_then(|held| held.waiting.pop_front()) else {
                return;
            };
            state.waiting -= 1;
            // One that stopped waiting in this moment has no place.
            if ticket.grant.send(()).is_ok() {
                state.grant(holder, amount);
            }
        }
    }
}

impl State {
    fn grant(&mut self, holder: Holder, amount: usize) {
        self.in_use += amount;
        self.holders.entry(holder).or_default().in_use += amount;
    }

    fn forget_if_idle(&mut self, holder: Holder) {
        let held = self.holders.get(&holder);
        if held.is_some_and(|held| held.in_use == 0 && held.waiting.is_empty()) {
            self.holders.remove(&holder);
        }
    }
}

/// The right to a part; dropped, it goes to the next.
pub struct Place {
    shared: Arc<Shared>,
    holder: Holder,
    amount: usize,
}

impl Place {
    /// Gives back all but `amount`.
    pub fn shrink(&mut self, amount: usize) {
        let more = self.amount.saturating_sub(amount);
        if more > 0 {
            self.amount -= more;
            self.shared.release(self.holder, more);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.release(self.holder, self.amount);
    }
}

/// One who waits. Who leaves takes its place in the queue along, and gives back what it was granted meanwhile.
struct Waiting {
    shared: Arc<Shared>,
    holder: Holder,
    number: u64,
    amount: usize,
    granted: oneshot::Receiver<()>,
    is_over: bool,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        self.granted.close();
        if self.granted.try_recv().is_ok() {
            return self.shared.release(self.holder, self.amount);
        }
        let mut state = self.shared.state();
        if let Some(held) = state.holders.get_mut(&self.holder)
            && let Ok(place) = held
                .waiting
                .binary_search_by_key(&self.number, |ticket| ticket.number)
        {
            held.waiting.remove(place);
            state.waiting -= 1;
        }
        // Those behind it may wait for less.
        self.shared.grant_next(&mut state);
        state.forget_if_idle(self.holder);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use futures_util::future::LocalBoxFuture;

    use super::*;

    const WAITING: usize = 32;

    /// A tenant may have three quarters of it.
    fn queue(total: usize) -> FairQueue {
        FairQueue::new(Size {
            total,
            tenant_max: total - total / 4,
            tenant_waiting: WAITING,
        })
    }

    fn tenant() -> Holder {
        Holder::Tenant(TenantId::generate())
    }

    type Asking<'a> = LocalBoxFuture<'a, Result<Place, Refusal>>;

    /// Asks, and waits as far as it gets.
    fn ask(queue: &FairQueue, holder: Holder) -> Result<Place, Asking<'_>> {
        ask_for(queue, holder, 1)
    }

    fn ask_for(queue: &FairQueue, holder: Holder, amount: usize) -> Result<Place, Asking<'_>> {
        let mut asking = queue.acquire(holder, amount).boxed_local();
        match (&mut asking).now_or_never() {
            Some(place) => Ok(place.ok().unwrap()),
            None => Err(asking),
        }
    }

    fn is_granted(asking: &mut Asking<'_>) -> Option<Place> {
        asking.now_or_never().map(|place| place.ok().unwrap())
    }

    #[test]
    fn no_tenant_has_all_connections_and_the_service_may() {
        let queue = queue(4);
        let noisy = tenant();
        let held: Vec<Place> = (0..3).map(|_| ask(&queue, noisy).ok().unwrap()).collect();
        let waiting = ask(&queue, noisy).err().unwrap();
        assert!(queue.is_crowded(noisy));
        let other = ask(&queue, tenant()).ok().unwrap();
        drop((other, held, waiting));
        assert_eq!(queue.in_use(), 0);
        let all: Vec<Place> = (0..4)
            .map(|_| ask(&queue, Holder::Service).ok().unwrap())
            .collect();
        assert_eq!(all.len(), queue.in_use());
        drop(all);
        assert!(queue.shared.state().holders.is_empty());
    }

    #[test]
    fn the_tenant_with_the_fewest_connections_is_next() {
        let queue = queue(4);
        let (noisy, busy, quiet) = (tenant(), tenant(), tenant());
        let mut of_noisy: Vec<Place> = (0..3).map(|_| ask(&queue, noisy).ok().unwrap()).collect();
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
        let (one, other) = (tenant(), tenant());
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
        let (noisy, quiet) = (tenant(), tenant());
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
        assert!(queue.emptied().now_or_never().is_none());
        drop(held);
        assert!(queue.emptied().now_or_never().is_some());
    }

    #[test]
    fn one_who_waits_for_much_is_not_overtaken_by_those_who_ask_for_little() {
        let queue = queue(100);
        let (one, other, third) = (tenant(), tenant(), tenant());
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
        let (noisy, quiet) = (tenant(), tenant());
        let mut held = ask_for(&queue, noisy, 70).ok().unwrap();
        let mut waits = ask_for(&queue, noisy, 500).err().unwrap();
        let of_quiet = ask_for(&queue, quiet, 20).ok().unwrap();
        held.shrink(10);
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
        let (one, other) = (tenant(), tenant());
        let _held = ask_for(&queue, one, 60).ok().unwrap();
        let much = ask_for(&queue, other, 50).err().unwrap();
        let mut little = ask_for(&queue, other, 10).err().unwrap();
        drop(much);
        assert!(is_granted(&mut little).is_some());
    }
}
