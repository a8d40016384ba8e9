//! What the dataplane must leave alone, seen on the wire in every ingress mode. Needs root.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use roce_common::{
    units::Addr,
    wire::{self, Opcode, Verdict},
};
use roce_tests::{
    endpoint::{Clock, CnpFlood, Connection, Host, Message, Op, Sender, Sent, Traffic, ack_timeout, connect},
    lab::{HostPort, Netns, Pair, Place, Port, Route, Tap, connect as cable, roce, wait_up},
    needs_root,
    run::{AgentProcess, AgentRole},
};

const INGRESS: [&str; 3] = ["xdp", "xdp-generic", "tc"];
/// MAC address of nobody: hosts record frames to it and answer none.
const NOBODY: [u8; 6] = [2, 0x52, 0xee, 0, 0, 2];
const MARKED: [u8; 6] = [2, 0x52, 0xee, 0, 0, 1];

fn agent(ns: &Netns, ifaces: &str, role: AgentRole, args: &[&str]) -> AgentProcess {
    let args: Vec<String> = args.iter().map(|a| (*a).to_owned()).collect();
    let mut agent = AgentProcess::start(&roce(), ns, ifaces, role, &args).unwrap();
    agent.wait_ready().unwrap();
    agent
}

/// A counter of the agent's last summary, of both directions.
fn counted(agent: &AgentProcess, counter: &str) -> u64 {
    let summary = agent.summary().unwrap();
    ["ingress", "egress"].iter().filter_map(|d| summary["counters"][d][counter].as_u64()).sum()
}

fn finish(agent: &mut AgentProcess) {
    assert!(agent.stop().unwrap().success(), "{}", agent.stderr());
    assert_eq!(agent.stderr(), "");
}

fn route(a: &Port, b: &Port, src_mac: [u8; 6], dst_mac: [u8; 6]) -> Route {
    Route {
        src_mac,
        dst_mac,
        v4: [Addr::from(IpAddr::from(a.v4)), Addr::from(IpAddr::from(b.v4))],
        v6: [Addr::from(IpAddr::from(a.v6)), Addr::from(IpAddr::from(b.v6))],
    }
}

/// Sends the frames from `port`, through its qdisc and tc egress.
fn send(port: &Port, frames: &[Vec<u8>]) {
    let sender = port.ns.run(|| Ok(Sender::open(port.index, 2048)?)).unwrap();
    for frame in frames {
        let sent = loop {
            match sender.send(frame) {
                Sent::Blocked => {}
                done => break done,
            }
        };
        assert_eq!(sent, Sent::Taken, "{frame:02x?}");
    }
}

fn from_us(frame: &[u8]) -> bool {
    frame.get(6..12) == Some(&MARKED)
}

/// As on the wire: a veth pads nothing, so the frames themselves.
fn assert_same(arrived: &[Vec<u8>], sent: &[Vec<u8>], what: &str) {
    if let Some(i) = (0..sent.len()).find(|&i| arrived.get(i) != Some(&sent[i])) {
        let head = |f: Option<&Vec<u8>>| f.map(|f| format!("{} bytes {:02x?}", f.len(), &f[..f.len().min(64)]));
        panic!(
            "{what}: frame {i}, {} of {} arrived\nsent    {:?}\narrived {:?}",
            arrived.len(),
            sent.len(),
            head(sent.get(i)),
            head(arrived.get(i))
        );
    }
    assert_eq!(arrived.len(), sent.len(), "{what}");
}

fn opcode(frame: &[u8]) -> Option<Opcode> {
    match wire::parse(frame) {
        Verdict::Roce(packet) => Some(packet.bth.opcode),
        _ => None,
    }
}

/// Two hosts on a bridge; the bridge's ports are `p1` and `p2`.
struct Bridged {
    a: HostPort,
    b: HostPort,
    bridge: Netns,
    _ports: [Port; 2],
}

impl Bridged {
    fn new() -> Self {
        let [na, bridge, nb] = [(); 3].map(|()| Netns::new().unwrap());
        let (a, p1) = cable(1, 1500, (&na, "a"), (&bridge, "p1")).unwrap();
        let (b, p2) = cable(2, 1500, (&nb, "b"), (&bridge, "p2")).unwrap();
        bridge
            .ip(&[
                "link add br0 type bridge mcast_snooping 0",
                "link set p1 master br0",
                "link set p2 master br0",
                "link set br0 up",
            ])
            .unwrap();
        wait_up([&a, &b, &p1, &p2]).unwrap();
        let (mac_a, mac_b) = (a.mac, b.mac);
        let bridged = Self {
            a: HostPort { port: a, next_hop_mac: mac_b },
            b: HostPort { port: b, next_hop_mac: mac_a },
            bridge,
            _ports: [p1, p2],
        };
        bridged.wait_forwarding();
        bridged
    }

