//! Frames of many kinds, to see whether what passes them on leaves them alone.

use roce_common::{
    psn::Psn,
    units::{Addr, Qpn},
    wire::{Aeth, Bth, IpVersion, Opcode, Reth, checksum, emit},
};

const UDP: u8 = 17;
const TCP: u8 = 6;
const ROCE_PORT: u16 = roce_common::wire::UDP_PORT;

/// Who sends to whom.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Source MAC address.
    pub src_mac: [u8; 6],
    /// Destination MAC address.
    pub dst_mac: [u8; 6],
    /// IPv4 source and destination.
    pub v4: [Addr; 2],
    /// IPv6 source and destination.
    pub v6: [Addr; 2],
}

impl Route {
    /// A RoCEv2 packet.
    pub fn roce(&self, ipv6: bool, tos: u8, opcode: Opcode, qpn: u32, psn: u32) -> Vec<u8> {
        let [src, dst] = if ipv6 { self.v6 } else { self.v4 };
        let path = emit::Path {
            src_mac: self.src_mac,
            dst_mac: self.dst_mac,
            src,
            dst,
            tos,
            ttl: 64,
            ip_id: psn as u16,
            src_port: 0xc123,
        };
        if opcode == Opcode::CNP {
            let mut out = [0; emit::CNP_FRAME_V6];
            let version = if ipv6 { IpVersion::V6 } else { IpVersion::V4 };
            let n = emit::cnp(&path, version, Qpn::new(qpn), &mut out);
            return out[..n].to_vec();
        }
        let payload = match opcode {
            Opcode::ACKNOWLEDGE | Opcode::READ_REQUEST => &[][..],
            _ => &[0x5a; 1021],
        };
        let has_reth = matches!(opcode, Opcode::WRITE_FIRST | Opcode::WRITE_ONLY | Opcode::READ_REQUEST);
        let has_aeth = matches!(opcode, Opcode::ACKNOWLEDGE | Opcode::READ_RESPONSE_ONLY);
        let ext = emit::Ext {
            reth: has_reth.then_some(Reth { va: 0x7000, rkey: 3, dma_len: 1021 }),
            aeth: has_aeth.then_some(Aeth { raw_syndrome: 0x1f, msn: 1 }),
            ..emit::Ext::default()
        };
        let mut out = vec![0; 2048];
        let n = emit::frame(&path, &Bth::new(opcode, Qpn::new(qpn), Psn::new(psn)), &ext, payload, &mut out)
            .expect("room for a frame, and the headers of its opcode");
        out.truncate(n);
        out
    }

    /// RoCEv2 packets over both IP versions, of every ECN codepoint and several DSCPs, with and without VLAN tags.
    pub fn roce_frames(&self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut psn = 100;
        for ipv6 in [false, true] {
            for tos in [0, 1, 2, 3, 0x6a, 0xff] {
                for opcode in [
                    Opcode::SEND_ONLY,
                    Opcode::WRITE_ONLY,
                    Opcode::READ_REQUEST,
                    Opcode::READ_RESPONSE_ONLY,
                    Opcode::ACKNOWLEDGE,
                    Opcode::CNP,
                ] {
                    psn += 1;
                    frames.push(self.roce(ipv6, tos, opcode, 0x77, psn));
                }
            }
        }
        let tagged: Vec<_> = frames.iter().step_by(5).map(|f| tag(f, 0x8100, 5)).collect();
        let twice: Vec<_> = tagged.iter().map(|f| tag(f, 0x88a8, 9)).collect();
        frames.extend(tagged);
        frames.extend(twice);
        frames
    }

    /// What is no RoCEv2 packet, or none that is whole: damaged ones, fragments, the port as source, TCP to the port,
    /// RoCEv1, other protocols; with and without VLAN tags.
    pub fn other_frames(&self) -> Vec<Vec<u8>> {
        let good = self.roce(false, 0, Opcode::SEND_ONLY, 0x77, 5);
        let damage = |at: usize, to: u8| {
            let mut frame = good.clone();
            frame[at] = to;
            frame
        };
        let data: Vec<u8> = (0..999u32).map(|i| (i * 7) as u8).collect();
        let mut frames = vec![
            // Opcode, transport version, UDP length.
            damage(42, 0xff),
            damage(43, 0x0f),
            damage(38, 5),
            good[..50].to_vec(),
            self.udp(ROCE_PORT, 5000, 0, &data),
            self.udp(5000, ROCE_PORT, 0, &[1, 2, 3]),
            self.udp(5000, ROCE_PORT, 0, &[]),
            self.udp(53, 53, 0, &data),
            // First, middle and last fragment.
            self.udp(5000, ROCE_PORT, 0x2000, &data),
            self.v4(UDP, 0x2000 | 126, &data),
            self.v4(UDP, 252, &data),
            self.v4(TCP, 0, &[&[0x12, 0xb7, 0x12, 0xb7][..], &data].concat()),
            self.v4(1, 0, &[8, 0, 0, 0, 1, 2, 3, 4]),
            self.ethernet(0x8915, &[&[0x60; 40][..], &data].concat()),
            self.ethernet(0x0806, &[0; 46]),
            self.ethernet(0x88b5, &data),
            self.ethernet(0x0800, &[0x45, 0, 0, 20]),
            self.ethernet(0x86dd, &[0x60; 20]),
        ];
        let tagged: Vec<_> = frames.iter().map(|f| tag(f, 0x8100, 5)).collect();
        frames.extend(tagged);
        frames
    }

    fn udp(&self, from: u16, to: u16, fragment: u16, data: &[u8]) -> Vec<u8> {
        let length = (8 + data.len()) as u16;
        self.v4(UDP, fragment, &[&[from, to, length, 0].map(u16::to_be_bytes).concat()[..], data].concat())
    }

    fn v4(&self, protocol: u8, fragment: u16, data: &[u8]) -> Vec<u8> {
        let mut header = vec![0x45, 0];
        header.extend(((20 + data.len()) as u16).to_be_bytes());
        header.extend([0, 9]);
        header.extend(fragment.to_be_bytes());
        header.extend([64, protocol, 0, 0]);
        for address in self.v4 {
            header.extend(&address.0[12..]);
        }
        let sum = header.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
        header[10..12].copy_from_slice(&checksum::fold(sum).to_be_bytes());
        header.extend(data);
        self.ethernet(0x0800, &header)
    }

    fn ethernet(&self, kind: u16, data: &[u8]) -> Vec<u8> {
        [&self.dst_mac[..], &self.src_mac, &kind.to_be_bytes(), data].concat()
    }
}

/// The frame with a VLAN tag in front of its others.
fn tag(frame: &[u8], kind: u16, vlan: u16) -> Vec<u8> {
    [&frame[..12], &kind.to_be_bytes(), &vlan.to_be_bytes(), &frame[12..]].concat()
}
