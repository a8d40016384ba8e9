//! RoCEv2 inside VXLAN (RFC 7348) and GENEVE (RFC 8926).

use network_types::udp::UdpHdr;

use super::{Bytes, Link, parse::any_udp};
use crate::units::Ecn;

/// UDP destination port of VXLAN (IANA).
const VXLAN_PORT: u16 = 4789;
/// UDP destination port of GENEVE (IANA).
const GENEVE_PORT: u16 = 6081;
const HEADER: usize = 8;
/// VXLAN: the network identifier is valid.
const VXLAN_I: u8 = 0x08;
/// GENEVE protocol type: an Ethernet frame.
const ETHERTYPE_TEB: u16 = 0x6558;

/// Kinds of tunnel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum TunnelKind {
    /// VXLAN.
    Vxlan,
    /// GENEVE.
    Geneve,
}

impl TunnelKind {
    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vxlan => "vxlan",
            Self::Geneve => "geneve",
        }
    }
}

/// A frame that travels in a tunnel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tunnel {
    /// Kind of tunnel.
    pub kind: TunnelKind,
    /// Network identifier, 24 bits.
    pub vni: u32,
    /// IPv4 ToS or IPv6 traffic class of the outer packet.
    pub outer_tos: u8,
    /// Where the inner frame starts, in bytes from the start of the outer one.
    pub inner_at: usize,
    /// What the inner frame starts with; offsets in it count from `inner_at`.
    pub inner_link: Link,
}

/// The tunnel that `frame`, whose first byte is what `link` says, is a packet of; `None` for any other frame. GENEVE
/// options are passed over; a control packet of GENEVE carries nothing.
pub fn tunnel<B: Bytes + ?Sized>(frame: &B, link: Link) -> Option<Tunnel> {
    let (l4, port, outer_tos) = any_udp(frame, link)?;
    let at = l4 + UdpHdr::LEN;
    let h: [u8; HEADER] = match port {
        VXLAN_PORT | GENEVE_PORT => frame.get(at)?,
        _ => return None,
    };
    let vni = u32::from_be_bytes([0, h[4], h[5], h[6]]);
    if port == VXLAN_PORT {
        let inner_at = at + HEADER;
        return (h[0] & VXLAN_I != 0).then_some(Tunnel {
            kind: TunnelKind::Vxlan,
            vni,
            outer_tos,
            inner_at,
            inner_link: Link::Ethernet,
        });
    }
    let (version, control) = (h[0] >> 6, h[1] & 0x80 != 0);
    if version != 0 || control {
        return None;
    }
    let inner_link = match u16::from_be_bytes([h[2], h[3]]) {
        ETHERTYPE_TEB => Link::Ethernet,
        ethertype => Link::Other { ethertype, offset: 0 },
    };
    let inner_at = at + HEADER + usize::from(h[0] & 0x3f) * 4;
    Some(Tunnel { kind: TunnelKind::Geneve, vni, outer_tos, inner_at, inner_link })
}

impl Tunnel {
    /// The ToS that the inner packet leaves the tunnel with: a mark of congestion on the outer packet passes to an
    /// ECN-capable inner one (RFC 6040).
    pub const fn tos_behind(&self, inner_tos: u8) -> u8 {
        match (Ecn::of_tos(self.outer_tos), Ecn::of_tos(inner_tos)) {
            (Ecn::Ce, Ecn::Ect0 | Ecn::Ect1) => inner_tos | Ecn::Ce as u8,
            _ => inner_tos,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use super::*;

    /// IPv4 or IPv6 and UDP to `port`, then `payload`.
    fn outer(v6: bool, port: u16, tos: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 12];
        let udp_len = 8 + payload.len() as u16;
        if v6 {
            frame.extend([0x86, 0xdd, 0x60 | tos >> 4, tos << 4, 0, 0]);
            frame.extend(udp_len.to_be_bytes());
            frame.extend([17, 64]);
            frame.extend([0xfd; 32]);
        } else {
            frame.extend([0x08, 0x00, 0x45, tos]);
            frame.extend((20 + udp_len).to_be_bytes());
            frame.extend([0, 1, 0x40, 0, 64, 17, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2]);
        }
        frame.extend([0xc0, 0x01]);
        frame.extend(port.to_be_bytes());
        frame.extend(udp_len.to_be_bytes());
        frame.extend([0, 0]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn both_kinds_are_found_over_both_versions_of_ip() {
        for (v6, l4) in [(false, 34), (true, 54)] {
            let frame = outer(v6, 4789, 0x6b, &[0x08, 0, 0, 0, 0x01, 0x02, 0x03, 0, 0xaa]);
            let found = tunnel(&frame[..], Link::Ethernet).expect("VXLAN");
            assert_eq!((found.kind, found.vni, found.outer_tos), (TunnelKind::Vxlan, 0x01_0203, 0x6b));
            assert_eq!((found.inner_at, found.inner_link), (l4 + 16, Link::Ethernet));
            // Twelve bytes of options.
            let frame = outer(v6, 6081, 0, &[0x03, 0, 0x65, 0x58, 0, 0, 9, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
            let found = tunnel(&frame[..], Link::Ethernet).expect("GENEVE");
            assert_eq!((found.kind, found.vni, found.inner_at), (TunnelKind::Geneve, 9, l4 + 28));
            // IP without Ethernet.
            let frame = outer(v6, 6081, 0, &[0, 0, 0x08, 0x00, 0, 0, 9, 0]);
            let found = tunnel(&frame[..], Link::Ethernet).expect("GENEVE");
            assert_eq!(found.inner_link, Link::Other { ethertype: 0x0800, offset: 0 });
        }
    }

    #[test]
    fn what_is_no_tunnel_packet_is_left_alone() {
        let vxlan = [0x08, 0, 0, 0, 0, 0, 1, 0];
        let none = |frame: &[u8]| assert_eq!(tunnel(frame, Link::Ethernet), None);
        none(&outer(false, 4791, 0, &vxlan));
        none(&outer(false, 4789, 0, &[0; 8]));
        none(&outer(false, 4789, 0, &vxlan[..7]));
        // A later version, a control packet.
        none(&outer(false, 6081, 0, &[0x40, 0, 0x65, 0x58, 0, 0, 1, 0]));
        none(&outer(false, 6081, 0, &[0, 0x80, 0x65, 0x58, 0, 0, 1, 0]));
        let mut fragment = outer(false, 4789, 0, &vxlan);
        fragment[20] = 0x20;
        none(&fragment);
        let mut tcp = outer(true, 4789, 0, &vxlan);
        tcp[20] = 6;
        none(&tcp);
        for n in 0..42 {
            none(&outer(false, 4789, 0, &vxlan)[..n]);
        }
    }

    #[test]
    fn congestion_outside_passes_to_what_can_carry_it() {
        let tunnel =
            |outer_tos| Tunnel { kind: TunnelKind::Vxlan, vni: 1, outer_tos, inner_at: 0, inner_link: Link::Ethernet };
        assert_eq!([0x68, 0x69, 0x6a, 0x6b].map(|tos| tunnel(0x03).tos_behind(tos)), [0x68, 0x6b, 0x6b, 0x6b]);
        assert_eq!([0x68, 0x69, 0x6a, 0x6b].map(|tos| tunnel(0x02).tos_behind(tos)), [0x68, 0x69, 0x6a, 0x6b]);
    }
}
