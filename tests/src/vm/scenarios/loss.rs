//! A switch that drops silently: what we count as lost is what it dropped, on the right side of each tap, and agrees with rxe.

use std::collections::HashSet;

use anyhow::{Context, Result, bail};

use crate::{
    capture::Seen,
    lab::json,
    run::AgentProcess,
    vm::{Case, Counters, Fabric, Flows, Header, Node, Part, Passed, Perf, Placement, Report, Scenario, Wire, load},
};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "loss",
    about: "what we call lost is what the switch dropped, upstream and downstream told apart, consistent with rxe's counters",
    parts: &[Part::new("drops", 400, dropping).share(33)],
};

/// Traffic whose data goes from host 0 to host 1.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    tool: &'static str,
    args: &'static str,
    /// The host that asks.
    client: usize,
    space: &'static str,
}

impl Kind {
    /// Whether what is lost is sent again.
    fn repeats(self) -> bool {
        !self.args.contains("UC")
    }
}

const WRITE: Kind = Kind { name: "write", tool: "ib_write_bw", args: "-s 16384 -n 150", client: 0, space: "request" };
const SEND: Kind = Kind { name: "send", tool: "ib_send_bw", args: "-s 16384 -n 150", client: 0, space: "request" };
const READ: Kind = Kind { name: "read", tool: "ib_read_bw", args: "-s 16384 -n 120", client: 1, space: "response" };
const UC_WRITE: Kind =
    Kind { name: "write, unreliable", tool: "ib_write_bw", args: "-c UC -s 16384 -n 150", client: 0, space: "request" };

/// How the switch drops: netem(8). One in a hundred; and bursts of two on average that begin at one packet in 200.
const WAYS: [(&str, &str); 2] = [("1 %", "loss 1%"), ("bursts", "loss gemodel 0.5% 50%")];

/// What the switch did with data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Truth {
    dropped: usize,
    /// Of these, those whose loss the order of what came through cannot show, see [`Passage::hides`].
    hidden: usize,
    /// Of the hidden ones, those that had come through before: a NAK of such a one seems to tell of a loss behind the tap.
    hidden_again: usize,
}

/// A packet that was sent.
#[derive(Clone, Copy)]
struct Fate {
    psn: u32,
    passed: bool,
    /// It is an answer that begins a message.
    begins: bool,
}

impl Truth {
    /// From the frames that host 0 sent and those that the switch passed on to host 1, both in order.
    fn find(before: &[&Seen], after: &[&Seen]) -> Result<Self> {
        let mut rest = after.iter().peekable();
        let mut fates = Vec::new();
        for seen in before {
            let passed = rest.next_if(|next| next.frame == seen.frame).is_some();
            let header = Header::read(&seen.frame).context("a frame that is no RoCEv2")?;
            // READ RESPONSE FIRST and ONLY.
            fates.push(Fate { psn: header.psn, passed, begins: matches!(header.opcode, 0x0d | 0x10) });
        }
        if let Some(extra) = rest.next() {
            bail!("the switch passed on what was not sent: {:?}", Header::read(&extra.frame));
        }
        Ok(Self::of(&fates))
    }

    fn of(fates: &[Fate]) -> Self {
        let mut passage = Passage::default();
        let passing: Vec<Place> = fates.iter().filter(|fate| fate.passed).map(|fate| passage.pass(fate.psn)).collect();
        let (mut truth, mut passed) = (Self { dropped: 0, hidden: 0, hidden_again: 0 }, 0);
        for (i, fate) in fates.iter().enumerate() {
            if fate.passed {
                passed += 1;
                continue;
            }
            let before = &passing[..passed];
            let hidden = passage.hides(&fates[i..], before.last());
            truth.dropped += 1;
            truth.hidden += usize::from(hidden);
            let came = before.iter().any(|place| place.psn == fate.psn);
            truth.hidden_again += usize::from(hidden && came);
        }
        truth
    }
}

/// Where a packet that came through stands.
struct Place {
    psn: u32,
    /// The newest PSN that has come through, this one included.
    newest: u32,
    /// The repeat that is going on behind the newest PSN, by its number.
    repeat: Option<usize>,
}

/// Packets of which each came after the one before, none of them new.
#[derive(Default)]
struct Repeat {
    packets: i32,
    /// One of them had come through before.
    duplicate: bool,
    last: u32,
}

