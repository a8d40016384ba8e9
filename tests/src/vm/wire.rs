//! What passes the switch's ports, read by code that shares nothing with what it judges.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context, Result};

use super::{Node, share};
use crate::capture::{Capture, Seen, save};

/// A running capture at the switch's end of a host's cable.
#[derive(Debug)]
pub struct Wire {
    capture: Capture,
    host_mac: [u8; 6],
}

/// Packets and payload bytes by source, destination, destination QPN and space.
pub type WireFlows = BTreeMap<(String, String, u32, &'static str), (u64, u64)>;

/// A RoCEv2 packet's headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// DSCP and ECN.
    pub tos: u8,
    /// Opcode, with its transport.
    pub opcode: u8,
    /// Destination QPN.
    pub dest_qp: u32,
    /// PSN.
    pub psn: u32,
    /// AETH syndrome, where the packet has one.
    pub syndrome: Option<u8>,
    /// Bytes of payload, without padding.
    pub payload: usize,
}

impl Header {
    /// From a frame without VLAN tags, IP options and tunnels, as rxe sends them.
    pub fn read(frame: &[u8]) -> Option<Self> {
        let (src, dst, tos, udp) = match frame.get(12..14)? {
            [8, 0] => {
                let ip = frame.get(14..34)?;
                let address =
                    |at: usize| Some(IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(ip.get(at..at + 4)?).ok()?)));
                let length = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
                (ip[0] == 0x45 && ip[9] == 17).then_some(())?;
                (address(12)?, address(16)?, ip[1], frame.get(34..14 + length)?)
            }
            [0x86, 0xdd] => {
                let ip = frame.get(14..54)?;
                let address =
                    |at: usize| Some(IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(ip.get(at..at + 16)?).ok()?)));
                let length = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
                (ip[6] == 17).then_some(())?;
                (address(8)?, address(24)?, ip[0] << 4 | ip[1] >> 4, frame.get(54..54 + length)?)
            }
            _ => return None,
        };
        (udp.get(2..4)? == [0x12, 0xb7]).then_some(())?;
        let bth = udp.get(8..20)?;
        let (opcode, pad) = (bth[0], usize::from(bth[1] >> 4 & 3));
        let number = |at: usize| u32::from_be_bytes([0, bth[at], bth[at + 1], bth[at + 2]]);
        // IBTA volume 1, 9.2: what follows the BTH, by the operation and the transport.
        let (rc_like, ud) = (opcode >> 5 <= 1, opcode >> 5 == 3);
        let extended = match opcode & 0x1f {
            // CNP: sixteen reserved bytes.
            _ if opcode == 0x81 => 16,
            0x03 | 0x05 if rc_like => 4,
            0x06 | 0x0a | 0x0c if rc_like => 16,
            0x0b if rc_like => 20,
            0x09 if rc_like => 4,
            0x0d | 0x0f | 0x10 | 0x11 if rc_like => 4,
            0x12 if rc_like => 12,
            0x13 | 0x14 if rc_like => 28,
            0x16 | 0x17 if rc_like => 4,
            0x04 if ud => 8,
            0x05 if ud => 12,
            _ => 0,
        };
        let has_aeth = rc_like && matches!(opcode & 0x1f, 0x0d | 0x0f..=0x12);
        Some(Self {
            src,
            dst,
            tos,
            opcode,
            dest_qp: number(5),
            psn: number(9),
            syndrome: if has_aeth { udp.get(20).copied() } else { None },
            payload: udp.len().checked_sub(8 + 12 + extended + pad + 4)?,
        })
    }

    /// `request` or `response`.
    pub fn space(&self) -> &'static str {
        if self.opcode >> 5 == 0 && matches!(self.opcode & 0x1f, 0x0d..=0x12) { "response" } else { "request" }
    }

    /// Whether it is a congestion notification.
    pub fn is_cnp(&self) -> bool {
        self.opcode == 0x81
    }
}

/// What a capture saw.
#[derive(Debug)]
pub struct Passed {
    /// Everything, in order.
    pub all: Vec<Seen>,
    host_mac: [u8; 6],
}

impl Wire {
    /// Begins, at the switch's end of a host's cable, and keeps whole frames.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn start(node: &Node) -> Result<Self> {
        Ok(Self { capture: Capture::start(&node.switch_port)?, host_mac: node.port.mac })
    }

    /// The same for headers only: what [`Header::read`] takes for incomplete.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn headers(node: &Node) -> Result<Self> {
        Ok(Self { capture: Capture::headers(&node.switch_port)?, host_mac: node.port.mac })
    }

    /// Ends.
    ///
    /// # Errors
    /// When packets were lost.
    pub fn finish(self) -> Result<Passed> {
        Ok(Passed { all: self.capture.finish()?, host_mac: self.host_mac })
    }
}

impl Passed {
    /// What the host sent, before the switch did anything to it.
    pub fn sent(&self) -> impl Iterator<Item = &Seen> {
        self.all.iter().filter(|seen| seen.frame.get(6..12) == Some(&self.host_mac))
    }

    /// What the switch sent to the host, behind the port's queue.
    pub fn received(&self) -> impl Iterator<Item = &Seen> {
        self.all.iter().filter(|seen| seen.frame.get(..6) == Some(&self.host_mac))
    }

    /// Writes a capture for the host.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, name: &str) -> Result<()> {
        save(&self.all, &share().join(name)).with_context(|| format!("writing {name}"))
    }
}

/// Packets by flow.
pub fn count<'a>(packets: impl IntoIterator<Item = &'a Seen>) -> WireFlows {
    let mut flows = WireFlows::new();
    for header in packets.into_iter().filter_map(|seen| Header::read(&seen.frame)) {
        let key = (header.src.to_string(), header.dst.to_string(), header.dest_qp, header.space());
        let (packets, bytes) = flows.entry(key).or_default();
        *packets += 1;
        *bytes += header.payload as u64;
    }
    flows
}
