//! Packet sockets: one that sends whole frames and blocks, one that receives RoCEv2.

use std::{
    io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    time::Duration,
};

use nix::errno::Errno;

/// Frames a transmit socket holds before it blocks: rxe pauses above 64 packets in flight per QP.
const FRAMES_IN_FLIGHT: usize = 64;
/// How long a send may block before the caller gets to look around.
const SEND_TIMEOUT: Duration = Duration::from_millis(100);
/// Receive buffer: an endpoint must never be the one that loses packets.
const RECEIVE_BUFFER: libc::c_int = 16 << 20;

/// Receive buffer of a [`Tap`], which sees everything.
const TAP_BUFFER: libc::c_int = 128 << 20;
/// Longest wait of [`Tap::next`].
const TAP_WAIT: Duration = Duration::from_millis(50);
/// Time stamp of the last frame received (`SIOCGSTAMPNS_OLD` of asm-generic/sockios.h).
const SIOCGSTAMPNS: libc::Ioctl = 0x8907;

const ETH_P_ALL: u16 = 0x0003;
const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;

fn socket(domain: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: socket(2) takes no pointer; a descriptor it returns is ours alone.
    unsafe {
        let fd = libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol);
        Errno::result(fd)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn set_option<T>(fd: RawFd, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: the pointer and the length describe `value`, which outlives the call.
    let done = unsafe { libc::setsockopt(fd, level, name, (&raw const *value).cast(), size_of::<T>() as u32) };
    Errno::result(done)?;
    Ok(())
}

fn bind_packet(fd: RawFd, protocol: u16, index: u32) -> io::Result<()> {
    // SAFETY: an all-zero sockaddr_ll is a valid value of this plain C structure.
    let mut addr: libc::sockaddr_ll = unsafe { mem::zeroed() };
    addr.sll_family = libc::AF_PACKET as u16;
    addr.sll_protocol = protocol.to_be();
    addr.sll_ifindex = index as i32;
    // SAFETY: the pointer and the length describe `addr`, which outlives the call.
    let done = unsafe { libc::bind(fd, (&raw const addr).cast(), size_of_val(&addr) as u32) };
    Errno::result(done)?;
    Ok(())
}

/// What became of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sent {
    /// The kernel took it.
    Taken,
    /// The socket is still full after [`SEND_TIMEOUT`]: try the same frame again.
    Blocked,
    /// The kernel dropped it (a full queue, an interface that is down).
    Refused,
}

/// A socket that sends frames through one interface, in the namespace of the thread that opened it.
#[derive(Debug)]
pub struct Sender(OwnedFd);

impl Sender {
    /// For frames of about `frame` bytes on interface `index`.
    ///
    /// # Errors
    /// Without CAP_NET_RAW or where there is no such interface.
    pub fn open(index: u32, frame: usize) -> io::Result<Self> {
        let fd = socket(libc::AF_PACKET, libc::SOCK_RAW, 0)?;
        bind_packet(fd.as_raw_fd(), 0, index)?;
        // The kernel doubles the value and charges each frame its buffer's true size: headroom, frame and shared info
        // rounded up to a slab, and the sk_buff.
        let truesize = (frame + 448).next_power_of_two() + 256;
        let half = (FRAMES_IN_FLIGHT * truesize / 2) as libc::c_int;
        set_option(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &half)?;
        let timeout = libc::timeval { tv_sec: 0, tv_usec: SEND_TIMEOUT.as_micros() as _ };
        set_option(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDTIMEO, &timeout)?;
        Ok(Self(fd))
    }

    /// Sends one frame, Ethernet header included.
    pub fn send(&self, frame: &[u8]) -> Sent {
        loop {
            // SAFETY: the pointer and the length describe `frame`, which outlives the call.
            let n = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
            match Errno::result(n) {
                Ok(_) => return Sent::Taken,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Sent::Blocked,
                Err(_) => return Sent::Refused,
            }
        }
    }
}

