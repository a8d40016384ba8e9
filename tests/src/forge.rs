//! Frames that no endpoint would send.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::Result;
use roce_common::{
    psn::Psn,
    units::{Addr, Qpn},
    wire::{
        self, Aeth, Bth, IpVersion, Opcode, Reth, Verdict,
        emit::{self, CNP_FRAME_V6, Ext, Path},
        icrc,
    },
};

use crate::{
    endpoint::{Sender, Sent},
    lab::HostPort,
};

/// Longest frame.
const BUFFER: usize = 9_216;

/// A packet socket of a host, and what its frames have in common.
#[derive(Debug)]
pub struct Forger {
    sender: Sender,
    /// Addresses, ToS and ports of what is made next.
    pub path: Path,
}

impl Forger {
    /// Sends through `from`, with its own address, to `to`.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn new(from: &HostPort, to: IpAddr) -> Result<Self> {
        let sender = from.port.ns.run(|| Ok(Sender::open(from.port.index, 1_500)?))?;
        let path = Path {
            src_mac: from.port.mac,
            dst_mac: from.next_hop_mac,
            src: Addr::from(from.address(to.is_ipv6())),
            dst: Addr::from(to),
            tos: 2,
            ttl: 64,
            ip_id: 1,
            src_port: 0xc123,
        };
        Ok(Self { sender, path })
    }

    /// Sends a frame as it is, however long the interface makes us wait.
    pub fn send(&self, frame: &[u8]) {
        while self.sender.send(frame) == Sent::Blocked {}
    }

    /// A CNP for `qpn`.
    pub fn cnp(&self, qpn: u32) -> Vec<u8> {
        let version = if self.path.src.as_v4().is_some() { IpVersion::V4 } else { IpVersion::V6 };
        let mut frame = [0; CNP_FRAME_V6];
        let n = emit::cnp(&self.path, version, Qpn::new(qpn), &mut frame);
        frame[..n].to_vec()
    }

    /// A packet with one RETH where its opcode has one.
    ///
    /// # Panics
    /// When the opcode needs other headers.
    pub fn packet(&self, opcode: Opcode, qpn: u32, psn: u32, dma_len: u32, payload: &[u8]) -> Vec<u8> {
        let reth = Reth { va: 0, rkey: 0, dma_len };
        let ext = Ext {
            reth: matches!(opcode, Opcode::READ_REQUEST | Opcode::WRITE_FIRST | Opcode::WRITE_ONLY).then_some(reth),
            ..Ext::default()
        };
        let mut frame = vec![0; BUFFER];
        let bth = Bth::new(opcode, Qpn::new(qpn), Psn::new(psn));
        let n = emit::frame(&self.path, &bth, &ext, payload, &mut frame).expect("headers of the opcode");
        frame.truncate(n);
        frame
    }

    /// A whole WRITE of one packet.
    pub fn write(&self, qpn: u32, psn: u32, payload: &[u8]) -> Vec<u8> {
        self.packet(Opcode::WRITE_ONLY, qpn, psn, payload.len() as u32, payload)
    }
}

impl Forger {
    /// An ACKNOWLEDGE for `qpn` with this syndrome byte.
    ///
    /// # Panics
    /// Never: the headers are those of the opcode.
    pub fn acknowledge(&self, qpn: u32, psn: u32, raw_syndrome: u8) -> Vec<u8> {
        let ext = Ext { aeth: Some(Aeth { raw_syndrome, msn: 1 }), ..Ext::default() };
        let mut frame = vec![0; BUFFER];
        let bth = Bth::new(Opcode::ACKNOWLEDGE, Qpn::new(qpn), Psn::new(psn));
        let n = emit::frame(&self.path, &bth, &ext, &[], &mut frame).expect("headers of the opcode");
        frame.truncate(n);
        frame
    }
}

/// Changes a frame and makes its ICRC right again, where it still has one.
pub fn altered(frame: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = frame.to_vec();
    change(&mut frame);
    if let Verdict::Roce(p) = wire::parse(&frame[..])
        && let Some(right) = icrc::expected(&frame, &p)
    {
        let at = p.icrc_offset();
        frame[at..at + 4].copy_from_slice(&right);
    }
    frame
}

/// The frame with an 802.1Q tag of `vlan`.
pub fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    let mut out = frame[..12].to_vec();
    out.extend([0x81, 0x00]);
    out.extend(vlan.to_be_bytes());
    out.extend(&frame[12..]);
    out
}

/// Malformed in every way there is, by the name of its counter.
pub fn malformed(forger: &Forger) -> BTreeMap<&'static str, Vec<u8>> {
    let (l3, l4, bth) = (14, 34, 42);
    let write = forger.write(0x11, 5, &[0; 32]);
    let with = |change: &dyn Fn(&mut Vec<u8>)| altered(&write, change);
    BTreeMap::from([
        (
            "truncated_header",
            with(&|f| {
                f.truncate(bth + 12);
                f[l3 + 2..l3 + 4].copy_from_slice(&40u16.to_be_bytes());
                f[l4 + 4..l4 + 6].copy_from_slice(&20u16.to_be_bytes());
            }),
        ),
        ("bad_length", with(&|f| f[l4 + 5] += 4)),
        ("bad_version", with(&|f| f[bth + 1] |= 1)),
        ("unknown_opcode", with(&|f| f[bth] = 0x1f)),
        ("pad_beyond_payload", altered(&forger.write(0x11, 5, &[]), |f| f[bth + 1] |= 0x30)),
        (
            "read_too_long",
            altered(&forger.packet(Opcode::READ_REQUEST, 0x11, 5, 64, &[]), |f| {
                f[bth + 24..bth + 28].copy_from_slice(&0x8000_0001u32.to_be_bytes());
            }),
        ),
        ("udp_fragment", with(&|f| f[l3 + 6] = 0x20)),
    ])
}

/// A well-formed frame with some bytes changed or cut off, behind the Ethernet header; the same number makes the same.
pub fn mutated(base: &[Vec<u8>], number: u32) -> Vec<u8> {
    let mut state = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = |below: usize| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below
    };
    let mut frame = base[random(base.len())].clone();
    for _ in 0..1 + random(3) {
        let at = 14 + random(frame.len().min(90) - 14);
        frame[at] = random(256) as u8;
    }
    if random(8) == 0 {
        frame.truncate(34 + random(frame.len() - 34));
    }
    frame
}
