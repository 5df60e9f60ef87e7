//! A scarce resource of a node, shared among tenants: connections, memory, descriptors. The next free part goes to the
//! tenant that has the least, after the service itself, and of its requests to the one that has waited longest. No
//! tenant gets all of it, so that a tenant whose requests hold their parts for long leaves some to the others.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use crate::ids::TenantId;

/// The owner of a request for a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holder {
    /// Work that belongs to no tenant: credentials, jobs, heartbeats, the operator. Not bounded by a share, never
    /// refused, and next before all tenants while it has less than half of the total: its work is short, and every
    /// request needs some of it. The other half is the tenants', however much the service requests.
    Service,
    /// Requests of a tenant.
    Tenant(TenantId),
    /// The service's work for a tenant's accepted turns and open streams: before the tenant's requests, and with a
    /// reserve beyond their share, so that no number of requests makes a turn lose its lease.
    TenantTurns(TenantId),
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

/// The size of the resource and of the shares.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub total: usize,
    /// The share of one tenant.
    pub tenant_max: usize,
    /// The further share of a tenant's `Holder::TenantTurns`.
    pub turns_reserve: usize,
    /// Requests of one tenant that may wait. A further one is refused at once.
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
    /// The waiting requests of all holders.
    waiting: usize,
    closed: bool,
    next_ticket: u64,
    holders: HashMap<Holder, HolderState>,
}

/// The parts and the waiting requests of one holder. An entry without either is removed.
#[derive(Default)]
struct HolderState {
    in_use: usize,
    /// By ticket, the oldest first.
    waiting: VecDeque<Ticket>,
}

/// The order of holders that have equally much.
#[derive(PartialEq, Eq, PartialOrd, Ord, Clone, Copy)]
enum Kind {
    Service,
    Turns,
    Requests,
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