/// One instruction of a classic BPF filter.
const fn op(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

const LD_B_ABS: u16 = 0x30;
const LD_H_ABS: u16 = 0x28;
const LD_H_IND: u16 = 0x48;
const LDX_MSH: u16 = 0xb1;
const JEQ: u16 = 0x15;
const RET: u16 = 0x06;
const PORT: u32 = roce_common::wire::UDP_PORT as u32;
const UDP: u32 = 17;

/// IPv4 UDP to 4791, header length honoured.
const FILTER_V4: [libc::sock_filter; 7] = [
    op(LD_B_ABS, 0, 0, 14 + 9),
    op(JEQ, 0, 4, UDP),
    op(LDX_MSH, 0, 0, 14),
    op(LD_H_IND, 0, 0, 14 + 2),
    op(JEQ, 0, 1, PORT),
    op(RET, 0, 0, u32::MAX),
    op(RET, 0, 0, 0),
];
/// IPv6 UDP to 4791.
const FILTER_V6: [libc::sock_filter; 6] = [
    op(LD_B_ABS, 0, 0, 14 + 6),
    op(JEQ, 0, 3, UDP),
    op(LD_H_ABS, 0, 0, 14 + 40 + 2),
    op(JEQ, 0, 1, PORT),
    op(RET, 0, 0, u32::MAX),
    op(RET, 0, 0, 0),
];
/// Nothing.
const FILTER_NONE: [libc::sock_filter; 1] = [op(RET, 0, 0, 0)];

fn attach_filter(fd: RawFd, filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    set_option(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// Receives every RoCEv2 frame that reaches the host's IP layer: bound to the IP protocols, the sockets stand behind
/// XDP and tc ingress as rxe's UDP socket does, and never see what the host sends.
#[derive(Debug)]
pub struct Receiver {
    v4: OwnedFd,
    v6: OwnedFd,
    /// Bound to port 4791 so that the host does not answer with ICMP; it keeps nothing.
    _port: OwnedFd,
}

impl Receiver {
    /// On interface `index`, in the namespace of the calling thread.
    ///
    /// # Errors
    /// Without CAP_NET_RAW, where there is no such interface, or where port 4791 is taken.
    pub fn open(index: u32) -> io::Result<Self> {
        let open = |protocol: u16, filter: &[libc::sock_filter]| -> io::Result<OwnedFd> {
            let fd = socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK, 0)?;
            attach_filter(fd.as_raw_fd(), filter)?;
            set_option(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &RECEIVE_BUFFER)?;
            bind_packet(fd.as_raw_fd(), protocol, index)?;
            Ok(fd)
        };
        Ok(Self { v4: open(ETH_P_IP, &FILTER_V4)?, v6: open(ETH_P_IPV6, &FILTER_V6)?, _port: occupy_port()? })
    }

    /// Waits at most `timeout` and hands every frame that is there to `each`.
    ///
    /// # Errors
    /// When the interface is gone.
    pub fn receive(&self, timeout: Duration, buffer: &mut [u8], mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let pollfd = |fd: &OwnedFd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut fds = [pollfd(&self.v4), pollfd(&self.v6)];
        // SAFETY: the pointer and the count describe `fds`, which outlives the call.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as u64, timeout.as_millis() as i32) };
        match Errno::result(ready) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        for fd in fds.iter().filter(|f| f.revents != 0).map(|f| f.fd) {
            while let Some(n) = receive_one(fd, buffer)? {
                if let Some(frame) = buffer.get(..n) {
                    each(frame);
                }
            }
        }
        Ok(())
    }

    /// Frames the kernel dropped because a receive buffer was full, since the last call.
    ///
    /// # Errors
    /// Never in practice.
    pub fn dropped(&self) -> io::Result<u32> {
        Ok(drops(&self.v4)? + drops(&self.v6)?)
    }
}

/// Frames that `fd`, a packet socket, had to drop since the last call.
fn drops(fd: &OwnedFd) -> io::Result<u32> {
    let mut stats = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
    let mut len = size_of_val(&stats) as libc::socklen_t;
    // SAFETY: the pointer and the length describe `stats`, which outlives the call.
    let done = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut stats).cast(),
            &raw mut len,
        )
    };
    Errno::result(done)?;
    Ok(stats.tp_drops)
}

