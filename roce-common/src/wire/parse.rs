//! The parser: frame in, [`Verdict`] out. It reads nothing past the shorter of the IP and the UDP length, and it never
//! guesses: what it does not understand it names.

use network_types::{eth::EthHdr, ip::Ipv4Hdr, ip::Ipv6Hdr, udp::UdpHdr, vlan::VlanHdr};

use super::{
    Aeth, AtomicEth, BTH_LEN, Bth, Bytes, CNP_UDP_LEN, Deth, ETHERTYPE_ROCEV1, ICRC_LEN, Kind, Opcode, Reth, UDP_PORT,
};
use crate::{
    psn::Psn,
    units::{Addr, Dscp, Ecn, Qpn},
};

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_QINQ: u16 = 0x88a8;
const IPPROTO_UDP: u8 = 17;
/// IPv4 more-fragments flag and fragment offset.
const IPV4_FRAGMENT_MASK: u16 = 0x3fff;
/// A READ may ask for at most 2^31 bytes (InfiniBand's largest message).
const MAX_READ_LEN: u32 = 1 << 31;

/// Why a frame that claims to be RoCEv2 is not one we can use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Malformed {
    /// The UDP datagram is too short for the BTH, the opcode's extension headers and the ICRC.
    TruncatedHeader = 0,
    /// The capture kept too few bytes to read the headers (snap length).
    TruncatedCapture = 1,
    /// IP, UDP and frame length contradict each other, or the payload length is one the opcode cannot have.
    BadLength = 2,
    /// Transport header version other than 0.
    BadVersion = 3,
    /// An opcode that does not exist.
    UnknownOpcode = 4,
    /// More pad bytes than bytes behind the headers.
    PadBeyondPayload = 5,
    /// A READ request for more than 2^31 bytes.
    ReadTooLong = 6,
    /// A fragment of a UDP datagram that is or may be for port 4791.
    UdpFragment = 7,
}

impl Malformed {
    /// Every reason, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::TruncatedHeader,
        Self::TruncatedCapture,
        Self::BadLength,
        Self::BadVersion,
        Self::UnknownOpcode,
        Self::PadBeyondPayload,
        Self::ReadTooLong,
        Self::UdpFragment,
    ];

    /// The name used in tables, JSON and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TruncatedHeader => "truncated_header",
            Self::TruncatedCapture => "truncated_capture",
            Self::BadLength => "bad_length",
            Self::BadVersion => "bad_version",
            Self::UnknownOpcode => "unknown_opcode",
            Self::PadBeyondPayload => "pad_beyond_payload",
            Self::ReadTooLong => "read_too_long",
            Self::UdpFragment => "udp_fragment",
        }
    }
}

/// IP version of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// What the frame's first byte is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// An Ethernet header.
    Ethernet,
    /// An IPv4 or IPv6 header (raw IP capture).
    Ip,
    /// Something else whose IP header starts at `offset` and whose EtherType is `ethertype` (Linux cooked capture).
    Other {
        /// EtherType of what starts at `offset`.
        ethertype: u16,
        /// Where it starts, in bytes.
        offset: usize,
    },
}

/// A well-formed RoCEv2 packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet {
    /// IP version.
    pub ip: IpVersion,
    /// Offset of the IP header in the frame.
    pub l3_offset: u16,
    /// Offset of the UDP header in the frame.
    pub l4_offset: u16,
    /// Source address.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
    /// IPv4 ToS or IPv6 traffic class.
    pub tos: u8,
    /// UDP source port.
    pub src_port: u16,
    /// UDP length, header included.
    pub udp_len: u16,
    /// Base transport header.
    pub bth: Bth,
    /// AETH where the opcode has one.
    pub aeth: Option<Aeth>,
    /// RETH where the opcode has one.
    pub reth: Option<Reth>,
    /// DETH of a UD packet.
    pub deth: Option<Deth>,
    /// Payload bytes, pad and ICRC excluded.
    pub payload_len: u16,
}

