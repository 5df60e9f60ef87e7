//! Keeps every processor awake while something is measured. In a virtual machine one that has nothing to do is
//! given back, and woken by the host when it pleases; one client would measure that.

use std::fs::{File, OpenOptions};
use std::io::Write;

/// While this file is open with a number in it, processors only sleep as deeply as lets them wake within so many
/// microseconds. Not by programs that keep them busy, of whatever priority: the kernel takes a processor back from
/// those at the clock's next tick, up to 4 ms late.
const LATENCY: &str = "/dev/cpu_dma_latency";

/// Until it is dropped, or we end.
pub struct Awake(#[allow(dead_code, reason = "it only has to stay open")] Option<File>);

impl Awake {
    pub fn start() -> Self {
        match open() {
            Ok(file) => Self(Some(file)),
            Err(error) => {
                println!("Processors may fall asleep, and few clients be slow: {LATENCY}: {error}");
                Self(None)
            }
        }
    }
}

fn open() -> std::io::Result<File> {
    let mut file = OpenOptions::new().write(true).open(LATENCY)?;
    file.write_all(&0i32.to_ne_bytes())?;
    Ok(file)
}
