//! Random numbers.

/// Xorshift: the quality matters little, as long as every number can occur.
pub fn next(mut random: u64) -> u64 {
    random ^= random << 13;
    random ^= random >> 7;
    random ^ (random << 17)
}
