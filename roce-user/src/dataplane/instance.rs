//! One agent per interface.

use std::{
    fs,
    io::ErrorKind,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            fs::MetadataExt as _,
            net::{SocketAddr, UnixListener},
        },
    },
};

use anyhow::{Context as _, Result, bail};

/// The right to be the agent of an interface; it ends with the process, however that ends.
#[derive(Debug)]
pub struct Instance {
    _listener: UnixListener,
}

impl Instance {
    /// Takes the interface.
    ///
    /// # Errors
    /// Another agent has it.
    pub fn take(name: &str, ifindex: u32) -> Result<Self> {
        // An abstract name belongs to the network namespace, like the interface.
        let address = SocketAddr::from_abstract_name(format!("roce-agent-{ifindex}"))?;
        match UnixListener::bind_addr(&address) {
            Ok(listener) => Ok(Self { _listener: listener }),
            Err(e) if e.kind() == ErrorKind::AddrInUse => {
                bail!("another roce agent is running on {name}: stop it first (one agent per interface)")
            }
            Err(e) => Err(e).context("cannot take the interface for this agent"),
        }
    }
}

/// Inode of the calling thread's network namespace: with the interface index it names an interface of this machine.
///
/// # Errors
/// When /proc is not mounted.
pub(super) fn netns_inode() -> Result<u64> {
    Ok(fs::metadata("/proc/thread-self/ns/net").context("cannot read /proc/thread-self/ns/net")?.ino())
}
