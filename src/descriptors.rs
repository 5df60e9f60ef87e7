//! How many files and sockets the process may have open at one time.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Where the system does not tell.
const USUAL: usize = 1024;
/// More than a node has connections for.
const MOST: u64 = 1 << 20;

/// Raises the limit to what the system lets the process have.
pub fn raise_limit() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return;
    };
    let wanted = hard.min(MOST);
    if soft >= wanted {
        return;
    }
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) {
        tracing::warn!(%error, soft, wanted, "raising the open file limit failed");
    }
}

pub fn limit() -> usize {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) => usize::try_from(soft.min(MOST)).unwrap_or(USUAL),
        Err(_) => USUAL,
    }
}
