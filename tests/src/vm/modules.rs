//! Kernel modules of the guest.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, bail};

use super::skip;

/// `uname -r`.
pub fn kernel_release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Loads modules; one that is built in needs none.
///
/// # Errors
/// A [`super::Skip`] where the kernel does not have one, a failure where it cannot be loaded.
pub fn load(names: &[&str]) -> Result<()> {
    let dir = PathBuf::from("/lib/modules").join(kernel_release());
    let index = |file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default().replace('-', "_");
    let (loadable, builtin) = (index("modules.dep"), index("modules.builtin"));
    for name in names {
        let file = format!("{}.ko", name.replace('-', "_"));
        let loadable = loadable.lines().any(|line| line.split(':').next() == Some(&file));
        if !loadable {
            if builtin.lines().any(|line| line.rsplit('/').next() == Some(&file)) {
                continue;
            }
            return Err(skip(format!("Linux {} has no {name}", kernel_release())));
        }
        let output = Command::new("modprobe").arg(name).output().context("cannot run modprobe")?;
        if !output.status.success() {
            bail!("modprobe {name}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
    }
    Ok(())
}
