//! What guests run beside our own programs: a few of Debian's, with the libraries that they name.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};

use super::{apt::Apt, cpio::Archive, dirs, elf::Elf};
use crate::exec::say;

/// Of the lists below: raise it when they change, and the cache is made anew.
const VERSION: u32 = 1;

const PACKAGES: [&str; 10] = [
    "busybox-static",
    "iproute2",
    "perftest",
    "ibverbs-utils",
    "ibverbs-providers",
    "rdmacm-utils",
    "bpftool",
    "tcpdump",
    "ethtool",
    "iperf3",
];

/// Programs, wherever their packages put them.
const PROGRAMS: [&str; 31] = [
    "busybox",
    "ip",
    "tc",
    "ss",
    "bridge",
    "rdma",
    "ib_write_bw",
    "ib_send_bw",
    "ib_read_bw",
    "ib_atomic_bw",
    "ib_write_lat",
    "ib_send_lat",
    "ib_read_lat",
    "ib_atomic_lat",
    "ibv_devices",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ibv_uc_pingpong",
    "ibv_ud_pingpong",
    "rping",
    "ucmatose",
    "udaddy",
    "rdma_client",
    "rdma_server",
    "rdma_xclient",
    "rdma_xserver",
    "bpftool",
    "tcpdump",
    "ethtool",
    "iperf3",
    "ib_acme",
];
/// Of those, the ones that a release of Debian may lack.
const OPTIONAL: [&str; 1] = ["ib_acme"];
const DIRECTORIES: [&str; 4] = ["usr/bin", "usr/sbin", "bin", "sbin"];
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";
/// Delay distributions of netem.
const TC_DATA: &str = "usr/lib/x86_64-linux-gnu/tc";

/// The part of the initramfs with Debian's programs: from the cache below `dir`, or fetched.
pub(super) fn get(dir: &Path, refresh: bool, apt: &mut dyn FnMut() -> anyhow::Result<Apt>) -> anyhow::Result<PathBuf> {
    let ready = dir.join(format!("userland-{VERSION}.cpio"));
    if ready.is_file() && !refresh {
        return Ok(ready);
    }
    let root = dir.join(".userland");
    dirs::remove(&root)?;
    let apt = apt()?;
    say(format_args!("fetching {}", PACKAGES.join(", ")));
    apt.unpack_closure(&PACKAGES, &root)?;
    let unfinished = ready.with_extension("part");
    let file = File::create(&unfinished).with_context(|| format!("writing {}", unfinished.display()))?;
    pack(&root, Archive::new(BufWriter::new(file)))?;
    fs::rename(&unfinished, &ready).context("renaming an initramfs")?;
    dirs::remove(&root)?;
    Ok(ready)
}

fn pack(root: &Path, mut archive: Archive<impl Write>) -> anyhow::Result<()> {
    for dir in ["proc", "sys", "dev", "run", "tmp", "share", "root", "etc", "var/run", "usr/lib64"] {
        archive.directory(dir)?;
    }
    for (link, target) in [("bin", "usr/bin"), ("sbin", "usr/sbin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
        archive.link(link, target)?;
    }
    // The C library loads the second when a thread ends, and no program names it.
    let mut libraries = BTreeSet::from([LOADER.to_owned(), "libgcc_s.so.1".to_owned()]);
    for program in PROGRAMS {
        let found = DIRECTORIES.iter().map(|dir| root.join(dir).join(program)).find(|file| file.is_file());
        let Some(file) = found else {
            if OPTIONAL.contains(&program) {
                continue;
            }
            bail!("{program} is in none of the packages {}", PACKAGES.join(", "));
        };
        archive.copy(&file, format!("usr/bin/{program}"))?;
        needs(&file, &mut libraries)?;
    }
    for (link, target) in [("usr/bin/sh", "busybox"), ("usr/sbin/modprobe", "../bin/busybox")] {
        archive.link(link, target)?;
    }
    // The verbs library finds the driver of soft-RoCE by this file, and loads it by itself.
    let driver = root.join("etc/libibverbs.d/rxe.driver");
    archive.copy(&driver, "etc/libibverbs.d/rxe.driver")?;
    let plugins = root.join(LIBRARIES).join("libibverbs");
    for entry in fs::read_dir(&plugins).with_context(|| format!("reading {}", plugins.display()))? {
        let file = entry?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("librxe") {
            archive.copy(&file, format!("{LIBRARIES}/libibverbs/{name}"))?;
            needs(&file, &mut libraries)?;
        }
    }
    let mut packed = BTreeSet::new();
    while let Some(name) = libraries.pop_first() {
        let file = root.join(LIBRARIES).join(&name);
        if !packed.insert(name.clone()) {
            continue;
        }
        if !file.is_file() {
            bail!("the library {name} is in none of the packages");
        }
        let place = if name == LOADER { "usr/lib64" } else { LIBRARIES };
        archive.copy(&file, format!("{place}/{name}"))?;
        let mut more = BTreeSet::new();
        needs(&file, &mut more)?;
        libraries.extend(more.difference(&packed).cloned());
    }
    let tc = root.join(TC_DATA);
    for entry in fs::read_dir(&tc).with_context(|| format!("reading {}", tc.display()))? {
        let file = entry?.path();
        archive.copy(&file, Path::new(TC_DATA).join(file.file_name().unwrap_or_default()))?;
    }
    for (path, text) in [
        ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
        ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
        ("etc/hosts", "127.0.0.1 localhost guest\n::1 localhost\n"),
        ("etc/nsswitch.conf", "hosts: files\n"),
    ] {
        archive.file(path, 0o644, text.as_bytes())?;
    }
    archive.finish()
}

/// The libraries that a file names.
fn needs(file: &Path, libraries: &mut BTreeSet<String>) -> anyhow::Result<()> {
    let bytes = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
    if let Some(elf) = Elf::new(&bytes) {
        libraries.extend(elf.needed().iter().map(|&n| n.to_owned()));
    }
    Ok(())
}