impl Packet {
    /// What [`parse_into`] fills.
    pub const EMPTY: Self = Self {
        ip: IpVersion::V4,
        l3_offset: 0,
        l4_offset: 0,
        src: Addr([0; 16]),
        dst: Addr([0; 16]),
        tos: 0,
        src_port: 0,
        udp_len: 0,
        bth: Bth::new(Opcode::SEND_FIRST, Qpn::new(0), Psn::new(0)),
        aeth: None,
        reth: None,
        deth: None,
        payload_len: 0,
    };

    /// ECN codepoint.
    #[inline(always)]
    pub const fn ecn(&self) -> Ecn {
        Ecn::of_tos(self.tos)
    }

    /// DSCP.
    #[inline(always)]
    pub const fn dscp(&self) -> Dscp {
        Dscp::of_tos(self.tos)
    }

    /// Offset of the BTH in the frame.
    #[inline(always)]
    pub const fn bth_offset(&self) -> usize {
        self.l4_offset as usize + UdpHdr::LEN
    }

    /// Offset of the first byte behind the extension headers.
    #[inline(always)]
    pub fn payload_offset(&self) -> usize {
        self.bth_offset() + BTH_LEN + self.bth.opcode.ext_len()
    }

    /// Bytes of the frame before the payload, by the lengths: the same as [`Packet::payload_offset`], without the table.
    #[inline(always)]
    pub const fn headers_len(&self) -> usize {
        self.icrc_offset().wrapping_sub(self.payload_len as usize).wrapping_sub(self.bth.pad as usize)
    }

    /// Offset of the ICRC in the frame.
    #[inline(always)]
    pub const fn icrc_offset(&self) -> usize {
        self.l4_offset as usize + self.udp_len as usize - ICRC_LEN
    }

    /// The AtomicETH where the opcode has one and the source holds it.
    pub fn atomic_eth<B: Bytes + ?Sized>(&self, frame: &B) -> Option<AtomicEth> {
        let at = self.bth_offset() + BTH_LEN + self.bth.opcode.atomic_at()?;
        let head: [u8; 12] = frame.get(at)?;
        let [va @ .., k0, k1, k2, k3] = head;
        Some(AtomicEth {
            va: u64::from_be_bytes(va),
            rkey: u32::from_be_bytes([k0, k1, k2, k3]),
            swap_or_add: u64::from_be_bytes(frame.get(at + 12)?),
            compare: u64::from_be_bytes(frame.get(at + 20)?),
        })
    }
}

/// What a frame is when it is not a well-formed RoCEv2 packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Other {
    /// A RoCEv1 frame.
    RoceV1,
    /// Not RoCE: pass it untouched.
    NotRoce,
    /// It claims to be RoCEv2 and is not usable.
    Malformed(Malformed),
}

impl From<Other> for Verdict {
    fn from(other: Other) -> Self {
        match other {
            Other::RoceV1 => Self::RoceV1,
            Other::NotRoce => Self::NotRoce,
            Other::Malformed(reason) => Self::Malformed(reason),
        }
    }
}

/// What a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// A well-formed RoCEv2 packet.
    Roce(Packet),
    /// A RoCEv1 frame.
    RoceV1,
    /// Not RoCE: pass it untouched.
    NotRoce,
    /// It claims to be RoCEv2 and is not usable.
    Malformed(Malformed),
}

/// Parses an Ethernet frame.
pub fn parse<B: Bytes + ?Sized>(frame: &B) -> Verdict {
    parse_link(frame, Link::Ethernet)
}

/// Parses a frame whose first byte is what `link` says.
pub fn parse_link<B: Bytes + ?Sized>(frame: &B, link: Link) -> Verdict {
    let mut packet = Packet::EMPTY;
    match parse_into(frame, link, &mut packet) {
        Ok(()) => Verdict::Roce(packet),
        Err(other) => other.into(),
    }
}

/// Parses a frame into `out`, field by field: a BPF stack has no room for the packet and its parts.
///
/// # Errors
/// What the frame is when it is not a well-formed RoCEv2 packet; `out` holds no packet then.
#[inline(always)]
pub fn parse_into<B: Bytes + ?Sized>(frame: &B, link: Link, out: &mut Packet) -> Result<(), Other> {
    let (ethertype, l3) = behind_link(frame, link)?;
    let ip_payload = match ethertype {
        ETHERTYPE_IPV4 => ipv4(frame, l3, out)?,
        ETHERTYPE_IPV6 => ipv6(frame, l3, out)?,
        ETHERTYPE_ROCEV1 => return Err(Other::RoceV1),
        _ => return Err(Other::NotRoce),
    };
    transport(frame, ip_payload, out)
}