/// What came through the switch.
#[derive(Default)]
struct Passage {
    came: HashSet<u32>,
    newest: Option<u32>,
    repeats: Vec<Repeat>,
    going_on: bool,
}

impl Passage {
    fn pass(&mut self, psn: u32) -> Place {
        let behind = self.newest.filter(|newest| ahead(psn, *newest) <= 0);
        if behind.is_some() {
            if !self.going_on || self.repeats.last().is_some_and(|repeat| ahead(psn, repeat.last) <= 0) {
                self.repeats.push(Repeat::default());
            }
            let duplicate = self.came.contains(&psn);
            if let Some(repeat) = self.repeats.last_mut() {
                *repeat = Repeat { packets: repeat.packets + 1, duplicate: repeat.duplicate || duplicate, last: psn };
            }
        }
        self.going_on = behind.is_some_and(|newest| newest != psn);
        self.came.insert(psn);
        let newest = *self.newest.insert(behind.unwrap_or(psn));
        Place { psn, newest, repeat: self.going_on.then(|| self.repeats.len() - 1) }
    }

    /// Whether the order of what came through cannot show that the first of `fates` was dropped; `before` came through last before
    /// it.
    ///
    /// Until the next comes through, only what stands behind it may be sent. A new packet is missed then, unless the next is an
    /// answer that begins a message: it may have skipped another request's PSNs. One that is sent again is missed only inside a
    /// repeat that is seen to be one: something of it has come through before, and something that had come through already;
    /// and if it is at the repeat's end, the repeat must be longer than that end.
    fn hides(&self, fates: &[Fate], before: Option<&Place>) -> bool {
        let psn = fates[0].psn;
        let (Some(before), Some(n)) = (before, fates.iter().position(|fate| fate.passed)) else { return true };
        let next = fates[n];
        if fates[1..=n].iter().any(|later| ahead(later.psn, psn) <= 0) {
            return true;
        }
        if ahead(psn, before.newest) > 0 {
            return next.begins;
        }
        let Some(repeat) = before.repeat.filter(|_| ahead(psn, before.psn) > 0) else { return true };
        let left = ahead(before.newest, before.psn);
        let Repeat { packets, duplicate, .. } = self.repeats[repeat];
        !duplicate || ahead(next.psn, before.newest) > 0 && left >= packets
    }
}

/// How far `a` is ahead of `b`, in 24 bits.
fn ahead(a: u32, b: u32) -> i32 {
    (a.wrapping_sub(b) << 8) as i32 >> 8
}

/// A switch whose port to host 1 drops, and agents on both hosts.
struct Bench {
    fabric: Fabric,
    _agents: Vec<AgentProcess>,
}

impl Bench {
    fn new() -> Result<Self> {
        load(&["sch_netem"])?;
        let fabric = Fabric::new(2, 1_500, Placement::Initial)?;
        let agent = |host: usize| fabric.agent(host, &["--ingress", "tc", "--pacer", "off"]);
        Ok(Self { _agents: vec![agent(0)?, agent(1)?], fabric })
    }

    fn port(&self) -> &Node {
        &self.fabric.nodes[1]
    }

    fn drop_by(&self, how: &str) -> Result<()> {
        let port = &self.port().switch_port;
        port.ns.tc(&[format!("qdisc replace dev {} root netem {how} limit 10000", port.name)])
    }

    /// What the switch's own qdisc says that it has dropped.
    fn dropped(&self) -> Result<u64> {
        let port = &self.port().switch_port;
        let json = json(port.ns.command("tc").args(["-s", "-j", "qdisc", "show", "dev", &port.name]))?;
        json[0]["drops"].as_u64().with_context(|| format!("the switch's port has no queue that drops: {json}"))
    }
}

fn dropping(report: &mut Report) -> Result<()> {
    let bench = Bench::new()?;
    for (way, how) in WAYS {
        for kind in [WRITE, SEND, READ, UC_WRITE] {
            bench.drop_by(how)?;
            report.case(format!("{}, {way}", kind.name), |case| lossy(case, &bench, kind));
        }
    }
    Ok(())
}

