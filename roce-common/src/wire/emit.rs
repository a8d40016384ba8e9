//! Builders: the other direction of the parser. The BPF programs make their CNPs with them, the tests whole dialogues.

use network_types::{eth::EthHdr, ip::Ipv4Hdr, ip::Ipv6Hdr, udp::UdpHdr};

use super::{Aeth, AtomicEth, BTH_LEN, Bth, CNP_UDP_LEN, Deth, ICRC_LEN, IpVersion, Opcode, Reth, UDP_PORT, icrc};
use crate::{
    psn::Psn,
    units::{Addr, Qpn},
};

/// Length of a CNP frame over IPv4.
pub const CNP_FRAME_V4: usize = EthHdr::LEN + Ipv4Hdr::LEN + CNP_UDP_LEN;
/// Length of a CNP frame over IPv6.
pub const CNP_FRAME_V6: usize = EthHdr::LEN + Ipv6Hdr::LEN + CNP_UDP_LEN;
impl Bth {
    /// A BTH with the default partition key and every flag clear.
    #[inline(always)]
    pub const fn new(opcode: Opcode, dest_qp: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            mig_req: false,
            pad: 0,
            pkey: 0xffff,
            fecn: false,
            becn: false,
            dest_qp,
            ack_req: false,
            psn,
        }
    }

    /// The header on the wire.
    #[inline(always)]
    pub const fn to_bytes(&self) -> [u8; BTH_LEN] {
        let key = self.pkey.to_be_bytes();
        let qp = self.dest_qp.get().to_be_bytes();
        let psn = self.psn.get().to_be_bytes();
        [
            self.opcode.get(),
            (self.solicited as u8) << 7 | (self.mig_req as u8) << 6 | (self.pad & 3) << 4,
            key[0],
            key[1],
            (self.fecn as u8) << 7 | (self.becn as u8) << 6,
            qp[1],
            qp[2],
            qp[3],
            (self.ack_req as u8) << 7,
            psn[1],
            psn[2],
            psn[3],
        ]
    }
}

impl Aeth {
    /// The header on the wire.
    pub const fn to_bytes(self) -> [u8; 4] {
        let msn = self.msn.to_be_bytes();
        [self.raw_syndrome, msn[1], msn[2], msn[3]]
    }
}

/// Where a packet goes and comes from, below the transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    /// Source MAC address.
    pub src_mac: [u8; 6],
    /// Destination MAC address.
    pub dst_mac: [u8; 6],
    /// Source address; both addresses must be of one version.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
    /// ToS or traffic class.
    pub tos: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// IPv4 identification.
    pub ip_id: u16,
    /// UDP source port.
    pub src_port: u16,
}

/// The extension headers a packet may carry; emitted in wire order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ext {
    /// XRCETH: the shared receive queue.
    pub xrc_srq: Option<Qpn>,
    /// RETH.
    pub reth: Option<Reth>,
    /// DETH.
    pub deth: Option<Deth>,
    /// AtomicETH.
    pub atomic: Option<AtomicEth>,
    /// AETH.
    pub aeth: Option<Aeth>,
    /// AtomicAckETH: the original value.
    pub atomic_ack: Option<u64>,
    /// ImmDt or IETH.
    pub immediate: Option<u32>,
}

/// Why a packet could not be built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmitError {
    /// The buffer is too small; the frame needs this many bytes.
    BufferTooSmall(usize),
    /// The extension headers given are not those of the opcode.
    WrongHeaders(Opcode),
    /// The datagram would exceed 65,535 bytes.
    TooLong,
}

impl core::fmt::Display for EmitError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::BufferTooSmall(n) => write!(f, "buffer too small: the frame needs {n} bytes"),
            Self::WrongHeaders(op) => write!(f, "the extension headers given are not those of opcode {op:?}"),
            Self::TooLong => f.write_str("the UDP datagram would exceed 65,535 bytes"),
        }
    }
}

impl core::error::Error for EmitError {}

