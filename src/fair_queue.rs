//! Something of which a node has only so much, shared among tenants: connections, memory, descriptors. The next free
//! part goes to the tenant that has the least, after the service itself, and of its requests to the one that has waited
//! longest. No tenant has all of it, so that one whose requests hold theirs for long leaves some to the others.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use crate::ids::TenantId;

/// Who asks for a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holder {
    /// What belongs to no tenant: credentials, jobs, heartbeats, the operator. Not bounded by a share, never refused,
    /// and next before all tenants while it has less than half of what there is: its work is short, and every request
    /// needs some of it. The other half is the tenants', however many ask for the service.
    Service,
    /// Requests of a tenant.
    Tenant(TenantId),
    /// What the service does for a tenant's accepted turns and open streams: before the tenant's requests, and with a
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

/// How much there is.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub total: usize,
    /// Of one tenant.
    pub tenant_max: usize,
    /// How much more a tenant may have where `Holder::TenantTurns` asks.
    pub turns_reserve: usize,
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

/// Who comes first of those who have as much.
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

    /// A part; waits for its turn. Who asks for more than it may have gets all that it may have.
    pub async fn acquire(&self, holder: Holder, amount: usize) -> Result<Permit, Refusal> {
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
            if queue.len() >= self.shared.most_waiting(holder) {
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

    /// A part, if there is one now. Who asks for more than it may have gets all that it may have.
    pub fn try_acquire(&self, holder: Holder, amount: usize) -> Option<Permit> {
        let amount = amount.min(self.shared.most(holder));
        let mut state = self.shared.state();
        let granted = !state.closed && self.shared.grant_at_once(&mut state, holder, amount);
        drop(state);
        granted.then(|| self.place(holder, amount))
    }

    fn place(&self, holder: Holder, amount: usize) -> Permit {
        Permit {
            shared: self.shared.clone(),
            holder,
            amount,
        }
    }

    pub fn in_use(&self) -> usize {
        self.shared.state().in_use
    }

    /// Whether the tenant has most of what it may have: then its requests likely wait for each other.
    pub fn is_crowded(&self, tenant_id: TenantId) -> bool {
        let in_use = self.shared.state().in_use_of_tenant(tenant_id);
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
            Holder::TenantTurns(_) => self.size.tenant_max + self.size.turns_reserve,
        }
    }

    fn most_waiting(&self, holder: Holder) -> usize {
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
        in_use + amount <= self.most(holder)
    }

    /// Who has the least is next; of those who have as much, the one that has waited longest. Turns do not rank behind
    /// for what requests of their tenant have.
    fn rank(&self, state: &State, holder: Holder) -> (usize, Kind) {
        match holder {
            Holder::Service if state.in_use_by(holder) * 2 < self.size.total => (0, Kind::Service),
            Holder::Service => (state.in_use_by(holder), Kind::Requests),
            Holder::TenantTurns(_) => (state.in_use_by(holder), Kind::Turns),
            Holder::Tenant(tenant_id) => (state.in_use_of_tenant(tenant_id), Kind::Requests),
        }
    }

    /// Only if no other request waits, but for those that wait for their own share alone.
    fn grant_at_once(&self, state: &mut State, holder: Holder, amount: usize) -> bool {
        let held = state.holders.get(&holder);
        let waits = held.is_some_and(|held| !held.waiting.is_empty());
        let fits = state.in_use + amount <= self.size.total && self.may_have(state, holder, amount);
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
    fn in_use_by(&self, holder: Holder) -> usize {
        self.holders.get(&holder).map_or(0, |held| held.in_use)
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
        let held = self.holders.get(&holder);
        if held.is_some_and(|held| held.in_use == 0 && held.waiting.is_empty()) {
            self.holders.remove(&holder);
        }
    }
}

/// The right to a part; dropped, it goes to the next.
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
#[path = "fair_queue_tests.rs"]
mod tests;