    /// A new port of a bridge forwards a moment after it is up.
    fn wait_forwarding(&self) {
        let tap = Tap::open(&self.b.port, Place::Wire).unwrap();
        let probe = vec![[&NOBODY[..], &[2, 0, 0, 0, 0, 9], &[0x88, 0xb5]].concat()];
        for _ in 0..100 {
            send(&self.a.port, &probe);
            thread::sleep(Duration::from_millis(20));
            if !tap.frames(|f| f.get(..12) == probe[0].get(..12)).is_empty() {
                return;
            }
        }
        panic!("the bridge does not forward");
    }
}

#[test]
fn what_passes_a_bridge_is_not_touched() {
    needs_root!();
    let lab = Bridged::new();
    let (a, b) = (&lab.a.port, &lab.b.port);
    let route = route(a, b, MARKED, NOBODY);
    let frames = [route.roce_frames(), route.other_frames()].concat();
    // Some of the damaged ones the kernel's bridge itself drops.
    let there = Tap::open(b, Place::Wire).unwrap();
    send(a, &frames);
    thread::sleep(Duration::from_millis(200));
    let passed = there.frames(from_us);
    drop(there);
    let frames: Vec<_> = frames.into_iter().filter(|f| passed.contains(f)).collect();
    assert!(passed == frames && frames.len() >= 130, "{}", frames.len());
    for (role, pacer) in [(AgentRole::Host, "htb"), (AgentRole::Observe, "off")] {
        for ingress in INGRESS {
            let what = format!("{} {ingress}", role.name());
            let mut agent = agent(&lab.bridge, "p1,p2", role, &["--ingress", ingress, "--pacer", pacer]);
            let (there, back) = (Tap::open(b, Place::Wire).unwrap(), Tap::open(a, Place::Wire).unwrap());
            send(a, &frames);
            assert_same(&there.wait(frames.len(), from_us), &frames, &what);
            // Nobody answers CE that is for others.
            thread::sleep(Duration::from_millis(50));
            assert_eq!(back.frames(|f| opcode(f).is_some()).len(), 0, "{what}");
            finish(&mut agent);
            assert_eq!(counted(&agent, "np_cnp_sent") + counted(&agent, "np_unpaired"), 0, "{what}");
            assert!(agent.flows().is_some_and(|f| f["flows"].is_array()) || counted(&agent, "rocev2") > 0, "{what}");
        }
    }
}

#[test]
fn transit_connections_are_not_paced() {
    needs_root!();
    let lab = Bridged::new();
    let mut agent = agent(&lab.bridge, "p1,p2", AgentRole::Host, &["--pacer", "htb", "--link-rate", "10m"]);
    let clock = Clock::start();
    let (mut ha, mut hb) = (Host::start(&lab.a.port, clock).unwrap(), Host::start(&lab.b.port, clock).unwrap());
    let messages = vec![Message::new(Op::Write, 60_000), Message::new(Op::Read, 30_000), Message::new(Op::Send, 500)];
    let connection = Connection {
        // CE and ECT on everything: whoever thought himself meant would notify.
        tos: 3,
        timeout: ack_timeout(19),
        traffic_a: Traffic { messages, rounds: Some(200) },
        ..Connection::default()
    };
    let flood = CnpFlood::start(&lab.b, &lab.a, connection.qpn_a, 0xc0, Duration::from_millis(1)).unwrap();
    let begin = Instant::now();
    let (qa, qb) = connect((&mut ha, &lab.a), (&mut hb, &lab.b), &connection).unwrap();
    assert!(qa.wait_done(Duration::from_secs(10)), "{:?}", qa.stats());
    let rate = 200.0 * 90_500.0 * 8.0 / begin.elapsed().as_secs_f64();
    println!("{rate:.0} b/s");
    assert!(rate > 30e6, "paced: {rate:.0} b/s");
    let (sa, sb) = (qa.stats(), qb.stats());
    assert_eq!((sa.retransmitted, sa.reasked, sb.naks_sent, sa.timeouts), (0, 0, 0, 0), "{sa:?} {sb:?}");
    thread::sleep(Duration::from_millis(100));
    let sent = flood.sent();
    drop(flood);
    thread::sleep(Duration::from_millis(100));
    assert!(ha.stats().cnps >= sent, "CNPs in transit arrive: {} of {sent}", ha.stats().cnps);
    assert_eq!((hb.stats().cnps, hb.stats().icrc_errors), (0, 0));
    finish(&mut agent);
}

