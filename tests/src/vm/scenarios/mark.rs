//! Applications that set no traffic class: their packets leave with the configured marks, and rxe still takes them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use serde_json::Value;

use crate::{
    capture::Seen,
    rig,
    run::AgentProcess,
    vm::{Case, Counters, Fabric, Header, JUMBO, Part, Perf, Placement, Report, Scenario, Wire, rping},
};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "mark",
    about: "DSCP and ECT(0) on what applications left unmarked, CNPs in their own class, and transfers that stay right",
    parts: &[
        Part::new("ipv4", 300, ipv4).share(33),
        Part::new("ipv6-4096", 240, |r| unmarked(r, &Fabric::new(2, JUMBO, Placement::Initial)?, true).map(drop))
            .share(33),
    ],
};

const DATA_DSCP: u8 = 34;
const CNP_DSCP: u8 = 46;
const ECT0: u8 = 2;

/// An agent that marks, and paces nothing.
fn agent(fabric: &Fabric, node: usize, more: &[&str]) -> Result<AgentProcess> {
    let (data, cnp) = (DATA_DSCP.to_string(), CNP_DSCP.to_string());
    let args = [&["--ingress", "tc", "--pacer", "off", "--data-dscp", &data, "--cnp-dscp", &cnp], more].concat();
    fabric.agent(node, &args)
}

/// Such agents on both hosts.
fn agents(fabric: &Fabric) -> Result<[AgentProcess; 2]> {
    Ok([agent(fabric, 0, &[])?, agent(fabric, 1, &[])?])
}

/// Packets by what they carry in the byte of DSCP and ECN.
fn tos<'a>(packets: impl Iterator<Item = &'a Seen>) -> BTreeMap<u8, u64> {
    let mut counts = BTreeMap::new();
    for header in packets.filter_map(|seen| Header::read(&seen.frame)) {
        *counts.entry(header.tos).or_default() += 1;
    }
    counts
}

