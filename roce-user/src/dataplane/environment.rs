//! What the machine must have, each with what to do where it does not.

use std::{fs, path::Path};

use anyhow::{Result, bail};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

const BTF: &str = "/sys/kernel/btf/vmlinux";

/// Capabilities we need, by bit number: `CAP_NET_ADMIN`, `CAP_PERFMON`, `CAP_BPF`; `CAP_SYS_ADMIN` stands for the last two.
const NET_ADMIN: u32 = 12;
const SYS_ADMIN: u32 = 21;
const PERFMON: u32 = 38;
const BPF: u32 = 39;

/// Checks capabilities, BTF and the BPF filesystem.
///
/// # Errors
/// The first thing that is missing, with what to do about it.
pub fn check(bpffs: &Path) -> Result<()> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = effective_capabilities(&status);
    let missing: Vec<&str> =
        [(NET_ADMIN, "CAP_NET_ADMIN", false), (PERFMON, "CAP_PERFMON", true), (BPF, "CAP_BPF", true)]
            .into_iter()
            .filter(|&(bit, _, covered)| effective & 1 << bit == 0 && !(covered && effective & 1 << SYS_ADMIN != 0))
            .map(|(_, name, _)| name)
            .collect();
    if !missing.is_empty() {
        bail!("missing {}: run as root, with sudo, or give the program these capabilities", missing.join(", "));
    }
    if !Path::new(BTF).exists() {
        bail!("{BTF} is missing: this needs a kernel built with CONFIG_DEBUG_INFO_BTF=y");
    }
    let Ok(fs) = statfs(bpffs) else {
        bail!(
            "{} does not exist: mount a BPF filesystem there (mkdir -p it, then mount -t bpf bpf on it)",
            bpffs.display()
        );
    };
    if fs.filesystem_type() != BPF_FS_MAGIC {
        bail!("no BPF filesystem at {0}: mount -t bpf bpf {0}", bpffs.display());
    }
    Ok(())
}

fn effective_capabilities(status: &str) -> u64 {
    status
        .lines()
        .find_map(|l| l.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::effective_capabilities;

    #[test]
    fn the_effective_set_is_read_from_the_status_file() {
        assert_eq!(effective_capabilities("Name:\troce\nCapPrm:\t00\nCapEff:\t000001ffffffffff\n"), 0x1ff_ffff_ffff);
        assert_eq!(effective_capabilities("Name:\troce\n"), 0);
    }
}
