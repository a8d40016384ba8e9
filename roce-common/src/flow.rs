//! What is kept of one flow, in a BPF map value and offline alike.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    facts::{Answer, Measured, Mix, Probe, is_timed},
    psn::{Account, Direct, MarkRange, Observed, Psn, Refusals, Tracker},
    units::{Dscp, Nanos},
    wire::{Kind, Opcode, Packet, Syndrome},
};

/// Different DSCPs of a flow that are counted one by one.
pub const DSCP_SLOTS: usize = 4;

/// The kinds of NAK that are told apart; the discriminant is the index into [`Flow::nak`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u32)]
pub enum NakKind {
    /// 0x60.
    PsnSequence = 0,
    /// 0x61.
    InvalidRequest = 1,
    /// 0x62.
    RemoteAccess = 2,
    /// 0x63.
    RemoteOperational = 3,
    /// Any other syndrome that is neither ACK nor RNR NAK.
    Other = 4,
}

impl NakKind {
    /// Every kind, in the order of their numbers.
    pub const ALL: [Self; 5] =
        [Self::PsnSequence, Self::InvalidRequest, Self::RemoteAccess, Self::RemoteOperational, Self::Other];

    /// The kind of a NAK; `None` for an ACK or RNR NAK.
    #[inline(always)]
    pub const fn of(syndrome: Syndrome) -> Option<Self> {
        Some(match syndrome {
            Syndrome::Ack(_) | Syndrome::RnrNak(_) => return None,
            Syndrome::PsnSequence => Self::PsnSequence,
            Syndrome::InvalidRequest => Self::InvalidRequest,
            Syndrome::RemoteAccess => Self::RemoteAccess,
            Syndrome::RemoteOperational => Self::RemoteOperational,
            Syndrome::Other(_) => Self::Other,
        })
    }

    /// The name used in tables, JSON and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PsnSequence => "psn_sequence",
            Self::InvalidRequest => "invalid_request",
            Self::RemoteAccess => "remote_access",
            Self::RemoteOperational => "remote_operational",
            Self::Other => "other",
        }
    }
}

/// The answer of a responder that is not an ACK: its syndrome, where the packet is an ACKNOWLEDGE or
/// ATOMIC_ACKNOWLEDGE and refuses a request.
#[inline(always)]
pub fn refusal(packet: &Packet) -> Option<Syndrome> {
    let opcode = packet.bth.opcode;
    if opcode.is_acknowledge() || opcode.is_atomic_acknowledge() {
        match packet.aeth?.syndrome() {
            Syndrome::Ack(_) => None,
            syndrome => Some(syndrome),
        }
    } else {
        None
    }
}

/// One (tap, source, destination, destination QPN, space). All zero = nothing seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Flow {
    /// The BPF side's lock; 0 = free. Always 0 offline.
    pub lock: u64,
    /// Packets, CNPs excluded.
    pub packets: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// When the newest packet came; for ageing, never for counting.
    pub last_seen_ns: u64,
    /// Packets by ECN codepoint: Not-ECT, ECT(1), ECT(0), CE.
    pub ecn: [u64; 4],
    /// Packets of the DSCPs in [`Flow::dscp_values`]; a slot is free while its count is 0.
    pub dscp_counts: [u64; DSCP_SLOTS],
    /// Packets of any further DSCP.
    pub dscp_others: u64,
    /// CNPs that tell this flow's sender to slow down. Not counted by [`Flow::observe`]: a CNP does not name the flow.
    pub cnp: u64,
    /// NAKs that this flow carries, by [`NakKind`].
    pub nak: [u32; 5],
    /// RNR NAKs that this flow carries.
    pub rnr_nak: u32,
    /// DSCPs counted one by one.
    pub dscp_values: [u8; DSCP_SLOTS],
    /// PSN of the first packet.
    pub first_psn: u32,
    /// PSN of the serially highest packet.
    pub last_psn: u32,
    /// UDP source port of the newest packet.
    pub src_port: u16,
    /// Opcode byte of the newest packet; its service is the flow's.
    pub last_opcode: u8,
    /// Always 0.
    pub reserved: u8,
    /// Packets by what they do, and messages.
    pub mix: Mix,
    /// What became of its PSNs.
    pub tracker: Tracker,
    /// Messages, ACKs and repeats.
    pub measured: Measured,
    /// How often the source port changed.
    pub src_port_changes: u32,
    /// Of requests, on the BPF side: `packets`, its low half, when the newest NAK or RNR NAK refused one.
    pub refused_after: u32,
    /// Of answers, on the BPF side: the request that is being timed.
    pub probe: Probe,
    /// Of requests, on the BPF side: when the newest one to be timed passed.
    pub probed_ns: u64,
    /// Of requests, on the BPF side: refusals that [`Flow::tracker`] has not heard of. Always none offline.
    pub refusals: Refusals,
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Flow>() == 992 && align_of::<Flow>() == 8);
    assert!(
        offset_of!(Flow, lock) == 0
            && offset_of!(Flow, packets) == 8
            && offset_of!(Flow, mix) == 152
            && offset_of!(Flow, tracker) == 224
            && offset_of!(Flow, measured) == 608
    );
};

