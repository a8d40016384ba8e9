//! Records the frames an interface receives, as they were on the wire.

use std::{
    io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::errno::Errno;

use super::Port;

const BUFFER: libc::c_int = 64 << 20;
const LONGEST: usize = 16_384;

/// Where in an interface's receive path a tap stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The wire: behind XDP, before tc ingress; sees what the peer's tc egress and qdisc let out.
    Wire,
    /// IPv4's door: behind XDP and tc ingress. Frames for others, and of VLANs that the host is not in, do not pass it.
    Ipv4,
    /// IPv6's door.
    Ipv6,
}

impl Place {
    const fn protocol(self) -> u16 {
        match self {
            Self::Wire => libc::ETH_P_ALL as u16,
            Self::Ipv4 => libc::ETH_P_IP as u16,
            Self::Ipv6 => libc::ETH_P_IPV6 as u16,
        }
    }
}

/// Records until it is dropped. Frames that the interface sends are not recorded.
#[derive(Debug)]
pub struct Tap {
    frames: Arc<Mutex<Vec<Vec<u8>>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Tap {
    /// Begins.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn open(port: &Port, place: Place) -> Result<Self> {
        let socket = port.ns.run(|| open(port.index, place.protocol()).context("packet socket"))?;
        let (frames, stop) = (Arc::<Mutex<Vec<Vec<u8>>>>::default(), Arc::new(AtomicBool::new(false)));
        let (kept, stopped) = (Arc::clone(&frames), Arc::clone(&stop));
        let thread = thread::Builder::new().name(format!("{}-tap", port.name)).spawn(move || {
            let mut buffer = vec![0; LONGEST];
            while !stopped.load(Ordering::Relaxed) {
                let mut fd = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one pollfd, which outlives the call.
                unsafe { libc::poll(&raw mut fd, 1, 20) };
                while let Some(frame) = receive(socket.as_raw_fd(), &mut buffer, place) {
                    kept.lock().unwrap_or_else(PoisonError::into_inner).push(frame);
                }
            }
        })?;
        Ok(Self { frames, stop, thread: Some(thread) })
    }

    /// The frames so far for which `wanted` holds.
    pub fn frames(&self, wanted: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|f| wanted(f)).cloned().collect()
    }

    /// The same once there are `count` of them, or after two seconds.
    pub fn wait(&self, count: usize, wanted: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
        let end = Instant::now() + Duration::from_secs(2);
        loop {
            let frames = self.frames(&wanted);
            if frames.len() >= count || Instant::now() > end {
                return frames;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It cannot panic; there is nothing to add.
            let _ = thread.join();
        }
    }
}

fn open(index: u32, protocol: u16) -> io::Result<OwnedFd> {
    // SAFETY: socket(2) takes no pointer; a descriptor it returns is ours alone.
    let fd = unsafe {
        let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0);
        Errno::result(fd)?;
        OwnedFd::from_raw_fd(fd)
    };
    let set = |level: libc::c_int, name: libc::c_int, value: libc::c_int| {
        // SAFETY: pointer and length describe `value`, which outlives the call.
        let done = unsafe {
            libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), size_of_val(&value) as u32)
        };
        Errno::result(done)
    };
    set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER)?;
    set(libc::SOL_PACKET, libc::PACKET_AUXDATA, 1)?;
    // SAFETY: an all-zero sockaddr_ll is a valid value of this plain C structure.
    let mut addr: libc::sockaddr_ll = unsafe { mem::zeroed() };
    addr.sll_family = libc::AF_PACKET as u16;
    addr.sll_protocol = protocol.to_be();
    addr.sll_ifindex = index as i32;
    // SAFETY: pointer and length describe `addr`, which outlives the call.
    let done = unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), size_of_val(&addr) as u32) };
    Errno::result(done)?;
    Ok(fd)
}

/// `struct tpacket_auxdata` of linux/if_packet.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct AuxData {
    status: u32,
    len: u32,
    snaplen: u32,
    mac: u16,
    net: u16,
    vlan_tci: u16,
    vlan_tpid: u16,
}

const TP_STATUS_VLAN_VALID: u32 = 1 << 4;

/// One received frame, its VLAN tag back in its place, or `None` where none is waiting.
fn receive(fd: RawFd, buffer: &mut [u8], place: Place) -> Option<Vec<u8>> {
    loop {
        // SAFETY: all-zero values of these plain C structures are valid.
        let (mut from, mut message): (libc::sockaddr_ll, libc::msghdr) = unsafe { mem::zeroed() };
        let mut control = [0u64; 16];
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = size_of_val(&from) as u32;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        // SAFETY: every pointer in `message` is to a local that outlives the call, with its length.
        let n = unsafe { libc::recvmsg(fd, &raw mut message, 0) };
        let n = match Errno::result(n) {
            Ok(n) => n as usize,
            Err(Errno::EINTR) => continue,
            Err(_) => return None,
        };
        let skipped = if place == Place::Wire { libc::PACKET_OUTGOING } else { libc::PACKET_OTHERHOST };
        if from.sll_pkttype == skipped {
            continue;
        }
        let mut frame = buffer.get(..n)?.to_vec();
        // SAFETY: the kernel filled `control` with well-formed control messages; CMSG_* stay within it.
        unsafe {
            let mut at = libc::CMSG_FIRSTHDR(&raw const message);
            while !at.is_null() {
                if (*at).cmsg_level == libc::SOL_PACKET && (*at).cmsg_type == libc::PACKET_AUXDATA {
                    let aux = libc::CMSG_DATA(at).cast::<AuxData>().read_unaligned();
                    if aux.status & TP_STATUS_VLAN_VALID != 0 && frame.len() > 12 {
                        let tag = [aux.vlan_tpid.to_be_bytes(), aux.vlan_tci.to_be_bytes()].concat();
                        frame.splice(12..12, tag);
                    }
                }
                at = libc::CMSG_NXTHDR(&raw const message, at);
            }
        }
        return Some(frame);
    }
}
