//! BTH opcodes (Linux `include/rdma/ib_pack.h`; header order from `rxe_opcode.c` and the XRC series of 2021).

use core::fmt;

/// Transport service, the top three bits of an opcode.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Reliable datagram.
    Rd,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification.
    Cnp,
    /// Extended reliable connection.
    Xrc,
}

impl Service {
    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Rd => "RD",
            Self::Ud => "UD",
            Self::Cnp => "CNP",
            Self::Xrc => "XRC",
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which of the two PSN spaces of a direction a packet belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// Sent by a requester: carries the PSN of the sender's own send queue.
    Request,
    /// Sent by a responder: echoes PSNs of the other side's send queue.
    Response,
    /// A CNP, outside every PSN space.
    Cnp,
}

/// Where in its message a packet stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Position {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The whole message.
    Only,
}

const KNOWN: u16 = 1 << 0;
const RESPONSE: u16 = 1 << 1;
const CNP: u16 = 1 << 2;
const AETH: u16 = 1 << 3;
const RETH: u16 = 1 << 4;
const DETH: u16 = 1 << 5;
const ATOMIC: u16 = 1 << 6;
const PAYLOAD: u16 = 1 << 7;
const FIRST: u16 = 1 << 8;
const MIDDLE: u16 = 1 << 9;
const LAST: u16 = 1 << 10;
const FULL: u16 = 1 << 11;
const EIGHT: u16 = 1 << 12;
const NONEMPTY: u16 = 1 << 13;

/// One row per opcode; [`KNOWN`] is set where the opcode exists.
static TABLE: [Row; 256] = build_table();

#[derive(Clone, Copy)]
struct Row {
    flags: u16,
    /// Length of all extension headers.
    ext_len: u8,
    /// Offset behind the BTH of the AETH, RETH or AtomicETH (whichever `flags` names).
    header_at: u8,
}

const UNKNOWN: Row = Row { flags: 0, ext_len: 0, header_at: 0 };

/// The reliable-connection column of the table.
const fn rc(op: u8) -> Row {
    let (flags, ext_len) = match op {
        0x00 => (PAYLOAD | FIRST | FULL, 0),
        0x01 => (PAYLOAD | MIDDLE | FULL, 0),
        0x02 => (PAYLOAD | LAST | NONEMPTY, 0),
        0x03 => (PAYLOAD | LAST | NONEMPTY, 4),
        0x04 => (PAYLOAD, 0),
        0x05 => (PAYLOAD, 4),
        0x06 => (PAYLOAD | FIRST | FULL | RETH, 16),
        0x07 => (PAYLOAD | MIDDLE | FULL, 0),
        0x08 => (PAYLOAD | LAST | NONEMPTY, 0),
        0x09 => (PAYLOAD | LAST | NONEMPTY, 4),
        0x0a => (PAYLOAD | RETH, 16),
        0x0b => (PAYLOAD | RETH, 20),
        0x0c => (RETH, 16),
        0x0d => (RESPONSE | PAYLOAD | FIRST | FULL | AETH, 4),
        0x0e => (RESPONSE | PAYLOAD | MIDDLE | FULL, 0),
        0x0f => (RESPONSE | PAYLOAD | LAST | NONEMPTY | AETH, 4),
        0x10 => (RESPONSE | PAYLOAD | AETH, 4),
        0x11 => (RESPONSE | AETH, 4),
        0x12 => (RESPONSE | AETH, 12),
        0x13 | 0x14 => (ATOMIC, 28),
        0x16 => (PAYLOAD | LAST | NONEMPTY, 4),
        0x17 => (PAYLOAD, 4),
        // FLUSH: the FETH stands before the RETH.
        0x1c => return Row { flags: KNOWN | RETH, ext_len: 20, header_at: 4 },
        0x1d => (PAYLOAD | RETH | EIGHT, 16),
        _ => return UNKNOWN,
    };
    Row { flags: flags | KNOWN, ext_len, header_at: 0 }
}

/// The row of the RC column behind `prefix` bytes of another service's own headers.
const fn behind(prefix: u8, row: Row, extra: u16) -> Row {
    if row.flags & KNOWN == 0 {
        return UNKNOWN;
    }
    Row { flags: row.flags | extra, ext_len: row.ext_len + prefix, header_at: row.header_at + prefix }
}