#[test]
fn an_observer_changes_nothing_on_a_host() {
    needs_root!();
    for ingress in INGRESS {
        let pair = Pair::new(1500).unwrap();
        let (a, b) = (&pair.a.port, &pair.b.port);
        let route = route(a, b, MARKED, b.mac);
        let frames = [route.roce_frames(), route.other_frames()].concat();
        let is_v4 = |f: &[u8]| f.get(12..14) == Some(&[8, 0]);
        let is_v6 = |f: &[u8]| f.get(12..14) == Some(&[0x86, 0xdd]);
        let only = |keep: fn(&[u8]) -> bool| frames.iter().filter(|f| keep(f)).cloned().collect::<Vec<_>>();
        let (v4, v6) = (only(is_v4), only(is_v6));
        let observe = |port: &Port| agent(&port.ns, &port.name, AgentRole::Observe, &["--ingress", ingress]);
        let mut agents = [observe(a), observe(b)];
        let [wire, door4, door6] = [Place::Wire, Place::Ipv4, Place::Ipv6].map(|p| Tap::open(b, p).unwrap());
        let back = Tap::open(a, Place::Wire).unwrap();
        send(a, &frames);
        assert_same(&wire.wait(frames.len(), from_us), &frames, &format!("{ingress} wire"));
        assert_same(&door4.wait(v4.len(), |f| from_us(f) && is_v4(f)), &v4, &format!("{ingress} IPv4"));
        assert_same(&door6.wait(v6.len(), |f| from_us(f) && is_v6(f)), &v6, &format!("{ingress} IPv6"));
        thread::sleep(Duration::from_millis(50));
        assert_eq!(back.frames(|f| opcode(f).is_some()).len(), 0, "{ingress}: no CNP");
        agents.iter_mut().for_each(finish);

        // The same frames from a host that is to mark them do change: the comparison can tell.
        let mut host = agent(&a.ns, &a.name, AgentRole::Host, &["--ingress", ingress, "--pacer", "off"]);
        let wire = Tap::open(b, Place::Wire).unwrap();
        send(a, &frames);
        assert_ne!(wire.wait(frames.len(), from_us), frames);
        finish(&mut host);
    }
}

/// A real TCP connection: 3 MB each way, and what arrives is what was sent.
fn tcp(from: &Netns, to: &Netns, address: Ipv4Addr) {
    const BYTES: usize = 3 << 20;
    let data = |seed: u32| -> Vec<u8> { (0..BYTES as u32).map(|i| (i.wrapping_mul(seed) >> 11) as u8).collect() };
    let talk = |mut stream: TcpStream, ours: Vec<u8>, theirs: Vec<u8>| {
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut writer = stream.try_clone().unwrap();
        let writing =
            thread::spawn(move || writer.write_all(&ours).and_then(|()| writer.shutdown(std::net::Shutdown::Write)));
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).unwrap();
        writing.join().unwrap().unwrap();
        assert!(heard == theirs, "{} of {BYTES} bytes, or others", heard.len());
    };
    // The port of RoCEv2 means nothing to TCP.
    let listener = to.run(|| Ok(TcpListener::bind((address, 4791))?)).unwrap();
    let stream = from.run(|| Ok(TcpStream::connect_timeout(&(address, 4791).into(), Duration::from_secs(5))?)).unwrap();
    thread::scope(|scope| {
        let server = scope.spawn(|| talk(listener.accept().unwrap().0, data(77), data(99)));
        talk(stream, data(99), data(77));
        server.join().unwrap();
    });
}

/// UDP datagrams from one port to another, whole and in fragments.
fn udp(from: &Netns, from_port: u16, to: &Netns, address: Ipv4Addr, port: u16) {
    let receiver = to.run(|| Ok(UdpSocket::bind((address, port))?)).unwrap();
    receiver.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let sender = from.run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, from_port))?)).unwrap();
    let mut buffer = vec![0; 65_536];
    for length in [0, 1, 12, 500, 1472, 1473, 5000, 20_000] {
        let data: Vec<u8> = (0..length).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        sender.send_to(&data, SocketAddr::from((address, port))).unwrap();
        let (n, source) = receiver
            .recv_from(&mut buffer)
            .unwrap_or_else(|e| panic!("{length} bytes from {from_port} to {port}: {e}"));
        assert_eq!(source.port(), from_port);
        assert!(buffer[..n] == data, "{length} bytes from {from_port} to {port}: {n} arrived, or others");
    }
}

/// Host-role agents with an HTB root on both ends.
fn paced(pair: &Pair, ingress: &str) -> [AgentProcess; 2] {
    [&pair.a.port, &pair.b.port]
        .map(|p| agent(&p.ns, &p.name, AgentRole::Host, &["--ingress", ingress, "--pacer", "htb"]))
}