/// Writes the whole Ethernet frame into `out` and returns its length. The pad count of `bth` is set from the payload;
/// the UDP checksum is 0, as rxe and hardware send it; DF is set.
///
/// # Errors
/// See [`EmitError`]; nothing is written then.
pub fn frame(path: &Path, bth: &Bth, ext: &Ext, payload: &[u8], out: &mut [u8]) -> Result<usize, EmitError> {
    let version = version_of(path);
    let ext_len = ext_len(ext);
    if ext_len != bth.opcode.ext_len() {
        return Err(EmitError::WrongHeaders(bth.opcode));
    }
    let pad = payload.len().wrapping_neg() & 3;
    let udp_len = UdpHdr::LEN + BTH_LEN + ext_len + payload.len() + pad + ICRC_LEN;
    let l4 = EthHdr::LEN + ip_len(version);
    let total = l4 + udp_len;
    if total > usize::from(u16::MAX) {
        return Err(EmitError::TooLong);
    }
    let Some(out) = out.get_mut(..total) else {
        return Err(EmitError::BufferTooSmall(total));
    };
    let mut w = Writer { out, at: 0 };
    w.put(&ethernet(path, version));
    match version {
        IpVersion::V4 => w.put(&ipv4(path, udp_len as u16)),
        IpVersion::V6 => w.put(&ipv6(path, udp_len as u16)),
    }
    w.put(&udp(path, udp_len as u16));
    w.put(&Bth { pad: pad as u8, ..*bth }.to_bytes());
    if let Some(srq) = ext.xrc_srq {
        w.put(&srq.get().to_be_bytes());
    }
    if let Some(d) = ext.deth {
        w.put(&d.qkey.to_be_bytes());
        w.put(&d.src_qp.get().to_be_bytes());
    }
    if let Some(r) = ext.reth {
        w.put(&r.va.to_be_bytes());
        w.put(&r.rkey.to_be_bytes());
        w.put(&r.dma_len.to_be_bytes());
    }
    if let Some(a) = ext.atomic {
        w.put(&a.va.to_be_bytes());
        w.put(&a.rkey.to_be_bytes());
        w.put(&a.swap_or_add.to_be_bytes());
        w.put(&a.compare.to_be_bytes());
    }
    if let Some(a) = ext.aeth {
        w.put(&a.to_bytes());
    }
    if let Some(v) = ext.atomic_ack {
        w.put(&v.to_be_bytes());
    }
    if let Some(v) = ext.immediate {
        w.put(&v.to_be_bytes());
    }
    w.put(payload);
    w.put(&[0; 3][..pad]);
    let icrc = match super::parse(&w.out[..]) {
        super::Verdict::Roce(p) => icrc::expected(w.out, &p).unwrap_or_default(),
        _ => return Err(EmitError::WrongHeaders(bth.opcode)),
    };
    w.put(&icrc);
    Ok(total)
}

struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        if let Some(room) = self.out.get_mut(self.at..self.at + bytes.len()) {
            room.copy_from_slice(bytes);
        }
        self.at += bytes.len();
    }
}

fn ext_len(ext: &Ext) -> usize {
    let mut n = 0;
    n += if ext.xrc_srq.is_some() { 4 } else { 0 };
    n += if ext.deth.is_some() { 8 } else { 0 };
    n += if ext.reth.is_some() { 16 } else { 0 };
    n += if ext.atomic.is_some() { 28 } else { 0 };
    n += if ext.aeth.is_some() { 4 } else { 0 };
    n += if ext.atomic_ack.is_some() { 8 } else { 0 };
    n += if ext.immediate.is_some() { 4 } else { 0 };
    n
}

fn version_of(path: &Path) -> IpVersion {
    if path.src.as_v4().is_some() && path.dst.as_v4().is_some() { IpVersion::V4 } else { IpVersion::V6 }
}

const fn ip_len(version: IpVersion) -> usize {
    match version {
        IpVersion::V4 => Ipv4Hdr::LEN,
        IpVersion::V6 => Ipv6Hdr::LEN,
    }
}

