//! The state that `dev` keeps besides the servers' own data: passwords, keys, the demo tenant.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::directory;
use crate::crypto;
use crate::ids::TenantId;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct State {
    pub superuser_password: String,
    pub owner_password: String,
    pub service_password: String,
    pub redis_password: String,
    pub operator_key: String,
    pub secret_key: String,
    pub demo: Option<Demo>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Demo {
    pub tenant_id: TenantId,
    pub api_key: String,
}

/// The data directory, locked for this process.
pub struct DataDir {
    path: PathBuf,
    _lock: File,
}

impl DataDir {
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot use the data directory {}", path.display());
        std::fs::create_dir_all(path).with_context(cannot)?;
        let path = path.canonicalize().with_context(cannot)?;
        let lock = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path.join("lock"))
            .with_context(cannot)?;
        if lock.try_lock().is_err() {
            anyhow::bail!(
                "another `throughline dev` is running on {}; stop it or choose another --data-dir",
                path.display()
            );
        }
        Ok(Self { path, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn state_file(&self) -> PathBuf {
        self.path.join("dev.json")
    }

    /// The stored state, or a new one, which is stored from now on. Servers outside a lost data directory are removed
    /// with their passwords and start empty.
    pub fn load(&self, server_dir: &Path) -> anyhow::Result<State> {
        let file = self.state_file();
        if file.exists() {
            let text = std::fs::read_to_string(&file)?;
            return serde_json::from_str(&text)
                .with_context(|| format!("{} is damaged", file.display()));
        }
        if server_dir.exists() && !server_dir.starts_with(&self.path) {
            std::fs::remove_dir_all(server_dir)?;
        }
        let state = State {
            superuser_password: crypto::random_secret()?,
            owner_password: crypto::random_secret()?,
            service_password: crypto::random_secret()?,
            redis_password: crypto::random_secret()?,
            operator_key: crypto::random_secret()?,
            secret_key: crypto::random_secret()?,
            demo: None,
        };
        self.save(&state)?;
        Ok(state)
    }

    pub fn save(&self, state: &State) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(state)?;
        directory::write_private(&self.state_file(), &text, None)
    }
}
