//! Keeps every processor awake during a measurement. In a virtual machine the host takes an idle processor away
//! and wakes it with a delay, which would dominate the figures of a single client.

use std::fs::{File, OpenOptions};
use std::io::Write;

/// While this file is open with a number in it, processors sleep only as deeply as they can wake within that many
/// microseconds. Busy loops of any priority are no replacement: the kernel preempts them only at the clock's next
/// tick, up to 4 ms late.
const LATENCY: &str = "/dev/cpu_dma_latency";

/// Keeps processors awake until it is dropped, or the program ends.
pub struct Awake(#[allow(dead_code, reason = "it only has to stay open")] Option<File>);

impl Awake {
    pub fn start() -> Self {
        match open() {
            Ok(file) => Self(Some(file)),
            Err(error) => {
                println!("Processors may sleep, which slows down few clients: {LATENCY}: {error}");
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
