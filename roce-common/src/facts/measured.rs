//! What is measured of a flow besides its counters, wherever the flow is kept.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Acks, Messages, Repeats};
use crate::{
    psn::{Account, Reads},
    wire::{Kind, Packet},
};

/// Messages, ACKs and repeats of a flow: what the BPF side can afford beyond counting.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Measured {
    /// Messages and their sizes.
    pub messages: Messages,
    /// What its ACKs say.
    pub acks: Acks,
    /// Bytes that were sent again.
    pub repeats: Repeats,
    /// Where its READs started.
    pub reads: Reads,
}

const _: () = assert!(size_of::<Measured>() == 352);

impl Measured {
    /// Whether [`Measured::packet`] would change nothing.
    #[inline(always)]
    pub const fn skips(p: &Packet, account: Account) -> bool {
        Messages::skips(p.bth.opcode, account)
    }

    /// Takes the next packet of the flow and what the tracker said of it.
    #[inline(always)]
    pub fn packet(&mut self, p: &Packet, account: Account) {
        self.messages.packet(p, account.outcome());
        self.repeats.packet(p.payload_len, account);
        if p.bth.opcode.kind() as u8 == Kind::Response as u8 {
            self.acks.packet(p);
        } else if p.bth.opcode.is_read_request() {
            self.reads.packet(p.bth.psn, account);
        }
    }
}
