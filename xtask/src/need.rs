//! What the verbs need: found, installed with a word about it, or named with the command that installs it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, anyhow, bail};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use crate::{
    exec::{self, Stop, say},
    project::Project,
};

/// The linker that reads the bitcode of the pinned rustc. Later ones need a system LLVM.
const BPF_LINKER: &str = "0.10.3";
const BPFFS: &str = "/sys/fs/bpf";
const BTF: &str = "/sys/kernel/btf/vmlinux";

/// Components of the toolchain, and the file of its sysroot that shows that one is there.
const RUST_SRC: (&str, &str) = ("rust-src", "lib/rustlib/src/rust/library/core/src/lib.rs");
const CLIPPY: (&str, &str) = ("clippy", "bin/cargo-clippy");
const RUSTFMT: (&str, &str) = ("rustfmt", "bin/rustfmt");

/// What building needs: the pinned toolchain with rust-src, and bpf-linker.
pub(crate) fn to_build(project: &Project) -> Result<(), Stop> {
    toolchain(project, &[RUST_SRC])?;
    bpf_linker(project)
}

/// What linting needs: what building needs, clippy and rustfmt.
pub(crate) fn to_lint(project: &Project) -> Result<(), Stop> {
    toolchain(project, &[RUST_SRC, CLIPPY, RUSTFMT])?;
    bpf_linker(project)
}

/// What loading BPF programs needs: root, BTF and bpffs.
pub(crate) fn to_load() -> Result<(), Stop> {
    exec::as_root("the dataplane")?;
    btf()?;
    bpffs()
}

/// What attaching them in a lab needs: all that, and iproute2.
pub(crate) fn to_run() -> Result<(), Stop> {
    to_load()?;
    iproute2()
}

/// The version that `rust-toolchain.toml` pins.
fn pinned(project: &Project) -> anyhow::Result<String> {
    let file = project.root.join("rust-toolchain.toml");
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    channel(&text).ok_or_else(|| anyhow!("{} names no channel", file.display()))
}

fn channel(toml: &str) -> Option<String> {
    let line = toml.lines().find_map(|line| line.trim().strip_prefix("channel"))?;
    Some(line.trim_start().strip_prefix('=')?.trim().trim_matches('"').to_owned())
}

fn toolchain(project: &Project, components: &[(&str, &str)]) -> Result<(), Stop> {
    add(project, &["component", "add"], components)
}

/// What building for another target needs beside: its standard library.
pub(crate) fn target(project: &Project, target: &str) -> Result<(), Stop> {
    let library = format!("lib/rustlib/{target}/lib");
    add(project, &["target", "add"], &[(target, &library)])
}

/// Makes sure that the pinned toolchain is there and has these parts, by `rustup VERB --toolchain … NAME…`. Each comes with a
/// file of its sysroot that shows that it is there.
fn add(project: &Project, verb: &[&str], parts: &[(&str, &str)]) -> Result<(), Stop> {
    let pinned = pinned(project)?;
    let rustc = |args: &[&str]| -> anyhow::Result<String> {
        let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        let text = exec::capture(rustc.args(args).current_dir(&project.root))?;
        Ok(String::from_utf8_lossy(&text).trim().to_owned())
    };
    let version = rustc(&["--version"])?;
    if version.split(' ').nth(1) != Some(&pinned) {
        return Err(anyhow!(
            "this is {version}, and the project needs {pinned}: rustup toolchain install {pinned} --profile minimal"
        )
        .into());
    }
    let sysroot = PathBuf::from(rustc(&["--print", "sysroot"])?);
    let missing: Vec<&str> =
        parts.iter().filter(|(_, file)| !sysroot.join(file).exists()).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    // The pinned name may be another toolchain's in a rustup that was told to use that one.
    let toolchain = env::var("RUSTUP_TOOLCHAIN").unwrap_or(pinned);
    let command = format!("rustup {} --toolchain {toolchain} {names}", verb.join(" "));
    if exec::find("rustup").is_none() {
        return Err(anyhow!(
            "the toolchain in {} lacks {names}, and rustup, which would add it, is not installed: \
             install rustup (https://rustup.rs), then: {command}",
            sysroot.display()
        )
        .into());
    }
    say(format_args!("installing {names} for Rust {toolchain}: {command}"));
    exec::must(Command::new("rustup").args(verb).args(["--toolchain", &toolchain]).args(&missing))?;
    match parts.iter().find(|(_, file)| !sysroot.join(file).exists()) {
        None => Ok(()),
        Some((name, _)) => Err(anyhow!("rustup has added {name}, but not to {}", sysroot.display()).into()),
    }
}

