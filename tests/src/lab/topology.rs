//! The shapes of the lab: hosts behind a switch with one slow port, two hosts on a cable, two hosts behind a router.

use std::net::IpAddr;

use anyhow::Result;

use super::{
    link::{Port, connect},
    netns::Netns,
};

/// Handle of the bottleneck's leaf, the queue that drops: `10:`.
pub const LEAF: u16 = 0x10;
/// Link number of the receiver; senders count from 1.
const RECEIVER: u8 = 200;

/// A host: its port and where its frames go first.
#[derive(Clone, Debug)]
pub struct HostPort {
    /// Its own port.
    pub port: Port,
    /// MAC address of the next hop for everything.
    pub next_hop_mac: [u8; 6],
}

impl HostPort {
    /// Its address of the wished IP version.
    pub fn address(&self, ipv6: bool) -> IpAddr {
        if ipv6 { self.port.v6.into() } else { self.port.v4.into() }
    }
}

/// The slow port of a switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bottleneck {
    /// Bits per second, Ethernet headers counted.
    pub bits_per_sec: u64,
    /// Packets its queue holds before it drops.
    pub queue: u32,
}

/// The MTU a path MTU needs: 1,500 up to 1,024, else room for every header.
pub const fn mtu_for(pmtu: u16) -> u32 {
    if pmtu <= 1024 { 1500 } else { pmtu as u32 + 104 }
}

/// Two hosts joined by one veth pair.
#[derive(Debug)]
pub struct Pair {
    /// The first host, 10.66.1.1.
    pub a: HostPort,
    /// The second host, 10.66.1.2.
    pub b: HostPort,
}

impl Pair {
    /// Builds it; interfaces are called `a` and `b`.
    ///
    /// # Errors
    /// See [`connect`].
    pub fn new(mtu: u32) -> Result<Self> {
        let (na, nb) = (Netns::new()?, Netns::new()?);
        let (a, b) = connect(1, mtu, (&na, "a"), (&nb, "b"))?;
        let (mac_a, mac_b) = (a.mac, b.mac);
        Ok(Self { a: HostPort { port: a, next_hop_mac: mac_b }, b: HostPort { port: b, next_hop_mac: mac_a } })
    }
}

/// Senders, a switch that forwards at layer 3, one receiver.
#[derive(Debug)]
pub struct Star {
    /// The senders, interfaces `s1`, `s2`, …, addresses 10.66.1.1, 10.66.2.1, …
    pub senders: Vec<HostPort>,
    /// The receiver, interface `r`, address 10.66.200.1.
    pub receiver: HostPort,
    /// The switch's ports to the senders, `to-s1`, `to-s2`, …
    pub sender_ports: Vec<Port>,
    /// The switch's port to the receiver, `to-r`; the bottleneck's queue is qdisc [`LEAF`] on it.
    pub receiver_port: Port,
}

impl Star {
    /// Builds it with `senders` (1 … 199) senders.
    ///
    /// # Errors
    /// See [`connect`].
    pub fn new(senders: u8, mtu: u32, bottleneck: Option<Bottleneck>) -> Result<Self> {
        let switch = Netns::new()?;
        switch.sysctl("ipv4/ip_forward", "1")?;
        switch.sysctl("ipv6/conf/all/forwarding", "1")?;
        let mut hosts = Vec::new();
        let mut ports = Vec::new();
        for i in 1..=senders {
            let (host, port) = attach(&switch, i, mtu, &format!("s{i}"))?;
            hosts.push(host);
            ports.push(port);
        }
        let (receiver, receiver_port) = attach(&switch, RECEIVER, mtu, "r")?;
        if let Some(b) = bottleneck {
            shape(&receiver_port, b)?;
        }
        Ok(Self { senders: hosts, receiver, sender_ports: ports, receiver_port })
    }

    /// The switch's namespace.
    pub fn switch(&self) -> &Netns {
        &self.receiver_port.ns
    }
}

/// Two hosts behind a router: `Transit::new(mtu)` is a [`Star`] with one sender and no bottleneck. The router's ports
/// are `sender_ports[0]` and `receiver_port`.
///
/// # Errors
/// See [`connect`].
pub fn transit(mtu: u32) -> Result<Star> {
    Star::new(1, mtu, None)
}

/// A new host on link `number` of the switch.
fn attach(switch: &Netns, number: u8, mtu: u32, name: &str) -> Result<(HostPort, Port)> {
    let ns = Netns::new()?;
    let (host, port) = connect(number, mtu, (&ns, name), (switch, &format!("to-{name}")))?;
    ns.ip(&[format!("route add default via {}", port.v4), format!("route add ::/0 via {}", port.v6)])?;
    Ok((HostPort { port: host, next_hop_mac: port.mac }, port))
}

/// Limits what leaves `port`: HTB of the rate, under it a FIFO that drops at its tail.
///
/// # Errors
/// When `tc` is missing or refuses (HTB or pfifo absent from the kernel).
pub fn shape(port: &Port, b: Bottleneck) -> Result<()> {
    let (dev, rate) = (&port.name, b.bits_per_sec);
    // Two full frames, or what the rate moves in 200 µs: the timer must not cost throughput.
    let burst = (rate / 8 / 5_000).max(2 * 1600);
    port.ns.tc(&[
        format!("qdisc add dev {dev} root handle 1: htb default 1"),
        format!(
            "class add dev {dev} parent 1: classid 1:1 htb rate {rate}bit ceil {rate}bit burst {burst} cburst {burst} \
             quantum 1600"
        ),
        format!("qdisc add dev {dev} parent 1:1 handle {LEAF:x}: pfifo limit {}", b.queue),
    ])
}