/// EtherType and offset of what stands behind the link layer's header.
#[inline(always)]
fn behind_link<B: Bytes + ?Sized>(frame: &B, link: Link) -> Result<(u16, usize), Other> {
    match link {
        Link::Ethernet => network_layer(frame),
        Link::Ip => match take::<B, 1>(frame, 0, Other::NotRoce)?[0] >> 4 {
            4 => Ok((ETHERTYPE_IPV4, 0)),
            6 => Ok((ETHERTYPE_IPV6, 0)),
            _ => Err(Other::NotRoce),
        },
        Link::Other { ethertype, offset } => Ok((ethertype, offset)),
    }
}

/// Of an unfragmented UDP datagram: the offset of its UDP header, its destination port, and the ToS or traffic class.
pub(super) fn any_udp<B: Bytes + ?Sized>(frame: &B, link: Link) -> Option<(usize, u16, u8)> {
    let (ethertype, l3) = behind_link(frame, link).ok()?;
    let (l4, tos) = match ethertype {
        ETHERTYPE_IPV4 => {
            let h: [u8; 10] = frame.get(l3)?;
            let header_len = usize::from(h[0] & 0x0f) * 4;
            let whole = u16::from_be_bytes([h[6], h[7]]) & IPV4_FRAGMENT_MASK == 0;
            if h[0] >> 4 != 4 || header_len < Ipv4Hdr::LEN || h[9] != IPPROTO_UDP || !whole {
                return None;
            }
            (l3 + header_len, h[1])
        }
        ETHERTYPE_IPV6 => {
            let h: [u8; 8] = frame.get(l3)?;
            if h[0] >> 4 != 6 || h[6] != IPPROTO_UDP {
                return None;
            }
            (l3 + Ipv6Hdr::LEN, h[0] << 4 | h[1] >> 4)
        }
        _ => return None,
    };
    Some((l4, u16::from_be_bytes(frame.get(l4 + 2)?), tos))
}

/// Whether an Ethernet frame is surely not RoCE, told by as few bytes as possible: no IP and no tag, another protocol than
/// UDP, or another port in a plain IPv4 header. What it does not settle, [`parse_into`] does.
#[inline(always)]
pub fn is_surely_not_roce<B: Bytes + ?Sized>(frame: &B) -> bool {
    let Some(h) = frame.get::<26>(EthHdr::LEN - 2) else { return false };
    match u16::from_be_bytes([h[0], h[1]]) {
        ETHERTYPE_IPV4 => {
            let plain = h[2] == 0x45 && h[8] & 0x3f == 0 && h[9] == 0;
            h[2] >> 4 == 4 && h[11] != IPPROTO_UDP || plain && u16::from_be_bytes([h[24], h[25]]) != UDP_PORT
        }
        ETHERTYPE_IPV6 => h[2] >> 4 == 6 && h[8] != IPPROTO_UDP,
        ETHERTYPE_VLAN | ETHERTYPE_QINQ | ETHERTYPE_ROCEV1 => false,
        _ => true,
    }
}

/// The IP destination of an Ethernet frame, whatever it carries: whom a malformed packet was for.
#[inline(always)]
pub fn destination<B: Bytes + ?Sized>(frame: &B) -> Option<Addr> {
    let (ethertype, l3) = network_layer(frame).ok()?;
    match ethertype {
        ETHERTYPE_IPV4 => Some(Addr::v4(frame.get(l3 + 16)?)),
        ETHERTYPE_IPV6 => Some(Addr(frame.get(l3 + 24)?)),
        _ => None,
    }
}

/// A missing byte: the frame ended (`ended`) or the capture did.
#[inline(always)]
fn short<B: Bytes + ?Sized>(frame: &B, end: usize, ended: Other) -> Other {
    if end > frame.wire_len() { ended } else { Other::Malformed(Malformed::TruncatedCapture) }
}

