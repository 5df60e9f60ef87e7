//! Who gets the next free connection: the tenant that has the fewest, and of its requests the one that has waited
//! longest. No tenant has all of them, so that one whose requests wait for a row leaves some to the others.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use crate::ids::TenantId;

/// Requests of one tenant that wait, for each connection of the pool. One more is refused at once.
const WAITING_PER_CONNECTION: usize = 32;

/// Who asks for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holder {
    /// What belongs to no tenant: credentials, jobs, heartbeats. Not bounded by a share.
    Service,
    Tenant(TenantId),
}

#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue is closed.
    Closed,
    /// Too many requests of this tenant wait already.
    Full,
}

#[derive(Clone)]
pub struct ConnectionQueue {
    shared: Arc<Shared>,
}

struct Shared {
    size: usize,
    tenant_max: usize,
    state: Mutex<State>,
    /// Notified when a connection is released.
    released: Notify,
}

#[derive(Default)]
struct State {
    in_use: usize,
    closed: bool,
    next_ticket: u64,
    holders: HashMap<Holder, Use>,
}

/// What one holder has and waits for. There is an entry only while that is something.
#[derive(Default)]
struct Use {
    in_use: usize,
    /// By ticket, the oldest first.
    waiting: VecDeque<(u64, oneshot::Sender<()>)>,
}

impl ConnectionQueue {
    pub fn new(size: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                size,
                tenant_max: size - size / 4,
                state: Mutex::default(),
                released: Notify::new(),
            }),
        }
    }

    /// A place for one connection; waits for its turn.
    pub async fn acquire(&self, holder: Holder) -> Result<Place, Refusal> {
        let mut waiting = {
            let mut state = self.shared.state();
            if state.closed {
                return Err(Refusal::Closed);
            }
            if state.in_use < self.shared.size && self.shared.may_have_more(&state, holder) {
                state.grant(holder);
                drop(state);
                return Ok(self.place(holder));
            }
            let ticket = state.next_ticket;
            state.next_ticket += 1;
            let queue = &mut state.holders.entry(holder).or_default().waiting;
            if queue.len() >= self.shared.size * WAITING_PER_CONNECTION {
                return Err(Refusal::Full);
            }
            let (grant, granted) = oneshot::channel();
            queue.push_back((ticket, grant));
            Waiting {
                shared: self.shared.clone(),
                holder,
                ticket,
                granted,
                is_over: false,
            }
        };
        let granted = (&mut waiting.granted).await;
        waiting.is_over = true;
        match granted {
            Ok(()) => Ok(self.place(holder)),
            // Only `close` drops the other end.
            Err(_) => Err(Refusal::Closed),
        }
    }

    fn place(&self, holder: Holder) -> Place {
        Place {
            shared: self.shared.clone(),
            holder,
        }
    }

    pub fn in_use(&self) -> usize {
        self.shared.state().in_use
    }

    /// Whether the holder has most of what it may have: then its requests likely wait for each other.
    pub fn is_crowded(&self, holder: Holder) -> bool {
        let state = self.shared.state();
        let in_use = state.holders.get(&holder).map_or(0, |held| held.in_use);
        in_use * 2 > self.shared.tenant_max
    }

    /// Nobody gets a place any more, and those who wait are refused.
    pub fn close(&self) {
        let mut state = self.shared.state();
        state.closed = true;
        for held in state.holders.values_mut() {
            held.waiting.clear();
        }
    }

    pub fn is_closed(&self) -> bool {
        self.shared.state().closed
    }

    /// Returns when no place is in use.
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

    fn may_have_more(&self, state: &State, holder: Holder) -> bool {
        match holder {
            Holder::Service => true,
            Holder::Tenant(_) => {
                let held = state.holders.get(&holder);
                held.is_none_or(|held| held.in_use < self.tenant_max)
            }
        }
    }

    fn release(&self, holder: Holder) {
        let mut state = self.state();
        state.in_use -= 1;
        if let Some(held) = state.holders.get_mut(&holder) {
            held.in_use -= 1;
        }
        self.grant_next(&mut state);
        state.forget_if_idle(holder);
        drop(state);
        self.released.notify_waiters();
    }

    /// Grants free places until nobody waits who may have one.
    fn grant_next(&self, state: &mut State) {
        while state.in_use < self.size {
            let eligible = state.holders.iter().filter_map(|(holder, held)| {
                let (ticket, _) = held.waiting.front()?;
                let may = self.may_have_more(state, *holder);
                may.then_some((held.in_use, *ticket, *holder))
            });
            let next = eligible.min_by_key(|(in_use, ticket, _)| (*in_use, *ticket));
            let Some((_, _, holder)) = next else {
                return;
            };
            let held = state.holders.get_mut(&holder);
            let Some((_, grant)) = held.and_then(|held| held.waiting.pop_front()) else {
                return;
            };
            // One that stopped waiting in this moment has no place.
            if grant.send(()).is_ok() {
                state.grant(holder);
            }
        }
    }
}

