//! `--between`: two captures of one path, and where on it packets were lost.
//!
//! The rules are those of [`roce_common::psn::bracket`]. Which tap a flow passes first is found for each direction: the one
//! that sees losses behind it where the other sees them before it; or else the one that saw more of its packets. Clocks are not
//! compared.

use std::{
    collections::{BTreeMap, VecDeque},
    io::Write,
    net::IpAddr,
};

use anyhow::{Context, Result, bail};
use roce_common::{
    abi::{FlowKey, Space},
    flow::Flow,
    psn::{Episode, LostBetween, Segment, bracket},
    units::{Addr, Qpn},
};
use serde::Serialize;

use super::{
    InspectArgs,
    filter::Flows,
    session::{self, Observed},
};
use crate::export::SCHEMA;

/// Episodes of one tap that may stand between two of the same disturbance: more at a time go on in no flow.
const APART: usize = 64;

/// What two taps tell of one flow.
#[derive(Clone, Debug, Serialize)]
struct FlowBetween {
    src: IpAddr,
    dst: IpAddr,
    dest_qp: u32,
    space: &'static str,
    service: &'static str,
    /// The capture whose tap it passed first.
    first: String,
    /// Packets at the first tap and at the second.
    packets: [u64; 2],
    /// Packets that passed the first and not the second.
    lost_between: i64,
    /// The same by what the second tap's tracker makes of it.
    told_between: i64,
    /// Both taps saw it from the same PSN to the same PSN; else the two numbers are no losses.
    same_span: bool,
    /// Disturbances by where they were.
    episodes: Places,
}

/// Disturbances of a flow.
#[derive(Clone, Copy, Default, Debug, Serialize)]
struct Places {
    /// Before both taps.
    before_both: u64,
    /// Between them.
    between: u64,
    /// Behind both.
    behind_both: u64,
    /// What the two say does not tell.
    unknown: u64,
    /// Seen at the first tap alone: the second one missed nothing by it.
    only_first: u64,
    /// Seen at the second tap alone.
    only_second: u64,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
struct Report {
    schema: u32,
    kind: &'static str,
    files: [String; 2],
    /// Why a file was not read to its end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    incomplete: Vec<String>,
    /// Over the flows that both taps saw from the same PSN to the same PSN.
    lost_between: i64,
    told_between: i64,
    flows: Vec<FlowBetween>,
    /// Flows that one of them did not see.
    only_in: [u64; 2],
}

/// What of a flow does not depend on the tap.
type Identity = (Addr, Addr, Qpn, Space);
/// A flow at one tap.
type Seen<'a> = (&'a Flow, &'a [Episode]);

/// Reads the two files and writes what was lost between them. Whether anything was lost anywhere.
///
/// # Errors
///
/// Not two files; or one cannot be read, or the report not be written.
pub(super) fn run(args: &InspectArgs, out: &mut impl Write) -> Result<bool> {
    let [one, other] = &args.files[..] else {
        bail!("--between takes two files, the captures of two taps; these are {}", args.files.len());
    };
    let [one, other] = [session::observe(args, one, out)?, session::observe(args, other, out)?];
    let report = compare(&one, &other, |key, at| Flows(&args.flows).key(at.capture.tap_name(key.tap), key));
    let incomplete = !report.incomplete.is_empty();
    if args.json {
        serde_json::to_writer(&mut *out, &report).context("cannot write the report")?;
        writeln!(out)?;
    } else {
        table(out, &report).context("cannot write the report")?;
    }
    out.flush()?;
    let disturbed = report.flows.iter().any(|f| {
        let Places { before_both, between, behind_both, unknown, .. } = f.episodes;
        f.same_span && f.lost_between != 0 || before_both + between + behind_both + unknown > 0
    });
    Ok(incomplete || disturbed)
}

/// The flows of a capture by what does not depend on the tap. Where several taps of it saw one, the tap that saw most.
fn by_identity<'a>(at: &'a Observed, asked: &impl Fn(&FlowKey, &Observed) -> bool) -> BTreeMap<Identity, Seen<'a>> {
    let mut flows: BTreeMap<Identity, Seen<'a>> = BTreeMap::new();
    for (key, flow, episodes) in at.flows.iter().filter(|(key, _, _)| asked(key, at)) {
        let seen = (flow, &episodes[..]);
        let best = flows.entry((key.src, key.dst, key.dest_qp(), key.space())).or_insert(seen);
        if flow.packets > best.0.packets {
            *best = seen;
        }
    }
    flows
}

