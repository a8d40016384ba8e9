//! rxe devices on veth pairs through a software switch.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::modules;
use crate::{
    lab::{Netns, Port, format_mac, interface_index, wait_up},
    rig,
    run::{AgentProcess, AgentRole},
};

/// An MTU that lets rxe choose a path MTU of 4096.
pub const JUMBO: u32 = 4_200;
/// A report each second takes an agent on an emulated CPU a tenth of it.
const SELDOM: [&str; 2] = ["--interval", "10"];
/// How long an rxe device may take to become active.
const ACTIVE: Duration = Duration::from_secs(10);

/// Where the hosts are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// All in the first namespace, and policy routing sends what they say to each other over the wire: works on every kernel.
    Initial,
    /// Each in a namespace of its own. rxe can do so since Linux 7.2.
    Separate,
}

/// A host.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its interface.
    pub port: Port,
    /// The switch's end of the cable. It has no addresses.
    pub switch_port: Port,
    /// Its rxe device.
    pub device: String,
}

impl Node {
    /// Its address of the wished IP version.
    pub fn address(&self, ipv6: bool) -> IpAddr {
        if ipv6 { self.port.v6.into() } else { self.port.v4.into() }
    }

    /// Makes the switch's port to it mark every IPv4 RoCEv2 packet with CE.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn mark_all_with_ce(&self) -> Result<()> {
        modules::load(&["sch_ingress", "cls_u32", "act_pedit", "act_csum"])?;
        let port = &self.switch_port;
        port.ns.tc(&[
            format!("qdisc add dev {} clsact", port.name),
            format!(
                "filter add dev {} egress protocol ip u32 match ip protocol 17 0xff match ip dport 4791 0xffff \
                 action pedit ex munge ip tos set 3 retain 3 pipe action csum ip",
                port.name
            ),
        ])
    }

    /// Takes back [`Node::mark_all_with_ce`].
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn mark_nothing(&self) -> Result<()> {
        let port = &self.switch_port;
        port.ns.tc(&[format!("qdisc del dev {} clsact", port.name)])
    }

    /// The index of its GID for an IP version.
    ///
    /// # Errors
    /// When the device has none.
    pub fn gid_index(&self, ipv6: bool) -> Result<u32> {
        let wanted = match self.address(ipv6) {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        (0..16)
            .find(|i| {
                let file = format!("/sys/class/infiniband/{}/ports/1/gids/{i}", self.device);
                fs::read_to_string(file).is_ok_and(|gid| gid.trim().parse() == Ok(wanted))
            })
            .with_context(|| format!("{} has no GID for {wanted}", self.device))
    }
}

/// Hosts and the switch between them.
#[derive(Debug)]
pub struct Fabric {
    /// The switch: a bridge whose ports are `p0`, `p1`, …
    pub switch: Netns,
    /// The hosts: interfaces `v0`, `v1`, …, devices `rxe0`, `rxe1`, …
    pub nodes: Vec<Node>,
    /// Where they are.
    pub placement: Placement,
}

impl Fabric {
    /// Builds it with `hosts` hosts (2 … 16): 10.9.0.1 and fd09::1 upwards, known to each other.
    ///
    /// # Errors
    /// Names what was refused; a [`super::Skip`] where a module is missing.
    pub fn new(hosts: u8, mtu: u32, placement: Placement) -> Result<Self> {
        modules::load(&["veth", "bridge", "ib_uverbs", "rdma_ucm", "rdma_rxe"])?;
        let (switch, here) = (Netns::new()?, Netns::here()?);
        switch.ip(&["link add br0 type bridge mcast_snooping 0", "link set br0 up"])?;
        let mut nodes = Vec::new();
        for i in 0..hosts {
            let ns = match placement {
                Placement::Initial => here.clone(),
                Placement::Separate => Netns::new()?,
            };
            nodes.push(cable(i, mtu, &ns, &switch)?);
        }
        let fabric = Self { switch, nodes, placement };
        if placement == Placement::Initial {
            fabric.onto_the_wire(&here)?;
        }
        fabric.introduce()?;
        for node in &fabric.nodes {
            node.add_device()?;
        }
        fabric.wait_active()?;
        Ok(fabric)
    }

    /// Gives every host its addresses, fixed entries for all others, so that no packet is on the wire but those of the tests, and
    /// its routes. Again after an interface was down, which takes most of it away.
    ///
    /// # Errors
    /// Names what was refused.
    pub fn introduce(&self) -> Result<()> {
        for (i, node) in self.nodes.iter().enumerate() {
            let name = &node.port.name;
            let mut lines = vec![
                format!("addr replace {}/24 dev {name}", node.port.v4),
                format!("addr replace {}/64 dev {name} nodad", node.port.v6),
                format!("link set dev {name} up"),
            ];
            for other in self.others(node) {
                for ipv6 in [false, true] {
                    let (own, to, mac) = (node.address(ipv6), other.address(ipv6), format_mac(other.port.mac));
                    lines.push(format!("neigh replace {to} lladdr {mac} nud permanent dev {name}"));
                    if self.placement == Placement::Initial {
                        lines.push(format!("route replace {to} dev {name} src {own} table {}", table(i)));
                    }
                }
            }
            node.port.ns.ip(&lines)?;
        }
        wait_up(self.nodes.iter().flat_map(|node| [&node.port, &node.switch_port]))
    }

