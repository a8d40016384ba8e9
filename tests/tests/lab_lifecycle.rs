//! How an agent ends, in order or not, and what is left of it then. Needs root.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use roce_tests::{
    endpoint::{Clock, CnpFlood, Connection, Host, Message, Op, QpHandle, Traffic, ack_timeout, connect},
    lab::{Netns, Pair, Port, Traces, connect as cable, roce, run_roce, wait_up},
    needs_root,
    run::{AgentProcess, AgentRole},
};

/// What a limited queue pair may not go below, frame bits per second.
const FLOOR: f64 = 4e6;
/// Without heartbeats pacing ends after this.
const FAILSAFE: Duration = Duration::from_secs(1);
const QPN_A: u32 = 0x11;

/// Host a sends to host b; an agent paces a.
struct Load {
    pair: Pair,
    // Dropped in this order: what an agent leaves is removed once it has ended.
    agent: AgentProcess,
    traces: Traces,
    sender: QpHandle,
    receiver: QpHandle,
    config: tempfile::TempDir,
    _hosts: [Host; 2],
}

impl Load {
    fn start(traffic: Traffic) -> Self {
        let pair = Pair::new(1500).unwrap();
        let config = tempfile::tempdir().unwrap();
        fs::write(
            config.path().join("c.toml"),
            "link_rate = \"100m\"\npacer = \"htb\"\n[dcqcn]\nrpg_min_rate = \"4m\"\n",
        )
        .unwrap();
        let mut traces = Traces::before(&pair.a.port).unwrap();
        let agent = agent(&pair.a.port, &config, &[]);
        assert_eq!(traces.note().unwrap(), 3, "egress, ingress and the HTB filter");
        let clock = Clock::start();
        let mut hosts = [Host::start(&pair.a.port, clock).unwrap(), Host::start(&pair.b.port, clock).unwrap()];
        let connection =
            Connection { qpn_a: QPN_A, timeout: ack_timeout(19), traffic_a: traffic, ..Connection::default() };
        let [host_a, host_b] = &mut hosts;
        let (sender, receiver) = connect((host_a, &pair.a), (host_b, &pair.b), &connection).unwrap();
        Self { pair, agent, traces, sender, receiver, config, _hosts: hosts }
    }

    fn endless() -> Self {
        Self::start(Traffic::endless(Message::new(Op::Write, 65_536)))
    }

    /// CNPs for the sender, one every 2 ms.
    fn cnps(&self) -> CnpFlood {
        CnpFlood::start(&self.pair.b, &self.pair.a, QPN_A, 0xc0, Duration::from_millis(2)).unwrap()
    }

    /// Payload bits per second that arrive during `time`.
    fn rate(&self, time: Duration) -> f64 {
        let (before, begin) = (self.receiver.stats().accepted_bytes, Instant::now());
        thread::sleep(time);
        (self.receiver.stats().accepted_bytes - before) as f64 * 8.0 / begin.elapsed().as_secs_f64()
    }

    /// Waits until the rate is about the floor.
    fn wait_limited(&self) {
        let end = Instant::now() + Duration::from_secs(8);
        let mut rate = f64::NAN;
        while Instant::now() < end {
            rate = self.rate(Duration::from_millis(300));
            if (0.5 * FLOOR..2.0 * FLOOR).contains(&rate) {
                return;
            }
        }
        panic!("not limited: {rate:.0} b/s; agent: {}", self.agent.stderr());
    }

    /// Traffic goes on without a pause, and within the failsafe time it is free.
    fn assert_released(&self, since: Instant) {
        let slow = self.rate(Duration::from_millis(300));
        // It goes on; how fast depends on who else is busy on two CPUs.
        assert!(slow > 0.1 * FLOOR, "the sender stands: {slow:.0} b/s");
        // The failsafe, what waits in the class at the floor (64 frames), and slack for two busy CPUs.
        let end = since + FAILSAFE + Duration::from_millis(150 + 500);
        thread::sleep(end.saturating_duration_since(Instant::now()));
        let free = self.rate(Duration::from_millis(400));
        println!("{slow:.0} b/s before the failsafe, {free:.0} b/s after it");
        assert!(free > 10.0 * FLOOR, "still throttled: {free:.0} b/s");
        assert_eq!(self.sender.stats().fatal, None);
    }

    /// Everything asked for arrives.
    fn finish(&self) {
        self.sender.stop_requesting();
        assert!(self.sender.wait_done(Duration::from_secs(10)), "{:?}", self.sender.stats());
        assert_eq!(self.sender.stats().transmit_failures, 0);
    }
}

