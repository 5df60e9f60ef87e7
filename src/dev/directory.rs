//! The directories of `dev`, and the account its servers run as. Postgres refuses to run as root, so root
//! lends it an unprivileged account, and that account must be able to reach its files.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::unistd::{User, geteuid};

use crate::child_guard::UnixUser;
use crate::crypto;

/// For root whose data directory no other account may enter, such as one below /root.
const REACHABLE: &str = "/var/lib/throughline-dev";

/// `None` when we are not root: the servers then run as we do.
pub fn account() -> anyhow::Result<Option<UnixUser>> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    for name in ["postgres", "nobody"] {
        if let Some(user) = User::from_name(name)? {
            return Ok(Some(UnixUser {
                uid: user.uid.as_raw(),
                gid: user.gid.as_raw(),
            }));
        }
    }
    anyhow::bail!("started as root, but there is no account postgres or nobody to run Postgres as")
}

/// The directory for the servers' files: in the data directory if `account` can enter that.
pub fn server_dir(data_dir: &Path, account: Option<UnixUser>) -> anyhow::Result<PathBuf> {
    let inside = data_dir.join("servers");
    let Some(account) = account else {
        return Ok(inside);
    };
    if data_dir.ancestors().all(|dir| can_enter(dir, account)) {
        return Ok(inside);
    }
    let name = hex::encode(&crypto::sha256(data_dir.as_os_str().as_encoded_bytes())[..8]);
    Ok(Path::new(REACHABLE).join(name))
}

fn can_enter(dir: &Path, account: UnixUser) -> bool {
    fs::metadata(dir).is_ok_and(|meta| {
        let needed = if meta.uid() == account.uid {
            0o100
        } else if meta.gid() == account.gid {
            0o010
        } else {
            0o001
        };
        meta.mode() & needed != 0
    })
}

/// Creates `dir` for one owner alone.
pub fn make_private_dir(dir: &Path, account: Option<UnixUser>) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    if let Some(account) = account {
        chown(dir, Some(account.uid), Some(account.gid))?;
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    Ok(())
}

/// Writes a file with secrets: only its owner can read it, and it appears as a whole or not at all.
pub fn write_private(path: &Path, text: &str, account: Option<UnixUser>) -> anyhow::Result<()> {
    let draft = path.with_extension("tmp");
    let write = || -> anyhow::Result<()> {
        let _ = fs::remove_file(&draft);
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&draft)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        if let Some(account) = account {
            chown(&draft, Some(account.uid), Some(account.gid))?;
        }
        fs::rename(&draft, path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
