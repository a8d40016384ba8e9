//! Frames that no endpoint would send.

use std::net::IpAddr;

use anyhow::Result;
use roce_common::{
    psn::Psn,
    units::{Addr, Qpn},
    wire::{
        self, Bth, IpVersion, Opcode, Reth, Verdict,
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
