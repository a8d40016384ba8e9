//! Newtypes for the quantities of the field, so that a rate cannot be passed where a time is meant.

use core::fmt;

/// A queue pair number, 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Qpn(u32);

impl Qpn {
    /// QP1, the general services interface: connection management and other MADs.
    pub const GSI: Self = Self(1);
    /// The multicast QPN.
    pub const MULTICAST: Self = Self(0xff_ffff);

    /// The low 24 bits of `value`.
    #[inline(always)]
    pub const fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// The number, below 2^24.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A point on or a span of a monotonic clock, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// One second.
    pub const SECOND: Self = Self(1_000_000_000);

    /// A span of `n` microseconds.
    pub const fn from_micros(n: u64) -> Self {
        Self(n.saturating_mul(1_000))
    }

    /// A span of `n` milliseconds.
    pub const fn from_millis(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000))
    }

    /// `self − earlier`, zero when `earlier` is later.
    #[inline(always)]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

/// A rate in bytes per second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Rate(u64);

impl Rate {
    /// A rate of `n` bytes per second.
    #[inline(always)]
    pub const fn from_bytes_per_sec(n: u64) -> Self {
        Self(n)
    }

    /// A rate of `n` bits per second, rounded down to whole bytes.
    pub const fn from_bits_per_sec(n: u64) -> Self {
        Self(n / 8)
    }

    /// Bytes per second.
    #[inline(always)]
    pub const fn bytes_per_sec(self) -> u64 {
        self.0
    }

    /// Bits per second, saturating.
    pub const fn bits_per_sec(self) -> u64 {
        self.0.saturating_mul(8)
    }

    /// The time `bytes` take at this rate, in nanoseconds, rounded up; saturates, and is [`u64::MAX`] at rate zero.
    ///
    /// 64-bit arithmetic only (BPF links no 128-bit multiply): exact for `bytes` below 2^34.
    #[inline(always)]
    pub const fn time_for(self, bytes: u64) -> Nanos {
        if self.0 == 0 {
            return Nanos(u64::MAX);
        }
        // Not checked_mul: its overflow test is a 128-bit multiply.
        if bytes > u64::MAX / 1_000_000_000 {
            return Nanos(u64::MAX);
        }
        Nanos((bytes * 1_000_000_000).div_ceil(self.0))
    }

    /// The bytes that `time` carries at this rate, rounded down; saturates. 64-bit arithmetic only: exact for rates below
    /// 2^34 bytes per second, above to 33 bits.
    pub const fn bytes_in(self, time: Nanos) -> u64 {
        let (seconds, rest) = (time.0 / 1_000_000_000, time.0 % 1_000_000_000);
        // A factor of 34 bits and one of 30: their product fits.
        let shift = (u64::BITS - self.0.leading_zeros()).saturating_sub(34);
        let part = ((self.0 >> shift) * rest / 1_000_000_000) << shift;
        self.0.saturating_mul(seconds).saturating_add(part)
    }
}

/// A differentiated services code point, 6 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Dscp(u8);

impl Dscp {
    /// That of CNPs, which NIC vendors set by default.
    pub const CNP: Self = Self(48);

    /// `value` when it fits 6 bits.
    pub const fn new(value: u8) -> Option<Self> {
        if value < 64 { Some(Self(value)) } else { None }
    }

    /// The DSCP of a ToS or traffic-class byte.
    #[inline(always)]
    pub const fn of_tos(tos: u8) -> Self {
        Self(tos >> 2)
    }

    /// The code point, below 64.
    #[inline(always)]
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// The ECN codepoint in the low two bits of a ToS or traffic-class byte (RFC 3168).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Ecn {
    /// Not ECN-capable: a queue may only drop it.
    NotEct = 0,
    /// ECN-capable, codepoint 01.
    Ect1 = 1,
    /// ECN-capable, codepoint 10.
    Ect0 = 2,
    /// Congestion experienced.
    Ce = 3,
}

impl Ecn {
    /// The codepoint of a ToS or traffic-class byte.
    #[inline(always)]
    pub const fn of_tos(tos: u8) -> Self {
        match tos & 3 {
            0 => Self::NotEct,
            1 => Self::Ect1,
            2 => Self::Ect0,
            _ => Self::Ce,
        }
    }
}

/// An IP address; IPv4 as an IPv4-mapped IPv6 address, in network byte order.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    zerocopy::FromBytes,
    zerocopy::IntoBytes,
    zerocopy::Immutable,
    zerocopy::KnownLayout,
)]
#[repr(transparent)]
pub struct Addr(pub [u8; 16]);

impl Addr {
    /// The IPv4-mapped form of four octets.
    #[inline(always)]
    pub const fn v4(o: [u8; 4]) -> Self {
        Self([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, o[0], o[1], o[2], o[3]])
    }

    /// The four octets when this is an IPv4-mapped address.
    pub fn as_v4(&self) -> Option<[u8; 4]> {
        match self.0 {
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d] => Some([a, b, c, d]),
            _ => None,
        }
    }
}

impl From<core::net::IpAddr> for Addr {
    fn from(ip: core::net::IpAddr) -> Self {
        match ip {
            core::net::IpAddr::V4(v4) => Self::v4(v4.octets()),
            core::net::IpAddr::V6(v6) => Self(v6.octets()),
        }
    }
}

impl From<Addr> for core::net::IpAddr {
    fn from(a: Addr) -> Self {
        core::net::Ipv6Addr::from(a.0).to_canonical()
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&core::net::IpAddr::from(*self), f)
    }
}

impl fmt::Debug for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
