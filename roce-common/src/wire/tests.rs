//! Golden answers from scapy 2.8.0, an independent bitwise CRC and one real ConnectX-4 Lx packet's published fields.

use std::{string::String, vec::Vec};

use super::{emit, *};
use crate::{
    psn::Psn,
    units::{Addr, Dscp, Ecn, Qpn},
};

fn unhex(s: &str) -> Vec<u8> {
    let s: String = s.chars().filter(|c| !c.is_whitespace()).collect();
    (0..s.len()).step_by(2).map(|i| u8::from_str_radix(&s[i..i + 2], 16).unwrap()).collect()
}

const SEND_ONLY_V4: &str = "0200000000020200000000010800456a004c12344000401114010a0000010a000002c12312b7003800000400ffff0000001180000100000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f7484fc7a";
const SEND_ONLY_PAD3: &str = "0200000000020200000000010800456a003412344000401114190a0000010a000002c12312b7002000000430ffff000000118000010168656c6c6f0000009e1543f9";
const ACK_V4: &str = "0200000000010200000000020800456a0030432140004011e32f0a0000020a000001c45612b7001c00001100ffff00000012000001001f000001e6ab38b4";
const NAK_V4: &str = "0200000000010200000000020800456a0030432240004011e32e0a0000020a000001c45612b7001c00001100ffff000000120000010160000001672e9f69";
const CNP_V4: &str = "020000000001020000000002080045c2003c00004000401125ed0a0000020a000001c00012b7002800008100ffff400000120000000000000000000000000000000000000000b8e7f1e4";
const SEND_ONLY_V6: &str = "02000000000202000000000186dd66a0000000381140fd000000000000000000000000000001fd000000000000000000000000000002c12312b7003800000400ffff0000001180000100000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f4740cac8";
const CNP_V6: &str = "02000000000102000000000286dd6c20000000281140fd000000000000000000000000000002fd000000000000000000000000000001c00012b7002800008100ffff400000120000000000000000000000000000000000000000708704ab";

fn packet(frame: &[u8]) -> Packet {
    match parse(frame) {
        Verdict::Roce(p) => p,
        other => panic!("not a RoCEv2 packet: {other:?}"),
    }
}

#[test]
fn icrc_of_every_vector_is_valid_and_any_covered_change_breaks_it() {
    for hex in [SEND_ONLY_V4, SEND_ONLY_PAD3, ACK_V4, NAK_V4, CNP_V4, SEND_ONLY_V6, CNP_V6] {
        let mut frame = unhex(hex);
        let p = packet(&frame);
        assert_eq!(icrc::is_valid(&frame, &p), Some(true), "{hex}");
        frame[p.bth_offset() + 11] ^= 1;
        assert_eq!(icrc::is_valid(&frame, &p), Some(false), "PSN changed in {hex}");
    }
}

#[test]
fn icrc_ignores_what_routers_and_markers_change() {
    let mut frame = unhex(SEND_ONLY_V4);
    let p = packet(&frame);
    frame[15] |= 3; // CE
    frame[22] -= 1; // TTL
    frame[24] ^= 0xff; // header checksum
    frame[p.bth_offset() + 4] |= 0x40; // BECN
    assert_eq!(icrc::is_valid(&frame, &p), Some(true));
}

#[test]
fn fields_of_the_reference_packet() {
    let frame = unhex(SEND_ONLY_V4);
    let p = packet(&frame);
    assert_eq!(p.bth.opcode, Opcode::SEND_ONLY);
    assert_eq!((p.bth.dest_qp, p.bth.psn, p.bth.ack_req), (Qpn::new(0x11), Psn::new(0x100), true));
    assert_eq!((p.src, p.dst), (Addr::v4([10, 0, 0, 1]), Addr::v4([10, 0, 0, 2])));
    assert_eq!((p.dscp().get(), p.ecn(), p.src_port, p.payload_len), (26, Ecn::Ect0, 0xc123, 32));
    let p = packet(&unhex(SEND_ONLY_PAD3));
    assert_eq!((p.bth.pad, p.payload_len), (3, 5));
    let p = packet(&unhex(NAK_V4));
    assert_eq!(p.aeth.unwrap().syndrome(), Syndrome::PsnSequence);
    let p = packet(&unhex(CNP_V6));
    assert_eq!(
        (p.bth.becn, p.bth.dest_qp, p.dscp(), p.ecn()),
        (true, Qpn::new(0x12), Dscp::new(48).unwrap(), Ecn::Ect0)
    );
}

