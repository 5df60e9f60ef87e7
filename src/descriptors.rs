//! The limit of open files and sockets of the process.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// If the system reports no limit.
const DEFAULT_LIMIT: usize = 1024;
/// More than a node has connections for.
const MAX_LIMIT: u64 = 1 << 20;

/// Raises the limit to the maximum that the system allows.
pub fn raise_limit() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return;
    };
    let wanted = hard.min(MAX_LIMIT);
    if soft >= wanted {
        return;
    }
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) {
        tracing::warn!(%error, soft, wanted, "raising the open file limit failed");
    }
}

pub fn limit() -> usize {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) => usize::try_from(soft.min(MAX_LIMIT)).unwrap_or(DEFAULT_LIMIT),
        Err(_) => DEFAULT_LIMIT,
    }
}