/// Whether the checksum of an IPv4 header is right: the sum over it, in ones' complement, is all ones. IPv6 has none.
fn checksum_is_right(frame: &[u8]) -> bool {
    if frame.get(12..14) != Some(&[8, 0]) {
        return true;
    }
    let words = frame.get(14..34).into_iter().flat_map(|ip| ip.chunks_exact(2));
    let sum: u32 = words.map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

/// Runs traffic and returns what both hosts sent; rxe must have had no trouble with it.
fn sent(case: &mut Case, fabric: &Fabric, traffic: impl FnOnce() -> Result<()>) -> Result<[Vec<Seen>; 2]> {
    let before = Counters::all(fabric)?;
    let wires = [Wire::start(&fabric.nodes[0])?, Wire::start(&fabric.nodes[1])?];
    traffic()?;
    let [first, second] = wires.map(|wire| wire.finish().map(|passed| passed.sent().cloned().collect::<Vec<_>>()));
    let sent = [first?, second?];
    for (device, grown) in Counters::grown(fabric, &before)? {
        case.equal(format_args!("{device} trouble"), grown.trouble(), vec![]);
    }
    for (i, packets) in sent.iter().enumerate() {
        let wrong = packets.iter().filter(|seen| !checksum_is_right(&seen.frame)).count();
        case.equal(format_args!("wrong IPv4 checksums from host {i}"), wrong, 0);
        if packets.is_empty() {
            bail!("host {i} sent nothing");
        }
    }
    Ok(sent)
}

fn ipv4(report: &mut Report) -> Result<()> {
    let fabric = Fabric::new(2, 1_500, Placement::Initial)?;
    let receiver = &fabric.nodes[1];
    receiver.mark_all_with_ce()?;
    report.case("without us CE changes nothing", |case| {
        let perf = Perf::new("ib_write_bw").args("-s 65536 -n 20 --tclass 2");
        let [_, answers] = sent(case, &fabric, || perf.run(&fabric, 0, 1).map(drop))?;
        case.expect(!answers.iter().any(|s| Header::read(&s.frame).is_some_and(|h| h.is_cnp())), "rxe sent a CNP");
        Ok(())
    });
    receiver.mark_nothing()?;
    let agents = unmarked(report, &fabric, false)?;
    receiver.mark_all_with_ce()?;
    congestion(report, &fabric, agents);
    policies(report, &fabric);
    Ok(())
}

/// What applications left unmarked; the agents that marked it.
fn unmarked(report: &mut Report, fabric: &Fabric, ipv6: bool) -> Result<[AgentProcess; 2]> {
    let mut plain = BTreeMap::new();
    report.case("without us rxe marks nothing", |case| {
        let perf = Perf::new("ib_write_bw").args("-s 16384 -n 20").ipv6(ipv6);
        let [client, _] = sent(case, fabric, || perf.run(fabric, 0, 1).map(drop))?;
        plain = tos(client.iter());
        case.equal("marks", plain.keys().copied().collect(), BTreeSet::from([0]));
        Ok(())
    });
    let agents = agents(fabric)?;
    for (name, tool, args) in [
        ("write", "ib_write_bw", "-s 16384 -n 60"),
        ("send", "ib_send_bw", "-s 16384 -n 60"),
        ("read", "ib_read_bw", "-s 16384 -n 60"),
        ("atomic", "ib_atomic_bw", "-n 100"),
        ("unreliable datagram", "ib_send_bw", "-c UD -s 1000 -n 100 -r 200"),
    ] {
        report.case(name, |case| {
            let sent = if name == "unreliable datagram" {
                // Its receiver says nothing.
                let wire = Wire::start(&fabric.nodes[0])?;
                Perf::new(tool).args(args).ipv6(ipv6).run(fabric, 0, 1)?;
                vec![wire.finish()?.sent().cloned().collect()]
            } else {
                sent(case, fabric, || Perf::new(tool).args(args).ipv6(ipv6).run(fabric, 0, 1).map(drop))?.to_vec()
            };
            for (i, packets) in sent.iter().enumerate() {
                let expected = BTreeMap::from([(DATA_DSCP << 2 | ECT0, packets.len() as u64)]);
                case.equal(format_args!("marks of host {i}"), tos(packets.iter()), expected);
                case.figure(&format!("host_{i}_packets"), packets.len());
            }
            Ok(())
        });
    }
    report.case("rping compares its data", |case| {
        let sent = sent(case, fabric, || rping(fabric, 0, 1, ipv6, 30, 4_096))?;
        for (i, packets) in sent.iter().enumerate() {
            let marks: BTreeSet<u8> = tos(packets.iter()).into_keys().collect();
            case.equal(format_args!("marks of host {i}"), marks, BTreeSet::from([DATA_DSCP << 2 | ECT0]));
        }
        Ok(())
    });
    Ok(agents)
}

/// What an application has set itself.
fn policies(report: &mut Report, fabric: &Fabric) {
    const OWN: u8 = 10 << 2;
    for (name, args, expected) in [
        ("fill keeps what is set", &["--dscp-policy", "fill", "--ecn-policy", "fill"][..], OWN | ECT0),
        ("force overrides it", &["--dscp-policy", "force", "--ecn-policy", "force"], DATA_DSCP << 2 | ECT0),
        ("keep changes nothing", &["--dscp-policy", "keep", "--ecn-policy", "keep"], OWN),
    ] {
        report.case(name, |case| {
            let agent = agent(fabric, 0, args)?;
            let class = format!("-s 16384 -n 20 --tclass {OWN}");
            let perf = Perf::new("ib_write_bw").args(&class);
            let [client, _] = sent(case, fabric, || perf.run(fabric, 0, 1).map(drop))?;
            case.equal("marks of the client", tos(client.iter()), BTreeMap::from([(expected, client.len() as u64)]));
            rig::finish(agent).map(drop)
        });
    }
}

/// The switch says that it is congested: every data packet gets CE there.
fn congestion(report: &mut Report, fabric: &Fabric, agents: [AgentProcess; 2]) {
    let mut all = 0;
    for (name, perf, from) in [
        ("write", Perf::new("ib_write_bw").args("-s 65536 -n 15"), 0),
        ("send", Perf::new("ib_send_bw").args("-s 65536 -n 15"), 0),
        // The data of a READ comes from the server: the client asks from behind the congested port.
        ("read", Perf::new("ib_read_bw").args("-s 65536 -n 15"), 1),
    ] {
        report.case(format!("CNPs for a {name}"), |case| {
            let [data, answers] = sent(case, fabric, || perf.run(fabric, from, 1 - from).map(drop))?;
            let is_cnp = |seen: &&Seen| Header::read(&seen.frame).is_some_and(|h| h.is_cnp());
            let (cnps, others): (Vec<_>, Vec<_>) = answers.iter().partition(is_cnp);
            let (data_tos, cnp_tos) = (DATA_DSCP << 2 | ECT0, CNP_DSCP << 2 | ECT0);
            let marks = |of: &[&Seen]| tos(of.iter().copied());
            let only = |tos: u8, packets: usize| BTreeMap::from([(tos, packets as u64)]);
            case.expect(!cnps.is_empty(), "not one CNP was sent");
            case.equal("marks of CNPs", marks(&cnps), only(cnp_tos, cnps.len()));
            case.equal("marks of data", tos(data.iter()), only(data_tos, data.len()));
            case.equal("marks of answers", marks(&others), only(data_tos, others.len()));
            case.figure("cnps", cnps.len());
            case.figure("data_packets", data.len());
            all += cnps.len() as u64;
            Ok(())
        });
    }
    report.case("both agents counted the CNPs", |case| {
        let [sender, receiver] = agents.map(rig::finish);
        let (sender, receiver) = (sender?, receiver?);
        let number = |summary: &Value, name: &str| rig::counter(summary, "ingress", name);
        case.equal("CNPs that the receiver made", rig::counter(&receiver, "egress", "np_cnp_sent"), all);
        case.equal("CNPs that the sender got", number(&sender, "cnp"), all);
        case.equal("CNPs that were kept from rxe", number(&sender, "cnp_consumed"), all);
        case.expect(number(&receiver, "ce") >= all, "more CNPs than CE");
        case.figure("ce", number(&receiver, "ce"));
        Ok(())
    });
}
