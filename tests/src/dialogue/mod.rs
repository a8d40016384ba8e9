//! Random dialogues of queue pairs through a link with a tap in its middle, and the truth about them.
//!
//! The truth is written by the link, which drops, delays and copies packets before and behind the tap, and by the two
//! ends, which know what they repeat. It is kept in plain sets of PSNs; no part of it is the tracker's algorithm. Where
//! an order of packets cannot tell a loss (schema 1 counts nothing there), the link does not make it:
//!
//! - before the tap, a repeat loses nothing until something in it has passed that had passed before, and its packet that
//!   reaches the newest PSN is not lost: else the repeat looks shorter than it was, or like late packets;
//! - READ answers lose only MIDDLEs before the tap: what a FIRST or ONLY leaves out may belong to other requests;
//! - answers to READs and atomics are repeated without those of other requests between them, for the same reason;
//! - late packets come while nothing is missing, and READ requests are never late.
//!
//! PSNs that are lost last, with nothing behind them, are in no counter by definition: they were never overtaken.

mod frames;
mod ledger;
mod random;
mod sim;

pub use frames::Wire;
pub use ledger::Truth;
#[cfg(test)]
pub(crate) use random::Random;
pub use sim::{Dialogue, Kind, TIMEOUT, dialogue};

use roce_common::{psn::Psn, wire::Opcode};

/// Which end a packet comes from: the requester, or the responder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// It sends requests.
    Requester,
    /// It answers them.
    Responder,
}

/// A packet as it passes the tap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Passed {
    /// Who sent it.
    pub from: End,
    /// Opcode.
    pub opcode: Opcode,
    /// PSN.
    pub psn: Psn,
    /// Payload bytes.
    pub payload: u16,
    /// Bytes a READ request asks for.
    pub dma_len: u32,
    /// Raw AETH syndrome of an answer.
    pub syndrome: u8,
}
