//! Redis, and the only room with Redis. It carries hints and leases, never rights and never the truth: every caller
//! must work without it.

use std::time::Duration;

use anyhow::Context;
use deadpool_redis::{Config, Pool, Runtime, Timeouts};
use secrecy::{ExposeSecret, SecretString};

use crate::error::{Error, Result};

pub mod limits;
pub mod pubsub;

/// A slower Redis counts as down.
const WAIT: Duration = Duration::from_millis(1500);
const CONNECTIONS: usize = 8;

#[derive(Clone)]
pub struct Redis {
    pool: Pool,
    /// For connections outside the pool: the subscriptions.
    url: SecretString,
}

impl Redis {
    /// Opens no connection yet: the service starts, and answers, without Redis.
    pub fn new(url: &SecretString) -> anyhow::Result<Self> {
        let mut config = Config::from_url(url.expose_secret());
        let mut pool = deadpool_redis::PoolConfig::new(CONNECTIONS);
        pool.timeouts = Timeouts {
            wait: Some(WAIT),
            create: Some(WAIT),
            recycle: Some(WAIT),
        };
        config.pool = Some(pool);
        let pool = config
            .create_pool(Some(Runtime::Tokio1))
            .context("THROUGHLINE_REDIS_URL is not a Redis URL")?;
        Ok(Self {
            pool,
            url: url.clone(),
        })
    }

    fn url(&self) -> &str {
        self.url.expose_secret()
    }

    /// Whether Redis answers.
    pub async fn ping(&self) -> Result<()> {
        let pinging = async {
            let mut connection = self.pool.get().await.map_err(anyhow::Error::from)?;
            deadpool_redis::redis::cmd("PING")
                .query_async::<String>(&mut connection)
                .await
                .map_err(anyhow::Error::from)
        };
        match tokio::time::timeout(WAIT, pinging).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(cause)) => Err(Error::unavailable("Redis", cause)),
            Err(late) => Err(Error::unavailable("Redis", late)),
        }
    }
}
