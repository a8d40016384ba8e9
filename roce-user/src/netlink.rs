//! Route netlink: links, addresses, and the qdiscs and classes of the HTB pacer.
//!
//! Synchronous requests on a socket of the calling thread's network namespace; answers are typed by
//! `netlink-packet-route`.

use std::{io, net::IpAddr};

use anyhow::{Context as _, Result, anyhow, bail};
use netlink_packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{self, LinkAttribute, LinkFlags, LinkMessage, LinkXdp},
    tc::{TcAttribute, TcHandle, TcMessage, TcOption, TcStats2},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// Parent of a root qdisc.
pub const ROOT: TcHandle = TcHandle { major: 0xffff, minor: 0xffff };
/// Parent of the clsact and ingress qdiscs.
const CLSACT: TcHandle = TcHandle { major: 0xffff, minor: 0xfff1 };
/// Minor numbers of clsact's hooks.
const CLSACT_INGRESS: u16 = 0xfff2;
const CLSACT_EGRESS: u16 = 0xfff3;

const TCA_OPTIONS: u16 = 2;
const TCA_HTB_PARMS: u16 = 1;
const TCA_HTB_INIT: u16 = 2;
const TCA_HTB_DIRECT_QLEN: u16 = 5;
const TCA_HTB_RATE64: u16 = 6;
const TCA_HTB_CEIL64: u16 = 7;
/// `TC_LINKLAYER_ETHERNET`: the kernel needs no rate table then.
const LINKLAYER_ETHERNET: u8 = 1;
/// A kernel tick of packet schedulers is 2^6 ns.
const TICK_SHIFT: u32 = 6;

/// A route netlink socket.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

/// What a link is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinkInfo {
    /// Interface index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// The loopback interface.
    pub loopback: bool,
    /// Kind of a virtual device, e.g. `veth`; `None` for a physical one.
    pub kind: Option<String>,
    /// Id of an attached XDP program.
    pub xdp_prog: Option<u32>,
}

/// A qdisc of an interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Qdisc {
    /// Kind, e.g. `htb`.
    pub kind: String,
    /// Handle; major 0 for what the kernel chose by default.
    pub handle: TcHandle,
    /// Parent; [`ROOT`] for the root qdisc.
    pub parent: TcHandle,
    /// Packets waiting.
    pub backlog_packets: u32,
}

