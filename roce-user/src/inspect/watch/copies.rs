//! The same packet captured twice, as by an `any` interface or a mirror of two ports; not to be confused with the sender's
//! repeating it.

use roce_common::{
    psn::Psn,
    units::Nanos,
    wire::{IpVersion, Packet},
};

use crate::inspect::{attribution::FlowIndex, capture::Frame};

/// Packets remembered: a copy follows its original within a few batches of a NIC.
const MEMORY: usize = 4_096;
/// A copy with the same IP identification passes within this; a sender's counter does not come round in that time.
const WITHIN: Nanos = Nanos::from_millis(100);
/// Without an identification (IPv6, or 0, or always the same) a repeat has the same bytes, ICRC included. A repeat takes a round trip and a NAK or a timer;
/// a copy passes as quickly as a host forwards.
const WITHIN_WITHOUT_ID: Nanos = Nanos::from_micros(100);

#[derive(Clone, Copy, Default)]
struct Passed {
    fingerprint: u64,
    at: u64,
}

/// The newest packets.
pub(super) struct Copies(Box<[Passed]>);

impl Default for Copies {
    fn default() -> Self {
        Self(vec![Passed::default(); MEMORY].into_boxed_slice())
    }
}

/// What a flow's IP identifications are worth: some senders put the same one, or none, into every packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Identification {
    newest: u16,
    psn: Psn,
    constant: bool,
}

impl Identification {
    /// The identification of the next packet, if it tells packets apart.
    #[inline]
    fn next(&mut self, frame: &Frame<'_>, p: &Packet) -> Option<u16> {
        if p.ip == IpVersion::V6 {
            return None;
        }
        let id = u16::from_be_bytes(*frame.bytes.get(usize::from(p.l3_offset) + 4..)?.first_chunk()?);
        self.constant |= id == self.newest && p.bth.psn != self.psn;
        (self.newest, self.psn) = (id, p.bth.psn);
        (id != 0 && !self.constant).then_some(id)
    }
}

impl Copies {
    /// Remembers the packet of `flow` in `frame`; whether it is a copy of one that passed just before.
    #[inline]
    pub(super) fn pass(
        &mut self,
        frame: &Frame<'_>,
        p: &Packet,
        flow: FlowIndex,
        identification: &mut Identification,
    ) -> bool {
        let (mark, within) = match identification.next(frame, p) {
            Some(id) => (u64::from(id), WITHIN),
            // ACKs that say the same are the same bytes.
            None if p.payload_len == 0 => return false,
            None => {
                // It covers everything but what routers change.
                let Some(icrc) = frame.bytes.get(p.icrc_offset()..).and_then(|b| b.first_chunk::<4>()) else {
                    return false;
                };
                (u64::from(u32::from_ne_bytes(*icrc)), WITHIN_WITHOUT_ID)
            }
        };
        let psn = p.bth.psn.get();
        let fingerprint = (mark << 32 | u64::from(psn) << 8 | u64::from(p.bth.opcode.get()))
            ^ (flow as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
        let slot = &mut self.0[(psn as usize ^ flow.wrapping_mul(0x9e5)) % MEMORY];
        let copy = slot.fingerprint == fingerprint && frame.time.0.abs_diff(slot.at) <= within.0;
        *slot = Passed { fingerprint, at: frame.time.0 };
        copy
    }
}