/// Writes a CNP towards `dest_qp`, the queue pair that sent the congested data, and returns the length of the frame:
/// [`CNP_FRAME_V4`] or [`CNP_FRAME_V6`]. Works in place, since a BPF stack has no room for a frame.
#[inline(always)]
pub fn cnp(path: &Path, version: IpVersion, dest_qp: Qpn, out: &mut [u8; CNP_FRAME_V6]) -> usize {
    let mut bth = Bth::new(Opcode::CNP, dest_qp, Psn::new(0));
    bth.becn = true;
    out[..14].copy_from_slice(&ethernet(path, version));
    match version {
        IpVersion::V4 => {
            out[14..34].copy_from_slice(&ipv4(path, CNP_UDP_LEN as u16));
            out[34..42].copy_from_slice(&udp(path, CNP_UDP_LEN as u16));
            out[42..54].copy_from_slice(&bth.to_bytes());
            out[54..70].fill(0);
            let covered = out.first_chunk::<70>().and_then(|o| o.last_chunk());
            let icrc = covered.map_or([0; ICRC_LEN], icrc::of_cnp_v4);
            out[70..74].copy_from_slice(&icrc);
            CNP_FRAME_V4
        }
        IpVersion::V6 => {
            out[14..54].copy_from_slice(&ipv6(path, CNP_UDP_LEN as u16));
            out[54..62].copy_from_slice(&udp(path, CNP_UDP_LEN as u16));
            out[62..74].copy_from_slice(&bth.to_bytes());
            out[74..90].fill(0);
            let covered = out.first_chunk::<90>().and_then(|o| o.last_chunk());
            let icrc = covered.map_or([0; ICRC_LEN], icrc::of_cnp_v6);
            out[90..94].copy_from_slice(&icrc);
            CNP_FRAME_V6
        }
    }
}

#[inline(always)]
fn ethernet(path: &Path, version: IpVersion) -> [u8; EthHdr::LEN] {
    let d = path.dst_mac;
    let s = path.src_mac;
    let [t0, t1] = match version {
        IpVersion::V4 => [0x08, 0x00],
        IpVersion::V6 => [0x86, 0xdd],
    };
    [d[0], d[1], d[2], d[3], d[4], d[5], s[0], s[1], s[2], s[3], s[4], s[5], t0, t1]
}

#[inline(always)]
fn ipv4(path: &Path, udp_len: u16) -> [u8; Ipv4Hdr::LEN] {
    let [l0, l1] = (udp_len + Ipv4Hdr::LEN as u16).to_be_bytes();
    let [i0, i1] = path.ip_id.to_be_bytes();
    let s = path.src.0;
    let d = path.dst.0;
    let mut h = [
        0x45, path.tos, l0, l1, i0, i1, 0x40, 0, path.ttl, 17, 0, 0, s[12], s[13], s[14], s[15], d[12], d[13], d[14],
        d[15],
    ];
    let mut sum = 0u32;
    let mut i = 0;
    while i < Ipv4Hdr::LEN {
        sum += u32::from(u16::from_be_bytes([h[i], h[i + 1]]));
        i += 2;
    }
    let [c0, c1] = super::checksum::fold(sum).to_be_bytes();
    h[10] = c0;
    h[11] = c1;
    h
}

#[inline(always)]
fn ipv6(path: &Path, udp_len: u16) -> [u8; Ipv6Hdr::LEN] {
    let mut h = [0u8; Ipv6Hdr::LEN];
    h[0] = 0x60 | path.tos >> 4;
    h[1] = path.tos << 4;
    let [l0, l1] = udp_len.to_be_bytes();
    h[4] = l0;
    h[5] = l1;
    h[6] = 17;
    h[7] = path.ttl;
    h[8..24].copy_from_slice(&path.src.0);
    h[24..40].copy_from_slice(&path.dst.0);
    h
}

#[inline(always)]
fn udp(path: &Path, udp_len: u16) -> [u8; UdpHdr::LEN] {
    let [s0, s1] = path.src_port.to_be_bytes();
    let [d0, d1] = UDP_PORT.to_be_bytes();
    let [l0, l1] = udp_len.to_be_bytes();
    [s0, s1, d0, d1, l0, l1, 0, 0]
}
