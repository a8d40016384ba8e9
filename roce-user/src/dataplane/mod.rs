//! The kernel side as seen from user space: loading, attaching, pinning, reading and removing.

mod attach;
mod detach;
mod environment;
mod instance;
mod maps;
mod object;
mod pins;

use roce_common::units::Nanos;

pub use attach::{Attachment, Options, attach};
pub use detach::{Removed, detach, detach_stale, list};
pub use environment::check;
pub use instance::Instance;
pub use maps::{Abi, FlowWalker, Maps};
pub use object::{OBJECT_BYTES, Object, ring};
pub use pins::{DEFAULT_BPFFS, Pins};

/// Major number of the handle of every root qdisc we make ("ro"): how ours is told from others'.
pub const QDISC_MAJOR: u16 = 0x726f;

/// The kernel's CLOCK_MONOTONIC, which the BPF programs read too.
pub fn monotonic() -> Nanos {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    Nanos(t.tv_sec as u64 * Nanos::SECOND.0 + t.tv_nsec as u64)
}
