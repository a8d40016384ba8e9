//! `roce events`: what an agent tells other processes, and that none of them can hurt it. Needs root.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use roce_tests::{
    forge::Forger,
    lab::{Pair, Port, roce, run_roce},
    needs_root,
    rig::{self, eventually},
    run::{AgentProcess, AgentRole},
};
use serde_json::Value;

const QP: u32 = 0x21;
const PATIENCE: Duration = Duration::from_secs(5);

/// Two hosts; the second has an agent that looks.
struct Lab {
    pair: Pair,
    agent: AgentProcess,
    forger: Forger,
}

impl Lab {
    fn new() -> Self {
        let pair = Pair::new(1500).unwrap();
        let agent = rig::agent(&pair.b.port, AgentRole::Observe, &[]).unwrap();
        let forger = Forger::new(&pair.a, pair.b.address(false)).unwrap();
        Self { pair, agent, forger }
    }

    fn port(&self) -> &Port {
        &self.pair.b.port
    }

    fn write(&self, psns: impl IntoIterator<Item = u32>) {
        psns.into_iter().for_each(|psn| self.forger.send(&self.forger.write(QP, psn, &[7; 32])));
    }

    fn events(&self, args: &[&str]) -> Vec<Value> {
        let all: Vec<&str> = ["events", "--json"].iter().chain(args).copied().collect();
        let output = run_roce(&self.port().ns, &all).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    }
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|e| e["event"] == name).collect()
}

fn address(port: &Port) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("roce-events-{}", port.index)).unwrap()
}

/// `roce events --follow` with its lines, by a thread.
struct Follower {
    child: Child,
    lines: Receiver<String>,
}

impl Follower {
    fn start(port: &Port, args: &[&str]) -> Self {
        let mut command: Command = port.ns.command(roce());
        command.args(["events", "--follow"]).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (to, lines) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|l| to.send(l)));
        Self { child, lines }
    }

    fn wait_for(&self, text: &str) -> String {
        let end = Instant::now() + PATIENCE;
        while let Ok(line) = self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            if line.contains(text) {
                return line;
            }
        }
        panic!("no line with {text:?}");
    }

    fn end(mut self) -> (Option<i32>, String) {
        assert!(eventually(PATIENCE, || self.child.try_wait().unwrap().is_some()), "it goes on");
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap().code(), said)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn what_happened_is_told_once_each_with_its_numbers() {
    needs_root!();
    let lab = Lab::new();
    lab.write([100, 101, 104, 105]);
    // Elsewhere, and three in a row there.
    lab.write([9_000, 9_001, 9_002, 9_003]);
    for (psn, syndrome) in [(101, 0x1f), (102, 0x60), (103, 0x61), (104, 0x2c)] {
        lab.forger.send(&lab.forger.acknowledge(QP, psn, syndrome));
    }
    assert!(eventually(PATIENCE, || named(&lab.events(&[]), "rnr_nak").len() == 1), "{:#?}", lab.events(&[]));
    let events = lab.events(&[]);
    let gaps = named(&events, "gap");
    assert_eq!(gaps.len(), 1, "{events:#?}");
    let [gap] = gaps[..] else { unreachable!() };
    assert_eq!(
        (gap["skipped"].as_u64(), gap["psn"].as_u64(), gap["dest_qp"].as_u64()),
        (Some(2), Some(104), Some(0x21))
    );
    assert_eq!((&gap["schema"], &gap["kind"], &gap["iface"]), (&1.into(), &"event".into(), &"b".into()));
    assert_eq!((&gap["tap"], &gap["space"], &gap["service"]), (&"b/ingress".into(), &"request".into(), &"RC".into()));
    assert_eq!(gap["src"], lab.pair.a.address(false).to_string());
    assert_eq!(named(&events, "discontinuity").len(), 1);
    let naks: Vec<_> = named(&events, "nak").iter().map(|e| (e["nak"].as_str(), e["psn"].as_u64())).collect();
    assert_eq!(naks, [(Some("psn_sequence"), Some(102)), (Some("invalid_request"), Some(103))]);
    // Requests and responses to the queue pair.
    assert_eq!(named(&events, "first_sight").len(), 2);
    let seqs: Vec<_> = events.iter().map(|e| e["seq"].as_u64().unwrap()).collect();
    assert!(seqs.is_sorted_by(|a, b| a < b), "{seqs:?}");

    let only = lab.events(&["--kind", "nak,rnr_nak", "--iface", "b"]);
    assert_eq!(only.len(), 3, "{only:#?}");
    let text = String::from_utf8(run_roce(&lab.port().ns, &["events"]).unwrap().stdout).unwrap();
    assert!(
        text.contains("gap            2 PSNs missing before PSN 104") && text.lines().count() == events.len(),
        "{text}"
    );
}