/// TCP and UDP from a to b.
fn talk(pair: &Pair, address: Ipv4Addr) {
    let (a, b) = (&pair.a.port.ns, &pair.b.port.ns);
    tcp(a, b, address);
    udp(a, 4791, b, address, 5000);
    udp(a, 5001, b, address, 5000);
    // Datagrams for the RoCEv2 port that are none of RoCEv2 reach whoever waits there: no rxe, no guard.
    udp(a, 5001, b, address, 4791);
}

#[test]
fn other_traffic_of_a_host_is_complete_and_unchanged() {
    needs_root!();
    for ingress in INGRESS {
        let pair = Pair::new(1500).unwrap();
        let (a, b) = (&pair.a.port, &pair.b.port);
        let mut agents = paced(&pair, ingress);
        let frames = route(a, b, MARKED, b.mac).other_frames();
        let v4: Vec<_> = frames.iter().filter(|f| f.get(12..14) == Some(&[8, 0])).cloned().collect();
        let [wire, door] = [Place::Wire, Place::Ipv4].map(|p| Tap::open(b, p).unwrap());
        send(a, &frames);
        assert_same(&wire.wait(frames.len(), from_us), &frames, &format!("{ingress} wire"));
        assert_same(&door.wait(v4.len(), from_us), &v4, &format!("{ingress} IPv4"));
        drop((wire, door));
        talk(&pair, b.v4);
        agents.iter_mut().for_each(finish);
    }
}

#[test]
fn a_vlan_interface_on_top_is_left_alone() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    let vlan = |port: &Port, end: u8| {
        let name = &port.name;
        port.ns.ip(&[
            format!("link add link {name} name {name}.5 type vlan id 5"),
            format!("addr add 10.67.5.{end}/24 dev {name}.5"),
            format!("link set {name}.5 up"),
        ])
    };
    if vlan(&pair.a.port, 1).and_then(|()| vlan(&pair.b.port, 2)).is_err() {
        println!("SKIP this kernel has no VLAN interfaces");
        return;
    }
    for ingress in INGRESS {
        let mut agents = paced(&pair, ingress);
        talk(&pair, Ipv4Addr::new(10, 67, 5, 2));
        agents.iter_mut().for_each(finish);
    }
}

#[test]
fn a_cnp_is_never_answered() {
    needs_root!();
    for ingress in INGRESS {
        let pair = Pair::new(1500).unwrap();
        let host =
            |p: &HostPort| agent(&p.port.ns, &p.port.name, AgentRole::Host, &["--ingress", ingress, "--pacer", "off"]);
        let mut agents = [host(&pair.a), host(&pair.b)];
        let clock = Clock::start();
        let (mut ha, mut hb) = (Host::start(&pair.a.port, clock).unwrap(), Host::start(&pair.b.port, clock).unwrap());
        let connection = Connection {
            timeout: ack_timeout(19),
            traffic_a: Traffic::endless(Message::new(Op::Write, 10_000)),
            traffic_b: Traffic::endless(Message::new(Op::Write, 10_000)),
            ..Connection::default()
        };
        let (qa, qb) = connect((&mut ha, &pair.a), (&mut hb, &pair.b), &connection).unwrap();
        let is_cnp = |f: &[u8]| opcode(f) == Some(Opcode::CNP);
        let at_b = Tap::open(&pair.b.port, Place::Wire).unwrap();
        // Paired by now, both ways.
        thread::sleep(Duration::from_millis(300));
        for tos in [0xc0, 0xc2, 0xc3] {
            let flood = CnpFlood::start(&pair.b, &pair.a, connection.qpn_a, tos, Duration::from_millis(1)).unwrap();
            let end = Instant::now() + Duration::from_secs(3);
            while flood.sent() < 50 && Instant::now() < end {
                thread::sleep(Duration::from_millis(20));
            }
            assert!(flood.sent() >= 50, "{}", flood.sent());
        }
        let handled = ha.stats().cnps;
        assert!(handled > 100, "{handled} reached the host");
        assert_eq!(at_b.frames(is_cnp).len(), 0, "{ingress}");

        // Data with CE from the same peer is answered: the silence was not deafness.
        qa.kill();
        qb.kill();
        let ce = Connection { qpn_a: 0x31, qpn_b: 0x4b, tos: 3, ..connection.clone() };
        let (qa2, qb2) = connect((&mut ha, &pair.a), (&mut hb, &pair.b), &ce).unwrap();
        let cnps = at_b.wait(1, is_cnp);
        let moved = (qa2.stats().accepted_bytes, qb2.stats().accepted_bytes);
        qa2.kill();
        qb2.kill();
        agents.iter_mut().for_each(finish);
        assert!(!cnps.is_empty(), "{ingress}: no CNP for CE: {moved:?} {:?}", agents[0].summary());
    }
}