    /// Waits for a part. A request for more than the holder's maximum gets the maximum.
    pub async fn acquire(&self, holder: Holder, amount: usize) -> Result<Permit, Refusal> {
        let amount = amount.min(self.shared.max_for(holder));
        let mut waiting = {
            let mut state = self.shared.state();
            if state.closed {
                return Err(Refusal::Closed);
            }
            if self.shared.grant_at_once(&mut state, holder, amount) {
                drop(state);
                return Ok(self.permit(holder, amount));
            }
            let number = state.next_ticket;
            let queue = &mut state.holders.entry(holder).or_default().waiting;
            if queue.len() >= self.shared.max_waiting(holder) {
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
            // A request for less than those before it may be the next.
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
            Ok(()) => Ok(self.permit(holder, amount)),
            // Only `close` drops the other end.
            Err(_) => Err(Refusal::Closed),
        }
    }

    /// A part, if one is free now. A request for more than the holder's maximum gets the maximum.
    pub fn try_acquire(&self, holder: Holder, amount: usize) -> Option<Permit> {
        let amount = amount.min(self.shared.max_for(holder));
        let mut state = self.shared.state();
        let granted = !state.closed && self.shared.grant_at_once(&mut state, holder, amount);
        drop(state);
        granted.then(|| self.permit(holder, amount))
    }

    fn permit(&self, holder: Holder, amount: usize) -> Permit {
        Permit {
            shared: self.shared.clone(),
            holder,
            amount,
        }
    }

    pub fn in_use(&self) -> usize {
        self.shared.state().in_use
    }

    /// Whether the tenant has most of its share: then its requests likely wait for each other.
    pub fn is_crowded(&self, tenant_id: TenantId) -> bool {
        let in_use = self.shared.state().in_use_of_tenant(tenant_id);
        in_use * 2 > self.shared.size.tenant_max
    }

    /// Refuses all waiting and all later requests.
    pub fn close(&self) {
        let mut state = self.shared.state();
        state.closed = true;
        state.waiting = 0;
        for holder_state in state.holders.values_mut() {
            holder_state.waiting.clear();
        }
    }

    pub fn is_closed(&self) -> bool {
        self.shared.state().closed
    }

    /// Returns when nothing is in use.
    pub async fn until_empty(&self) {
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

    /// The maximum of a holder.
    fn max_for(&self, holder: Holder) -> usize {
        match holder {
            Holder::Service => self.size.total,
            Holder::Tenant(_) => self.size.tenant_max,
            Holder::TenantTurns(_) => self.size.tenant_max + self.size.turns_reserve,
        }
    }

    fn max_waiting(&self, holder: Holder) -> usize {
        match holder {
            Holder::Service => usize::MAX,
            Holder::Tenant(_) | Holder::TenantTurns(_) => self.size.tenant_waiting,
        }
    }

    fn may_have(&self, state: &State, holder: Holder, amount: usize) -> bool {
        let in_use = match holder {
            Holder::Service => state.in_use_by(holder),
            Holder::Tenant(tenant_id) | Holder::TenantTurns(tenant_id) => {
                state.in_use_of_tenant(tenant_id)
            }
        };
        in_use + amount <= self.max_for(holder)
    }

    /// The holder with the least is next; among equals, the one that has waited longest. Turns do not rank behind
    /// others because of the parts that requests of their tenant have.
    fn rank(&self, state: &State, holder: Holder) -> (usize, Kind) {
        match holder {
            Holder::Service if state.in_use_by(holder) * 2 < self.size.total => (0, Kind::Service),
            Holder::Service => (state.in_use_by(holder), Kind::Requests),
            Holder::TenantTurns(_) => (state.in_use_by(holder), Kind::Turns),
            Holder::Tenant(tenant_id) => (state.in_use_of_tenant(tenant_id), Kind::Requests),
        }
    }

    /// Grants only if no other request waits, but for those that wait for their own share alone.
    fn grant_at_once(&self, state: &mut State, holder: Holder, amount: usize) -> bool {
        let holder_state = state.holders.get(&holder);
        let waits = holder_state.is_some_and(|holder_state| !holder_state.waiting.is_empty());
        let fits = state.in_use + amount <= self.size.total && self.may_have(state, holder, amount);
        let granted = fits && !waits && self.next(state).is_none();
        if granted {
            state.grant(holder, amount);
        }
        granted
    }

    /// The next holder and its amount, of the requests that do not wait for their own share.
    fn next(&self, state: &State) -> Option<(Holder, usize)> {
        if state.waiting == 0 {
            return None;
        }
        let eligible = state.holders.iter().filter_map(|(holder, holder_state)| {
            let first = holder_state.waiting.front()?;
            let may = self.may_have(state, *holder, first.amount);
            let rank = self.rank(state, *holder);
            may.then_some((rank, first.number, *holder, first.amount))
        });
        let next = eligible.min_by_key(|(rank, number, ..)| (*rank, *number));
        next.map(|(_, _, holder, amount)| (holder, amount))
    }

    fn release(&self, holder: Holder, amount: usize) {
        let mut state = self.state();
        state.in_use -= amount;
        if let Some(holder_state) = state.holders.get_mut(&holder) {
            holder_state.in_use -= amount;
        }
        self.grant_next(&mut state);
        state.forget_if_idle(holder);
        drop(state);
        self.released.notify_waiters();
    }

    /// Grants free parts until the next request does not fit, which is then not overtaken.
    fn grant_next(&self, state: &mut State) {
        while let Some((holder, amount)) = self.next(state) {
            if state.in_use + amount > self.size.total {
                return;
            }
            let holder_state = state.holders.get_mut(&holder);
            let Some(ticket) =
                holder_state.and_then(|holder_state| holder_state.waiting.pop_front())
            else {
                return;
            };
            state.waiting -= 1;
            // A request that was dropped in this moment gets no part.
            if ticket.grant.send(()).is_ok() {
                state.grant(holder, amount);
            }
        }
    }
}

impl State {
    fn in_use_by(&self, holder: Holder) -> usize {
        self.holders
            .get(&holder)
            .map_or(0, |holder_state| holder_state.in_use)
    }

    fn in_use_of_tenant(&self, tenant_id: TenantId) -> usize {
        let of_turns = self.in_use_by(Holder::TenantTurns(tenant_id));
        self.in_use_by(Holder::Tenant(tenant_id)) + of_turns
    }

    fn grant(&mut self, holder: Holder, amount: usize) {
        self.in_use += amount;
        self.holders.entry(holder).or_default().in_use += amount;
    }

    fn forget_if_idle(&mut self, holder: Holder) {
        let holder_state = self.holders.get(&holder);
        if holder_state
            .is_some_and(|holder_state| holder_state.in_use == 0 && holder_state.waiting.is_empty())
        {
            self.holders.remove(&holder);
        }
    }
}

/// The right to a part. Dropped, it goes to the next request.
pub struct Permit {
    shared: Arc<Shared>,
    holder: Holder,
    amount: usize,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.release(self.holder, self.amount);
    }
}

/// A waiting request. Dropped, it leaves the queue and releases what it was granted meanwhile.
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
        if let Some(holder_state) = state.holders.get_mut(&self.holder)
            && let Ok(index) = holder_state
                .waiting
                .binary_search_by_key(&self.number, |ticket| ticket.number)
        {
            holder_state.waiting.remove(index);
            state.waiting -= 1;
        }
        // The requests behind it may need less.
        self.shared.grant_next(&mut state);
        state.forget_if_idle(self.holder);
    }
}

#[cfg(test)]
#[path = "fair_queue_tests.rs"]
mod tests;
