//! Packets that the BPF programs copy for a capture.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Tap;

/// Most bytes of a frame that are copied.
pub const MAX_CAPTURE_BYTES: u32 = 9_216;
/// Bytes of the capture ring buffer.
pub const CAPTURE_RING_BYTES: u32 = 1 << 22;
/// Bytes of it where nothing is captured: the least there can be.
pub const CAPTURE_RING_UNUSED: u32 = 1 << 12;

/// The head of a record of CAPTURE; the first `captured` bytes of the frame follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CaptureHead {
    /// CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// Where.
    pub tap: Tap,
    /// Bytes of the frame on the wire, Ethernet header included, frame check sequence not.
    pub wire_len: u32,
    /// Bytes of it that follow.
    pub captured: u32,
    /// BTH opcode byte.
    pub opcode: u32,
    /// Destination QPN.
    pub dest_qp: u32,
    /// PSN.
    pub psn: u32,
}

const _: () = assert!(size_of::<CaptureHead>() == 32);
