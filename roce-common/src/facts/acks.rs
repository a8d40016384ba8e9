//! What the ACKs of a flow say besides which PSN they cover.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Spread;
use crate::{
    psn::Psn,
    wire::{Packet, Syndrome, credits},
};

/// What the AETHs of a response flow show.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Acks {
    /// PSNs that each ACK covers and no ACK before it did. READ responses in between are among them.
    pub coalesced: Spread,
    /// Credits granted, in receive buffers, where an AETH carries any.
    pub credits: Spread,
    /// AETHs without credit information, which is all that soft-RoCE sends.
    pub without_credits: u64,
    /// The highest PSN covered, once there was an ACK.
    highest: u32,
    /// 1 once there was an ACK.
    started: u32,
}

impl Acks {
    /// Takes the next response of the flow.
    #[inline(always)]
    pub fn packet(&mut self, p: &Packet) {
        let Some(Syndrome::Ack(code)) = p.aeth.map(crate::wire::Aeth::syndrome) else { return };
        match credits(code) {
            Some(buffers) => self.credits.add(u64::from(buffers)),
            None => self.without_credits += 1,
        }
        if !p.bth.opcode.is_acknowledge() {
            return;
        }
        let psn = p.bth.psn;
        if self.started != 0 {
            let covered = psn.diff(Psn::new(self.highest));
            if covered <= 0 {
                return;
            }
            self.coalesced.add(covered as u64);
        }
        self.started = 1;
        self.highest = psn.get();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        units::Qpn,
        wire::{Aeth, Bth, Opcode},
    };

    fn answer(opcode: Opcode, psn: u32, raw_syndrome: u8) -> Packet {
        let bth = Bth::new(opcode, Qpn::new(17), Psn::new(psn));
        Packet { bth, aeth: Some(Aeth { raw_syndrome, msn: 0 }), ..Packet::EMPTY }
    }

    #[test]
    fn coalescing_and_credits() {
        let mut acks = Acks::default();
        for (psn, syndrome) in [(0xff_fffe, 0x1f), (2, 0x1f), (2, 0x05), (1, 0x00), (3, 0x1e), (4, 0x60), (5, 0x2c)] {
            acks.packet(&answer(Opcode::ACKNOWLEDGE, psn, syndrome));
        }
        acks.packet(&answer(Opcode::READ_RESPONSE_ONLY, 90, 0x02));
        // From 0xfffffe to 2 four PSNs, to 3 one; NAKs, repeats and READ responses are no ACKs.
        assert_eq!((acks.coalesced.count(), acks.coalesced.min(), acks.coalesced.max()), (2, 1, 4));
        assert_eq!((acks.credits.count(), acks.credits.min(), acks.credits.max()), (4, 0, 32_768));
        assert_eq!(acks.without_credits, 2);
    }
}