const fn row(opcode: u8) -> Row {
    let op = opcode & 0x1f;
    match opcode & 0xe0 {
        0x00 => rc(op),
        0x20 if op <= 0x0b => rc(op),
        // RD requests: RDETH, DETH, then the RC list; responses: RDETH, then the RC list. No invalidate, no ATOMIC_WRITE.
        0x40 => match op {
            0x15 => Row { flags: KNOWN, ext_len: 12, header_at: 0 },
            0x0d..=0x12 => behind(4, rc(op), 0),
            0x16 | 0x17 | 0x1d => UNKNOWN,
            _ => behind(12, rc(op), 0),
        },
        0x60 => match op {
            0x04 => Row { flags: KNOWN | PAYLOAD | DETH, ext_len: 8, header_at: 0 },
            0x05 => Row { flags: KNOWN | PAYLOAD | DETH, ext_len: 12, header_at: 0 },
            _ => UNKNOWN,
        },
        0x80 if op == 0x01 => Row { flags: KNOWN | CNP, ext_len: 16, header_at: 0 },
        // XRC requests carry the XRCETH first; responses do not.
        0xa0 => match op {
            0x0d..=0x12 => rc(op),
            0x1c | 0x1d => UNKNOWN,
            _ => behind(4, rc(op), 0),
        },
        _ => UNKNOWN,
    }
}

const fn build_table() -> [Row; 256] {
    let mut table = [UNKNOWN; 256];
    let mut op = 0;
    while op < 256 {
        table[op] = row(op as u8);
        op += 1;
    }
    table
}

/// A BTH opcode that exists.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Opcode(u8);

impl Opcode {
    /// RC SEND_FIRST.
    pub const SEND_FIRST: Self = Self(0x00);
    /// RC SEND_MIDDLE.
    pub const SEND_MIDDLE: Self = Self(0x01);
    /// RC SEND_LAST.
    pub const SEND_LAST: Self = Self(0x02);
    /// RC SEND_ONLY.
    pub const SEND_ONLY: Self = Self(0x04);
    /// RC RDMA_WRITE_FIRST.
    pub const WRITE_FIRST: Self = Self(0x06);
    /// RC RDMA_WRITE_MIDDLE.
    pub const WRITE_MIDDLE: Self = Self(0x07);
    /// RC RDMA_WRITE_LAST.
    pub const WRITE_LAST: Self = Self(0x08);
    /// RC RDMA_WRITE_ONLY.
    pub const WRITE_ONLY: Self = Self(0x0a);
    /// RC RDMA_READ_REQUEST.
    pub const READ_REQUEST: Self = Self(0x0c);
    /// RC RDMA_READ_RESPONSE_FIRST.
    pub const READ_RESPONSE_FIRST: Self = Self(0x0d);
    /// RC RDMA_READ_RESPONSE_MIDDLE.
    pub const READ_RESPONSE_MIDDLE: Self = Self(0x0e);
    /// RC RDMA_READ_RESPONSE_LAST.
    pub const READ_RESPONSE_LAST: Self = Self(0x0f);
    /// RC RDMA_READ_RESPONSE_ONLY.
    pub const READ_RESPONSE_ONLY: Self = Self(0x10);
    /// RC ACKNOWLEDGE: an ACK or, by its AETH, a NAK.
    pub const ACKNOWLEDGE: Self = Self(0x11);
    /// RC ATOMIC_ACKNOWLEDGE.
    pub const ATOMIC_ACKNOWLEDGE: Self = Self(0x12);
    /// RC CMP_SWAP.
    pub const COMPARE_SWAP: Self = Self(0x13);
    /// RC FETCH_ADD.
    pub const FETCH_ADD: Self = Self(0x14);
    /// UD SEND_ONLY.
    pub const UD_SEND_ONLY: Self = Self(0x64);
    /// Congestion notification packet.
    pub const CNP: Self = Self(0x81);

