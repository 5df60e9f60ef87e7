//! What a node has only so much of, and shares among its tenants: the memory that bodies and answers take, descriptors,
//! and downloads.

use std::time::Duration;

use tokio::time::timeout;

use crate::error::{Error, Result};
use crate::fair_queue::{FairQueue, Holder, Permit, Size};
use crate::ids::TenantId;

const MIB: usize = 1024 * 1024;
/// Bytes of bodies that are read, or passed on to a model.
const BODIES: Size = Size {
    total: 256 * MIB,
    tenant_max: 128 * MIB,
    turns_reserve: 0,
    tenant_waiting: 1024,
};
/// Pieces of large bodies that are taken in at one time: a thread that takes in many has no time for other requests.
const TURNS_TO_READ: Size = Size {
    total: 8,
    tenant_max: 2,
    turns_reserve: 0,
    tenant_waiting: usize::MAX,
};
/// What bodies come to as values, by `http::json_text`.
const VALUES: Size = Size {
    total: 192 * MIB,
    tenant_max: MAX_VALUES_COST,
    turns_reserve: 0,
    tenant_waiting: 1024,
};
/// Bytes of answers that clients have not taken yet.
const ANSWERS: Size = Size {
    total: 256 * MIB,
    tenant_max: 128 * MIB,
    turns_reserve: 0,
    tenant_waiting: 0,
};
/// Each holds a page in memory while its client reads.
const DOWNLOADS: Size = Size {
    total: 32,
    tenant_max: 8,
    turns_reserve: 0,
    tenant_waiting: 64,
};
/// One body may come to all that its tenant may have.
pub const MAX_VALUES_COST: usize = 96 * MIB;
/// What takes less is not counted.
pub const SMALL: usize = 64 * 1024;
/// A request that waits longer for memory is better answered with an error.
const WAIT: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub struct NodeShares {
    bodies: FairQueue,
    values: FairQueue,
    parsers: FairQueue,
    turns_to_read: FairQueue,
    answers: FairQueue,
    downloads: FairQueue,
    descriptors: FairQueue,
}

/// Memory of the node that a request holds; none if it is little.
#[derive(Default)]
pub struct Memory(Vec<Permit>);

impl NodeShares {
    /// `descriptors` is how many files and sockets the process may have open.
    pub fn new(descriptors: usize) -> Self {
        Self {
            bodies: FairQueue::new(BODIES),
            values: FairQueue::new(VALUES),
            parsers: FairQueue::new(parsers()),
            turns_to_read: FairQueue::new(TURNS_TO_READ),
            answers: FairQueue::new(ANSWERS),
            downloads: FairQueue::new(DOWNLOADS),
            // The other half is for what is answered at once, for turns, and for the service itself.
            descriptors: FairQueue::new(Size {
                total: descriptors / 2,
                tenant_max: descriptors / 8 * 3,
                turns_reserve: 0,
                tenant_waiting: 0,
            }),
        }
    }

    /// Room for so many more bytes of a body.
    pub async fn more_of_body(
        &self,
        holder: Holder,
        memory: &mut Memory,
        bytes: usize,
    ) -> Result<()> {
        let place = timeout(WAIT, self.bodies.acquire(holder, bytes)).await;
        let place = place.ok().and_then(|place| place.ok());
        memory.0.push(place.ok_or_else(too_many_bodies)?);
        Ok(())
    }

    pub fn bodies_in_use(&self) -> usize {
        self.bodies.in_use()
    }

    /// Room for what a body comes to as values.
    pub async fn values(&self, holder: Holder, cost: usize) -> Result<Memory> {
        acquire(&self.values, holder, cost).await
    }

    /// A turn to take in a piece of a large body.
    pub async fn turn_to_read(&self, holder: Holder) -> Result<Permit> {
        let turn = self.turns_to_read.acquire(holder, 1).await;
        turn.map_err(|_| too_many_bodies())
    }

    /// A processor, for as long as a large body is walked or parsed on a thread of its own. Nobody who has one waits for
    /// anything else.
    pub async fn parser(&self, holder: Holder) -> Result<Permit> {
        match timeout(WAIT, self.parsers.acquire(holder, 1)).await {
            Ok(Ok(place)) => Ok(place),
            Ok(Err(_)) | Err(_) => Err(too_many_bodies()),
        }
    }

    /// Room for an answer until its client has taken it, if there is any.
    pub fn answer(&self, holder: Holder, bytes: usize) -> Option<Memory> {
        if bytes <= SMALL {
            return Some(Memory::default());
        }
        let place = self.answers.try_acquire(holder, bytes);
        place.map(|place| Memory(vec![place]))
    }

    /// A download, from its beginning until its client has taken it.
    pub async fn download(&self, tenant_id: TenantId) -> Result<Permit> {
        let holder = Holder::Tenant(tenant_id);
        match timeout(WAIT, self.downloads.acquire(holder, 1)).await {
            Ok(Ok(place)) => Ok(place),
            Ok(Err(_)) | Err(_) => Err(Error::busy("too many downloads run at one time")),
        }
    }

    pub fn downloads_in_use(&self) -> usize {
        self.downloads.in_use()
    }

    /// Connections that are held for long: a client's that waits, and one to a model for it.
    pub fn connections(&self, tenant_id: TenantId, count: usize) -> Result<Permit> {
        let holder = Holder::Tenant(tenant_id);
        let place = self.descriptors.try_acquire(holder, count);
        place.ok_or_else(|| Error::busy("too many connections wait at one time"))
    }
}

async fn acquire(queue: &FairQueue, holder: Holder, bytes: usize) -> Result<Memory> {
    if bytes <= SMALL {
        return Ok(Memory::default());
    }
    match timeout(WAIT, queue.acquire(holder, bytes)).await {
        Ok(Ok(place)) => Ok(Memory(vec![place])),
        Ok(Err(_)) | Err(_) => Err(too_many_bodies()),
    }
}

fn too_many_bodies() -> Error {
    Error::busy("too many large bodies are read at one time")
}

/// The threads that serve requests need their share of the processors too: of those who would use all, a tenant has
/// half.
fn parsers() -> Size {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Size {
        total: processors,
        tenant_max: (processors / 2).max(1),
        turns_reserve: 0,
        tenant_waiting: 1024,
    }
}