fn bpf_linker(project: &Project) -> Result<(), Stop> {
    let tools = project.tools();
    let linker = tools.join("bin/bpf-linker");
    let found = linker_version(&linker);
    if found.as_deref() == Some(BPF_LINKER) {
        return Ok(());
    }
    match found {
        Some(other) => say(format_args!("{} is version {other}, and {BPF_LINKER} is needed", linker.display())),
        None if linker.exists() => say(format_args!("{} does not run", linker.display())),
        None => {}
    }
    say(format_args!("installing bpf-linker {BPF_LINKER} into {} (half a minute, once)", tools.display()));
    exec::must(
        project
            .cargo()
            .args(["install", "bpf-linker", "--version", BPF_LINKER, "--locked", "--force", "--quiet", "--root"])
            .arg(&tools)
            // Its work is LLVM's, which is not built here: a quick build is as fast.
            .envs([("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1"), ("CARGO_PROFILE_RELEASE_LTO", "off")])
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            // Its objects are of no use to us: cargo install builds in a directory that it removes.
            .env_remove("CARGO_TARGET_DIR"),
    )?;
    match linker_version(&linker) {
        Some(version) if version == BPF_LINKER => Ok(()),
        _ => Err(anyhow!("bpf-linker {BPF_LINKER} was installed into {} but does not run", tools.display()).into()),
    }
}

/// The version that a bpf-linker says it has; `None` when there is none or it does not run.
fn linker_version(linker: &Path) -> Option<String> {
    let text = exec::capture(Command::new(linker).arg("--version")).ok()?;
    Some(String::from_utf8_lossy(&text).trim().strip_prefix("bpf-linker ")?.to_owned())
}

fn btf() -> anyhow::Result<()> {
    if Path::new(BTF).exists() {
        return Ok(());
    }
    bail!(
        "{BTF} is missing: this kernel describes its types to no one (CONFIG_DEBUG_INFO_BTF is off); \
         boot a kernel that has it, for instance Debian's linux-image-amd64"
    )
}

fn iproute2() -> Result<(), Stop> {
    if exec::find("ip").is_some() && exec::find("tc").is_some() {
        return Ok(());
    }
    let command = "apt-get install iproute2";
    if exec::find("apt-get").is_none() {
        return Err(anyhow!(
            "ip and tc are missing: install the package iproute2 with this system's package manager (Debian: {command})"
        )
        .into());
    }
    say(format_args!("installing ip and tc: {command}"));
    let install = || -> anyhow::Result<u8> {
        let mut command = exec::as_root("apt-get")?;
        command.env("DEBIAN_FRONTEND", "noninteractive");
        exec::run_aside(command.args(["install", "--yes", "--no-install-recommends", "iproute2"]))
    };
    // A machine that has never asked for the list of packages knows none.
    if install()? != 0 {
        exec::must(exec::as_root("apt-get")?.arg("update"))?;
        if install()? != 0 {
            return Err(anyhow!("ip and tc are missing and could not be installed: {command}").into());
        }
    }
    Ok(())
}

fn bpffs() -> Result<(), Stop> {
    if statfs(BPFFS).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC) {
        return Ok(());
    }
    let command = format!("mount -t bpf bpf {BPFFS}");
    if !Path::new(BPFFS).is_dir() {
        return Err(anyhow!("{BPFFS} does not exist: the kernel is without BPF, or /sys is not mounted").into());
    }
    say(format_args!("mounting the BPF file system: {command}"));
    match exec::run_aside(exec::as_root("mount")?.args(["-t", "bpf", "bpf", BPFFS]))? {
        0 => Ok(()),
        _ => Err(anyhow!("no BPF file system on {BPFFS}, and mounting one failed: {command}").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pin_is_read_from_the_file_that_rustup_reads() {
        assert_eq!(channel("[toolchain]\nchannel = \"1.95.0\"\nprofile = \"minimal\"\n").as_deref(), Some("1.95.0"));
        assert_eq!(channel("[toolchain]\nprofile = \"minimal\"\n"), None);
        assert!(channel(include_str!("../../rust-toolchain.toml")).is_some());
    }

    #[test]
    fn a_linker_that_is_not_there_has_no_version() {
        assert_eq!(linker_version(Path::new("/nowhere/bpf-linker")), None);
        // Runs, but is another program.
        assert_eq!(linker_version(Path::new("/bin/echo")), None);
    }
}