    /// The opcode of a BTH's first byte, or `None` where no such opcode is defined.
    #[inline(always)]
    pub fn new(byte: u8) -> Option<Self> {
        if TABLE[byte as usize].flags & KNOWN == 0 { None } else { Some(Self(byte)) }
    }

    /// The byte on the wire.
    #[inline(always)]
    pub const fn get(self) -> u8 {
        self.0
    }

    #[inline(always)]
    fn has(self, flag: u16) -> bool {
        TABLE[self.0 as usize].flags & flag != 0
    }

    /// The transport service.
    #[inline(always)]
    pub const fn service(self) -> Service {
        match self.0 >> 5 {
            0 => Service::Rc,
            1 => Service::Uc,
            2 => Service::Rd,
            3 => Service::Ud,
            4 => Service::Cnp,
            _ => Service::Xrc,
        }
    }

    /// Request, response or CNP.
    #[inline(always)]
    pub fn kind(self) -> Kind {
        if self.has(CNP) {
            Kind::Cnp
        } else if self.has(RESPONSE) {
            Kind::Response
        } else {
            Kind::Request
        }
    }

    /// Where in its message the packet stands.
    #[inline(always)]
    pub fn position(self) -> Position {
        if self.has(FIRST) {
            Position::First
        } else if self.has(MIDDLE) {
            Position::Middle
        } else if self.has(LAST) {
            Position::Last
        } else {
            Position::Only
        }
    }

    /// Whether this is a READ_REQUEST of any service.
    #[inline(always)]
    pub const fn is_read_request(self) -> bool {
        self.0 & 0x1f == 0x0c
    }

    /// Whether this is an ACKNOWLEDGE of any service: an ACK or, by its AETH, a NAK.
    #[inline(always)]
    pub const fn is_acknowledge(self) -> bool {
        self.0 & 0x1f == 0x11
    }

    /// Whether this is an ATOMIC_ACKNOWLEDGE of any service.
    #[inline(always)]
    pub const fn is_atomic_acknowledge(self) -> bool {
        self.0 & 0x1f == 0x12
    }

    /// Whether this is a CMP_SWAP or FETCH_ADD of any service.
    #[inline(always)]
    pub const fn is_atomic_request(self) -> bool {
        matches!(self.0 & 0x1f, 0x13 | 0x14)
    }

    /// Whether the packet may carry a payload.
    #[inline(always)]
    pub fn may_carry_payload(self) -> bool {
        self.has(PAYLOAD)
    }

    /// Whether the payload must be exactly one path MTU (FIRST and MIDDLE).
    #[inline(always)]
    pub fn fills_pmtu(self) -> bool {
        self.has(FULL)
    }

    /// Whether an empty payload is invalid (LAST).
    #[inline(always)]
    pub fn needs_payload(self) -> bool {
        self.has(NONEMPTY | FULL)
    }

    /// Whether the payload must be exactly eight bytes (ATOMIC_WRITE).
    #[inline(always)]
    pub fn needs_eight_bytes(self) -> bool {
        self.has(EIGHT)
    }

    /// Length of the extension headers between BTH and payload, in bytes (for a CNP its 16 reserved bytes).
    #[inline(always)]
    pub fn ext_len(self) -> usize {
        TABLE[self.0 as usize].ext_len as usize
    }

    /// Offset of the AETH behind the BTH.
    #[inline(always)]
    pub(super) fn aeth_at(self) -> Option<usize> {
        self.header_at(AETH)
    }

    /// Offset of the RETH behind the BTH.
    #[inline(always)]
    pub(super) fn reth_at(self) -> Option<usize> {
        self.header_at(RETH)
    }

    /// Offset of the AtomicETH behind the BTH.
    #[inline(always)]
    pub(super) fn atomic_at(self) -> Option<usize> {
        self.header_at(ATOMIC)
    }

    /// Offset of the DETH behind the BTH (UD only; the DETH of RD is of no use to us).
    #[inline(always)]
    pub(super) fn deth_at(self) -> Option<usize> {
        self.header_at(DETH)
    }

    #[inline(always)]
    fn header_at(self, flag: u16) -> Option<usize> {
        let row = TABLE[self.0 as usize];
        if row.flags & flag == 0 { None } else { Some(row.header_at as usize) }
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#04x}", self.0)
    }
}
