//! Route netlink: links and addresses; in `tc`, queueing disciplines and their classes; in `rdma`, the RDMA devices and their
//! queue pairs by netlink of their own.
//!
//! Synchronous requests on a socket of the calling thread's network namespace; answers are typed by
//! `netlink-packet-route`, those about RDMA by `rdma`.

pub mod rdma;
mod tc;

use std::{io, net::IpAddr};

use anyhow::{Context as _, Result, anyhow, bail};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{self, LinkAttribute, LinkFlags, LinkMessage, LinkXdp},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

pub use self::tc::{Qdisc, ROOT};

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

impl Netlink {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// When the kernel refuses the socket.
    pub fn open() -> Result<Self> {
        let socket = open(NETLINK_ROUTE).context("cannot open a netlink socket")?;
        Ok(Self { socket, sequence: 0 })
    }

    fn request(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.sequence = self.sequence.wrapping_add(1);
        exchange(&self.socket, self.sequence, message, flags)
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
}

/// A connected socket of the calling thread's network namespace.
fn open(protocol: isize) -> io::Result<Socket> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

/// Sends one request and collects the answers.
fn exchange<M>(socket: &Socket, sequence: u32, message: M, flags: u16) -> io::Result<Vec<M>>
where
    M: NetlinkSerializable + NetlinkDeserializable,
    NetlinkPayload<M>: From<M>,
{
    let mut request = NetlinkMessage::from(message);
    request.header.flags = NLM_F_REQUEST | flags;
    request.header.sequence_number = sequence;
    request.finalize();
    let mut buffer = vec![0; request.buffer_len()];
    request.serialize(&mut buffer);
    socket.send(&buffer, 0)?;
    let mut answers = Vec::new();
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = &datagram[..];
        while let Some(answer) = next_message::<M>(&mut rest)? {
            if answer.header.sequence_number != sequence {
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

/// The next message of a datagram, of which `rest` is what follows; `None` at its end.
fn next_message<M: NetlinkDeserializable>(rest: &mut &[u8]) -> io::Result<Option<NetlinkMessage<M>>> {
    if rest.is_empty() {
        return Ok(None);
    }
    let message = NetlinkMessage::<M>::deserialize(rest)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))?;
    let length = (message.header.length as usize).next_multiple_of(4).clamp(1, rest.len());
    *rest = &rest[length..];
    Ok(Some(message))
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
    let failed = unsafe { libc::ioctl(fd, libc::SIOCETHTOOL as libc::Ioctl, &raw mut request) } != 0;
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