impl Flow {
    /// Takes a packet of the flow, in the order of the tap. A CNP belongs to no flow by its addresses and is ignored.
    #[inline(always)]
    pub fn observe(&mut self, packet: &Packet, now: Nanos) -> Account {
        let account = self.count::<Direct>(packet, now);
        if !Measured::skips(packet, account) {
            self.measured.packet(packet, account);
        }
        account
    }

    /// The first half of [`Flow::observe`]: everything but [`Flow::measured`]. The BPF side has the halves checked apart, and its
    /// own `M`.
    #[inline(always)]
    pub fn count<M: MarkRange>(&mut self, packet: &Packet, now: Nanos) -> Account {
        let opcode = packet.bth.opcode;
        if opcode.kind() == Kind::Cnp {
            return Account::default();
        }
        let psn = packet.bth.psn;
        if self.packets == 0 {
            self.first_psn = psn.get();
            self.last_psn = psn.get();
        } else if psn.diff(Psn::new(self.last_psn)) > 0 {
            self.last_psn = psn.get();
        }
        if self.src_port != packet.src_port {
            self.src_port_changes += u32::from(self.packets != 0);
            self.src_port = packet.src_port;
        }
        self.packets += 1;
        self.bytes += u64::from(packet.payload_len);
        self.last_seen_ns = now.0;
        self.ecn[(packet.tos & 3) as usize] += 1;
        self.count_dscp(packet.dscp());
        self.last_opcode = opcode.get();
        match refusal(packet) {
            None => {}
            Some(Syndrome::RnrNak(_)) => self.rnr_nak += 1,
            Some(syndrome) => {
                if let Some(kind) = NakKind::of(syndrome) {
                    self.nak[kind as usize] += 1;
                }
            }
        }
        self.mix.packet(opcode);
        let account = self.tracker.observe_by::<M>(&Observed::from(packet));
        self.mix.message(opcode, account);
        account
    }

    /// For a reader that can remember one request at a time: whether this one, counted and with this `account`, is to be timed.
    /// One for each `now` at most, which may be a coarse clock.
    #[inline(always)]
    pub fn wants_probe(&mut self, packet: &Packet, account: Account, now: Nanos) -> bool {
        let wanted = is_timed(packet, account) && self.probed_ns != now.0;
        if wanted {
            self.probed_ns = now.0;
        }
        wanted
    }

    /// Of requests, on the BPF side: whether a refusal was the last that happened to the flow. Then it is told to wait.
    #[inline(always)]
    pub const fn is_told_to_wait(&self) -> bool {
        self.packets != 0 && self.refused_after == self.packets as u32
    }

    /// A response of the flow: the probe that it answers, or none.
    #[inline(always)]
    pub fn answered_probe(&mut self, packet: &Packet) -> Probe {
        let probe = self.probe;
        match probe.meets(packet.bth.psn, refusal(packet).is_some()) {
            Answer::Earlier => Probe::default(),
            Answer::Covered => {
                self.probe = Probe::default();
                Probe::default()
            }
            Answer::Exact => {
                self.probe = Probe::default();
                probe
            }
        }
    }

    /// Lets the tracker hear of what has been refused. On the BPF side the next packet does; a reader does it on its copy.
    #[inline(always)]
    pub fn settle(&mut self) {
        self.tracker.hear(core::mem::take(&mut self.refusals));
    }

    /// Closes the run that is going on: call it at the end of a capture, or on a copy for a report.
    pub fn finish(&mut self) -> Account {
        let account = self.tracker.finish();
        self.measured.repeats.end(account);
        account
    }

    #[inline(always)]
    fn count_dscp(&mut self, dscp: Dscp) {
        for slot in 0..DSCP_SLOTS {
            if self.dscp_counts[slot] == 0 {
                self.dscp_values[slot] = dscp.get();
            }
            if self.dscp_values[slot] == dscp.get() {
                self.dscp_counts[slot] += 1;
                return;
            }
        }
        self.dscp_others += 1;
    }

