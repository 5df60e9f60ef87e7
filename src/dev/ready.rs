//! The ready file: what other programs read to use a running `dev`. It holds keys, so only its owner may
//! read it, and it is there only while everything runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;

use super::place;
use crate::ids::TenantId;

const NAME: &str = "ready.json";

#[derive(Serialize)]
pub struct Ready {
    pub url: String,
    pub metrics_url: String,
    pub operator_key: String,
    pub tenant_id: TenantId,
    pub api_key: String,
    pub database_url: String,
    pub redis_url: String,
    pub env: BTreeMap<String, String>,
}

/// Where the ready file is written. Dropping it removes the files.
pub struct ReadyFiles {
    paths: Vec<PathBuf>,
}

impl ReadyFiles {
    /// In the data directory, and in another place if that is wanted. Files of an earlier run are removed.
    pub fn new(data_dir: &Path, other: Option<PathBuf>) -> Self {
        let files = Self {
            paths: [data_dir.join(NAME)].into_iter().chain(other).collect(),
        };
        files.remove();
        files
    }

    pub fn write(&self, ready: &Ready) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(ready)?;
        for path in &self.paths {
            place::write_private(path, &text, None).context("the ready file")?;
        }
        Ok(())
    }

    fn remove(&self) {
        for path in &self.paths {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for ReadyFiles {
    fn drop(&mut self) {
        self.remove();
    }
}