impl Netlink {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// When the kernel refuses the socket.
    pub fn open() -> Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE).context("cannot open a netlink socket")?;
        socket.bind_auto().context("cannot bind a netlink socket")?;
        socket.connect(&SocketAddr::new(0, 0)).context("cannot connect a netlink socket")?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends one request and collects the answers.
    fn request(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut request = NetlinkMessage::from(message);
        request.header.flags = NLM_F_REQUEST | flags;
        request.header.sequence_number = self.sequence;
        request.finalize();
        let mut buffer = vec![0; request.buffer_len()];
        request.serialize(&mut buffer);
        self.socket.send(&buffer, 0)?;
        let mut answers = Vec::new();
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = &datagram[..];
            while !rest.is_empty() {
                let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))?;
                let length = (answer.header.length as usize).next_multiple_of(4).clamp(1, rest.len());
                rest = &rest[length..];
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                match answer.payload {
                    NetlinkPayload::Done(_) => return Ok(answers),
                    NetlinkPayload::Error(e) if e.code.is_none() => return Ok(answers),
                    NetlinkPayload::Error(e) => return Err(e.to_io()),
                    NetlinkPayload::InnerMessage(inner) => {
                        answers.push(inner);
                        if flags & (NLM_F_DUMP | NLM_F_ACK) == 0 {
                            return Ok(answers);
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    /// The link called `name`, or `None` where there is none.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn link(&mut self, name: &str) -> Result<Option<LinkInfo>> {
        Ok(self.links()?.into_iter().find(|l| l.name == name))
    }

    /// Every link of the namespace.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn links(&mut self) -> Result<Vec<LinkInfo>> {
        let answers = self
            .request(RouteNetlinkMessage::GetLink(LinkMessage::default()), NLM_F_DUMP)
            .context("cannot list the network interfaces")?;
        Ok(answers
            .into_iter()
            .filter_map(|a| match a {
                RouteNetlinkMessage::NewLink(link) => Some(link_info(link)),
                _ => None,
            })
            .collect())
    }

    /// Every address of the namespace.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn addresses(&mut self) -> Result<Vec<IpAddr>> {
        let answers = self
            .request(RouteNetlinkMessage::GetAddress(AddressMessage::default()), NLM_F_DUMP)
            .context("cannot list the addresses of this host")?;
        let mut addresses = Vec::new();
        for answer in answers {
            let RouteNetlinkMessage::NewAddress(address) = answer else { continue };
            // On a point-to-point link Address is the peer's and Local ours.
            let local = address.attributes.iter().find_map(|a| match a {
                AddressAttribute::Local(ip) => Some(*ip),
                _ => None,
            });
            let any = address.attributes.iter().find_map(|a| match a {
                AddressAttribute::Address(ip) => Some(*ip),
                _ => None,
            });
            addresses.extend(local.or(any));
        }
        addresses.sort_unstable();
        addresses.dedup();
        Ok(addresses)
    }

    /// The qdiscs of an interface.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn qdiscs(&mut self, ifindex: u32) -> Result<Vec<Qdisc>> {
        let answers = self
            .request(RouteNetlinkMessage::GetQueueDiscipline(TcMessage::with_index(ifindex as i32)), NLM_F_DUMP)
            .context("cannot list the queueing disciplines")?;
        Ok(answers
            .into_iter()
            .filter_map(|a| match a {
                RouteNetlinkMessage::NewQueueDiscipline(m) if m.header.index == ifindex as i32 => Some(qdisc(&m)),
                _ => None,
            })
            .collect())
    }

    /// The root qdisc of an interface.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn root_qdisc(&mut self, ifindex: u32) -> Result<Option<Qdisc>> {
        Ok(self.qdiscs(ifindex)?.into_iter().find(|q| q.parent == ROOT))
    }

    /// The kind of the qdisc that holds the tc hooks: `clsact`, or `ingress`, which has no egress hook.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn hook_qdisc(&mut self, ifindex: u32) -> Result<Option<String>> {
        Ok(self.qdiscs(ifindex)?.into_iter().find(|q| q.parent == CLSACT).map(|q| q.kind))
    }

    /// Deletes the clsact qdisc, unless somebody has a filter there.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn delete_clsact_if_empty(&mut self, ifindex: u32) -> Result<bool> {
        if self.hook_qdisc(ifindex)?.as_deref() != Some("clsact") {
            return Ok(false);
        }
        for minor in [CLSACT_INGRESS, CLSACT_EGRESS] {
            let mut message = TcMessage::with_index(ifindex as i32);
            message.header.parent = TcHandle { major: CLSACT.major, minor };
            let filters = self
                .request(RouteNetlinkMessage::GetTrafficFilter(message), NLM_F_DUMP)
                .context("cannot list the tc filters")?;
            if !filters.is_empty() {
                return Ok(false);
            }
        }
        let handle = TcHandle { major: CLSACT.major, minor: 0 };
        self.delete_qdisc(ifindex, handle, CLSACT).context("cannot delete clsact")?;
        Ok(true)
    }

    /// Adds an HTB root qdisc without a default class: what no filter classifies is sent at once.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn add_htb_root(&mut self, ifindex: u32, handle: TcHandle, direct_qlen: u32) -> io::Result<()> {
        let version: [u32; 5] = [3, 10, 0, 0, 0];
        let options = vec![
            other(TCA_HTB_INIT, version.iter().flat_map(|w| w.to_ne_bytes()).collect()),
            other(TCA_HTB_DIRECT_QLEN, direct_qlen.to_ne_bytes().to_vec()),
        ];
        let message = tc(ifindex, handle, ROOT, "htb", Some(TcAttribute::Options(options)));
        self.request(RouteNetlinkMessage::NewQueueDiscipline(message), NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Adds a root qdisc with its defaults.
    ///
    /// # Errors
    /// The kernel's refusal; `NotFound` where it does not have the kind.
    pub fn add_fq_root(&mut self, ifindex: u32, handle: TcHandle, options: &[(u16, u32)]) -> io::Result<()> {
        let options = options.iter().map(|(kind, v)| other(*kind, v.to_ne_bytes().to_vec())).collect();
        let message = tc(ifindex, handle, ROOT, "fq", Some(TcAttribute::Options(options)));
        self.request(RouteNetlinkMessage::NewQueueDiscipline(message), NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Deletes a qdisc.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete_qdisc(&mut self, ifindex: u32, handle: TcHandle, parent: TcHandle) -> io::Result<()> {
        let mut message = TcMessage::with_index(ifindex as i32);
        message.header.handle = handle;
        message.header.parent = parent;
        self.request(RouteNetlinkMessage::DelQueueDiscipline(message), NLM_F_ACK).map(drop)
    }

    /// Adds an HTB class (`create`) or changes its rate.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_htb_class(
        &mut self,
        ifindex: u32,
        classid: TcHandle,
        parent: TcHandle,
        bytes_per_sec: u64,
        burst_bytes: u64,
        create: bool,
    ) -> io::Result<()> {
        let options = htb_class_options(bytes_per_sec, burst_bytes);
        let message = tc(ifindex, classid, parent, "htb", Some(TcAttribute::Options(options)));
        let flags = if create { NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL } else { NLM_F_ACK };
        self.request(RouteNetlinkMessage::NewTrafficClass(message), flags).map(drop)
    }

    /// Adds a pfifo of `packets` as the leaf of a class.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn add_pfifo_leaf(&mut self, ifindex: u32, parent: TcHandle, packets: u32) -> io::Result<()> {
        let options = TcAttribute::Other(DefaultNla::new(TCA_OPTIONS, packets.to_ne_bytes().to_vec()));
        let message = tc(ifindex, TcHandle { major: 0, minor: 0 }, parent, "pfifo", Some(options));
        self.request(RouteNetlinkMessage::NewQueueDiscipline(message), NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Deletes a class; the kernel drops what still waits in it.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete_class(&mut self, ifindex: u32, classid: TcHandle) -> io::Result<()> {
        let mut message = TcMessage::with_index(ifindex as i32);
        message.header.handle = classid;
        self.request(RouteNetlinkMessage::DelTrafficClass(message), NLM_F_ACK).map(drop)
    }

    /// The leaf classes of an interface with the packets waiting in each.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn classes(&mut self, ifindex: u32) -> Result<Vec<Qdisc>> {
        let answers = self
            .request(RouteNetlinkMessage::GetTrafficClass(TcMessage::with_index(ifindex as i32)), NLM_F_DUMP)
            .context("cannot list the traffic classes")?;
        Ok(answers
            .into_iter()
            .filter_map(|a| match a {
                RouteNetlinkMessage::NewTrafficClass(m) if m.header.index == ifindex as i32 => Some(qdisc(&m)),
                _ => None,
            })
            .collect())
    }
}

fn other(kind: u16, value: Vec<u8>) -> TcOption {
    TcOption::Other(DefaultNla::new(kind, value))
}

fn tc(ifindex: u32, handle: TcHandle, parent: TcHandle, kind: &str, options: Option<TcAttribute>) -> TcMessage {
    let mut message = TcMessage::with_index(ifindex as i32);
    message.header.handle = handle;
    message.header.parent = parent;
    message.attributes.push(TcAttribute::Kind(kind.into()));
    message.attributes.extend(options);
    message
}

/// `struct tc_htb_opt` with rate = ceil, and the 64-bit rates where 32 bits do not hold them.
fn htb_class_options(bytes_per_sec: u64, burst_bytes: u64) -> Vec<TcOption> {
    let rate32 = u32::try_from(bytes_per_sec).unwrap_or(u32::MAX);
    let mut spec = [0u8; 12];
    spec[1] = LINKLAYER_ETHERNET;
    spec[8..].copy_from_slice(&rate32.to_ne_bytes());
    let burst_ns = u128::from(burst_bytes) * 1_000_000_000 / u128::from(bytes_per_sec.max(1));
    let burst_ticks = u32::try_from(burst_ns >> TICK_SHIFT).unwrap_or(u32::MAX);
    let quantum = u32::try_from(burst_bytes).unwrap_or(u32::MAX).clamp(1_514, 200_000);
    let mut parms = Vec::with_capacity(44);
    parms.extend(spec);
    parms.extend(spec);
    for word in [burst_ticks, burst_ticks, quantum, 0, 0] {
        parms.extend(word.to_ne_bytes());
    }
    let mut options = vec![other(TCA_HTB_PARMS, parms)];
    if bytes_per_sec > u64::from(u32::MAX) {
        options.push(other(TCA_HTB_RATE64, bytes_per_sec.to_ne_bytes().to_vec()));
        options.push(other(TCA_HTB_CEIL64, bytes_per_sec.to_ne_bytes().to_vec()));
    }
    options
}

fn link_info(link: LinkMessage) -> LinkInfo {
    let mut info = LinkInfo {
        index: link.header.index,
        name: String::new(),
        mtu: 0,
        loopback: link.header.flags.contains(LinkFlags::Loopback),
        kind: None,
        xdp_prog: None,
    };
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => info.name = name,
            LinkAttribute::Mtu(mtu) => info.mtu = mtu,
            LinkAttribute::LinkInfo(infos) => {
                info.kind = infos.into_iter().find_map(|i| match i {
                    link::LinkInfo::Kind(kind) => Some(kind.to_string()),
                    _ => None,
                });
            }
            LinkAttribute::Xdp(xdp) => {
                info.xdp_prog = xdp.iter().find_map(|x| match x {
                    LinkXdp::ProgId(id) if *id != 0 => Some(*id),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    info
}

fn qdisc(message: &TcMessage) -> Qdisc {
    let mut q =
        Qdisc { kind: String::new(), handle: message.header.handle, parent: message.header.parent, backlog_packets: 0 };
    for attribute in &message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => q.kind.clone_from(kind),
            TcAttribute::Stats2(stats) => {
                for stat in stats {
                    if let TcStats2::Queue(queue) = stat {
                        q.backlog_packets = queue.qlen;
                    }
                }
            }
            _ => {}
        }
    }
    q
}

/// The link called `name`, or an error that says what to do.
///
/// # Errors
/// The interface does not exist, or is the loopback interface, which RoCE never passes.
pub fn require_link(name: &str) -> Result<LinkInfo> {
    let mut netlink = Netlink::open()?;
    let links = netlink.links()?;
    let Some(link) = links.iter().find(|l| l.name == name) else {
        let names: Vec<_> = links.iter().filter(|l| !l.loopback).map(|l| l.name.as_str()).collect();
        let have = if names.is_empty() { "there is none but lo".to_owned() } else { names.join(", ") };
        return Err(anyhow!("interface {name} does not exist in this network namespace (have: {have})"));
    };
    if link.loopback {
        bail!(
            "interface {name} is the loopback: RoCE packets between two local QPs never pass it; name a network interface"
        );
    }
    Ok(link.clone())
}

/// The speed the driver reports, in bits per second; `None` where it reports none.
pub fn link_speed(name: &str) -> Option<u64> {
    // struct ethtool_cmd: cmd at 0, speed (low half) at 12, speed_hi at 28; 44 bytes.
    const ETHTOOL_GSET: u32 = 1;
    let mut cmd = [0u8; 44];
    cmd[..4].copy_from_slice(&ETHTOOL_GSET.to_ne_bytes());
    // SAFETY: an all-zero ifreq is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = cmd.as_mut_ptr().cast();
    // SAFETY: a plain socket; closed below.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return None;
    }
    // SAFETY: `request` is a valid ifreq whose data points to a buffer of the size ETHTOOL_GSET writes.
    let failed = unsafe { libc::ioctl(fd, libc::SIOCETHTOOL, &raw mut request) } != 0;
    // SAFETY: `fd` is ours.
    unsafe { libc::close(fd) };
    if failed {
        return None;
    }
    let low = u16::from_ne_bytes([cmd[12], cmd[13]]);
    let high = u16::from_ne_bytes([cmd[28], cmd[29]]);
    let megabits = u32::from(high) << 16 | u32::from(low);
    // SPEED_UNKNOWN is -1; some drivers report 0.
    (megabits != 0 && megabits != u32::MAX).then(|| u64::from(megabits) * 1_000_000)
}
