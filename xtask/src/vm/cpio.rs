//! Archives for the kernel's initramfs: the "newc" format of cpio(5), Documentation/driver-api/early-userspace/buffer-format.rst.
//! Everything in them belongs to root, and there are no device nodes: the kernel mounts devtmpfs.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write},
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::{Component, Path, PathBuf},
};

use anyhow::Context as _;

const DIRECTORY: u32 = 0o040_755;
const SYMLINK: u32 = 0o120_777;
const FILE: u32 = 0o100_000;

/// An archive in the making. Directories are made as paths need them.
#[derive(Debug)]
pub(super) struct Archive<W> {
    out: W,
    next_inode: u32,
    directories: BTreeSet<PathBuf>,
}

impl<W: Write> Archive<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, next_inode: 1, directories: BTreeSet::new() }
    }

    /// A copy of a file of the host, with its permissions, at `path` (relative to the root).
    pub(super) fn copy(&mut self, from: &Path, path: impl AsRef<Path>) -> anyhow::Result<()> {
        let bytes = fs::read(from).with_context(|| format!("reading {}", from.display()))?;
        let mode = fs::metadata(from).with_context(|| format!("reading {}", from.display()))?.permissions().mode();
        self.file(path, mode & 0o777, &bytes)
    }

    /// A file with these contents.
    pub(super) fn file(&mut self, path: impl AsRef<Path>, permissions: u32, bytes: &[u8]) -> anyhow::Result<()> {
        self.entry(path.as_ref(), FILE | permissions, bytes)
    }

    /// A symbolic link.
    pub(super) fn link(&mut self, path: impl AsRef<Path>, target: impl AsRef<Path>) -> anyhow::Result<()> {
        self.entry(path.as_ref(), SYMLINK, target.as_ref().as_os_str().as_bytes())
    }

    /// An empty directory.
    pub(super) fn directory(&mut self, path: impl AsRef<Path>) -> anyhow::Result<()> {
        let mut whole = PathBuf::new();
        for part in path.as_ref().components() {
            // The root itself is there.
            let Component::Normal(part) = part else { continue };
            whole.push(part);
            if self.directories.insert(whole.clone()) {
                self.raw(&whole, DIRECTORY, &[])?;
            }
        }
        Ok(())
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        self.raw(Path::new("TRAILER!!!"), 0, &[])?;
        self.out.flush().context("writing an initramfs")
    }

    fn entry(&mut self, path: &Path, mode: u32, bytes: &[u8]) -> anyhow::Result<()> {
        if let Some(parent) = path.parent() {
            self.directory(parent)?;
        }
        self.raw(path, mode, bytes)
    }

    fn raw(&mut self, path: &Path, mode: u32, bytes: &[u8]) -> anyhow::Result<()> {
        let name = path.as_os_str().as_bytes();
        let size = u32::try_from(bytes.len()).with_context(|| format!("{} is too large", path.display()))?;
        let inode = self.next_inode;
        self.next_inode += 1;
        // Magic; inode, mode, uid, gid, links, mtime, size, device and rdevice (two numbers each), length of the name, check.
        let numbers = [inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        let header: String = numbers.iter().map(|n| format!("{n:08x}")).collect();
        let write = |out: &mut W| -> io::Result<()> {
            out.write_all(b"070701")?;
            out.write_all(header.as_bytes())?;
            out.write_all(name)?;
            // Name and contents are padded to four bytes; the header has 110.
            out.write_all(&[0; 4][..1 + (110 + name.len() + 1).next_multiple_of(4) - (110 + name.len() + 1)])?;
            out.write_all(bytes)?;
            out.write_all(&[0; 3][..bytes.len().next_multiple_of(4) - bytes.len()])
        };
        write(&mut self.out).with_context(|| format!("writing {} into an initramfs", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn cpio_reads_what_was_written() {
        let mut bytes = Vec::new();
        let mut archive = Archive::new(&mut bytes);
        archive.file("usr/bin/tool", 0o755, b"12345").expect("a file");
        archive.file("usr/bin/other", 0o644, b"").expect("a file");
        archive.link("bin", "usr/bin").expect("a link");
        archive.directory("proc").expect("a directory");
        archive.finish().expect("an end");
        assert_eq!(bytes.len() % 4, 0);
        if crate::exec::find("cpio").is_none() {
            println!("SKIP cpio is not installed");
            return;
        }
        let mut cpio = Command::new("cpio")
            .args(["-t", "-v", "--quiet", "-n"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cpio");
        cpio.stdin.take().expect("its stdin").write_all(&bytes).expect("it reads");
        let output = cpio.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_ascii_whitespace().collect()).collect();
        let seen: Vec<_> = lines.iter().map(|f| (f[0], f[2], f[4], f[8..].join(" "))).collect();
        assert_eq!(
            seen,
            [
                ("drwxr-xr-x", "0", "0", "usr".to_owned()),
                ("drwxr-xr-x", "0", "0", "usr/bin".to_owned()),
                ("-rwxr-xr-x", "0", "5", "usr/bin/tool".to_owned()),
                ("-rw-r--r--", "0", "0", "usr/bin/other".to_owned()),
                ("lrwxrwxrwx", "0", "7", "bin -> usr/bin".to_owned()),
                ("drwxr-xr-x", "0", "0", "proc".to_owned()),
            ]
        );
    }
}
