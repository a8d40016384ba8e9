//! Packets of a dialogue as frames, and as the parser would give them.

use roce_common::{
    abi::{FlowKey, PairKey, Space, Tap},
    psn::Psn,
    units::{Addr, Qpn},
    wire::{
        Aeth, AtomicEth, Bth, Deth, IpVersion, Kind, Opcode, Packet, Reth, Service,
        emit::{self, EmitError, Ext, Path},
        source_port,
    },
};

use super::{End, Passed};

/// Where a dialogue takes place.
#[derive(Clone, Copy, Debug)]
pub struct Wire {
    /// Address and QPN of the requester.
    pub requester: (Addr, Qpn),
    /// Address and QPN of the responder.
    pub responder: (Addr, Qpn),
}

impl Wire {
    /// The connection with this number: addresses and QPNs of its own, every other one over IPv6.
    pub fn numbered(n: u32) -> Self {
        let [_, a, b, c] = n.to_be_bytes();
        let address = |host| {
            if n.is_multiple_of(2) {
                Addr::v4([10, a, b, c ^ host])
            } else {
                Addr([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, host])
            }
        };
        Self { requester: (address(0), Qpn::new(0x100 + n)), responder: (address(0x80), Qpn::new(0x8_0000 + n)) }
    }

    /// From, to.
    fn ends(&self, from: End) -> ((Addr, Qpn), (Addr, Qpn)) {
        match from {
            End::Requester => (self.requester, self.responder),
            End::Responder => (self.responder, self.requester),
        }
    }

    /// The key of the flow from this end.
    pub fn key(&self, tap: Tap, from: End) -> FlowKey {
        let ((src, _), (dst, qpn)) = self.ends(from);
        let space = if from == End::Requester { Space::Request } else { Space::Response };
        FlowKey::new(tap, src, dst, qpn, space)
    }

    /// What the controller would have found out: who sends the packets from this end.
    pub fn pair(&self, from: End) -> (PairKey, Qpn) {
        let ((src, sender), (dst, qpn)) = self.ends(from);
        (PairKey::new(src, dst, qpn), sender)
    }

    /// The packet without a frame.
    pub fn packet(&self, p: &Passed) -> Packet {
        let ((src, sender), (dst, qpn)) = self.ends(p.from);
        let ip = if src.as_v4().is_some() { IpVersion::V4 } else { IpVersion::V6 };
        let l4_offset = if ip == IpVersion::V4 { 34 } else { 54 };
        let pad = p.payload.wrapping_neg() & 3;
        let ext = self.ext(p);
        let mut bth = Bth::new(p.opcode, qpn, p.psn);
        bth.pad = pad as u8;
        Packet {
            ip,
            l3_offset: 14,
            l4_offset,
            src,
            dst,
            tos: 2,
            src_port: source_port(sender, qpn),
            udp_len: 8 + 12 + p.opcode.ext_len() as u16 + p.payload + pad + 4,
            bth,
            aeth: ext.aeth,
            reth: ext.reth,
            deth: ext.deth,
            payload_len: p.payload,
        }
    }

    fn ext(&self, p: &Passed) -> Ext {
        let ((_, sender), _) = self.ends(p.from);
        let service = p.opcode.service();
        let op = p.opcode.get() & 0x1f;
        let request = p.opcode.kind() == Kind::Request;
        Ext {
            xrc_srq: (service == Service::Xrc && request).then_some(Qpn::new(7)),
            deth: (service == Service::Ud).then_some(Deth { qkey: 1, src_qp: sender }),
            reth: matches!(op, 0x06 | 0x0a | 0x0c).then_some(Reth { va: 0, rkey: 1, dma_len: p.dma_len }),
            atomic: matches!(op, 0x13 | 0x14).then_some(AtomicEth { va: 0, rkey: 1, swap_or_add: 1, compare: 0 }),
            aeth: (!request && p.opcode != Opcode::READ_RESPONSE_MIDDLE)
                .then_some(Aeth { raw_syndrome: p.syndrome, msn: 1 }),
            atomic_ack: p.opcode.is_atomic_acknowledge().then_some(0),
            immediate: None,
        }
    }

    /// The frame, written over `out`.
    ///
    /// # Errors
    /// When it cannot be built, which would be a mistake in the dialogue.
    pub fn frame(&self, p: &Passed, out: &mut Vec<u8>) -> Result<(), EmitError> {
        let ((src, sender), (dst, qpn)) = self.ends(p.from);
        let path = Path {
            src_mac: [2; 6],
            dst_mac: [4; 6],
            src,
            dst,
            tos: 2,
            ttl: 64,
            ip_id: 1,
            src_port: source_port(sender, qpn),
        };
        let payload = [5; 256];
        let payload = payload.get(..usize::from(p.payload)).unwrap_or(&payload);
        out.resize(1_024, 0);
        let len = emit::frame(&path, &Bth::new(p.opcode, qpn, Psn::new(p.psn.get())), &self.ext(p), payload, out)?;
        out.truncate(len);
        Ok(())
    }
}