fn compare(one: &Observed, other: &Observed, asked: impl Fn(&FlowKey, &Observed) -> bool) -> Report {
    let (ones, others) = (by_identity(one, &asked), by_identity(other, &asked));
    // Which tap comes first, by direction.
    let mut votes: BTreeMap<(Addr, Addr), (i64, i64)> = BTreeMap::new();
    for (id, here) in &ones {
        let Some(there) = others.get(id) else { continue };
        let vote = votes.entry((id.0, id.1)).or_default();
        vote.0 += places(here.1, there.1).between as i64 - places(there.1, here.1).between as i64;
        vote.1 += here.0.packets as i64 - there.0.packets as i64;
    }
    let mut flows = Vec::new();
    for (id, here) in &ones {
        let Some(there) = others.get(id) else { continue };
        let in_order = votes.get(&(id.0, id.1)).is_none_or(|vote| *vote >= (0, 0));
        let (first, second) = if in_order { (here, there) } else { (there, here) };
        let lost = LostBetween::of(first.0, second.0);
        flows.push(FlowBetween {
            src: id.0.into(),
            dst: id.1.into(),
            dest_qp: id.2.get(),
            space: id.3.name(),
            service: first.0.opcode().map_or("", |opcode| opcode.service().name()),
            first: if in_order { one.name.clone() } else { other.name.clone() },
            packets: [first.0.packets, second.0.packets],
            lost_between: lost.packets,
            told_between: lost.told,
            same_span: (first.0.first_psn, first.0.last_psn) == (second.0.first_psn, second.0.last_psn),
            episodes: places(first.1, second.1),
        });
    }
    flows.sort_by_key(|f| std::cmp::Reverse((f.lost_between.abs(), f.packets[0])));
    let whole = || flows.iter().filter(|f| f.same_span);
    let missing = |a: &BTreeMap<Identity, Seen<'_>>, b: &BTreeMap<Identity, Seen<'_>>| {
        a.keys().filter(|id| !b.contains_key(id)).count() as u64
    };
    let incomplete = [one, other].into_iter();
    Report {
        schema: SCHEMA,
        kind: "between",
        files: [one.name.clone(), other.name.clone()],
        incomplete: incomplete
            .filter_map(|at| Some(format!("{}: {}", at.name, at.capture.incomplete.as_ref()?)))
            .collect(),
        lost_between: whole().map(|f| f.lost_between).sum(),
        told_between: whole().map(|f| f.told_between).sum(),
        only_in: [missing(&ones, &others), missing(&others, &ones)],
        flows,
    }
}

/// Where the disturbances of a flow were.
fn places(first: &[Episode], second: &[Episode]) -> Places {
    let mut places = Places::default();
    let mut waiting: VecDeque<&Episode> = VecDeque::new();
    let mut left = first.iter();
    for there in second {
        while waiting.len() < APART
            && let Some(next) = left.next()
        {
            waiting.push_back(next);
        }
        let found = waiting.iter().enumerate().find_map(|(i, here)| Some((i, bracket(here, there)?)));
        let Some((i, segment)) = found else {
            places.only_second += 1;
            continue;
        };
        waiting.remove(i);
        // What stands far before it will meet nobody any more.
        while i >= APART / 2 && waiting.len() > APART / 2 {
            waiting.pop_front();
            places.only_first += 1;
        }
        *match segment {
            Segment::BeforeBoth => &mut places.before_both,
            Segment::Between => &mut places.between,
            Segment::BehindBoth => &mut places.behind_both,
            Segment::Unknown => &mut places.unknown,
        } += 1;
    }
    places.only_first += (waiting.len() + left.len()) as u64;
    places
}

/// Flows shown; JSON has them all.
const MOST_ROWS: usize = 64;

fn table(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    let [one, other] = &report.files;
    writeln!(out, "{one} and {other}")?;
    for reason in &report.incomplete {
        writeln!(out, "  ! incomplete: {reason}")?;
    }
    writeln!(
        out,
        "  lost between the two taps: {} packets; {} by the tracker at the second",
        report.lost_between, report.told_between
    )?;
    for (file, n) in report.files.iter().zip(report.only_in).filter(|(_, n)| *n > 0) {
        writeln!(out, "  {n} flows are in {file} alone")?;
    }
    for f in report.flows.iter().take(MOST_ROWS) {
        writeln!(out)?;
        writeln!(out, "  {} → {} QP {}, {}, {}; first at {}", f.src, f.dst, f.dest_qp, f.space, f.service, f.first)?;
        let [first, second] = f.packets;
        if f.same_span {
            writeln!(
                out,
                "    packets     {first}, then {second}: {} lost between, {} told",
                f.lost_between, f.told_between
            )?;
        } else {
            writeln!(out, "    packets     {first}, then {second}; the captures begin or end at other packets")?;
        }
        let e = f.episodes;
        let all = [
            (e.before_both, "before both"),
            (e.between, "between"),
            (e.behind_both, "behind both"),
            (e.unknown, "not told"),
            (e.only_first, "seen at the first alone"),
            (e.only_second, "seen at the second alone"),
        ];
        let seen: Vec<_> = all.iter().filter(|(n, _)| *n > 0).map(|(n, name)| format!("{n} {name}")).collect();
        if !seen.is_empty() {
            writeln!(out, "    episodes    {}", seen.join(", "))?;
        }
    }
    if report.flows.len() > MOST_ROWS {
        writeln!(out, "\n  {MOST_ROWS} flows of {}; --json has all", report.flows.len())?;
    }
    Ok(())
}
