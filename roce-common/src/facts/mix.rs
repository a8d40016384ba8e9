//! Packets by what they do, and how many messages they end: cheap enough to be kept in the kernel.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{psn::Outcome, wire::Opcode};

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
    /// FLUSH, RESYNC, CNP.
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

/// The number of the class of an opcode, below 8.
#[inline(always)]
const fn number_of(opcode: Opcode) -> usize {
    let op = opcode.get() & 0x1f;
    if opcode.get() == Opcode::CNP.get() {
        return Class::Other as usize;
    }
    let half = if op < 16 { CLASSES[0] } else { CLASSES[1] };
    (half >> (op as u32 % 16 * 4) & 7) as usize
}

/// Whether the packet ends a message or is one.
#[inline(always)]
const fn ends_message(opcode: Opcode) -> bool {
    ENDS >> (opcode.get() & 0x1f) & 1 != 0 && opcode.get() != Opcode::CNP.get()
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
    /// Counts a packet and what the tracker said of it.
    #[inline(always)]
    pub const fn observe(&mut self, opcode: Opcode, outcome: Outcome) {
        self.packets[number_of(opcode)] += 1;
        if ends_message(opcode) && !matches!(outcome, Outcome::Duplicate | Outcome::Far) {
            self.messages += 1;
        }
    }

    /// Packets of a class.
    pub const fn of(&self, class: Class) -> u64 {
        self.packets[class as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Kind, Position};

    #[test]
    fn every_opcode_has_the_class_and_the_end_that_its_headers_tell() {
        for opcode in (0..=255).filter_map(Opcode::new) {
            let class = Class::ALL[number_of(opcode)];
            let op = opcode.get() & 0x1f;
            assert_eq!(class == Class::Read, opcode.is_read_request(), "{opcode:?}");
            assert_eq!(class == Class::Acknowledge, opcode.is_acknowledge() && opcode.kind() == Kind::Response);
            let answer = matches!(class, Class::ReadResponse | Class::Acknowledge | Class::AtomicAcknowledge);
            assert_eq!(answer, opcode.kind() == Kind::Response, "{opcode:?}");
            let whole = matches!(opcode.position(), Position::Last | Position::Only);
            let no_message = class == Class::Acknowledge || op == 0x15 || opcode.kind() == Kind::Cnp;
            assert_eq!(ends_message(opcode), whole && !no_message, "{opcode:?}");
        }
    }

    #[test]
    fn repeats_are_packets_and_no_messages() {
        let mut mix = Mix::default();
        for outcome in [Outcome::First, Outcome::InOrder, Outcome::Duplicate, Outcome::Gap(2), Outcome::Filled(1)] {
            mix.observe(Opcode::WRITE_ONLY, outcome);
        }
        mix.observe(Opcode::WRITE_FIRST, Outcome::InOrder);
        mix.observe(Opcode::ACKNOWLEDGE, Outcome::NotTracked);
        mix.observe(Opcode::UD_SEND_ONLY, Outcome::NotTracked);
        assert_eq!((mix.of(Class::Write), mix.of(Class::Acknowledge), mix.of(Class::Send)), (6, 1, 1));
        assert_eq!(mix.messages, 5);
    }
}