/// Reads `N` bytes at `offset`, or says why there are none.
#[inline(always)]
fn take<B: Bytes + ?Sized, const N: usize>(frame: &B, offset: usize, ended: Other) -> Result<[u8; N], Other> {
    match frame.get::<N>(offset) {
        Some(bytes) => Ok(bytes),
        None => Err(short(frame, offset + N, ended)),
    }
}

/// EtherType and offset behind the Ethernet header and at most two VLAN tags.
#[inline(always)]
fn network_layer<B: Bytes + ?Sized>(frame: &B) -> Result<(u16, usize), Other> {
    let mut ethertype = u16::from_be_bytes(take(frame, EthHdr::LEN - 2, Other::NotRoce)?);
    let mut offset = EthHdr::LEN;
    for _ in 0..2 {
        if ethertype != ETHERTYPE_VLAN && ethertype != ETHERTYPE_QINQ {
            break;
        }
        ethertype = u16::from_be_bytes(take(frame, offset + 2, Other::NotRoce)?);
        offset += VlanHdr::LEN;
    }
    Ok((ethertype, offset))
}

/// Reads the IPv4 and the UDP header; returns the length of the IP payload.
#[inline(always)]
fn ipv4<B: Bytes + ?Sized>(frame: &B, l3: usize, out: &mut Packet) -> Result<usize, Other> {
    let h: [u8; Ipv4Hdr::LEN] = take(frame, l3, Other::NotRoce)?;
    let header_len = usize::from(h[0] & 0x0f) * 4;
    if h[0] >> 4 != 4 || header_len < Ipv4Hdr::LEN || h[9] != IPPROTO_UDP {
        return Err(Other::NotRoce);
    }
    let fragment = u16::from_be_bytes([h[6], h[7]]) & IPV4_FRAGMENT_MASK;
    if fragment & 0x1fff != 0 {
        // Not the first fragment: it has no ports, so it may belong to anything.
        return Err(Other::Malformed(Malformed::UdpFragment));
    }
    udp(frame, l3 + header_len, out)?;
    if fragment != 0 {
        return Err(Other::Malformed(Malformed::UdpFragment));
    }
    out.ip = IpVersion::V4;
    out.l3_offset = l3 as u16;
    out.src = Addr::v4([h[12], h[13], h[14], h[15]]);
    out.dst = Addr::v4([h[16], h[17], h[18], h[19]]);
    out.tos = h[1];
    let total_len = usize::from(u16::from_be_bytes([h[2], h[3]]));
    if total_len < header_len {
        return Err(Other::Malformed(Malformed::BadLength));
    }
    Ok(total_len - header_len)
}

/// Reads the IPv6 and the UDP header; returns the length of the IP payload.
#[inline(always)]
fn ipv6<B: Bytes + ?Sized>(frame: &B, l3: usize, out: &mut Packet) -> Result<usize, Other> {
    let h: [u8; 8] = take(frame, l3, Other::NotRoce)?;
    // An extension header hides the UDP header from RoCE hardware and from us alike: passed, not RoCE.
    if h[0] >> 4 != 6 || h[6] != IPPROTO_UDP {
        return Err(Other::NotRoce);
    }
    udp(frame, l3 + Ipv6Hdr::LEN, out)?;
    out.ip = IpVersion::V6;
    out.l3_offset = l3 as u16;
    out.src = Addr(take(frame, l3 + 8, Other::NotRoce)?);
    out.dst = Addr(take(frame, l3 + 24, Other::NotRoce)?);
    out.tos = h[0] << 4 | h[1] >> 4;
    Ok(usize::from(u16::from_be_bytes([h[4], h[5]])))
}

/// Reads the UDP header when it is for us.
#[inline(always)]
fn udp<B: Bytes + ?Sized>(frame: &B, l4: usize, out: &mut Packet) -> Result<(), Other> {
    let h: [u8; 6] = take(frame, l4, Other::NotRoce)?;
    if u16::from_be_bytes([h[2], h[3]]) != UDP_PORT {
        return Err(Other::NotRoce);
    }
    out.l4_offset = l4 as u16;
    out.src_port = u16::from_be_bytes([h[0], h[1]]);
    out.udp_len = u16::from_be_bytes([h[4], h[5]]);
    Ok(())
}

