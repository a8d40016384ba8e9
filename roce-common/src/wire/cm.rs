//! Connection management: the MADs on QP1 by which queue pairs learn of each other (`include/rdma/ib_cm.h` and
//! `drivers/infiniband/core/cm_msgs.h` of Linux). Whoever sees them knows both QPNs, both starting PSNs, the path MTU and
//! the timeouts of a connection before its first packet.

use super::{Bytes, Opcode, Packet};
use crate::{psn::Psn, units::Qpn};

/// Length of a MAD.
const MAD_LEN: u16 = 256;
/// Bytes of it that hold all that is read of a message.
pub const MAD_BYTES: usize = 120;
/// The management class of connection management.
const CLASS_CM: u8 = 0x07;
/// The Q_Key of QP1.
const GSI_QKEY: u32 = 0x8001_0000;
/// Where in a MAD the class-specific part begins.
const BODY: usize = 24;

/// What a REQ asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// The PSN its first request will have.
    pub starting_psn: Psn,
    /// Path MTU in bytes; 0 where the code is not one of the five.
    pub pmtu: u32,
    /// Local ACK timeout: 4.096 µs · 2^this; 0 = none.
    pub ack_timeout: u8,
    /// How often a packet may be repeated; 7 is without end in rxe.
    pub retries: u8,
    /// How often after RNR NAKs; 7 is without end.
    pub rnr_retries: u8,
    /// 0 RC, 1 UC, 2 RD, 3 by the extended type (XRC).
    pub transport: u8,
}

/// What a REP answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reply {
    /// The answering side's queue pair.
    pub qpn: Qpn,
    /// The PSN its first request will have.
    pub starting_psn: Psn,
    /// How often its peer may repeat after RNR NAKs.
    pub rnr_retries: u8,
}

/// A message of connection management.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// A connection is asked for.
    Request(Request),
    /// It is granted.
    Reply(Reply),
    /// It is ready to use.
    Ready,
    /// It is refused, for this reason (8 = invalid service ID, 28 = by the consumer, …).
    Reject(u16),
    /// The answer will take longer.
    Wait,
    /// It shall end; names the receiver's queue pair.
    Disconnect(Qpn),
    /// It has ended.
    Disconnected,
    /// A datagram service is looked for (SIDR).
    LookUp,
    /// It was found, and is served by this queue pair.
    Found(Qpn),
}

/// A message and whom it is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mad {
    /// The sender's number of the connection.
    pub local_id: u32,
    /// The receiver's; 0 where the sender does not know it.
    pub remote_id: u32,
    /// The message.
    pub message: Message,
}

/// The message in a packet; `None` where it is none, or not all of it was captured.
pub fn parse<B: Bytes + ?Sized>(frame: &B, packet: &Packet) -> Option<Mad> {
    if may_be(packet) { read(frame, packet.payload_offset()) } else { None }
}

/// Whether a packet may hold a message: a datagram for QP1, as long as a MAD.
#[inline(always)]
pub fn may_be(packet: &Packet) -> bool {
    packet.bth.opcode.get() == Opcode::UD_SEND_ONLY.get()
        && packet.bth.dest_qp.get() == Qpn::GSI.get()
        && packet.payload_len == MAD_LEN
        && packet.deth.is_some_and(|d| d.qkey == GSI_QKEY)
}

/// The message in a MAD that begins at `mad`. All that is read are its first [`MAD_BYTES`] bytes.
pub fn read<B: Bytes + ?Sized>(frame: &B, mad: usize) -> Option<Mad> {
    let [base_version, class, _, method] = frame.get(mad)?;
    // A Send of connection management.
    if base_version != 1 || class != CLASS_CM || method & 0x7f != 0x03 {
        return None;
    }
    let attribute = u16::from_be_bytes(frame.get(mad + 16)?);
    let at = |offset: usize| mad + BODY + offset;
    let word = |offset| Some(u32::from_be_bytes(frame.get(at(offset))?));
    let byte = |offset| Some(frame.get::<1>(at(offset))?[0]);
    let high24 = |offset| Some(word(offset)? >> 8);
    let message = match attribute {
        0x10 => Message::Request(Request {
            qpn: Qpn::new(high24(32)?),
            starting_psn: Psn::new(high24(44)?),
            pmtu: pmtu(byte(50)? >> 4),
            ack_timeout: byte(95)? >> 3,
            retries: byte(47)? & 7,
            rnr_retries: byte(50)? & 7,
            transport: byte(43)? >> 1 & 3,
        }),
        0x11 => Message::Wait,
        0x12 => Message::Reject((word(8)? & 0xffff) as u16),
        0x13 => Message::Reply(Reply {
            qpn: Qpn::new(high24(12)?),
            starting_psn: Psn::new(high24(20)?),
            rnr_retries: byte(27)? >> 5,
        }),
        0x14 => Message::Ready,
        0x15 => Message::Disconnect(Qpn::new(high24(8)?)),
        0x16 => Message::Disconnected,
        0x17 => Message::LookUp,
        0x18 => Message::Found(Qpn::new(high24(8)?)),
        _ => return None,
    };
    // A look-up has one number, its own.
    let remote_id = match attribute {
        0x10 | 0x17 | 0x18 => 0,
        _ => word(4)?,
    };
    Some(Mad { local_id: word(0)?, remote_id, message })
}

