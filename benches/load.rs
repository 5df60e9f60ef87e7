//! Clients that each do one thing after the other, for as long as is measured, and what that costs a process.

use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;

use crate::figures::{Part, Sample, Times};
use crate::machine::cpu_while;

/// What one client has done.
pub struct Done<S> {
    began: Instant,
    end: Duration,
    samples: Vec<(S, Duration)>,
}

impl<S> Done<S> {
    /// Adds what has just ended; answers whether there is time for another.
    pub fn put(&mut self, sample: S) -> bool {
        let ended = self.began.elapsed();
        self.samples.push((sample, ended));
        ended <= self.end
    }
}

/// What all clients have done.
pub struct Loaded<S> {
    samples: Vec<(S, Duration)>,
    window: Range<Duration>,
    used: Duration,
}

/// Lets so many clients, numbered from 0 on, work until `Done` says that it is enough; `pid` is the process
/// whose CPU time is taken.
pub async fn run<S, F>(
    clients: u32,
    pid: u32,
    times: Times,
    work: impl Fn(u64, Done<S>) -> F,
) -> anyhow::Result<Loaded<S>>
where
    S: Send + 'static,
    F: Future<Output = anyhow::Result<Done<S>>> + Send + 'static,
{
    let began = Instant::now();
    let working = (0..u64::from(clients)).map(|client| {
        let done = Done {
            began,
            end: times.warm_up + times.measured,
            samples: Vec::new(),
        };
        tokio::spawn(work(client, done))
    });
    let working = async { anyhow::Ok(try_join_all(working).await?) };
    let watching = cpu_while(pid, began, times);
    let (worked, (window, used)) = tokio::try_join!(working, watching)?;
    let worked = worked.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    Ok(Loaded {
        samples: worked.into_iter().flat_map(|done| done.samples).collect(),
        window,
        used,
    })
}

impl<S> Loaded<S> {
    pub fn part(&self, took: impl Fn(&S) -> Duration) -> anyhow::Result<Part> {
        let sample = |(sample, ended): &(S, Duration)| Sample {
            task: 0,
            took: took(sample),
            ended: *ended,
        };
        let samples: Vec<Sample> = self.samples.iter().map(sample).collect();
        Part::new(&samples, 1, self.window.clone())
    }

    /// Microseconds of CPU for each.
    pub fn cpu(&self) -> f64 {
        let measured = |(_, ended): &&(S, Duration)| self.window.contains(ended);
        let count = self.samples.iter().filter(measured).count();
        self.used.as_secs_f64() * 1e6 / count as f64
    }

    /// How many, also before and after what was measured.
    pub fn count(&self) -> usize {
        self.samples.len()
    }
}
