//! What happens to flows, for other processes: `roce events` from another shell, while an agent runs.
//!
//! The agent is the only reader of the ring buffers. It puts what it reads into a [`Log`] of bounded size and goes on; a
//! thread of its own serves the log on a local socket, so that no reader, however slow or hostile, delays the control loop.
//!
//! | file | what |
//! |---|---|
//! | `line` | the JSON line of an event (schema 1) and its text for people |
//! | `log` | the newest records of every kind, and how many a reader has missed |
//! | `server` | the socket, in the agent |
//! | `client` | the socket, in `roce events` |

mod client;
mod line;
mod log;
mod server;

use std::os::{linux::net::SocketAddrExt as _, unix::net::SocketAddr};

pub use client::{Events, Item, agents, connect, story};
pub use line::{EventLine, Kind, direction_name, tap_name};
pub use log::{Cursor, HISTORY, Log, Record, Wall, What};
pub use server::Server;

/// The agent's address for readers. An abstract name belongs to the network namespace, like the interface, and ends with
/// the process, however that ends.
fn address(ifindex: u32) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("roce-events-{ifindex}"))
}

/// What a reader asks for: one line of JSON, sent once.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Request {
    /// Go on after the history.
    #[serde(default)]
    pub follow: bool,
    /// Kinds wanted; none = all.
    #[serde(default)]
    pub kinds: Vec<Kind>,
    /// No events, but what they amount to so far.
    #[serde(default)]
    pub story: bool,
}

/// Kinds of the lines that are no event: the log was read to its end, records were lost, the reader is refused.
mod control {
    pub(super) const END: &str = "end";
    pub(super) const LOST: &str = "events_lost";
    pub(super) const STORY: &str = "story";
    pub(super) const REFUSED: &str = "refused";
}

/// Longest request, in bytes.
const REQUEST_BYTES: u64 = 1_024;
