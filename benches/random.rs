//! Numbers to choose by.

/// Xorshift: what is chosen matters little, only that all are.
pub fn next(mut random: u64) -> u64 {
    random ^= random << 13;
    random ^= random >> 7;
    random ^ (random << 17)
}
