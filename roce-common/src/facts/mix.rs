//! Packets by what they do, and how many messages they end: cheap enough to be kept in the kernel.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{psn::Account, wire::Opcode};

/// What a packet does, by its opcode; the discriminant is the index into [`Mix::packets`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u32)]
pub enum Class {
    /// SEND of any kind.
    Send = 0,
    /// RDMA WRITE and ATOMIC WRITE.
    Write = 1,
    /// READ request.
    Read = 2,
    /// CMP_SWAP, FETCH_ADD.
    Atomic = 3,
    /// READ response, which also answers FLUSH and ATOMIC WRITE.
    ReadResponse = 4,
    /// ACKNOWLEDGE: ACKs and NAKs.
    Acknowledge = 5,
    /// ATOMIC ACKNOWLEDGE.
    AtomicAcknowledge = 6,
    /// FLUSH, RESYNC.
    Other = 7,
}

/// The classes of the low five bits of an opcode, four bits each: shifts, where a table would cost the BPF side a load.
const CLASSES: [u64; 2] = {
    let mut classes = [0x7777_7777_7777_7777; 2];
    let mut op = 0;
    while op < 32 {
        let class = match op {
            0x00..=0x05 | 0x16 | 0x17 => Class::Send,
            0x06..=0x0b | 0x1d => Class::Write,
            0x0c => Class::Read,
            0x0d..=0x10 => Class::ReadResponse,
            0x11 => Class::Acknowledge,
            0x12 => Class::AtomicAcknowledge,
            0x13 | 0x14 => Class::Atomic,
            _ => Class::Other,
        };
        let shift = op % 16 * 4;
        classes[op / 16] = classes[op / 16] & !(0xf << shift) | (class as u64) << shift;
        op += 1;
    }
    classes
};

/// Opcodes, by their low five bits, that end a message, or are one: LAST and ONLY, READ requests, atomics, their answers.
const ENDS: u32 = {
    let ends =
        [0x02, 0x03, 0x04, 0x05, 0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0f, 0x10, 0x12, 0x13, 0x14, 0x16, 0x17, 0x1c, 0x1d];
    let (mut set, mut i) = (0, 0);
    while i < ends.len() {
        set |= 1 << ends[i];
        i += 1;
    }
    set
};

impl Class {
    /// Every class, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Send,
        Self::Write,
        Self::Read,
        Self::Atomic,
        Self::ReadResponse,
        Self::Acknowledge,
        Self::AtomicAcknowledge,
        Self::Other,
    ];

    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
            Self::Atomic => "atomic",
            Self::ReadResponse => "read_response",
            Self::Acknowledge => "acknowledge",
            Self::AtomicAcknowledge => "atomic_acknowledge",
            Self::Other => "other",
        }
    }
}

/// The number of the class of an opcode, below 8. No branches: the verifier would follow each, times all behind it.
#[inline(always)]
const fn number_of(opcode: Opcode) -> usize {
    let op = opcode.get() as u32 & 0x1f;
    let shift = op % 16 * 4;
    let upper = 0u64.wrapping_sub((op >> 4) as u64);
    (CLASSES[0] >> shift & !upper | CLASSES[1] >> shift & upper) as usize & 7
}

/// Packets of a flow by class, and its messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Mix {
    /// Packets by [`Class`].
    pub packets: [u64; 8],
    /// Messages that ended here, repeats not counted again. In the response space: READs and atomics answered.
    pub messages: u64,
}

const _: () = assert!(size_of::<Mix>() == 72);

impl Mix {
    /// Counts a packet of the flow. CNPs belong to no flow.
    #[inline(always)]
    pub const fn packet(&mut self, opcode: Opcode) {
        self.packets[number_of(opcode)] += 1;
    }

    /// Counts the message that a packet ends, if it ends one and, as the tracker says, passes for the first time.
    #[inline(always)]
    pub const fn message(&mut self, opcode: Opcode, account: Account) {
        self.messages += (ENDS >> (opcode.get() & 0x1f) & 1) as u64 & account.is_new();
    }

    /// Packets of a class.
    pub const fn of(&self, class: Class) -> u64 {
        self.packets[class as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        psn::{Observed, Psn, Tracker},
        wire::{Kind, Position},
    };

    #[test]
    fn every_opcode_has_the_class_and_the_end_that_its_headers_tell() {
        for opcode in (0..=255).filter_map(Opcode::new).filter(|o| o.kind() != Kind::Cnp) {
            let class = Class::ALL[number_of(opcode)];
            let op = opcode.get() & 0x1f;
            assert_eq!(class == Class::Read, opcode.is_read_request(), "{opcode:?}");
            assert_eq!(class == Class::Acknowledge, opcode.is_acknowledge() && opcode.kind() == Kind::Response);
            let answer = matches!(class, Class::ReadResponse | Class::Acknowledge | Class::AtomicAcknowledge);
            assert_eq!(answer, opcode.kind() == Kind::Response, "{opcode:?}");
            let whole = matches!(opcode.position(), Position::Last | Position::Only);
            let no_message = class == Class::Acknowledge || op == 0x15;
            assert_eq!(ENDS >> op & 1 == 1, whole && !no_message, "{opcode:?}");
        }
    }

    #[test]
    fn repeats_are_packets_and_no_messages() {
        let (mut mix, mut tracker) = (Mix::default(), Tracker::default());
        let packets = [
            (Opcode::WRITE_ONLY, 5),
            (Opcode::WRITE_ONLY, 6),
            (Opcode::WRITE_ONLY, 9),
            // Filled, then again; far away.
            (Opcode::WRITE_ONLY, 7),
            (Opcode::WRITE_ONLY, 7),
            (Opcode::WRITE_ONLY, 70_000),
            (Opcode::WRITE_FIRST, 10),
            // Not tracked.
            (Opcode::ACKNOWLEDGE, 3),
            (Opcode::UD_SEND_ONLY, 4),
        ];
        for (opcode, psn) in packets {
            mix.packet(opcode);
            mix.message(opcode, tracker.observe(&Observed::new(opcode, Psn::new(psn), 8, 0)));
        }
        assert_eq!((mix.of(Class::Write), mix.of(Class::Acknowledge), mix.of(Class::Send)), (7, 1, 1));
        assert_eq!(mix.messages, 5);
    }
}
