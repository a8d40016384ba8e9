//! The invariant CRC (Linux `rxe_icrc.c`): CRC-32 over the packet with every field a router may change set to ones.

use super::{BTH_LEN, CNP_UDP_LEN, ICRC_LEN, IpVersion, Packet};
use network_types::{ip::Ipv4Hdr, ip::Ipv6Hdr, udp::UdpHdr};

/// CRC-32, reflected, polynomial 0xEDB88320.
static TABLE: [u32; 256] = build_table();

/// Register after the eight bytes of ones that stand for the missing LRH.
const AFTER_LRH: u32 = 0xdebb_20e3;

const fn build_table() -> [u32; 256] {
    let mut table = [0u32; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

#[inline(always)]
const fn mask_v4(header: &mut [u8; Ipv4Hdr::LEN]) {
    header[1] = 0xff;
    header[8] = 0xff;
    header[10] = 0xff;
    header[11] = 0xff;
}

#[inline(always)]
const fn mask_v6(header: &mut [u8; Ipv6Hdr::LEN]) {
    header[0] |= 0x0f;
    header[1] = 0xff;
    header[2] = 0xff;
    header[3] = 0xff;
    header[7] = 0xff;
}

#[inline(always)]
const fn mask_udp(header: &mut [u8; UdpHdr::LEN]) {
    header[6] = 0xff;
    header[7] = 0xff;
}

#[inline(always)]
const fn mask_bth(header: &mut [u8; BTH_LEN]) {
    header[4] = 0xff;
}

/// Length of a CNP from its IP header on, over IPv4 without options.
pub const CNP_LEN_V4: usize = Ipv4Hdr::LEN + CNP_UDP_LEN;
/// Length of a CNP from its IP header on, over IPv6.
pub const CNP_LEN_V6: usize = Ipv6Hdr::LEN + CNP_UDP_LEN;

/// The ICRC of a CNP over IPv4, of which `datagram` is what comes before it, from the IP header on.
#[inline(always)]
pub fn of_cnp_v4(datagram: &[u8; CNP_LEN_V4 - ICRC_LEN]) -> [u8; ICRC_LEN] {
    let masked = |i| match i {
        1 | 8 | 10 | 11 | 26 | 27 | 32 => 0xff,
        _ => 0,
    };
    Icrc::start().masked(datagram, masked).finish()
}

/// The same over IPv6.
#[inline(always)]
pub fn of_cnp_v6(datagram: &[u8; CNP_LEN_V6 - ICRC_LEN]) -> [u8; ICRC_LEN] {
    let masked = |i| match i {
        0 => 0x0f,
        1 | 2 | 3 | 7 | 46 | 47 | 52 => 0xff,
        _ => 0,
    };
    Icrc::start().masked(datagram, masked).finish()
}

/// Whether the ICRC of a CNP is right; `datagram` begins with its IP header, which has no options, and holds
/// [`CNP_LEN_V4`] or [`CNP_LEN_V6`] bytes of it.
#[inline(always)]
pub fn is_intact_cnp(datagram: &[u8; CNP_LEN_V6], version: IpVersion) -> bool {
    let (wire, right) = match version {
        IpVersion::V4 => {
            let Some((covered, rest)) = datagram.split_first_chunk() else { return false };
            (rest.first_chunk(), of_cnp_v4(covered))
        }
        IpVersion::V6 => {
            let Some((covered, rest)) = datagram.split_first_chunk() else { return false };
            (rest.first_chunk(), of_cnp_v6(covered))
        }
    };
    wire == Some(&right)
}

/// A running ICRC.
#[derive(Clone, Copy, Debug)]
pub struct Icrc(u32);

impl Icrc {
    /// Starts behind the stand-in for the LRH.
    #[inline(always)]
    pub const fn start() -> Self {
        Self(AFTER_LRH)
    }

    /// Continues over bytes of which `mask(index)` names the bits to read as ones.
    #[inline(always)]
    pub fn masked(self, bytes: &[u8], mask: impl Fn(usize) -> u8) -> Self {
        let mut crc = self.0;
        for (i, &byte) in bytes.iter().enumerate() {
            crc = crc >> 8 ^ TABLE[(crc as u8 ^ (byte | mask(i))) as usize];
        }
        Self(crc)
    }

    /// Starts over an IPv4 header without options.
    #[inline(always)]
    pub fn v4(mut header: [u8; Ipv4Hdr::LEN]) -> Self {
        mask_v4(&mut header);
        Self::start().bytes(&header)
    }

    /// Starts over an IPv6 header.
    #[inline(always)]
    pub fn v6(mut header: [u8; Ipv6Hdr::LEN]) -> Self {
        mask_v6(&mut header);
        Self::start().bytes(&header)
    }

    /// Continues over a UDP header, its checksum masked.
    #[inline(always)]
    pub fn udp(self, mut header: [u8; UdpHdr::LEN]) -> Self {
        mask_udp(&mut header);
        self.bytes(&header)
    }

    /// Continues over a BTH, its congestion bits masked.
    #[inline(always)]
    pub fn bth(self, mut header: [u8; BTH_LEN]) -> Self {
        mask_bth(&mut header);
        self.bytes(&header)
    }

    /// Continues over bytes as sent.
    #[inline(always)]
    pub fn bytes(self, bytes: &[u8]) -> Self {
        self.masked(bytes, |_| 0)
    }

    /// The four bytes as they stand on the wire.
    #[inline(always)]
    pub const fn finish(self) -> [u8; ICRC_LEN] {
        (!self.0).to_le_bytes()
    }
}

/// The ICRC that `packet`, found in `frame`, should carry; `None` where the capture kept too few bytes or the IPv4
/// header has options (rxe and the specification disagree on them).
pub fn expected(frame: &[u8], packet: &Packet) -> Option<[u8; ICRC_LEN]> {
    let l3 = usize::from(packet.l3_offset);
    let l4 = usize::from(packet.l4_offset);
    let ip = frame.get(l3..l4)?;
    let start = match packet.ip {
        IpVersion::V4 => Icrc::v4(ip.try_into().ok()?),
        IpVersion::V6 => Icrc::v6(ip.try_into().ok()?),
    };
    let (udp, rest) = frame.get(l4..packet.icrc_offset())?.split_first_chunk()?;
    let (bth, rest) = rest.split_first_chunk()?;
    Some(start.udp(*udp).bth(*bth).bytes(rest).finish())
}

/// Whether the ICRC of `packet` is right; `None` where it cannot be told (see [`expected`]).
pub fn is_valid(frame: &[u8], packet: &Packet) -> Option<bool> {
    Some(expected(frame, packet)? == on_the_wire(frame, packet)?)
}

/// [`is_valid`] with a CRC-32 of the caller's choice, for whoever has a quicker one: `crc32(crc, bytes)` continues the
/// ordinary (zlib's) CRC-32 `crc` over `bytes`.
#[inline]
pub fn is_valid_by(frame: &[u8], packet: &Packet, crc32: impl Fn(u32, &[u8]) -> u32) -> Option<bool> {
    let wire = on_the_wire(frame, packet)?;
    let l3 = usize::from(packet.l3_offset);
    let ip_len = usize::from(packet.l4_offset).checked_sub(l3)?;
    let covered = frame.get(l3..packet.icrc_offset())?;
    // All headers that have masks in one piece.
    let mut masked = [0; Ipv6Hdr::LEN + UdpHdr::LEN + BTH_LEN];
    let headers = masked.get_mut(..ip_len + UdpHdr::LEN + BTH_LEN)?;
    let (plain, rest) = covered.split_at_checked(headers.len())?;
    headers.copy_from_slice(plain);
    let (ip, behind) = headers.split_at_mut_checked(ip_len)?;
    match packet.ip {
        IpVersion::V4 => mask_v4(ip.try_into().ok()?),
        IpVersion::V6 => mask_v6(ip.try_into().ok()?),
    }
    let (udp, bth) = behind.split_first_chunk_mut()?;
    mask_udp(udp);
    mask_bth(bth.first_chunk_mut()?);
    Some(crc32(crc32(!AFTER_LRH, headers), rest) == u32::from_le_bytes(wire))
}

fn on_the_wire(frame: &[u8], packet: &Packet) -> Option<[u8; ICRC_LEN]> {
    frame.get(packet.icrc_offset()..)?.first_chunk().copied()
}