/// Receives every frame of an interface, both ways: what arrives before tc sees it, what leaves behind the qdisc.
#[derive(Debug)]
pub struct Tap(OwnedFd);

impl Tap {
    /// On interface `index`, in the namespace of the calling thread.
    ///
    /// # Errors
    /// Without CAP_NET_RAW or where there is no such interface.
    pub fn open(index: u32) -> io::Result<Self> {
        let fd = socket(libc::AF_PACKET, libc::SOCK_RAW, 0)?;
        let wait = libc::timeval { tv_sec: 0, tv_usec: TAP_WAIT.as_micros() as _ };
        set_option(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVTIMEO, &wait)?;
        set_option(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &TAP_BUFFER)?;
        let tap = Self(fd);
        // The first question switches time stamps on; there is nothing to answer it with yet.
        let _ = tap.stamp();
        bind_packet(tap.0.as_raw_fd(), ETH_P_ALL, index)?;
        Ok(tap)
    }

    /// The next frame's length and when the kernel saw it; `None` where none came for a while.
    ///
    /// # Errors
    /// When the interface is gone.
    pub fn next(&self, buffer: &mut [u8]) -> io::Result<Option<(usize, Duration)>> {
        // SAFETY: the pointer and the length describe `buffer`, which outlives the call.
        let n = unsafe { libc::recv(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        match Errno::result(n) {
            Ok(n) => Ok(Some((n as usize, self.stamp()?))),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Frames dropped because the buffer was full, since the last call.
    ///
    /// # Errors
    /// Never in practice.
    pub fn dropped(&self) -> io::Result<u32> {
        drops(&self.0)
    }

    fn stamp(&self) -> io::Result<Duration> {
        let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the request writes a timespec, which outlives the call.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), SIOCGSTAMPNS, &raw mut at) };
        Errno::result(done)?;
        Ok(Duration::new(at.tv_sec as u64, at.tv_nsec as u32))
    }
}

/// One frame addressed to this host, or `None` where none is waiting.
fn receive_one(fd: RawFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        // SAFETY: an all-zero sockaddr_ll is a valid value of this plain C structure.
        let mut from: libc::sockaddr_ll = unsafe { mem::zeroed() };
        let mut len = size_of_val(&from) as libc::socklen_t;
        // SAFETY: pointers and lengths describe `buffer` and `from`, which outlive the call.
        let n = unsafe {
            libc::recvfrom(
                fd,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                libc::MSG_DONTWAIT,
                (&raw mut from).cast(),
                &raw mut len,
            )
        };
        match Errno::result(n) {
            Ok(n) if from.sll_pkttype == libc::PACKET_HOST => return Ok(Some(n as usize)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    }
}

/// A dual-stack UDP socket on the RoCEv2 port that receives nothing.
fn occupy_port() -> io::Result<OwnedFd> {
    let fd = socket(libc::AF_INET6, libc::SOCK_DGRAM, 0)?;
    attach_filter(fd.as_raw_fd(), &FILTER_NONE)?;
    // SAFETY: an all-zero sockaddr_in6 is a valid value of this plain C structure.
    let mut addr: libc::sockaddr_in6 = unsafe { mem::zeroed() };
    addr.sin6_family = libc::AF_INET6 as u16;
    addr.sin6_port = roce_common::wire::UDP_PORT.to_be();
    // SAFETY: the pointer and the length describe `addr`, which outlives the call.
    let done = unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), size_of_val(&addr) as u32) };
    Errno::result(done)?;
    Ok(fd)
}
