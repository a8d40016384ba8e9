//! Veth pairs, their offloads and addresses.

use std::{
    ffi::CString,
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{errno::Errno, net::if_::InterfaceFlags};

use super::netns::Netns;

/// One end of a link, addressed.
#[derive(Clone, Debug)]
pub struct Port {
    /// Where it lives.
    pub ns: Netns,
    /// Interface name there.
    pub name: String,
    /// Interface index there.
    pub index: u32,
    /// The CPU on which the frames that it receives are processed; `None`: the one that sent them.
    pub cpu: Option<usize>,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Its IPv4 address, in a /24.
    pub v4: Ipv4Addr,
    /// Its IPv6 address, in a /64.
    pub v6: Ipv6Addr,
}

/// Which end of a link.
#[derive(Clone, Copy, Debug)]
enum End {
    One = 1,
    Two = 2,
}

/// Link `number` (0 … 255) between two namespaces: 10.66.n.1 – 10.66.n.2 and fd66:n::1 – fd66:n::2, offloads off,
/// frames kept in order, static neighbours, both ends up; [`wait_up`] says when they carry frames.
///
/// # Errors
/// When `ip` is missing or refuses, or an offload cannot be switched off.
pub fn connect(number: u8, mtu: u32, one: (&Netns, &str), two: (&Netns, &str)) -> Result<(Port, Port)> {
    let mac = |end: End| [0x02, 0x52, 0x6c, 0, number, end as u8];
    one.0.ip(&[format!(
        "link add name {} mtu {mtu} address {} type veth peer name {} mtu {mtu} address {} netns {}",
        one.1,
        format_mac(mac(End::One)),
        two.1,
        format_mac(mac(End::Two)),
        two.0.path().display(),
    )])?;
    let port = |(ns, name): (&Netns, &str), end: End, peer: End| -> Result<Port> {
        let (v4, v6) = addresses(number, end);
        let (peer4, peer6) = addresses(number, peer);
        ns.ip(&[
            format!("addr add {v4}/24 dev {name}"),
            format!("addr add {v6}/64 dev {name} nodad"),
            format!("link set dev {name} up"),
            format!("neigh replace {peer4} lladdr {} nud permanent dev {name}", format_mac(mac(peer))),
            format!("neigh replace {peer6} lladdr {} nud permanent dev {name}", format_mac(mac(peer))),
        ])?;
        let (index, cpu) = ns.run(|| {
            offloads_off(name)?;
            let cpu = super::order::one_backlog(name, number)?;
            Ok((interface_index(name)?, cpu))
        })?;
        Ok(Port { ns: ns.clone(), name: name.to_owned(), index, cpu, mac: mac(end), v4, v6 })
    };
    Ok((port(one, End::One, End::Two)?, port(two, End::Two, End::One)?))
}

/// Waits until all of them carry frames.
///
/// # Errors
/// When one does not within five seconds.
pub fn wait_up<'a>(ports: impl IntoIterator<Item = &'a Port>) -> Result<()> {
    for port in ports {
        port.ns.run(|| wait_running(&port.name))?;
    }
    // The flag shows just before the queue is active.
    thread::sleep(Duration::from_millis(5));
    Ok(())
}

/// Waits until an interface of the calling thread's namespace carries frames: the kernel activates the queue of a new
/// link from a work item, and until then drops what is sent.
fn wait_running(name: &str) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        let up = nix::ifaddrs::getifaddrs()?
            .any(|i| i.interface_name == name && i.flags.contains(InterfaceFlags::IFF_RUNNING));
        if up {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(2));
    }
    bail!("{name} did not come up within 5 s")
}

fn addresses(number: u8, end: End) -> (Ipv4Addr, Ipv6Addr) {
    (Ipv4Addr::new(10, 66, number, end as u8), Ipv6Addr::new(0xfd66, u16::from(number), 0, 0, 0, 0, 0, end as u16))
}

/// A MAC address as text.
pub fn format_mac(mac: [u8; 6]) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

/// Index of an interface in the calling thread's namespace.
///
/// # Errors
/// When there is none of that name.
pub fn interface_index(name: &str) -> Result<u32> {
    nix::net::if_::if_nametoindex(name).with_context(|| format!("no interface {name}"))
}

/// `struct ethtool_value` of linux/ethtool.h.
#[repr(C)]
struct EthtoolValue {
    cmd: u32,
    data: u32,
}

/// Setters of linux/ethtool.h, in an order in which each is allowed: segmentation needs checksums.
const OFFLOADS: [(&str, u32); 5] = [
    ("tcp-segmentation-offload", 0x1f),
    ("generic-segmentation-offload", 0x24),
    ("generic-receive-offload", 0x2c),
    ("tx-checksumming", 0x17),
    ("rx-checksumming", 0x15),
];
const SIOCETHTOOL: libc::Ioctl = 0x8946;

/// Switches off every offload that would let frames exist that no wire carries, in the calling thread's namespace.
///
/// # Errors
/// Names the offload that cannot be switched off.
pub fn offloads_off(name: &str) -> Result<()> {
    let name_c = CString::new(name)?;
    if name_c.as_bytes_with_nul().len() > libc::IFNAMSIZ {
        bail!("interface name {name} is too long");
    }
    // SAFETY: socket(2) takes no pointer; a descriptor it returns is ours alone.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        Errno::result(fd).context("socket")?;
        OwnedFd::from_raw_fd(fd)
    };
    for (feature, cmd) in OFFLOADS {
        let mut value = EthtoolValue { cmd, data: 0 };
        // SAFETY: an all-zero ifreq is a valid value of this plain C structure.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name_c.as_bytes()) {
            *to = *from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = (&raw mut value).cast();
        // SAFETY: `request` names a terminated interface and points to an ethtool_value; both outlive the call.
        let done = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
        match Errno::result(done) {
            // A feature the driver does not have is off.
            Ok(_) | Err(Errno::EOPNOTSUPP) => {}
            Err(e) => bail!("cannot switch {feature} off on {name}: {e}"),
        }
    }
    Ok(())
}