fn agent(port: &Port, config: &tempfile::TempDir, more: &[&str]) -> AgentProcess {
    let mut args = vec!["--config".to_owned(), config.path().join("c.toml").display().to_string()];
    args.extend(more.iter().map(|a| (*a).to_owned()));
    let mut agent = AgentProcess::start(&roce(), &port.ns, &port.name, AgentRole::Host, &args).unwrap();
    agent.wait_ready().unwrap();
    agent
}

fn kill_9(agent: &mut AgentProcess) {
    agent.signal(Signal::SIGKILL).unwrap();
    agent.stop().unwrap();
}

#[test]
fn killed_it_throttles_nobody_and_detach_removes_the_rest() {
    needs_root!();
    let mut load = Load::endless();
    let cnps = load.cnps();
    load.wait_limited();
    load.traces.note().unwrap();
    kill_9(&mut load.agent);
    load.assert_released(Instant::now());
    drop(cnps);
    let left = load.traces.left().unwrap();
    assert!(left.iter().any(|l| l.contains("link")) && left.iter().any(|l| l.contains("class htb 726f:")), "{left:?}");

    let detach = run_roce(&load.pair.a.port.ns, &["detach"]).unwrap();
    let stdout = String::from_utf8_lossy(&detach.stdout);
    assert_eq!(detach.status.code(), Some(0), "{}", String::from_utf8_lossy(&detach.stderr));
    assert!(stdout.starts_with("a: removed ") && stdout.contains("root qdisc"), "{stdout}");
    assert_eq!(load.traces.left().unwrap(), [""; 0]);
    // What the kernel lost while it swapped the root qdisc may cost one ACK timeout, 2.1 s.
    assert!((0..12).any(|_| load.rate(Duration::from_millis(300)) > 10.0 * FLOOR), "{:?}", load.sender.stats());
    load.finish();

    let again = run_roce(&load.pair.a.port.ns, &["detach"]).unwrap();
    assert_eq!((again.status.code(), &*String::from_utf8_lossy(&again.stdout)), (Some(0), "nothing was attached\n"));
}

#[test]
fn stopped_it_throttles_nobody_and_continued_it_paces_again() {
    needs_root!();
    let mut load = Load::endless();
    let cnps = load.cnps();
    load.wait_limited();
    load.agent.signal(Signal::SIGSTOP).unwrap();
    load.assert_released(Instant::now());
    load.agent.signal(Signal::SIGCONT).unwrap();
    load.wait_limited();
    drop(cnps);
    load.finish();
    assert!(load.agent.stop().unwrap().success(), "{}", load.agent.stderr());
    assert_eq!(load.traces.left().unwrap(), [""; 0]);
}