#[test]
fn builders_reproduce_the_vectors_byte_for_byte() {
    let path = emit::Path {
        src_mac: [2, 0, 0, 0, 0, 1],
        dst_mac: [2, 0, 0, 0, 0, 2],
        src: Addr::v4([10, 0, 0, 1]),
        dst: Addr::v4([10, 0, 0, 2]),
        tos: 0x6a,
        ttl: 64,
        ip_id: 0x1234,
        src_port: 0xc123,
    };
    let payload: Vec<u8> = (0..32).collect();
    let mut bth = Bth::new(Opcode::SEND_ONLY, Qpn::new(0x11), Psn::new(0x100));
    bth.ack_req = true;
    let mut out = [0u8; 256];
    let n = emit::frame(&path, &bth, &emit::Ext::default(), &payload, &mut out).unwrap();
    assert_eq!(&out[..n], unhex(SEND_ONLY_V4));

    bth.psn = Psn::new(0x101);
    let n = emit::frame(&path, &bth, &emit::Ext::default(), b"hello", &mut out).unwrap();
    assert_eq!(&out[..n], unhex(SEND_ONLY_PAD3));

    let back = emit::Path { src_mac: path.dst_mac, dst_mac: path.src_mac, src: path.dst, dst: path.src, ..path };
    let back = emit::Path { tos: 0xc2, ip_id: 0, src_port: 0xc000, ..back };
    let mut cnp = [0xaa; emit::CNP_FRAME_V6];
    let n = emit::cnp(&back, IpVersion::V4, Qpn::new(0x12), &mut cnp);
    assert_eq!(cnp[..n], *unhex(CNP_V4));

    let mut v6 = back;
    v6.src = Addr(core::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2).octets());
    v6.dst = Addr(core::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).octets());
    let n = emit::cnp(&v6, IpVersion::V6, Qpn::new(0x12), &mut cnp);
    assert_eq!(cnp[..n], *unhex(CNP_V6));
}

#[test]
fn the_icrc_of_a_cnp_is_judged_without_parsing_it() {
    for (frame, version) in [(CNP_V4, IpVersion::V4), (CNP_V6, IpVersion::V6)] {
        let frame = unhex(frame);
        for at in 0..(frame.len() - 14) * 8 {
            let mut datagram = [0xa5; icrc::CNP_LEN_V6];
            datagram[..frame.len() - 14].copy_from_slice(&frame[14..]);
            assert!(icrc::is_intact_cnp(&datagram, version));
            datagram[at / 8] ^= 1 << (at % 8);
            let mut damaged = frame.clone();
            damaged[14 + at / 8] ^= 1 << (at % 8);
            let by_parser = match parse(&damaged[..]) {
                Verdict::Roce(p) if p.bth.opcode == Opcode::CNP => icrc::is_valid(&damaged, &p),
                _ => None,
            };
            if let Some(right) = by_parser {
                assert_eq!(icrc::is_intact_cnp(&datagram, version), right, "{version:?}, bit {at}");
            }
        }
    }
}

#[test]
fn source_port_matches_the_kernel_helper() {
    for (l, r, port) in [
        (0x11, 0x12, 0xc132),
        (0x1234, 0xabcd, 0xcf7a),
        (0xff_ffff, 0xff_fffe, 0xff12),
        (17, 17, 49441),
        (18, 18, 49476),
        (19, 19, 49513),
    ] {
        assert_eq!(source_port(Qpn::new(l), Qpn::new(r)), port, "{l:#x} {r:#x}");
    }
}

