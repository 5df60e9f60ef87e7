//! Clients that work sequentially during the measurement, and the CPU time of a process.

use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;

use crate::figures::{Part, Sample, Times};
use crate::machine::cpu_while;

/// The samples of one client.
pub struct ClientSamples<S> {
    began: Instant,
    end: Duration,
    samples: Vec<(S, Duration)>,
}

impl<S> ClientSamples<S> {
    /// Adds a sample that has just ended; returns whether there is time for another.
    pub fn put(&mut self, sample: S) -> bool {
        let ended = self.began.elapsed();
        self.samples.push((sample, ended));
        ended <= self.end
    }
}

/// The samples of all clients.
pub struct LoadResult<S> {
    samples: Vec<(S, Duration)>,
    window: Range<Duration>,
    used: Duration,
}

/// Runs this number of clients, numbered from 0, until `ClientSamples::put` returns false; `pid` is the process
/// whose CPU time is measured.
pub async fn run<S, F>(
    clients: u32,
    pid: u32,
    times: Times,
    work: impl Fn(u64, ClientSamples<S>) -> F,
) -> anyhow::Result<LoadResult<S>>
where
    S: Send + 'static,
    F: Future<Output = anyhow::Result<ClientSamples<S>>> + Send + 'static,
{
    let began = Instant::now();
    let working = (0..u64::from(clients)).map(|client| {
        let done = ClientSamples {
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
    Ok(LoadResult {
        samples: worked.into_iter().flat_map(|done| done.samples).collect(),
        window,
        used,
    })
}

impl<S> LoadResult<S> {
    pub fn part(&self, took: impl Fn(&S) -> Duration) -> anyhow::Result<Part> {
        let sample = |(sample, ended): &(S, Duration)| Sample {
            task: 0,
            took: took(sample),
            ended: *ended,
        };
        let samples: Vec<Sample> = self.samples.iter().map(sample).collect();
        Part::new(&samples, 1, self.window.clone())
    }

    /// CPU microseconds per sample.
    pub fn cpu(&self) -> f64 {
        let measured = |(_, ended): &&(S, Duration)| self.window.contains(ended);
        let count = self.samples.iter().filter(measured).count();
        self.used.as_secs_f64() * 1e6 / count as f64
    }

    /// The number of samples, including those outside of the measured time.
    pub fn count(&self) -> usize {
        self.samples.len()
    }
}
