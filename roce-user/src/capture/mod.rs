//! `roce run --capture DIR`: the packets around a gap, a NAK or a storm of CNPs, as a file for Wireshark.
//!
//! The BPF programs copy the headers of every RoCEv2 packet, as it came or as it left, into a ring buffer of its own. A thread
//! keeps the newest of them in memory, and where something happens writes those before it and those after it into a file. The
//! agent only says what happened: neither a full disk nor a slow one delays it.
//!
//! | file | what |
//! |---|---|
//! | `window` | which packets belong to which file; knows neither clock nor disk |
//! | `file` | a recording as pcapng |
//! | `folder` | the directory, a ring of files |
//! | `recorder` | the thread |

mod file;
mod folder;
mod recorder;
mod window;

use std::path::PathBuf;

pub use folder::{Folder, bytes};
pub use recorder::{Recorder, Source, Triggers};
pub use window::{CNP_STORM, Captured, Reason, Recording, STORM_SPAN, Trigger, Window};

/// Bytes of headers that are copied unless told otherwise: all that any RoCEv2 packet has, tags and IP options aside.
pub const HEADER_BYTES: u32 = 128;

/// What to capture and where to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// The directory.
    pub dir: PathBuf,
    /// Most bytes of a packet.
    pub snaplen: u32,
    /// Payload too, not only headers.
    pub payload: bool,
    /// Packets before what happened.
    pub before: usize,
    /// Packets after it.
    pub after: usize,
    /// Most bytes of all files; at least the newest file is kept.
    pub limit_bytes: u64,
    /// Most files.
    pub limit_files: usize,
}
