//! The same packet captured twice, as by an `any` interface or a mirror of two ports; not to be confused with the sender's
//! repeating it.

use roce_common::{units::Nanos, wire::IpVersion, wire::Packet};

use crate::inspect::{attribution::FlowIndex, capture::Frame};

/// Packets remembered: a copy follows its original within a few batches of a NIC.
const MEMORY: usize = 4_096;
/// A copy with the same IP identification passes within this; a sender's counter does not come round in that time.
const WITHIN: Nanos = Nanos::from_millis(100);
/// Without an identification (IPv6, or 0) a repeat has the same bytes. A repeat takes a round trip and a NAK or a timer;
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

impl Copies {
    /// Remembers the packet of `flow` in `frame`; whether it is a copy of one that passed just before. Needs the bytes of
    /// the ICRC, which covers everything but what routers change.
    #[inline]
    pub(super) fn pass(&mut self, frame: &Frame<'_>, p: &Packet, flow: FlowIndex) -> bool {
        let Some(icrc) = frame.bytes.get(p.icrc_offset()..).and_then(|b| b.first_chunk::<4>()) else { return false };
        let id = match p.ip {
            IpVersion::V4 => frame
                .bytes
                .get(usize::from(p.l3_offset) + 4..)
                .and_then(|b| b.first_chunk())
                .map_or(0, |b| u16::from_be_bytes(*b)),
            IpVersion::V6 => 0,
        };
        // ACKs that say the same are the same bytes.
        if id == 0 && p.payload_len == 0 {
            return false;
        }
        let psn = p.bth.psn.get();
        let mut fingerprint = u64::from(u32::from_ne_bytes(*icrc)) << 32 | u64::from(psn) << 8;
        fingerprint ^=
            u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (flow as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
        let slot = &mut self.0[(psn as usize ^ flow.wrapping_mul(0x9e5)) % MEMORY];
        let within = if id == 0 { WITHIN_WITHOUT_ID } else { WITHIN };
        let copy = slot.fingerprint == fingerprint && frame.time.0.abs_diff(slot.at) <= within.0;
        *slot = Passed { fingerprint, at: frame.time.0 };
        copy
    }
}