#[test]
fn what_is_not_usable_is_named() {
    let good = unhex(SEND_ONLY_V4);
    let at = 42;
    let verdict = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut f = good.clone();
        change(&mut f);
        parse(&f[..])
    };
    let malformed = Verdict::Malformed;
    assert_eq!(verdict(&|f| f[at] = 0x1f), malformed(Malformed::UnknownOpcode));
    assert_eq!(verdict(&|f| f[at + 1] = 1), malformed(Malformed::BadVersion));
    assert_eq!(verdict(&|f| f[37] = 0), Verdict::NotRoce, "another port");
    assert_eq!(verdict(&|f| f[12] = 0x89), Verdict::NotRoce, "another EtherType");
    assert_eq!(
        verdict(&|f| {
            f[12] = 0x89;
            f[13] = 0x15;
        }),
        Verdict::RoceV1
    );
    assert_eq!(verdict(&|f| f[20] = 0x20), malformed(Malformed::UdpFragment), "more fragments");
    assert_eq!(verdict(&|f| f[38] = 0xff), malformed(Malformed::BadLength), "UDP longer than IP");
    assert_eq!(verdict(&|f| f.truncate(80)), malformed(Malformed::BadLength), "frame shorter than UDP");
    assert_eq!(
        verdict(&|f| {
            f[38] = 0;
            f[39] = 20;
        }),
        malformed(Malformed::TruncatedHeader)
    );
    assert_eq!(
        verdict(&|f| {
            f[38] = 0;
            f[39] = 24;
            f[at + 1] = 0x30;
        }),
        malformed(Malformed::PadBeyondPayload)
    );
    assert_eq!(
        verdict(&|f| {
            f[at] = 0x0c;
            f[39] = 40;
            f[66] = 0xff;
        }),
        malformed(Malformed::ReadTooLong)
    );
    assert_eq!(verdict(&|f| f[at] = 0x81), malformed(Malformed::BadLength), "CNP of another length");
    assert_eq!(parse(&(&good[..50], good.len())), malformed(Malformed::TruncatedCapture));
    assert!(matches!(parse(&(&good[..54], good.len())), Verdict::Roce(_)), "headers suffice");
}

#[test]
fn two_vlan_tags_and_ip_options_are_followed() {
    let good = unhex(SEND_ONLY_V4);
    let mut tagged = good[..12].to_vec();
    tagged.extend([0x88, 0xa8, 0, 5, 0x81, 0, 0, 7]);
    tagged.extend(&good[12..]);
    assert_eq!(packet(&tagged).bth, packet(&good).bth);
    tagged.splice(12..12, [0x81, 0, 0, 1]);
    assert_eq!(parse(&tagged[..]), Verdict::NotRoce, "three tags");

    let mut options = good.clone();
    options[14] = 0x46;
    options[17] += 4;
    options.splice(34..34, [1, 1, 1, 0]);
    assert_eq!(packet(&options).bth.psn, packet(&good).bth.psn);
}

proptest::proptest! {
    /// The short cut never contradicts the parser, whatever the bytes.
    #[test]
    fn what_is_surely_not_roce_is_not_roce(
        base in 0usize..7,
        changes in proptest::collection::vec((0usize..60, proptest::num::u8::ANY), 0..5),
        keep in 0usize..120,
    ) {
        let all = [SEND_ONLY_V4, SEND_ONLY_PAD3, ACK_V4, NAK_V4, CNP_V4, SEND_ONLY_V6, CNP_V6];
        let mut frame = unhex(all[base]);
        for (at, byte) in changes {
            frame[at] = byte;
        }
        frame.truncate(keep.max(14));
        if is_surely_not_roce(&frame[..]) {
            assert_eq!(parse(&frame[..]), Verdict::NotRoce, "{frame:02x?}");
        }
    }
}

#[test]
fn the_short_cut_settles_common_traffic() {
    let mut frame = unhex(SEND_ONLY_V4);
    assert!(!is_surely_not_roce(&frame[..]));
    frame[37] = 53;
    assert!(is_surely_not_roce(&frame[..]), "another port");
    let mut tcp = unhex(SEND_ONLY_V6);
    tcp[20] = 6;
    assert!(is_surely_not_roce(&tcp[..]), "TCP over IPv6");
    tcp[12..14].copy_from_slice(&[8, 6]);
    assert!(is_surely_not_roce(&tcp[..]), "ARP");
}
