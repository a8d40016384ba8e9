//! Messages and their sizes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Spread;
use crate::{
    psn::{Account, Outcome},
    wire::{Opcode, Packet, Position},
};

/// Buckets of sizes: empty messages, then one for each power of two up to 2^31 bytes.
pub const SIZE_BUCKETS: usize = 33;

/// Messages of a flow. A size is known where it is announced (WRITE, READ) or all packets of the message passed in order;
/// atomics have none.
///
/// A packet in the middle of a message, in its place, changes nothing here: the length of a SEND is that of its FIRST packet
/// times the PSNs to its LAST one. So the BPF side need not look at most packets of a long message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Messages {
    sizes: Spread,
    buckets: [u32; SIZE_BUCKETS],
    /// PSN and payload of the FIRST packet of the message in the making; meaningless unless `WHOLE`.
    first_psn: u32,
    unit: u32,
    /// Its length as announced by the RETH of its FIRST packet.
    announced: u32,
    state: u32,
    /// Always 0.
    reserved: u32,
}

/// All packets of the message in the making have passed.
const WHOLE: u32 = 1;
/// Its length was announced.
const ANNOUNCED: u32 = 2;

impl Default for Messages {
    fn default() -> Self {
        Self {
            sizes: Spread::default(),
            buckets: [0; SIZE_BUCKETS],
            first_psn: 0,
            unit: 0,
            announced: 0,
            state: 0,
            reserved: 0,
        }
    }
}

impl Messages {
    /// Whether [`Messages::packet`] has nothing to do with such a packet.
    #[inline(always)]
    pub const fn skips(opcode: Opcode, account: Account) -> bool {
        const MIDDLE: u32 = 1 << 0x01 | 1 << 0x07 | 1 << 0x0e;
        account.is_plain() && MIDDLE >> (opcode.get() & 0x1f) & 1 != 0
    }

    /// Takes the next packet of the flow and what the tracker said of it.
    #[inline(always)]
    pub fn packet(&mut self, p: &Packet, outcome: Outcome) {
        if matches!(outcome, Outcome::Duplicate | Outcome::Far) {
            return;
        }
        let opcode = p.bth.opcode;
        let payload = u32::from(p.payload_len);
        match opcode.position() {
            Position::First => {
                self.first_psn = p.bth.psn.get();
                self.unit = payload;
                self.state = WHOLE;
                if let Some(reth) = p.reth {
                    self.announced = reth.dma_len;
                    self.state |= ANNOUNCED;
                }
            }
            Position::Only => {
                self.state = 0;
                if opcode.may_carry_payload() || opcode.is_read_request() {
                    self.record(p.reth.map_or(payload, |reth| reth.dma_len));
                }
            }
            Position::Middle => self.go_on(outcome),
            Position::Last => {
                self.go_on(outcome);
                if self.state & ANNOUNCED != 0 {
                    self.record(self.announced);
                } else if self.state & WHOLE != 0 {
                    let before = p.bth.psn.get().wrapping_sub(self.first_psn) & 0xff_ffff;
                    self.record(before.saturating_mul(self.unit).saturating_add(payload));
                }
                self.state = 0;
            }
        }
    }

    #[inline(always)]
    fn go_on(&mut self, outcome: Outcome) {
        if !matches!(outcome, Outcome::InOrder) {
            self.state &= ANNOUNCED;
        }
    }

    #[inline(always)]
    fn record(&mut self, size: u32) {
        self.sizes.add(u64::from(size));
        let bucket = match size {
            0 => 0,
            _ => size.ilog2() as usize + 1,
        };
        // Hidden from the compiler, which knows the bound from the logarithm and the verifier does not.
        if let Some(bucket) = self.buckets.get_mut(core::hint::black_box(bucket)) {
            *bucket = bucket.saturating_add(1);
        }
    }

    /// Sizes in bytes of the messages whose size is known.
    pub const fn sizes(&self) -> &Spread {
        &self.sizes
    }