const fn pmtu(code: u8) -> u32 {
    match code {
        1..=5 => 128 << code,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use super::*;
    use crate::units::Addr;
    use crate::wire::{Bth, Deth, Verdict, emit};

    /// A frame with this MAD for QP1.
    fn frame(mad: &[u8]) -> Vec<u8> {
        let path = emit::Path {
            src_mac: [2; 6],
            dst_mac: [4; 6],
            src: Addr::v4([10, 0, 0, 1]),
            dst: Addr::v4([10, 0, 0, 2]),
            tos: 0,
            ttl: 64,
            ip_id: 1,
            src_port: 55_410,
        };
        let deth = Deth { qkey: GSI_QKEY, src_qp: Qpn::GSI };
        let ext = emit::Ext { deth: Some(deth), ..emit::Ext::default() };
        let mut out = vec![0; 512];
        let n = emit::frame(&path, &Bth::new(Opcode::UD_SEND_ONLY, Qpn::GSI, Psn::new(0)), &ext, mad, &mut out)
            .expect("a frame");
        out.truncate(n);
        out
    }

    fn mad(attribute: u16, body: &[(usize, &[u8])]) -> Vec<u8> {
        let mut mad = vec![0; 256];
        mad[..4].copy_from_slice(&[1, CLASS_CM, 2, 3]);
        mad[16..18].copy_from_slice(&attribute.to_be_bytes());
        for (at, bytes) in body {
            mad[BODY + at..BODY + at + bytes.len()].copy_from_slice(bytes);
        }
        mad
    }

    fn read(frame: &[u8]) -> Option<Mad> {
        match crate::wire::parse(frame) {
            Verdict::Roce(p) => parse(frame, &p),
            _ => None,
        }
    }

    #[test]
    fn a_request_tells_everything_about_its_side() {
        let body: &[(usize, &[u8])] = &[
            (0, &[0xe8, 0x11, 0x87, 0x61]),
            (32, &[0, 0, 0x19, 4]),
            (43, &[0xa0]),
            (44, &[0x47, 0x3e, 0x18, 0xa7]),
            (50, &[0x3f]),
            (95, &[0x88]),
        ];
        let request = Request {
            qpn: Qpn::new(0x19),
            starting_psn: Psn::new(0x47_3e18),
            pmtu: 1024,
            ack_timeout: 17,
            retries: 7,
            rnr_retries: 7,
            transport: 0,
        };
        let want = Mad { local_id: 0xe811_8761, remote_id: 0, message: Message::Request(request) };
        assert_eq!(read(&frame(&mad(0x10, body))), Some(want));
        for (code, bytes) in [(0, 0), (1, 256), (2, 512), (4, 2048), (5, 4096), (6, 0), (15, 0)] {
            assert_eq!(pmtu(code), bytes);
        }
    }

    #[test]
    fn the_other_messages_name_what_they_are_about() {
        let ids: &[(usize, &[u8])] = &[(0, &[0, 0, 0, 1]), (4, &[0, 0, 0, 2]), (8, &[0, 0, 0x1c, 0x1c])];
        for (attribute, remote_id, message) in [
            (0x11, 2, Message::Wait),
            (0x12, 2, Message::Reject(0x1c1c)),
            (0x14, 2, Message::Ready),
            (0x15, 2, Message::Disconnect(Qpn::new(0x1c))),
            (0x16, 2, Message::Disconnected),
            (0x17, 0, Message::LookUp),
            (0x18, 0, Message::Found(Qpn::new(0x1c))),
        ] {
            assert_eq!(read(&frame(&mad(attribute, ids))), Some(Mad { local_id: 1, remote_id, message }));
        }
        let body: &[(usize, &[u8])] =
            &[(0, &[1, 2, 3, 4]), (4, &[5, 6, 7, 8]), (12, &[0, 0, 0x2a]), (20, &[0xff, 0xff, 0xfe]), (27, &[0xe0])];
        let reply = Reply { qpn: Qpn::new(0x2a), starting_psn: Psn::new(0xff_fffe), rnr_retries: 7 };
        let want = Mad { local_id: 0x0102_0304, remote_id: 0x0506_0708, message: Message::Reply(reply) };
        assert_eq!(read(&frame(&mad(0x13, body))), Some(want));
    }

    #[test]
    fn nothing_else_is_a_message() {
        let good = mad(0x14, &[]);
        assert!(read(&frame(&good)).is_some());
        for (at, byte) in [(0, 2), (1, 0x03), (3, 0x01), (17, 0x1f)] {
            let mut other = good.clone();
            other[at] = byte;
            assert_eq!(read(&frame(&other)), None, "byte {at}");
        }
        // Too short, for another queue pair, with another key, or cut by the capture at any place.
        assert_eq!(read(&frame(&good[..252])), None);
        let whole = frame(&good);
        let Verdict::Roce(p) = crate::wire::parse(&whole[..]) else { unreachable!() };
        let elsewhere = Packet { bth: Bth { dest_qp: Qpn::new(2), ..p.bth }, ..p };
        assert_eq!(parse(&whole[..], &elsewhere), None);
        let unlocked = Packet { deth: Some(Deth { qkey: 1, src_qp: Qpn::GSI }), ..p };
        assert_eq!(parse(&whole[..], &unlocked), None);
        for kept in 0..whole.len() {
            let _never_panics = parse(&(&whole[..kept], whole.len()), &p);
        }
    }
}