    /// The opcode of the newest packet; `None` before the first.
    pub fn opcode(&self) -> Option<Opcode> {
        if self.packets == 0 { None } else { Opcode::new(self.last_opcode) }
    }

    /// Packets of each DSCP seen, and of all DSCPs beyond the first [`DSCP_SLOTS`] last, as `None`.
    pub fn dscps(&self) -> impl Iterator<Item = (Option<Dscp>, u64)> {
        self.dscp_values
            .into_iter()
            .zip(self.dscp_counts)
            .map(|(value, count)| (Dscp::new(value), count))
            .chain([(None, self.dscp_others)])
            .filter(|&(_, count)| count != 0)
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::{
        units::{Addr, Qpn},
        wire::{Aeth, AtomicEth, Bth, Deth, IpVersion, Reth, Verdict, emit, parse},
    };

    fn packet(opcode: u8, psn: u32) -> Packet {
        let opcode = Opcode::new(opcode).expect("an opcode");
        Packet {
            ip: IpVersion::V4,
            l3_offset: 14,
            l4_offset: 34,
            src: Addr::v4([10, 0, 0, 1]),
            dst: Addr::v4([10, 0, 0, 2]),
            tos: 0x6a,
            src_port: 49_441,
            udp_len: 56,
            bth: Bth::new(opcode, Qpn::new(17), Psn::new(psn)),
            aeth: None,
            reth: None,
            deth: None,
            payload_len: 32,
        }
    }

    fn answer(opcode: u8, psn: u32, raw_syndrome: u8) -> Packet {
        Packet { aeth: Some(Aeth { raw_syndrome, msn: 1 }), payload_len: 0, ..packet(opcode, psn) }
    }

    fn flow_of(packets: impl IntoIterator<Item = Packet>) -> Flow {
        let mut flow = Flow::default();
        for (i, p) in packets.into_iter().enumerate() {
            flow.observe(&p, Nanos(i as u64));
        }
        flow
    }

    #[test]
    fn packets_bytes_codepoints_and_psns_are_counted() {
        let flow = flow_of([5, 6, 7].map(|psn| packet(0x04, psn)));
        assert_eq!((flow.packets, flow.bytes, flow.last_seen_ns, flow.src_port), (3, 96, 2, 49_441));
        assert_eq!((flow.first_psn, flow.last_psn, flow.ecn), (5, 7, [0, 0, 3, 0]));
        assert_eq!(flow.dscps().collect::<Vec<_>>(), [(Dscp::new(26), 3)]);
        assert_eq!(flow.opcode(), Some(Opcode::SEND_ONLY));
        assert_eq!(Flow::default().opcode(), None);
    }

    #[test]
    fn the_last_psn_is_the_serially_highest_and_acks_count_for_it() {
        let flow = flow_of([0xff_fffe, 2, 0, 1].map(|psn| answer(0x11, psn, 0x1f)));
        assert_eq!((flow.first_psn, flow.last_psn), (0xff_fffe, 2));
        assert!(!flow.tracker.is_started(), "ACKs enter no counter");
        // A READ request counts with its own PSN, not with the end of its span.
        let read = Reth { va: 0, rkey: 0, dma_len: 1 << 20 };
        let flow = flow_of([Packet { reth: Some(read), payload_len: 0, ..packet(0x0c, 9) }]);
        assert_eq!((flow.first_psn, flow.last_psn), (9, 9));
    }

    #[test]
    fn a_cnp_is_no_packet_of_a_flow() {
        assert_eq!(flow_of([packet(0x81, 0)]), Flow::default());
    }

    #[test]
    fn more_dscps_than_slots_are_counted_together() {
        let flow = flow_of([0, 26, 48, 26, 10, 11, 12, 0].map(|d| Packet { tos: d << 2, ..packet(0x04, 1) }));
        let dscps: Vec<_> = flow.dscps().map(|(d, n)| (d.map(Dscp::get), n)).collect();
        assert_eq!(dscps, [(Some(0), 2), (Some(26), 2), (Some(48), 1), (Some(10), 1), (None, 2)]);
    }

    #[test]
    fn naks_are_counted_by_kind_in_both_answers_that_carry_them() {
        for opcode in [0x11, 0x12, 0x51, 0x52, 0xb1, 0xb2] {
            let syndromes = [0x00, 0x1f, 0x20, 0x3f, 0x60, 0x60, 0x61, 0x62, 0x63, 0x64, 0x40, 0xff];
            let flow = flow_of(syndromes.map(|s| answer(opcode, 1, s)));
            assert_eq!((flow.nak, flow.rnr_nak), ([2, 1, 1, 1, 3], 2), "{opcode:#x}");
        }
        // The AETH of a READ response is no refusal.
        let flow = flow_of([0x0d, 0x0f, 0x10].map(|op| answer(op, 1, 0x60)));
        assert_eq!((flow.nak, flow.rnr_nak), ([0; 5], 0));
    }

    #[test]
    fn management_and_datagrams_are_not_tracked() {
        let gsi = Bth { dest_qp: Qpn::GSI, ..packet(0x04, 5).bth };
        for p in [Packet { bth: gsi, ..packet(0x04, 5) }, packet(0x64, 5), packet(0x44, 5)] {
            let flow = flow_of([p, p]);
            assert_eq!((flow.packets, flow.first_psn), (2, 5));
            assert!(!flow.tracker.is_started(), "{p:?}");
        }
    }

    /// Frames of every kind, with bytes changed at random: whatever still parses keeps a flow consistent.
    #[test]
    fn mutated_packets_never_panic_and_keep_the_numbers_consistent() {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut random = move |n: usize| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as usize % n
        };
        let mut frames = Vec::new();
        for (opcode, payload) in [
            (0x06, 256),
            (0x07, 256),
            (0x08, 8),
            (0x0c, 0),
            (0x0d, 256),
            (0x10, 4),
            (0x11, 0),
            (0x12, 0),
            (0x13, 0),
            (0x64, 16),
            (0x2a, 12),
        ] {
            let opcode = Opcode::new(opcode).expect("an opcode");
            for v6 in [false, true] {
                let addr = |n| if v6 { Addr([n; 16]) } else { Addr::v4([10, 0, 0, n]) };
                let path = emit::Path {
                    src_mac: [2; 6],
                    dst_mac: [4; 6],
                    src: addr(1),
                    dst: addr(2),
                    tos: 2,
                    ttl: 64,
                    ip_id: 1,
                    src_port: 49_441,
                };
                let has = |opcodes: &[u8]| opcodes.contains(&opcode.get());
                let ext = emit::Ext {
                    reth: has(&[0x06, 0x0c, 0x2a]).then_some(Reth { va: 0, rkey: 1, dma_len: 1 << 20 }),
                    aeth: has(&[0x0d, 0x10, 0x11, 0x12]).then_some(Aeth { raw_syndrome: 0x60, msn: 2 }),
                    atomic: has(&[0x13]).then_some(AtomicEth { va: 0, rkey: 1, swap_or_add: 2, compare: 3 }),
                    atomic_ack: has(&[0x12]).then_some(4),
                    deth: has(&[0x64]).then_some(Deth { qkey: 1, src_qp: Qpn::new(18) }),
                    ..emit::Ext::default()
                };
                let mut buffer = [0; 512];
                let bth = Bth::new(opcode, Qpn::new(17), Psn::new(100));
                let len = emit::frame(&path, &bth, &ext, &[7; 256][..payload], &mut buffer).expect("a frame");
                frames.push(buffer[..len].to_vec());
            }
        }
        let (mut flow, mut parsed) = (Flow::default(), 0u64);
        for _ in 0..60_000 {
            let mut frame = frames[random(frames.len())].clone();
            // Small steps of the PSN, so that the window is used; then noise.
            let at = frame.len() - 1;
            for _ in 0..random(4) {
                let byte = random(frame.len());
                frame[byte] = random(256) as u8;
            }
            if random(8) == 0 {
                frame.truncate(random(at + 1));
            }
            let Verdict::Roce(mut p) = parse(&frame[..]) else { continue };
            p.bth.psn = p.bth.psn.add(flow.tracker.next().get()).sub(100 + random(40) as u32).add(random(44) as u32);
            parsed += 1;
            flow.observe(&p, Nanos(parsed));
            if random(10) == 0 {
                flow.tracker.note_sequence_nak(p.bth.psn);
            }
            let mut end = flow.tracker;
            end.finish();
            assert_eq!(end.missing_psns, end.lost + end.reordered + end.open());
            assert_eq!(flow.ecn.iter().sum::<u64>(), flow.packets);
            assert_eq!(flow.dscps().map(|(_, n)| n).sum::<u64>(), flow.packets);
        }
        assert!(parsed > 10_000 && flow.tracker.missing_psns > 0, "{parsed}");
    }
}