    /// Messages by size: (least size of the bucket, messages), empty buckets left out.
    pub fn by_size(&self) -> impl Iterator<Item = (u64, u32)> {
        self.buckets
            .into_iter()
            .enumerate()
            .filter(|&(_, n)| n > 0)
            .map(|(i, n)| (if i == 0 { 0 } else { 1 << (i - 1) }, n))
    }
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use super::*;
    use crate::{
        psn::Psn,
        units::Qpn,
        wire::{Bth, Opcode, Reth},
    };

    fn packet(opcode: Opcode, psn: u32, payload_len: u16, dma_len: Option<u32>) -> Packet {
        Packet {
            bth: Bth::new(opcode, Qpn::new(17), Psn::new(psn)),
            payload_len,
            reth: dma_len.map(|dma_len| Reth { va: 0, rkey: 0, dma_len }),
            ..Packet::EMPTY
        }
    }

    fn sizes(packets: &[(Opcode, u16, Option<u32>, Outcome)]) -> Vec<(u64, u32)> {
        let mut m = Messages::default();
        let mut psn = 0xff_fffe;
        for &(opcode, payload, announced, outcome) in packets {
            psn += u32::from(outcome != Duplicate);
            m.packet(&packet(opcode, psn, payload, announced), outcome);
        }
        assert_eq!(m.sizes().count(), m.by_size().map(|(_, n)| u64::from(n)).sum::<u64>());
        m.by_size().collect()
    }

    use Outcome::{Duplicate, Gap, InOrder};

    #[test]
    fn sends_are_summed_and_writes_and_reads_announced() {
        let send = [
            (Opcode::SEND_FIRST, 1024, None, InOrder),
            (Opcode::SEND_MIDDLE, 1024, None, InOrder),
            (Opcode::SEND_LAST, 1, None, InOrder),
            (Opcode::SEND_ONLY, 0, None, InOrder),
        ];
        assert_eq!(sizes(&send), [(0, 1), (2048, 1)]);
        let write = [
            (Opcode::WRITE_FIRST, 256, Some(4096), InOrder),
            (Opcode::WRITE_MIDDLE, 256, None, Gap(3)),
            (Opcode::WRITE_LAST, 256, None, InOrder),
            (Opcode::READ_REQUEST, 0, Some(65_536), InOrder),
            (Opcode::FETCH_ADD, 0, None, InOrder),
        ];
        assert_eq!(sizes(&write), [(4096, 1), (65_536, 1)]);
        let huge = [(Opcode::READ_REQUEST, 0, Some(u32::MAX), InOrder)];
        assert_eq!(sizes(&huge), [(1 << 31, 1)]);
    }

    #[test]
    fn a_message_with_a_gap_or_without_its_start_has_no_size() {
        let gap = [(Opcode::SEND_FIRST, 1024, None, InOrder), (Opcode::SEND_LAST, 8, None, Gap(1))];
        assert_eq!(sizes(&gap), vec![]);
        let cut = [(Opcode::SEND_MIDDLE, 1024, None, InOrder), (Opcode::SEND_LAST, 8, None, InOrder)];
        assert_eq!(sizes(&cut), vec![]);
        // ACKs are no messages.
        assert_eq!(sizes(&[(Opcode::ACKNOWLEDGE, 0, None, InOrder)]), vec![]);
    }

    #[test]
    fn repeats_do_not_disturb_the_message_in_the_making() {
        let repeated = [
            (Opcode::SEND_FIRST, 1024, None, InOrder),
            (Opcode::SEND_MIDDLE, 1024, None, InOrder),
            (Opcode::SEND_FIRST, 1024, None, Duplicate),
            (Opcode::SEND_MIDDLE, 1024, None, Duplicate),
            (Opcode::SEND_LAST, 1024, None, InOrder),
        ];
        assert_eq!(sizes(&repeated), [(2048, 1)]);
    }
}