fn lossy(case: &mut Case, bench: &Bench, kind: Kind) -> Result<()> {
    let nodes = &bench.fabric.nodes;
    let (rxe_before, before, dropped_before) =
        (Counters::all(&bench.fabric)?, Flows::read(&bench.fabric)?, bench.dropped()?);
    let wires = [Wire::start(&nodes[0])?, Wire::start(&nodes[1])?];
    Perf::new(kind.tool).args(kind.args).timeout(14).run(&bench.fabric, kind.client, 1 - kind.client)?;
    let [at_sender, at_receiver] = wires.map(Wire::finish);
    let (at_sender, at_receiver) = (at_sender?, at_receiver?);
    let ours = Flows::read(&bench.fabric)?.since(&before);
    let dropped = bench.dropped()? - dropped_before;
    let rxe: Vec<Counters> =
        Counters::all(&bench.fabric)?.iter().zip(&rxe_before).map(|(after, before)| after.since(before)).collect();

    let sent: Vec<&Seen> = at_sender.sent().filter(|s| is_data(s, kind)).collect();
    let passed: Vec<&Seen> = at_receiver.received().filter(|s| is_data(s, kind)).collect();
    let truth = Truth::find(&sent, &passed)?;
    case.equal("what the captures miss and what the switch says it dropped", truth.dropped as u64, dropped);
    case.expect(dropped > 0, "the switch dropped nothing");

    // Behind the switch: lost before the tap, and nothing else.
    let of_data = |tap: &str, name: &str| -> u64 {
        ours.at(tap).filter(|(id, _)| id.space == kind.space).map(|(_, tally)| tally.get(name)).sum()
    };
    let lost = if kind.repeats() {
        of_data("v1/ingress", "lost") + of_data("v1/ingress", "lost_again")
    } else {
        // What nobody sends again is lost once it falls out of the window, and open until then.
        of_data("v1/ingress", "missing_psns")
    };
    case.equal("what we miss behind the switch", lost, dropped - truth.hidden as u64);
    for name in ["reordered", "discontinuities"] {
        case.equal(format_args!("{name} behind the switch"), of_data("v1/ingress", name), 0);
    }
    let after = of_data("v1/ingress", "lost_after_tap");
    case.expect(
        after <= truth.hidden_again as u64,
        format_args!("behind the switch {after} are lost after the tap, and {} losses are hidden", truth.hidden_again),
    );
    // In front of it: nothing is missing; what was repeated was lost behind this tap.
    for name in ["missing_psns", "lost", "lost_again", "reordered", "discontinuities"] {
        case.equal(format_args!("{name} in front of the switch"), of_data("v0/egress", name), 0);
    }
    case.equal("packets in front of the switch", of_data("v0/egress", "packets"), sent.len() as u64);
    case.equal("packets behind the switch", of_data("v1/ingress", "packets"), passed.len() as u64);

    if !case.holds() {
        // For whoever looks into it.
        at_sender.save(&format!("{}-sender.pcap", kind.tool))?;
        at_receiver.save(&format!("{}-receiver.pcap", kind.tool))?;
    }
    let naks = naks(&at_receiver);
    case.figure("dropped", dropped);
    case.figure("hidden", truth.hidden);
    case.figure("lost", of_data("v1/ingress", "lost"));
    case.figure("lost_again", of_data("v1/ingress", "lost_again"));
    case.figure("naks", naks);
    case.figure("retransmitted", of_data("v0/egress", "retransmitted"));
    for (device, counters) in ["sender", "receiver"].iter().zip(&rxe) {
        case.figure(&format!("rxe_{device}"), counters.trouble());
    }
    let [sender, receiver] = [&rxe[0], &rxe[1]];
    if kind.space == "request" && kind.repeats() {
        // The responder answers the first packet ahead of a gap, and only that: one NAK, one out_of_seq_request.
        case.equal("rxe's out_of_seq_request and the NAKs on the wire", receiver.get("out_of_seq_request"), naks);
        let known = repeats_of_known(&sent, &passed)?;
        case.equal("rxe's duplicate_request and the repeats of what it had", receiver.get("duplicate_request"), known);
        case.expect(
            known <= of_data("v1/ingress", "duplicates"),
            format_args!("{known} repeats of what rxe had are more than our duplicates"),
        );
        let beyond = naks_beyond(&sent, &at_sender)?;
        // Most of them: it also passes over some of those that a time-out has overtaken (one of nine, seen on 7.3).
        let counted = sender.get("rcvd_seq_err");
        case.expect(
            counted <= beyond && counted * 2 >= beyond,
            format_args!("rxe's rcvd_seq_err is {counted}, and {beyond} NAKs are beyond what was acknowledged"),
        );
        case.equal("our NAKs at the sender", ours.sum("v0/ingress", "nak.psn_sequence"), naks);
        case.equal("our NAKs at the receiver", ours.sum("v1/egress", "nak.psn_sequence"), naks);
        case.expect(naks <= dropped, format_args!("{naks} NAKs for {dropped} dropped packets"));
        case.expect(
            of_data("v0/egress", "lost_after_tap") <= naks,
            "in front of the switch more is lost after the tap than NAKs say",
        );
        case.expect(
            of_data("v0/egress", "lost_after_tap") > 0 || naks == 0,
            "no loss after the tap in front of the switch",
        );
    }
    if kind.space == "response" {
        // rxe asks again by itself: no NAK.
        case.equal("NAKs", naks, 0);
        case.expect(receiver.get("completer_retry_err") > 0, "rxe did not ask again");
        let reasked: u64 = ours.at("v1/egress").map(|(_, tally)| tally.get("reasked")).sum();
        case.expect(reasked > 0, "we saw nothing asked again");
    }
    Ok(())
}

