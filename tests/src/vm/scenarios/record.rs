//! Small captures of one kind of traffic each, for `tests/captures`.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::{
    capture::Seen,
    vm::{Case, Counters, Fabric, JUMBO, Part, Passed, Perf, Placement, Report, Scenario, Wire, load, rping},
};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "record",
    about: "small captures of one kind of traffic each: as many packets as rxe says that it sent, all of them whole",
    parts: &[Part::new("all", 300, all).share(33), Part::new("jumbo", 120, jumbo).share(66)],
};

/// Files in `tests/captures` stay below this.
const SMALL: usize = 50_000;

/// Runs traffic and saves what passed the switch's port to host 0, which must be what rxe says.
fn record(case: &mut Case, fabric: &Fabric, name: &str, traffic: impl FnOnce() -> Result<()>) -> Result<Passed> {
    let before = Counters::all(fabric)?;
    let wire = Wire::start(&fabric.nodes[0])?;
    traffic()?;
    let passed = wire.finish()?;
    let rxe = Counters::all(fabric)?[0].since(&before[0]);
    case.equal("packets that host 0 sent", passed.sent().count() as u64, rxe.get("sent_pkts"));
    case.equal("packets that host 0 received", passed.received().count() as u64, rxe.get("rcvd_pkts"));
    let bytes: usize = passed.all.iter().map(|seen| seen.frame.len() + 16).sum();
    case.expect(bytes < SMALL, format_args!("{name} is too large: {bytes} bytes"));
    case.figure("bytes", bytes);
    case.figure("packets", passed.all.len());
    passed.save(&format!("{name}.pcap"))?;
    Ok(passed)
}

fn all(report: &mut Report) -> Result<()> {
    let fabric = Fabric::new(3, 1_500, Placement::Initial)?;
    kinds(report, &fabric);
    loss(report, &fabric)?;
    congestion(report, &fabric)
}

fn kinds(report: &mut Report, fabric: &Fabric) {
    for (name, tool, args, ipv6) in [
        ("vm-write", "ib_write_bw", "-s 4000 -n 7", false),
        ("vm-send", "ib_send_bw", "-s 4000 -n 7", false),
        ("vm-read", "ib_read_bw", "-s 4000 -n 7", false),
        ("vm-atomic", "ib_atomic_bw", "-n 50", false),
        ("vm-uc", "ib_write_bw", "-c UC -s 4000 -n 8", false),
        ("vm-ud", "ib_send_bw", "-c UD -s 700 -n 40", false),
        ("vm-write-ipv6", "ib_write_bw", "-s 4000 -n 7", true),
    ] {
        report.case(name, |case| {
            let perf = Perf::new(tool).args(args).ipv6(ipv6);
            record(case, fabric, name, || perf.run(fabric, 0, 1).map(drop)).map(drop)
        });
    }
    report.case("vm-cm", |case| record(case, fabric, "vm-cm", || rping(fabric, 0, 1, false, 10, 1_000)).map(drop));
}

fn jumbo(report: &mut Report) -> Result<()> {
    let fabric = Fabric::new(2, JUMBO, Placement::Initial)?;
    report.case("vm-write-4096", |case| {
        let perf = Perf::new("ib_write_bw").args("-s 8000 -n 5");
        record(case, &fabric, "vm-write-4096", || perf.run(&fabric, 0, 1).map(drop)).map(drop)
    });
    Ok(())
}

/// Packets before a queue that are not behind it.
fn dropped(before: &Passed, behind: &Passed) -> usize {
    let mut left: BTreeMap<&[u8], usize> = BTreeMap::new();
    for seen in behind.received() {
        *left.entry(&seen.frame).or_default() += 1;
    }
    let is_missing = |seen: &&Seen| match left.get_mut(&seen.frame[..]) {
        Some(n) if *n > 0 => {
            *n -= 1;
            false
        }
        _ => true,
    };
    before.sent().filter(is_missing).count()
}

/// One packet is dropped, and with path MTU 256 there are enough behind it for a NAK.
fn loss(report: &mut Report, fabric: &Fabric) -> Result<()> {
    load(&["sch_netem"])?;
    let port = &fabric.nodes[1].switch_port;
    port.ns.tc(&[format!("qdisc add dev {} root netem loss 2% limit 10000", port.name)])?;
    report.case("vm-go-back-n", |case| {
        for attempt in 1..=40 {
            let wires = [Wire::start(&fabric.nodes[0])?, Wire::start(&fabric.nodes[1])?];
            Perf::new("ib_write_bw").args("-m 256 -s 4000 -n 5").run(fabric, 0, 1)?;
            let [before, behind] = wires.map(Wire::finish);
            let (before, behind) = (before?, behind?);
            // A NAK: opcode ACKNOWLEDGE, syndrome 0x60.
            let nak = |seen: &Seen| seen.packet.aeth.is_some_and(|aeth| aeth.raw_syndrome == 0x60);
            if dropped(&before, &behind) == 1 && before.received().filter(|seen| nak(seen)).count() == 1 {
                case.figure("attempts", attempt);
                before.save("vm-go-back-n-pre.pcap")?;
                return behind.save("vm-go-back-n-post.pcap");
            }
        }
        bail!("in 40 transfers there was none with one packet lost and one NAK")
    });
    port.ns.tc(&[format!("qdisc del dev {} root", port.name)])
}

/// Two hosts send into a slow port of ours: CE, CNPs, and no loss.
fn congestion(report: &mut Report, fabric: &Fabric) -> Result<()> {
    const RECEIVER: usize = 0;
    load(&["sch_fq"])?;
    // At line rate from the start, so that the queue is there at once.
    let args = ["--link-rate", "10m", "--start-rate", "0", "--ingress", "tc"];
    let attach =
        |host| fabric.agent(host, &[&args[..], &["--pacer", if host == RECEIVER { "off" } else { "edt" }]].concat());
    let _hosts = (0..3).map(attach).collect::<Result<Vec<_>>>()?;
    let _port = fabric.congestion_point(RECEIVER, &[&args[..], &["--pacer", "off"]].concat())?;
    report.case("vm-incast", |case| {
        let wire = Wire::start(&fabric.nodes[RECEIVER])?;
        let perf = Perf::new("ib_send_bw").args("-e -m 256 -s 4000 -n 60");
        let transfers = [1, 2].map(|host| perf.start(fabric, host, RECEIVER));
        for transfer in transfers {
            transfer?.wait()?;
        }
        let passed = wire.finish()?;
        let cnp = passed.all.iter().position(Seen::is_cnp);
        let Some(cnp) = cnp else { bail!("there was no CNP among {} packets", passed.all.len()) };
        case.figure("packets", passed.all.len());
        case.figure("first_cnp", cnp);
        let window = cnp.saturating_sub(60)..(cnp + 70).min(passed.all.len());
        crate::capture::save(&passed.all[window], &crate::vm::share().join("vm-incast.pcap"))
    });
    Ok(())
}
