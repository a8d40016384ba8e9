//! Congestion points where packets enter a bridge and where they leave a host, with classes and without. Needs root.

use std::{fs, thread, time::Duration};

use roce_common::units::Ecn;
use roce_tests::{
    capture::{Capture, Seen},
    forge::Forger,
    lab::{HostPort, Netns, Port, connect, wait_up},
    needs_root, rig,
    run::AgentRole,
};
use serde_json::Value;

/// Frames of a burst; a thousand bytes and some each, at 10 Mb/s nearly a millisecond.
const BURST: u32 = 60;

/// Two hosts on two ports of a bridge.
struct Bridge {
    sender: HostPort,
    receiver: Port,
    /// The bridge's port to the sender.
    entry: Port,
}

impl Bridge {
    fn new() -> Self {
        let (a, switch, b) = (Netns::new().unwrap(), Netns::new().unwrap(), Netns::new().unwrap());
        let (sender, entry) = connect(1, 1_500, (&a, "a"), (&switch, "to-a")).unwrap();
        let (receiver, exit) = connect(2, 1_500, (&b, "b"), (&switch, "to-b")).unwrap();
        switch
            .ip(&[
                "link add name br0 type bridge",
                "link set dev to-a master br0",
                "link set dev to-b master br0",
                "link set dev br0 up",
            ])
            .unwrap();
        wait_up([&sender, &entry, &receiver, &exit]).unwrap();
        let next_hop_mac = receiver.mac;
        Self { sender: HostPort { port: sender, next_hop_mac }, receiver, entry }
    }

    /// Sends a burst of each ToS byte in turn; what arrives at the other side.
    fn burst(&self, tos: &[u8]) -> Vec<Seen> {
        let capture = Capture::start(&self.receiver).unwrap();
        let mut forger = Forger::new(&self.sender, self.receiver.v4.into()).unwrap();
        for psn in 0..BURST {
            for t in tos {
                forger.path.tos = *t;
                forger.send(&forger.write(0x42, psn, &[0; 1_024]));
            }
        }
        thread::sleep(Duration::from_millis(60));
        let seen = capture.finish().unwrap();
        assert_eq!(seen.len(), BURST as usize * tos.len(), "a congestion point drops nothing");
        seen
    }
}

fn marked(seen: &[Seen], dscp: u8) -> usize {
    seen.iter().filter(|s| s.packet.dscp().get() == dscp && s.packet.ecn() == Ecn::Ce).count()
}

fn class(summary: &Value, number: u64) -> Value {
    let lines = summary["congestion"].as_array().unwrap();
    lines.iter().find(|l| l["class"] == number).unwrap_or_else(|| panic!("{summary}")).clone()
}

#[test]
fn a_bridge_port_marks_what_enters_by_a_virtual_queue() {
    needs_root!();
    let bridge = Bridge::new();
    let agent = rig::agent(&bridge.entry, AgentRole::Cp, &["--cp-at", "ingress", "--link-rate", "10m"]).unwrap();
    // ECT(0) and Not-ECT of DSCP 26, and a CNP's DSCP without ECT.
    let seen = bridge.burst(&[0x6a, 0x68]);
    let ce = marked(&seen, 26);
    let summary = rig::finish(agent).unwrap();
    // The second half of the burst finds more than kmax (32 packets): every ECT packet of it is marked.
    let counters = &summary["counters"];
    assert!(
        (BURST as usize / 2..BURST as usize).contains(&ce),
        "{ce} of {BURST}: {counters} {}",
        summary["congestion"]
    );
    assert_eq!(rig::counter(&summary, "ingress", "ce_marked"), ce as u64);
    assert!(rig::counter(&summary, "ingress", "ce_not_ect") > 0, "{}", summary["counters"]);
    assert_eq!(rig::counter(&summary, "egress", "ce_marked"), 0);
    let port = class(&summary, 0);
    assert_eq!((port["marked"].as_u64(), port["queue_bps"].as_u64()), (Some(ce as u64), Some(10_000_000)));
    assert!(port["packets"].as_u64() >= Some(2 * u64::from(BURST)), "{port}");
    assert!(port["peak_bytes"].as_u64() > Some(32_000) || port["mean_bytes"].as_u64() > Some(8_000), "{port}");
}

#[test]
fn a_host_marks_what_leaves_it_and_an_idle_queue_marks_nothing() {
    needs_root!();
    let bridge = Bridge::new();
    let agent = rig::agent(&bridge.sender.port, AgentRole::Cp, &["--link-rate", "10m"]).unwrap();
    let first = marked(&bridge.burst(&[0x6a]), 26);
    assert!(first > 10, "{first}");
    // Emptied, the queue has forgotten everything: the first packets of the next burst pass.
    thread::sleep(Duration::from_millis(300));
    let second = bridge.burst(&[0x6a]);
    assert!(second[..4].iter().all(|s| s.packet.ecn() == Ecn::Ect0), "the queue was empty");
    let both = first + marked(&second, 26);
    let summary = rig::finish(agent).unwrap();
    assert_eq!(rig::counter(&summary, "egress", "ce_marked"), both as u64);
    let port = class(&summary, 0);
    assert_eq!(port["marked"].as_u64(), Some(both as u64));
}

#[test]
fn classes_have_queues_and_thresholds_of_their_own() {
    needs_root!();
    let bridge = Bridge::new();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("cp.toml");
    // DSCP 26 has a twentieth of the link for itself. DSCP 10 shares the port's queue and is never marked there: its
    // thresholds are above all bytes of the bursts together, however fast the sender's processor makes them, and the queue
    // holds more than that.
    fs::write(
        &config,
        "queue_bytes = 800000\n\n[[cp_class]]\ndscp = [26]\nshare = 0.05\nkmin = 2000\nkmax = 4000\n\n\
         [[cp_class]]\ndscp = [10]\nkmin = 400000\nkmax = 400000\n",
    )
    .unwrap();
    let args = ["--link-rate", "100m", "--config", config.to_str().unwrap()];
    let agent = rig::agent(&bridge.sender.port, AgentRole::Cp, &args).unwrap();
    let seen = bridge.burst(&[0x6a, 0x2a, 0x02]);
    let counts = [26, 10, 0].map(|dscp| marked(&seen, dscp));
    let summary = rig::finish(agent).unwrap();
    assert!(counts[0] > 20 && counts[1] == 0, "DSCP 26, 10, 0: {counts:?} {}", summary["congestion"]);
    let (own, shared) = (class(&summary, 1), class(&summary, 2));
    assert_eq!(
        (own["dscp"].clone(), own["queue_bps"].as_u64(), own["shared"].as_bool()),
        ([26].into(), Some(5_000_000), Some(false))
    );
    assert_eq!((shared["queue_bps"].as_u64(), shared["shared"].as_bool()), (Some(95_000_000), Some(true)));
    assert_eq!([&own, &shared].map(|c| c["marked"].as_u64()), [Some(counts[0] as u64), Some(0)]);
    assert!(own["packets"].as_u64() >= Some(u64::from(BURST)) && shared["packets"].as_u64() >= Some(u64::from(BURST)));
}