#[test]
fn a_follower_hears_at_once_and_ends_with_the_agent() {
    needs_root!();
    let mut lab = Lab::new();
    let follower = Follower::start(lab.port(), &["--kind", "gap"]);
    for (last, text) in [(2, "before PSN 2 "), (4, "before PSN 4 ")] {
        lab.write([last - 2, last]);
        follower.wait_for(text);
    }
    assert!(lab.agent.stop().unwrap().success());
    assert_eq!(follower.end(), (Some(0), String::new()));

    // An agent that is killed says no goodbye.
    let mut agent = rig::agent(lab.port(), AgentRole::Observe, &[]).unwrap();
    let follower = Follower::start(lab.port(), &["--json"]);
    lab.write([0, 7]);
    let line: Value = serde_json::from_str(&follower.wait_for("\"gap\"")).unwrap();
    assert_eq!(line["skipped"], 6);
    agent.signal(Signal::SIGKILL).unwrap();
    let (code, said) = follower.end();
    assert_eq!((code, said.as_str()), (Some(2), "roce: b: its agent is gone\n"));
    assert!(eventually(PATIENCE, || !agent.is_running()));
    assert!(run_roce(&lab.port().ns, &["detach"]).unwrap().status.success());
}

#[test]
fn without_an_agent_it_says_so() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    for (args, place) in [(&["events"][..], "in this network namespace"), (&["events", "--iface", "a"][..], "on a")] {
        let output = run_roce(&pair.a.port.ns, args).unwrap();
        assert_eq!(output.status.code(), Some(2));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said, format!("roce: no agent runs {place}: start `roce run --iface …` first\n"));
    }
}

/// Sends a line to the agent and reads what it answers until it closes or `bytes` have come.
fn ask(port: &Port, line: &[u8], bytes: u64) -> String {
    let mut stream = UnixStream::connect_addr(&address(port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // It may have closed already.
    let _ = stream.write_all(line);
    let mut said = String::new();
    let _ = stream.take(bytes).read_to_string(&mut said);
    said
}

#[test]
fn strangers_nonsense_and_sleepers_do_not_hurt() {
    needs_root!();
    let mut lab = Lab::new();
    let port = lab.port().clone();
    let refused = port
        .ns
        .run(|| {
            // SAFETY: the call takes numbers only; called directly it concerns this thread alone, which ends here.
            let done = unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) };
            assert_eq!(done, 0);
            Ok(ask(&port, b"{\"follow\":false}\n", 1 << 20))
        })
        .unwrap();
    assert!(refused.contains("\"refused\"") && !refused.contains("first_sight"), "{refused}");

    port.ns
        .run(|| {
            for nonsense in [&b"\n"[..], b"7\n", b"{\"kinds\":[\"none\"]}\n", &[b'x'; 100_000], &[0xff; 3]] {
                assert_eq!(ask(&port, nonsense, 1 << 20), "");
            }
            Ok(())
        })
        .unwrap();

    // As many as it takes, none of which reads.
    let mut sleepers: Vec<UnixStream> = port
        .ns
        .run(|| {
            let connect = |_| {
                let mut stream = UnixStream::connect_addr(&address(&port))?;
                stream.write_all(b"{\"follow\":true}\n")?;
                Ok(stream)
            };
            (0..16).map(connect).collect()
        })
        .unwrap();
    thread::sleep(Duration::from_millis(200));
    let full = port.ns.run(|| Ok(ask(&port, b"{}\n", 1 << 20))).unwrap();
    assert!(full.contains("as many readers as it takes"), "{full}");

    for chunk in 0..20 {
        lab.write((chunk * 1_000..(chunk + 1) * 1_000).map(|n| 2 * n));
        thread::sleep(Duration::from_millis(30));
    }
    // A place for one who looks how far the agent is.
    drop(sleepers.pop());
    let mut naks = Vec::new();
    let told = eventually(PATIENCE, || {
        lab.forger.send(&lab.forger.acknowledge(QP, 7, 0x60));
        thread::sleep(Duration::from_millis(300));
        naks = lab.events(&["--kind", "nak"]);
        !naks.is_empty()
    });
    assert!(told, "the agent does not keep up");
    let nak = naks[0]["seq"].as_u64().unwrap();
    let mut reader = BufReader::new(sleepers.pop().unwrap());
    reader.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut heard, mut lost, mut seq, mut line) = (0, 0, 0, String::new());
    while seq < nak {
        line.clear();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "{heard} and {lost}");
        let value: Value = serde_json::from_str(&line).unwrap();
        match value["kind"].as_str() {
            Some("events_lost") => lost += value["lost"].as_u64().unwrap(),
            _ => {
                heard += 1;
                seq = value["seq"].as_u64().unwrap();
            }
        }
    }
    println!("{heard} heard, {lost} lost");
    assert!(lost > 0 && heard + lost == nak + 1, "{heard} and {lost} of {nak}");

    let before = Instant::now();
    assert!(lab.agent.stop().unwrap().success(), "{}", lab.agent.stderr());
    assert!(before.elapsed() < Duration::from_secs(3), "15 of them still do not read");
}
