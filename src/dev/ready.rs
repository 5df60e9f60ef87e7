//! The ready file: other programs read it to use a running `dev`. It holds keys, so only its owner may read it, and
//! it exists only while everything runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;

use super::directory;
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

/// The paths of the ready file. Dropping it removes the files.
pub struct ReadyFiles {
    paths: Vec<PathBuf>,
}

impl ReadyFiles {
    /// In the data directory, and at a further path if one is given. Files of an earlier run are removed.
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
            directory::write_private(path, &text, None).context("the ready file")?;
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