impl State {
    fn grant(&mut self, holder: Holder) {
        self.in_use += 1;
        self.holders.entry(holder).or_default().in_use += 1;
    }

    fn forget_if_idle(&mut self, holder: Holder) {
        let held = self.holders.get(&holder);
        if held.is_some_and(|held| held.in_use == 0 && held.waiting.is_empty()) {
            self.holders.remove(&holder);
        }
    }
}

/// The right to one connection; dropped, it goes to the next.
pub struct Place {
    shared: Arc<Shared>,
    holder: Holder,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.release(self.holder);
    }
}

/// One who waits. Who leaves takes its place in the queue along, and gives back what it was granted meanwhile.
struct Waiting {
    shared: Arc<Shared>,
    holder: Holder,
    ticket: u64,
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
            return self.shared.release(self.holder);
        }
        let mut state = self.shared.state();
        if let Some(held) = state.holders.get_mut(&self.holder)
            && let Ok(place) = held
                .waiting
                .binary_search_by_key(&self.ticket, |(ticket, _)| *ticket)
        {
            held.waiting.remove(place);
        }
        state.forget_if_idle(self.holder);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use futures_util::future::LocalBoxFuture;

    use super::*;

    fn tenant() -> Holder {
        Holder::Tenant(TenantId::generate())
    }

    type Asking<'a> = LocalBoxFuture<'a, Result<Place, Refusal>>;

    /// Asks, and waits as far as it gets.
    fn ask(queue: &ConnectionQueue, holder: Holder) -> Result<Place, Asking<'_>> {
        let mut asking = queue.acquire(holder).boxed_local();
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
        let queue = ConnectionQueue::new(4);
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
        let queue = ConnectionQueue::new(4);
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
        let queue = ConnectionQueue::new(1);
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
        let queue = ConnectionQueue::new(1);
        let (noisy, quiet) = (tenant(), tenant());
        let _held = ask(&queue, noisy).ok().unwrap();
        let waiting: Vec<_> = (0..WAITING_PER_CONNECTION)
            .map(|_| ask(&queue, noisy).err().unwrap())
            .collect();
        let refused = queue.acquire(noisy).now_or_never();
        assert!(matches!(refused, Some(Err(Refusal::Full))));
        assert!(ask(&queue, quiet).is_err());
        drop(waiting);
        assert!(ask(&queue, noisy).is_err());
    }

    #[test]
    fn a_closed_queue_refuses_those_who_wait_and_those_who_come() {
        let queue = ConnectionQueue::new(1);
        let held = ask(&queue, Holder::Service).ok().unwrap();
        let waiting = ask(&queue, Holder::Service).err().unwrap();
        queue.close();
        assert!(matches!(waiting.now_or_never(), Some(Err(Refusal::Closed))));
        let refused = queue.acquire(Holder::Service).now_or_never();
        assert!(matches!(refused, Some(Err(Refusal::Closed))));
        assert!(queue.emptied().now_or_never().is_none());
        drop(held);
        assert!(queue.emptied().now_or_never().is_some());
    }
}