#[test]
fn a_new_agent_takes_over_from_a_killed_one_under_load() {
    needs_root!();
    let mut load = Load::endless();
    let cnps = load.cnps();
    load.wait_limited();
    load.traces.note().unwrap();
    kill_9(&mut load.agent);
    load.agent = agent(&load.pair.a.port, &load.config, &[]);
    let stderr = load.agent.stderr();
    assert!(stderr.contains("a: removed what an earlier agent had left") && stderr.contains("root qdisc"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    load.wait_limited();
    assert_eq!(load.traces.note().unwrap(), 6, "three programs of each agent");
    drop(cnps);
    load.finish();
    assert!(load.agent.stop().unwrap().success(), "{}", load.agent.stderr());
    assert_eq!(load.traces.left().unwrap(), [""; 0]);
}

#[test]
fn what_a_limiter_holds_leaves_before_its_qdisc_goes() {
    needs_root!();
    // Messages of 60 packets: while a limiter holds one, nothing else is under way.
    let mut load = Load::start(Traffic::endless(Message::new(Op::Write, 60 * 1024)));
    let cnps = load.cnps();
    load.wait_limited();
    load.sender.stop_requesting();
    thread::sleep(Duration::from_millis(30));
    let before = load.sender.stats();
    assert!(!load.sender.is_done(), "nothing waits");
    assert!(load.agent.stop().unwrap().success(), "{}", load.agent.stderr());
    drop(cnps);
    assert!(load.sender.wait_done(Duration::from_secs(1)));
    let (sender, receiver) = (load.sender.stats(), load.receiver.stats());
    let waited = sender.completed - before.completed;
    assert!(waited > 0);
    assert_eq!((sender.retransmitted - before.retransmitted, sender.timeouts), (0, 0), "{sender:?}");
    assert_eq!((receiver.out_of_sequence, receiver.naks_sent), (0, 0), "{receiver:?}");
    assert_eq!(load.traces.left().unwrap(), [""; 0]);
}

/// Deleting a root qdisc loses what is sent in that very moment: the kernel puts a qdisc that drops in its place for a
/// while. That is one gap, and one NAK, whatever we do. Anything more is ours.
#[test]
fn under_load_an_agent_ends_with_one_gap_at_most() {
    needs_root!();
    for _ in 0..3 {
        let mut load = Load::endless();
        let cnps = load.cnps();
        load.wait_limited();
        let before = load.receiver.stats().naks_sent;
        assert!(load.agent.stop().unwrap().success(), "{}", load.agent.stderr());
        drop(cnps);
        load.finish();
        assert_eq!(load.traces.left().unwrap(), [""; 0]);
        let naks = load.receiver.stats().naks_sent - before;
        println!("{naks} NAKs");
        assert!(naks <= 2, "{naks} NAKs: the swap of the qdisc, and a retransmission that met it, explain two");
    }
}

/// Starts an agent on a quiet interface, ends it, and returns how it ended.
fn ends(args: &[&str], end: impl FnOnce(&mut std::process::Child)) -> (ExitStatus, String) {
    let pair = Pair::new(1500).unwrap();
    let port = &pair.a.port;
    let mut traces = Traces::before(port).unwrap();
    let mut child = port
        .ns
        .command(roce())
        .args(["run", "--iface", &port.name, "--pacer", "htb", "--json"])
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert!(line.contains("\"ready\""), "{line}");
    assert!(traces.note().unwrap() >= 3);
    child.stdout = Some(stdout.into_inner());
    end(&mut child);
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > Duration::from_secs(5) {
            child.kill().unwrap();
            panic!("{args:?}: it runs on");
        }
        thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(traces.left().unwrap(), [""; 0], "{args:?}");
    (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn every_way_to_end_it_leaves_nothing() {
    needs_root!();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let (status, stderr) = ends(&["--ingress", "xdp"], |child| {
            kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        });
        assert_eq!((status.code(), &*stderr), (Some(0), ""), "{signal}");
    }
    let begin = Instant::now();
    let (status, stderr) = ends(&["--duration", "1", "--ingress", "xdp-generic"], |_| {});
    assert_eq!((status.code(), &*stderr), (Some(0), ""), "--duration");
    assert!(begin.elapsed() >= Duration::from_secs(1));
    let (status, stderr) = ends(&[], |child| drop(child.stdout.take()));
    assert_eq!((status.code(), &*stderr), (Some(0), ""), "closed stdout");
}

#[test]
fn kept_attachments_are_read_and_removed_from_another_process() {
    needs_root!();
    let mut load = Load::start(Traffic::times(Message::new(Op::Write, 10_000), 10));
    assert!(load.sender.wait_done(Duration::from_secs(5)));
    assert!(load.agent.stop().unwrap().success());
    assert_eq!(load.traces.left().unwrap(), [""; 0]);

    load.agent = agent(&load.pair.a.port, &load.config, &["--keep"]);
    load.traces.note().unwrap();
    let ns = &load.pair.a.port.ns;
    let connection = Connection {
        qpn_a: 0x51,
        qpn_b: 0x77,
        timeout: ack_timeout(19),
        traffic_a: Traffic::times(Message::new(Op::Write, 10_000), 10),
        ..Connection::default()
    };
    let [host_a, host_b] = &mut load._hosts;
    let (sender, _receiver) = connect((host_a, &load.pair.a), (host_b, &load.pair.b), &connection).unwrap();
    assert!(sender.wait_done(Duration::from_secs(5)));
    assert!(load.agent.stop().unwrap().success());
    assert!(!load.traces.left().unwrap().is_empty(), "kept");

    let flows = run_roce(ns, &["flows", "--json"]).unwrap();
    assert_eq!(flows.status.code(), Some(0), "{}", String::from_utf8_lossy(&flows.stderr));
    let report: serde_json::Value = serde_json::from_slice(&flows.stdout).unwrap();
    assert_eq!((report["schema"].as_u64(), report["kind"].as_str()), (Some(1), Some("flows")));
    let of = |tap: &str, qpn: u64| {
        let all = report["flows"].as_array().unwrap();
        all.iter().find(|f| f["tap"] == tap && f["dest_qp"] == qpn).unwrap_or_else(|| panic!("{tap} {qpn}: {report}"))
    };
    let sent = of("a/egress", 0x77);
    assert_eq!((sent["bytes"].as_u64(), sent["packets"].as_u64()), (Some(100_000), Some(100)), "{sent}");
    assert_eq!((sent["src"].as_str(), sent["dst"].as_str()), (Some("10.66.1.1"), Some("10.66.1.2")));
    assert_eq!((sent["space"].as_str(), sent["missing_psns"].as_u64()), (Some("request"), Some(0)));
    assert_eq!(of("a/ingress", 0x51)["space"], "response");

    let detach = run_roce(ns, &["detach"]).unwrap();
    assert_eq!(detach.status.code(), Some(0), "{}", String::from_utf8_lossy(&detach.stderr));
    assert_eq!(load.traces.left().unwrap(), [""; 0]);
    let none = run_roce(ns, &["flows", "--json"]).unwrap();
    assert_eq!(none.status.code(), Some(2), "nothing is attached");
}

#[test]
fn detaching_one_interface_leaves_the_other() {
    needs_root!();
    let (near, far) = (Netns::new().unwrap(), Netns::new().unwrap());
    let (one, _far1) = cable(1, 1500, (&near, "one"), (&far, "far1")).unwrap();
    let (two, _far2) = cable(2, 1500, (&near, "two"), (&far, "far2")).unwrap();
    wait_up([&one, &two]).unwrap();
    let config = tempfile::tempdir().unwrap();
    fs::write(config.path().join("c.toml"), "pacer = \"htb\"\n").unwrap();
    let mut traces = [Traces::before(&one).unwrap(), Traces::before(&two).unwrap()];
    let mut agents = [agent(&one, &config, &[]), agent(&two, &config, &[])];
    for t in &mut traces {
        t.note().unwrap();
    }
    let busy = run_roce(&near, &["detach", "--iface", "one"]).unwrap();
    let stderr = String::from_utf8_lossy(&busy.stderr);
    assert_eq!((busy.status.code(), stderr.lines().count()), (Some(2), 1), "its agent runs: {stderr}");
    for a in &mut agents {
        kill_9(a);
    }
    let detach = run_roce(&near, &["detach", "--iface", "one"]).unwrap();
    assert_eq!(detach.status.code(), Some(0), "{}", String::from_utf8_lossy(&detach.stderr));
    assert_eq!(traces[0].left().unwrap(), [""; 0]);
    let left = traces[1].left().unwrap();
    assert_eq!(left.iter().filter(|l| l.starts_with("prog ")).count(), 3, "{left:?}");
    assert_eq!(run_roce(&near, &["detach"]).unwrap().status.code(), Some(0));
    assert_eq!(traces[1].left().unwrap(), [""; 0]);
}

#[test]
fn a_deleted_interface_ends_it_in_one_line() {
    needs_root!();
    let mut load = Load::endless();
    load.pair.a.port.ns.ip(&["link del dev a"]).unwrap();
    let begin = Instant::now();
    while load.agent.is_running() {
        assert!(begin.elapsed() < Duration::from_secs(4), "it runs on");
        thread::sleep(Duration::from_millis(20));
    }
    let status = load.agent.stop().unwrap();
    let stderr = load.agent.stderr();
    assert_eq!(status.code(), Some(2), "{stderr}");
    assert_eq!(stderr, "roce: interface a was deleted");
    assert_eq!(load.traces.left().unwrap(), [""; 0]);
}

#[test]
fn a_renamed_interface_is_followed() {
    needs_root!();
    let mut load = Load::endless();
    load.pair.a.port.ns.ip(&["link set dev a name a9"]).unwrap();
    let begin = Instant::now();
    let tapped = |load: &Load| {
        let flows = load.agent.flows()?;
        Some(flows["flows"].as_array()?.iter().any(|f| f["tap"] == "a9/egress" && f["rate_bps"].as_u64() > Some(0)))
    };
    while tapped(&load) != Some(true) {
        assert!(load.agent.is_running(), "{}", load.agent.stderr());
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", load.agent.flows());
        thread::sleep(Duration::from_millis(50));
    }
    let cnps = load.cnps();
    load.wait_limited();
    drop(cnps);
    load.finish();
    assert!(load.agent.stop().unwrap().success(), "{}", load.agent.stderr());
    let stderr = load.agent.stderr();
    assert!(stderr.ends_with("WARN ] interface a is called a9 now") && stderr.lines().count() == 1, "{stderr}");
    load.pair.a.port.ns.ip(&["link set dev a9 name a"]).unwrap();
    assert_eq!(load.traces.left().unwrap(), [""; 0]);
}
