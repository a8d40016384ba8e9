//! Network namespaces held by a file descriptor: they have no name and end with the process, however it ends.

use std::{
    fs::File,
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
    thread,
};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns, unshare};

/// Sysctls of a fresh namespace. No duplicate address detection and no autoconfiguration (addresses must work at once
/// and nothing but ours be on the wire), no reverse-path filter.
const SYSCTLS: [(&str, &str); 10] = [
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv6/conf/all/accept_dad", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/default/dad_transmits", "0"),
    ("ipv6/conf/default/router_solicitations", "0"),
    ("ipv6/conf/default/accept_ra", "0"),
    ("ipv6/conf/default/addr_gen_mode", "1"),
    ("ipv6/conf/all/disable_ipv6", "0"),
    ("ipv6/conf/default/disable_ipv6", "0"),
];

/// A network namespace; the last clone dropped removes it with every interface in it.
#[derive(Clone, Debug)]
pub struct Netns {
    file: Arc<File>,
}

impl Netns {
    /// Makes an empty namespace with its loopback up.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN, or where the kernel has no network namespaces.
    pub fn new() -> Result<Self> {
        let file = in_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)
                .context("cannot make a network namespace (root or CAP_SYS_ADMIN is needed)")?;
            for (path, value) in SYSCTLS {
                // IPv6 may be absent altogether; what depends on it fails by name later.
                let _ = sysctl(path, value);
            }
            File::open("/proc/thread-self/ns/net").context("/proc/thread-self/ns/net")
        })?;
        let ns = Self { file: Arc::new(file) };
        ns.ip(&["link set dev lo up"])?;
        Ok(ns)
    }

    /// The one that the calling thread is in.
    ///
    /// # Errors
    /// When /proc is not mounted.
    pub fn here() -> Result<Self> {
        let file = File::open("/proc/thread-self/ns/net").context("/proc/thread-self/ns/net")?;
        Ok(Self { file: Arc::new(file) })
    }

    /// A path to it that works for as long as this process holds it: for `nsenter --net=PATH`, `ip … netns PATH`.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    /// The inode number, which identifies a namespace.
    ///
    /// # Errors
    /// When the descriptor cannot be read, which does not happen.
    pub fn inode(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(self.file.metadata()?.ino())
    }

    /// Moves the calling thread into it, for good.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN.
    pub fn enter(&self) -> Result<()> {
        setns(self.as_fd(), CloneFlags::CLONE_NEWNET).context("cannot enter the network namespace")
    }

    /// Runs `f` in it, on a thread of its own.
    ///
    /// # Errors
    /// Those of `f`, and without CAP_SYS_ADMIN.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        in_thread(|| {
            self.enter()?;
            f()
        })
    }

    /// A command that runs in it. /sys is not remounted, so pins under /sys/fs/bpf stay visible.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        let file = Arc::clone(&self.file);
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(move || setns(file.as_fd(), CloneFlags::CLONE_NEWNET).map_err(io::Error::from));
        }
        command
    }

    /// Runs `ip -batch` with these lines in it.
    ///
    /// # Errors
    /// Names the line `ip` refused, or the package where `ip` is missing.
    pub fn ip<S: AsRef<str>>(&self, lines: &[S]) -> Result<()> {
        self.batch("ip", &["-batch", "-"], lines)
    }

    /// The same for one version of IP: `-4` or `-6`.
    ///
    /// # Errors
    /// As [`Netns::ip`].
    pub fn ip_of<S: AsRef<str>>(&self, version: &str, lines: &[S]) -> Result<()> {
        self.batch("ip", &[version, "-batch", "-"], lines)
    }

    /// Runs `tc -batch` with these lines in it.
    ///
    /// # Errors
    /// Names the line `tc` refused, or the package where `tc` is missing.
    pub fn tc<S: AsRef<str>>(&self, lines: &[S]) -> Result<()> {
        self.batch("tc", &["-batch", "-"], lines)
    }

    fn batch<S: AsRef<str>>(&self, program: &str, args: &[&str], lines: &[S]) -> Result<()> {
        let mut text = String::new();
        for line in lines {
            text.push_str(line.as_ref());
            text.push('\n');
        }
        let mut command = self.command(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                bail!("`{program}` is missing: install iproute2 (Debian: apt-get install iproute2)")
            }
            Err(e) => return Err(e).with_context(|| format!("cannot run `{program}`")),
        };
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(text.as_bytes())?;
        }
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("`{program}` refused:\n{text}{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Sets `/proc/sys/net/<path>` in it.
    ///
    /// # Errors
    /// When the kernel does not know or allow it.
    pub fn sysctl(&self, path: &str, value: &str) -> Result<()> {
        self.run(|| sysctl(path, value))
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn sysctl(path: &str, value: &str) -> Result<()> {
    std::fs::write(format!("/proc/sys/net/{path}"), value).with_context(|| format!("cannot set net/{path} = {value}"))
}

/// Runs `f` on a thread of its own, so that the caller's namespace is never touched.
fn in_thread<T: Send>(f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| match scope.spawn(f).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Whether this process may make namespaces; tests that need it say why they skip.
pub fn privileged() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Ends a test that needs namespaces, with the line that counts it as skipped, where this process may make none.
#[macro_export]
macro_rules! needs_root {
    () => {
        if !$crate::lab::privileged() {
            println!("SKIP network namespaces need root");
            return;
        }
    };
}
