//! What is kept of one flow, in a BPF map value and offline alike.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    psn::{Observed, Outcome, Psn, Tracker},
    units::{Dscp, Nanos},
    wire::{Kind, Opcode, Packet, Syndrome},
};

/// Different DSCPs of a flow that are counted one by one.
pub const DSCP_SLOTS: usize = 4;

/// The kinds of NAK that are told apart; the discriminant is the index into [`Flow::nak`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u32)]
pub enum NakKind {
    /// 0x60.
    PsnSequence = 0,
    /// 0x61.
    InvalidRequest = 1,
    /// 0x62.
    RemoteAccess = 2,
    /// 0x63.
    RemoteOperational = 3,
    /// Any other syndrome that is neither ACK nor RNR NAK.
    Other = 4,
}

impl NakKind {
    /// Every kind, in the order of their numbers.
    pub const ALL: [Self; 5] =
        [Self::PsnSequence, Self::InvalidRequest, Self::RemoteAccess, Self::RemoteOperational, Self::Other];

    /// The kind of a NAK; `None` for an ACK or RNR NAK.
    #[inline(always)]
    pub const fn of(syndrome: Syndrome) -> Option<Self> {
        Some(match syndrome {
            Syndrome::Ack(_) | Syndrome::RnrNak(_) => return None,
            Syndrome::PsnSequence => Self::PsnSequence,
            Syndrome::InvalidRequest => Self::InvalidRequest,
            Syndrome::RemoteAccess => Self::RemoteAccess,
            Syndrome::RemoteOperational => Self::RemoteOperational,
            Syndrome::Other(_) => Self::Other,
        })
    }

    /// The name used in tables, JSON and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PsnSequence => "psn_sequence",
            Self::InvalidRequest => "invalid_request",
            Self::RemoteAccess => "remote_access",
            Self::RemoteOperational => "remote_operational",
            Self::Other => "other",
        }
    }
}

/// The answer of a responder that is not an ACK: its syndrome, where the packet is an ACKNOWLEDGE or
/// ATOMIC_ACKNOWLEDGE and refuses a request.
#[inline(always)]
pub fn refusal(packet: &Packet) -> Option<Syndrome> {
    let opcode = packet.bth.opcode;
    if opcode.is_acknowledge() || opcode.is_atomic_acknowledge() {
        match packet.aeth?.syndrome() {
            Syndrome::Ack(_) => None,
            syndrome => Some(syndrome),
        }
    } else {
        None
    }
}

/// One (tap, source, destination, destination QPN, space). All zero = nothing seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Flow {
    /// The BPF side's lock; 0 = free. Always 0 offline.
    pub lock: u64,
    /// Packets, CNPs excluded.
    pub packets: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// When the newest packet came; for ageing, never for counting.
    pub last_seen_ns: u64,
    /// Packets by ECN codepoint: Not-ECT, ECT(1), ECT(0), CE.
    pub ecn: [u64; 4],
    /// Packets of the DSCPs in [`Flow::dscp_values`]; a slot is free while its count is 0.
    pub dscp_counts: [u64; DSCP_SLOTS],
    /// Packets of any further DSCP.
    pub dscp_others: u64,
    /// CNPs that tell this flow's sender to slow down. Not counted by [`Flow::observe`]: a CNP does not name the flow.
    pub cnp: u64,
    /// NAKs that this flow carries, by [`NakKind`].
    pub nak: [u32; 5],
    /// RNR NAKs that this flow carries.
    pub rnr_nak: u32,
    /// DSCPs counted one by one.
    pub dscp_values: [u8; DSCP_SLOTS],
    /// PSN of the first packet.
    pub first_psn: u32,
    /// PSN of the serially highest packet.
    pub last_psn: u32,
    /// UDP source port of the newest packet.
    pub src_port: u16,
    /// Opcode byte of the newest packet; its service is the flow's.
    pub last_opcode: u8,
    /// Always 0.
    pub reserved_too: u8,
    /// What became of its PSNs.
    pub tracker: Tracker,
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Flow>() == 536 && align_of::<Flow>() == 8);
    assert!(offset_of!(Flow, lock) == 0 && offset_of!(Flow, packets) == 8 && offset_of!(Flow, tracker) == 152);
};

impl Flow {
    /// Takes a packet of the flow, in the order of the tap. A CNP belongs to no flow by its addresses and is ignored.
    #[inline(always)]
    pub fn observe(&mut self, packet: &Packet, now: Nanos) -> Outcome {
        let opcode = packet.bth.opcode;
        if opcode.kind() == Kind::Cnp {
            return Outcome::NotTracked;
        }
        let psn = packet.bth.psn;
        if self.packets == 0 {
            self.first_psn = psn.get();
            self.last_psn = psn.get();
        } else if psn.diff(Psn::new(self.last_psn)) > 0 {
            self.last_psn = psn.get();
        }
        self.packets += 1;
        self.bytes += u64::from(packet.payload_len);
        self.last_seen_ns = now.0;
        self.ecn[(packet.tos & 3) as usize] += 1;
        self.count_dscp(packet.dscp());
        self.src_port = packet.src_port;
        self.last_opcode = opcode.get();
        match refusal(packet) {
            None => {}
            Some(Syndrome::RnrNak(_)) => self.rnr_nak += 1,
            Some(syndrome) => {
                if let Some(kind) = NakKind::of(syndrome) {
                    self.nak[kind as usize] += 1;
                }
            }
        }
        self.tracker.observe(&Observed::from(packet))
    }

    #[inline(always)]
    fn count_dscp(&mut self, dscp: Dscp) {
        for slot in 0..DSCP_SLOTS {
            if self.dscp_counts[slot] == 0 {
                self.dscp_values[slot] = dscp.get();
            }
            if self.dscp_values[slot] == dscp.get() {
                self.dscp_counts[slot] += 1;
                return;
            }
        }
        self.dscp_others += 1;
    }

    /// The opcode of the newest packet; `None` before the first.
    pub fn opcode(&self) -> Option<Opcode> {
        if self.packets == 0 { None } else { Opcode::new(self.last_opcode) }
    }

    /// Packets of each DSCP seen, and of all DSCPs beyond the first [`DSCP_SLOTS`] last, as `None`.
    pub fn dscps(&self) -> impl Iterator<Item = (Option<Dscp>, u64)> {
        self.dscp_values
            .into_iter()
            .zip(self.dscp_counts)
            .map(|(value, count)| (Dscp::new(value), count))
            .chain([(None, self.dscp_others)])
            .filter(|&(_, count)| count != 0)
    }
}