    /// Attaches an agent to a host.
    ///
    /// # Errors
    /// When it does not attach.
    pub fn agent(&self, host: usize, args: &[&str]) -> Result<AgentProcess> {
        rig::agent(&self.nodes[host].port, AgentRole::Host, &[&SELDOM, args].concat())
    }

    /// Makes the switch's port to a host a congestion point.
    ///
    /// # Errors
    /// When its agent does not attach.
    pub fn congestion_point(&self, host: usize, args: &[&str]) -> Result<AgentProcess> {
        rig::agent(&self.nodes[host].switch_port, AgentRole::Cp, &[&SELDOM, args].concat())
    }

    /// Waits until every device can send.
    ///
    /// # Errors
    /// When one cannot after ten seconds.
    pub fn wait_active(&self) -> Result<()> {
        self.nodes.iter().try_for_each(Node::wait_active)
    }

    fn others<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a Node> {
        self.nodes.iter().filter(|other| other.port.mac != node.port.mac)
    }

    /// What one local address sends to another is routed by the first one's table, and what comes in there is local.
    fn onto_the_wire(&self, here: &Netns) -> Result<()> {
        for node in &self.nodes {
            for (name, value) in [("rp_filter", "0"), ("accept_local", "1"), ("arp_ignore", "1"), ("arp_announce", "2")]
            {
                for who in ["all", &node.port.name] {
                    here.sysctl(&format!("ipv4/conf/{who}/{name}"), value)?;
                }
            }
        }
        for (version, ipv6) in [("-4", false), ("-6", true)] {
            let mut rules = Vec::new();
            for (i, node) in self.nodes.iter().enumerate() {
                rules.push(format!("rule add pref 10 iif {} lookup local", node.port.name));
                for other in self.others(node) {
                    let (own, to) = (node.address(ipv6), other.address(ipv6));
                    rules.push(format!("rule add pref 20 from {own} to {to} lookup {}", table(i)));
                }
            }
            // Last, so that there is never none.
            rules.push("rule add pref 100 lookup local".into());
            rules.push("rule del pref 0".into());
            here.ip_of(version, &rules)?;
        }
        Ok(())
    }

    /// The address at which perftest's server is found for what it says beside RDMA.
    pub fn side_address(&self, server: &Node) -> IpAddr {
        match self.placement {
            Placement::Initial => Ipv4Addr::LOCALHOST.into(),
            Placement::Separate => server.port.v4.into(),
        }
    }
}

/// The routing table of host `i`.
const fn table(i: usize) -> usize {
    101 + i
}

/// One host's cable to the switch.
fn cable(i: u8, mtu: u32, ns: &Netns, switch: &Netns) -> Result<Node> {
    let (name, peer) = (format!("v{i}"), format!("p{i}"));
    let mac = |side: u8| [0x02, 0x52, 0x6c, 9, side, i + 1];
    let (v4, v6) = (Ipv4Addr::new(10, 9, 0, i + 1), Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, u16::from(i) + 1));
    ns.ip(&[
        format!(
            "link add name {name} mtu {mtu} address {} type veth peer name {peer} mtu {mtu} address {} netns {}",
            format_mac(mac(0)),
            format_mac(mac(1)),
            switch.path().display(),
        ),
        // No addresses but ours: no router or listener reports on the wire, and short lists of GIDs.
        format!("link set dev {name} addrgenmode none"),
    ])?;
    switch.ip(&[
        format!("link set dev {peer} addrgenmode none"),
        format!("link set dev {peer} master br0"),
        format!("link set dev {peer} up"),
    ])?;
    let index = |ns: &Netns, name: &str| ns.run(|| interface_index(name));
    let port = Port { ns: ns.clone(), index: index(ns, &name)?, name, cpu: None, mac: mac(0), v4, v6 };
    let switch_port = Port {
        ns: switch.clone(),
        index: index(switch, &peer)?,
        name: peer,
        cpu: None,
        mac: mac(1),
        v4: Ipv4Addr::UNSPECIFIED,
        v6: Ipv6Addr::UNSPECIFIED,
    };
    Ok(Node { port, switch_port, device: format!("rxe{i}") })
}

impl Node {
    /// Makes its rxe device.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add_device(&self) -> Result<()> {
        let mut command = self.port.ns.command("rdma");
        command.args(["link", "add", &self.device, "type", "rxe", "netdev", &self.port.name]);
        let output = command.output().context("cannot run rdma")?;
        if !output.status.success() {
            bail!("rdma link add {}: {}", self.device, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Removes it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove_device(&self) -> Result<()> {
        let output =
            self.port.ns.command("rdma").args(["link", "delete", &self.device]).output().context("cannot run rdma")?;
        if !output.status.success() {
            bail!("rdma link delete {}: {}", self.device, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    fn wait_active(&self) -> Result<()> {
        let file = format!("/sys/class/infiniband/{}/ports/1/state", self.device);
        let end = Instant::now() + ACTIVE;
        loop {
            let state = fs::read_to_string(&file).unwrap_or_default();
            if state.contains("ACTIVE") && self.gid_index(false).is_ok() && self.gid_index(true).is_ok() {
                return Ok(());
            }
            if Instant::now() > end {
                bail!("{} is not active after {} s: {state}", self.device, ACTIVE.as_secs());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}
