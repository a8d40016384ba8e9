//! The kernel side as seen from user space: loading, attaching, pinning, reading and removing.

mod attach;
mod detach;
mod environment;
mod instance;
mod maps;
mod object;
mod pins;

pub use attach::{Attachment, Options, attach};
pub use detach::{Removed, detach, detach_stale, list};
pub use environment::check;
pub use instance::Instance;
pub use maps::{Abi, FlowWalker, Maps};
pub use object::{OBJECT_BYTES, Object, ring};
pub use pins::{DEFAULT_BPFFS, Pins};

/// Major number of the handle of every root qdisc we make ("ro"): how ours is told from others'.
pub const QDISC_MAJOR: u16 = 0x726f;
