//! The transport headers as values. All fields are big-endian on the wire.

use super::Opcode;
use crate::{psn::Psn, units::Qpn};

/// Base transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bth {
    /// Operation and service.
    pub opcode: Opcode,
    /// Solicited event.
    pub solicited: bool,
    /// MigReq: 0 from rxe, 1 from ConnectX; without meaning for us.
    pub mig_req: bool,
    /// Bytes added to make the payload a multiple of four, 0 … 3.
    pub pad: u8,
    /// Partition key.
    pub pkey: u16,
    /// Forward congestion (unused by RoCEv2 senders we know).
    pub fecn: bool,
    /// Backward congestion; set in CNPs.
    pub becn: bool,
    /// Destination queue pair.
    pub dest_qp: Qpn,
    /// The sender asks for an acknowledgement.
    pub ack_req: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

/// What an AETH syndrome says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syndrome {
    /// Acknowledged; the value is the credit code (31 = no credit information).
    Ack(u8),
    /// Receiver not ready; the value is the timer code.
    RnrNak(u8),
    /// NAK 0x60: PSN sequence error, the packet carries the expected PSN.
    PsnSequence,
    /// NAK 0x61: invalid request.
    InvalidRequest,
    /// NAK 0x62: remote access error.
    RemoteAccess,
    /// NAK 0x63: remote operational error.
    RemoteOperational,
    /// Any other NAK or a reserved value.
    Other(u8),
}

/// ACK extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// The raw syndrome byte; [`Aeth::syndrome`] reads it.
    pub raw_syndrome: u8,
    /// Messages completed by the responder, modulo 2^24.
    pub msn: u32,
}

impl Aeth {
    /// The meaning of the syndrome byte.
    #[inline(always)]
    pub const fn syndrome(self) -> Syndrome {
        let value = self.raw_syndrome & 0x1f;
        match self.raw_syndrome {
            0x00..=0x1f => Syndrome::Ack(value),
            0x20..=0x3f => Syndrome::RnrNak(value),
            0x60 => Syndrome::PsnSequence,
            0x61 => Syndrome::InvalidRequest,
            0x62 => Syndrome::RemoteAccess,
            0x63 => Syndrome::RemoteOperational,
            other => Syndrome::Other(other),
        }
    }
}

/// RDMA extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reth {
    /// Remote virtual address.
    pub va: u64,
    /// Remote key.
    pub rkey: u32,
    /// Length of the whole transfer in bytes.
    pub dma_len: u32,
}

/// Atomic extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AtomicEth {
    /// Remote virtual address.
    pub va: u64,
    /// Remote key.
    pub rkey: u32,
    /// Value to swap in or to add.
    pub swap_or_add: u64,
    /// Value to compare with.
    pub compare: u64,
}

/// Datagram extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deth {
    /// Queue key.
    pub qkey: u32,
    /// Queue pair of the sender.
    pub src_qp: Qpn,
}
