//! What goes into the tracker and what comes out.

use super::Psn;
use crate::wire::{Opcode, Packet};

/// What the tracker needs to know of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Observed {
    pub(super) psn: u32,
    payload_len: u32,
    pub(super) dma_len: u32,
    flags: u32,
}

impl Observed {
    /// It takes part in the sequence of its flow.
    pub(super) const COUNTED: u32 = 1 << 0;
    /// A READ request.
    pub(super) const READ: u32 = 1 << 1;
    /// FIRST or MIDDLE: its payload is as long as the path MTU.
    const FILLS_PMTU: u32 = 1 << 2;
    /// A response that may start anywhere ahead: FIRST, ONLY or ATOMIC_ACKNOWLEDGE.
    pub(super) const STARTS_ANYWHERE: u32 = 1 << 3;

    /// A packet by its opcode, PSN, payload length and, for a READ request, the length it asks for.
    #[inline(always)]
    pub const fn new(opcode: Opcode, psn: Psn, payload_len: u16, dma_len: u32) -> Self {
        // Low five bits of an opcode, as sets. Bit tests instead of table look-ups: this runs per packet in the kernel.
        const ACKNOWLEDGE: u32 = 1 << 0x11;
        const READ_REQUEST: u32 = 1 << 0x0c;
        const FULL: u32 = 1 << 0x00 | 1 << 0x01 | 1 << 0x06 | 1 << 0x07 | 1 << 0x0d | 1 << 0x0e;
        const STARTERS: u32 = 1 << 0x0d | 1 << 0x10 | 1 << 0x12;
        // RC, UC and XRC; a UD sender numbers its packets over all destinations, RD is extinct.
        const SERVICES: u32 = 1 << 0 | 1 << 1 | 1 << 5;
        let op = 1u32 << (opcode.get() & 0x1f);
        let mut flags = 0;
        if SERVICES >> (opcode.get() >> 5) & 1 != 0 && op & ACKNOWLEDGE == 0 {
            flags |= Self::COUNTED;
        }
        if op & READ_REQUEST != 0 {
            flags |= Self::READ;
        }
        if op & FULL != 0 {
            flags |= Self::FILLS_PMTU;
        }
        if op & STARTERS != 0 {
            flags |= Self::STARTS_ANYWHERE;
        }
        Self { psn: psn.get(), payload_len: payload_len as u32, dma_len, flags }
    }

    /// The payload length where it is that of the path MTU (FIRST and MIDDLE), else 0.
    #[inline(always)]
    pub(super) const fn full_payload(&self) -> u32 {
        if self.has(Self::FILLS_PMTU) { self.payload_len } else { 0 }
    }

    #[inline(always)]
    pub(super) const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

impl From<&Packet> for Observed {
    #[inline(always)]
    fn from(packet: &Packet) -> Self {
        let dma_len = match packet.reth {
            Some(reth) => reth.dma_len,
            None => 0,
        };
        let mut observed = Self::new(packet.bth.opcode, packet.bth.psn, packet.payload_len, dma_len);
        // QP0 and QP1 carry management datagrams.
        if packet.bth.dest_qp.get() <= 1 {
            observed.flags &= !Self::COUNTED;
        }
        observed
    }
}

/// What a packet was to the tracker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// An ACK, a NAK, a CNP or a packet of a service without a sequence per flow: it enters no counter.
    NotTracked,
    /// The first packet of the flow.
    First,
    /// At `next`, or a response that may start where it does.
    InOrder,
    /// This many PSNs before it were skipped.
    Gap(u32),
    /// Behind `next`, and it filled this many holes: a retransmission or late, known when its run ends.
    Filled(u32),
    /// Behind `next`, and everything it carries had passed.
    Duplicate,
    /// Too far from `next`, and not confirmed by following packets: ignored so far.
    Far,
    /// Too far from `next`, and confirmed: the flow goes on from here.
    Discontinuity,
}

/// What had become, at this tap, of a PSN that a sequence NAK names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Fate {
    /// Before the first packet seen, ahead of the last, or out of the window.
    Unknown = 0,
    /// An earlier NAK has named it since it last passed.
    Told = 1,
    /// It had passed: what the peer misses was lost behind this tap.
    Passed = 2,
    /// It was skipped, and has not passed since: lost before this tap.
    Skipped = 3,
}

impl Fate {
    /// The fate with this number.
    pub const fn from_number(n: u32) -> Option<Self> {
        Some(match n {
            0 => Self::Unknown,
            1 => Self::Told,
            2 => Self::Passed,
            3 => Self::Skipped,
            _ => return None,
        })
    }
}