/// Reads the BTH and the extension headers of a datagram for our port.
#[inline(always)]
fn transport<B: Bytes + ?Sized>(frame: &B, ip_payload: usize, out: &mut Packet) -> Result<(), Other> {
    use Malformed::{BadLength, BadVersion, PadBeyondPayload, ReadTooLong, TruncatedHeader, UnknownOpcode};
    let bad = |reason| Err(Other::Malformed(reason));
    let udp_len = usize::from(out.udp_len);
    let l4 = usize::from(out.l4_offset);
    if udp_len > ip_payload || l4 + udp_len > frame.wire_len() {
        return bad(BadLength);
    }
    if udp_len < UdpHdr::LEN + BTH_LEN + ICRC_LEN {
        return bad(TruncatedHeader);
    }
    let at = l4 + UdpHdr::LEN;
    let ended = Other::Malformed(TruncatedHeader);
    let h: [u8; BTH_LEN] = take(frame, at, ended)?;
    if h[1] & 0x0f != 0 {
        return bad(BadVersion);
    }
    let Some(opcode) = Opcode::new(h[0]) else {
        return bad(UnknownOpcode);
    };
    let pad = h[1] >> 4 & 3;
    out.bth = Bth {
        opcode,
        solicited: h[1] & 0x80 != 0,
        mig_req: h[1] & 0x40 != 0,
        pad,
        pkey: u16::from_be_bytes([h[2], h[3]]),
        fecn: h[4] & 0x80 != 0,
        becn: h[4] & 0x40 != 0,
        dest_qp: Qpn::new(u32::from_be_bytes([0, h[5], h[6], h[7]])),
        ack_req: h[8] & 0x80 != 0,
        psn: Psn::new(u32::from_be_bytes([0, h[9], h[10], h[11]])),
    };
    let headers = UdpHdr::LEN + BTH_LEN + opcode.ext_len() + ICRC_LEN;
    if udp_len < headers {
        return bad(TruncatedHeader);
    }
    let behind_headers = udp_len - headers;
    if behind_headers < usize::from(pad) {
        return bad(PadBeyondPayload);
    }
    let payload_len = behind_headers - usize::from(pad);
    if !length_fits(opcode, udp_len, behind_headers, payload_len) {
        return bad(BadLength);
    }
    out.payload_len = payload_len as u16;
    let ext = at + BTH_LEN;
    out.aeth = match opcode.aeth_at() {
        Some(o) => {
            let a: [u8; 4] = take(frame, ext + o, ended)?;
            Some(Aeth { raw_syndrome: a[0], msn: u32::from_be_bytes([0, a[1], a[2], a[3]]) })
        }
        None => None,
    };
    out.reth = match opcode.reth_at() {
        Some(o) => {
            let r: [u8; 16] = take(frame, ext + o, ended)?;
            let dma_len = u32::from_be_bytes([r[12], r[13], r[14], r[15]]);
            if opcode.is_read_request() && dma_len > MAX_READ_LEN {
                return bad(ReadTooLong);
            }
            Some(Reth {
                va: u64::from_be_bytes([r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]]),
                rkey: u32::from_be_bytes([r[8], r[9], r[10], r[11]]),
                dma_len,
            })
        }
        None => None,
    };
    out.deth = match opcode.deth_at() {
        Some(o) => {
            let d: [u8; 8] = take(frame, ext + o, ended)?;
            Some(Deth {
                qkey: u32::from_be_bytes([d[0], d[1], d[2], d[3]]),
                src_qp: Qpn::new(u32::from_be_bytes([0, d[5], d[6], d[7]])),
            })
        }
        None => None,
    };
    Ok(())
}

/// Whether the opcode may have a payload of this length: none, some, exactly eight bytes, always padded to four.
#[inline(always)]
fn length_fits(opcode: Opcode, udp_len: usize, behind_headers: usize, payload_len: usize) -> bool {
    if opcode.kind() == Kind::Cnp {
        return udp_len == CNP_UDP_LEN;
    }
    if !opcode.may_carry_payload() {
        return behind_headers == 0;
    }
    behind_headers.is_multiple_of(4)
        && !(opcode.needs_payload() && payload_len == 0)
        && !(opcode.needs_eight_bytes() && payload_len != 8)
}