/// Whether a packet carries what [`Kind`] sends from host 0.
fn is_data(seen: &Seen, kind: Kind) -> bool {
    Header::read(&seen.frame).is_some_and(|h| h.space() == kind.space && h.payload > 0)
}

/// The sequence NAKs that host 1 sent.
fn naks(wire: &Passed) -> u64 {
    wire.sent().filter(|s| Header::read(&s.frame).is_some_and(|h| h.syndrome == Some(0x60))).count() as u64
}

/// Packets that came when rxe had taken theirs: rxe_resp.c (6.1 to 7.3) takes one PSN after the other, drops what is ahead, and counts
/// `duplicate_request` for what is behind.
fn repeats_of_known(sent: &[&Seen], passed: &[&Seen]) -> Result<u64> {
    let mut expected = sent.first().and_then(|s| Header::read(&s.frame)).context("nothing was sent")?.psn;
    let mut known = 0;
    for header in passed.iter().filter_map(|s| Header::read(&s.frame)) {
        match ahead(header.psn, expected) {
            0 => expected = (expected + 1) & 0xff_ffff,
            1.. => {}
            _ => known += 1,
        }
    }
    Ok(known)
}

/// The sequence NAKs that ask for more than the sender already knew: rxe_comp.c (6.1 to 7.3) counts `rcvd_seq_err` only where a
/// NAK's PSN is beyond its own.
fn naks_beyond(sent: &[&Seen], at_sender: &Passed) -> Result<u64> {
    let first = sent.first().and_then(|s| Header::read(&s.frame)).context("nothing was sent")?;
    let (mut known, mut count) = (first.psn, 0);
    for header in at_sender.received().filter_map(|s| Header::read(&s.frame)) {
        match header.syndrome {
            Some(0x60) if ahead(header.psn, known) > 0 => {
                count += 1;
                known = header.psn;
            }
            Some(0..0x20) if ahead(header.psn + 1, known) > 0 => known = (header.psn + 1) & 0xff_ffff,
            _ => {}
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::{cmp::Ordering, collections::VecDeque, mem};

    use roce_common::{
        psn::{Observed, Psn, Tracker},
        wire::Opcode,
    };

    use super::*;
    use crate::dialogue::Random;

    #[test]
    fn psns_are_compared_in_24_bits() {
        assert_eq!((ahead(0, 0xff_ffff), ahead(0xff_ffff, 0), ahead(7, 7)), (1, -1, 0));
    }

    fn truth(fates: &[(u32, bool)]) -> (usize, usize) {
        let fates: Vec<_> = fates.iter().map(|&(psn, passed)| Fate { psn, passed, begins: psn % 10 == 0 }).collect();
        let truth = Truth::of(&fates);
        (truth.dropped, truth.hidden)
    }

    #[test]
    fn what_nothing_shows_is_hidden() {
        assert_eq!(truth(&[(1, true), (2, false), (3, true), (2, true), (3, true)]), (1, 0));
        // Nothing came behind the last two.
        assert_eq!(truth(&[(1, true), (2, false), (3, false)]), (2, 2));
        // Nothing came before the first.
        assert_eq!(truth(&[(1, false), (2, true), (1, true), (2, true)]), (1, 1));
        // The repeat begins, for who stands behind the switch, with 3: that 2 was sent again nobody saw.
        assert_eq!(truth(&[(1, true), (2, false), (3, true), (2, false), (3, true), (2, true), (3, true)]), (2, 1));
        // Within the repeat 3 is seen to be skipped.
        assert_eq!(
            truth(&[(1, true), (2, false), (3, true), (4, true), (2, true), (3, false), (4, true), (3, true)]),
            (2, 0)
        );
        // 10 may follow 7 where another request took 8 and 9; what comes behind 10 may not.
        assert_eq!(truth(&[(7, true), (8, false), (10, true), (11, false), (12, true)]), (2, 1));
        // A repeat that goes on to new packets, one of which is lost; before it the end was lost.
        assert_eq!(truth(&[(1, true), (2, false), (1, false), (2, true), (3, false), (4, true)]), (3, 2));
    }

    #[test]
    fn a_repeat_that_looks_like_none_hides_its_losses() {
        let start = [(1, true), (2, false), (3, true), (4, true)];
        let with = |more: &[(u32, bool)]| truth(&[&start[..], more].concat());
        // 2 alone: nothing in it had come before, and no longer than the end that is missing.
        assert_eq!(with(&[(2, true), (3, false), (4, false), (5, true)]), (3, 2));
        assert_eq!(with(&[(2, true), (3, true), (4, false), (5, true)]), (2, 0));
        // Two repeated, and two missing at the end; that they were repeated nobody knows.
        assert_eq!(with(&[(5, true), (2, true), (3, true), (4, false), (5, false), (6, true)]), (3, 2));
        // The next repeat goes on where the one before left off; what both lost is missed once.
        assert_eq!(with(&[(2, true), (3, false), (3, false), (4, true)]), (3, 1));
    }

    /// What an rxe of 128 unanswered packets sends to one that answers `delay` packets later, through a switch that loses `losses`
    /// in 1,000, each with those behind it, one on average, if in bursts; and what is counted behind the switch.
    fn transfer(random: &mut Random, delay: u32, losses: u64, bursts: bool) -> (Vec<Fate>, Tracker) {
        const PACKETS: u32 = 1_000;
        let (mut fates, mut tracker) = (Vec::new(), Tracker::default());
        let (mut expected, mut refused, mut losing) = (0, false, false);
        let (mut next, mut answered, mut now, mut heard) = (0, 0, 0, 0);
        let mut answers = VecDeque::new();
        while answered < PACKETS {
            now += 1;
            while let Some((_, psn, nak)) = answers.pop_front_if(|answer: &mut (u32, u32, bool)| answer.0 <= now) {
                (heard, answered) = (now, answered.max(psn));
                next = if nak { psn } else { next };
            }
            if next == PACKETS || next == answered + 128 {
                // It waits, and starts over when it has waited long.
                if now > heard + 200 {
                    (next, heard) = (answered, now);
                }
                continue;
            }
            losing = random.permille(if losing && bursts { 500 } else { losses });
            fates.push(Fate { psn: next, passed: !losing, begins: false });
            if !losing {
                tracker.observe(&Observed::new(Opcode::WRITE_MIDDLE, Psn::new(next), 1_024, 0));
                let nak = match next.cmp(&expected) {
                    Ordering::Less => Some(false),
                    Ordering::Equal => {
                        (expected, refused) = (expected + 1, false);
                        (expected % 16 == 0).then_some(false)
                    }
                    Ordering::Greater => (!mem::replace(&mut refused, true)).then_some(true),
                };
                if nak == Some(true) {
                    tracker.note_sequence_nak(Psn::new(expected));
                }
                answers.extend(nak.map(|nak| (now + delay, expected, nak)));
            }
            next += 1;
        }
        tracker.finish();
        (fates, tracker)
    }

    #[test]
    fn all_but_the_hidden_losses_are_counted() {
        let mut random = Random::new(1);
        let mut hidden = 0;
        for n in 0..2_000 {
            let (bursts, delay) = (n % 2 == 1, 1 + n % 20);
            let (fates, tracker) = transfer(&mut random, delay, if bursts { 5 } else { 10 }, bursts);
            let truth = Truth::of(&fates);
            let counted = (tracker.lost + tracker.lost_again + tracker.reordered) as usize;
            assert_eq!(counted, truth.dropped - truth.hidden, "transfer {n}: {truth:?}");
            assert!(tracker.lost_after_tap as usize <= truth.hidden_again, "transfer {n}: {truth:?}");
            hidden += truth.hidden_again;
        }
        assert!(hidden > 100, "{hidden}");
    }
}
