//! RDMA netlink: the RDMA devices that the kernel has, the interfaces their ports stand on, and their queue pairs with the
//! number at the peer and the process that owns them (`drivers/infiniband/core/nldev.c` of Linux, since 4.17).
//!
//! Needs no privilege. A device counts for the interfaces of the caller's network namespace only: of others the kernel does
//! not tell the index. Processes are numbered as in the caller's PID namespace; who is not visible there has no number.

mod message;

use std::{fs, io};

use netlink_packet_core::NLM_F_DUMP;
use netlink_sys::{Socket, protocols::NETLINK_RDMA};
use roce_common::{psn::Psn, units::Qpn};

use self::message::{Answer, Command, RdmaMessage};
use super::{exchange, open};

/// What a queue pair is for, `enum ib_qp_type`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum QpType {
    /// Subnet management, QP0.
    Smi,
    /// General services, QP1: connection management.
    Gsi,
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Any other, by its number.
    Other(u8),
}

impl QpType {
    const fn from_number(n: u8) -> Self {
        match n {
            0 => Self::Smi,
            1 => Self::Gsi,
            2 => Self::Rc,
            3 => Self::Uc,
            4 => Self::Ud,
            n => Self::Other(n),
        }
    }
}

/// What a queue pair is ready for, `enum ib_qp_state`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum QpState {
    /// Made.
    Reset,
    /// Takes receive requests.
    Init,
    /// Ready to receive: it knows its peer.
    Rtr,
    /// Ready to send.
    Rts,
    /// Sends what it has begun.
    Sqd,
    /// Its send queue failed.
    Sqe,
    /// It failed.
    Err,
    /// Any other, by its number.
    Other(u8),
}

impl QpState {
    const fn from_number(n: u8) -> Self {
        match n {
            0 => Self::Reset,
            1 => Self::Init,
            2 => Self::Rtr,
            3 => Self::Rts,
            4 => Self::Sqd,
            5 => Self::Sqe,
            6 => Self::Err,
            n => Self::Other(n),
        }
    }

    /// Whether a queue pair in this state is connected to its peer.
    pub const fn is_connected(self) -> bool {
        matches!(self, Self::Rtr | Self::Rts | Self::Sqd | Self::Sqe)
    }
}

/// Who owns a queue pair.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Owner {
    /// A process, by its number.
    Process(u32),
    /// Something in the kernel, by the name it gave.
    Kernel(String),
    /// A process that has ended, or that is not visible from here.
    Unknown,
}

/// A queue pair.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueuePair {
    /// Its number.
    pub lqpn: Qpn,
    /// The number at its peer, of a connected type.
    pub rqpn: Option<Qpn>,
    /// Type.
    pub qp_type: QpType,
    /// State.
    pub state: QpState,
    /// PSN that its driver reports as expected next; rxe does as of now (6.12).
    pub rq_psn: Option<Psn>,
    /// PSN that its driver reports as sent next; rxe does as of now (6.12).
    pub sq_psn: Option<Psn>,
    /// Owner.
    pub owner: Owner,
}

/// An RDMA device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Number.
    pub index: u32,
    /// Name, e.g. `rxe0`.
    pub name: String,
    /// Interfaces of this network namespace that its ports stand on.
    pub ifindexes: Vec<u32>,
    /// Queue pairs.
    pub qps: Vec<QueuePair>,
}

/// What the kernel has of RDMA.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Rdma {
    /// No RDMA: the reason the kernel gave.
    Unavailable(String),
    /// Its devices.
    Available(Vec<Device>),
}

impl Rdma {
    /// The devices; none where there is no RDMA.
    pub fn devices(&self) -> &[Device] {
        match self {
            Self::Unavailable(_) => &[],
            Self::Available(devices) => devices,
        }
    }

    /// `available`, or why it is not.
    pub fn availability(&self) -> String {
        match self {
            Self::Unavailable(why) => format!("not available: {why}"),
            Self::Available(_) => "available".into(),
        }
    }

    /// The devices on an interface.
    pub fn on(&self, ifindex: u32) -> impl Iterator<Item = &Device> {
        self.devices().iter().filter(move |d| d.ifindexes.contains(&ifindex))
    }

    /// The queue pair `lqpn` of a device on an interface, with its device; `None` where two devices there have one.
    pub fn find(&self, ifindex: u32, lqpn: Qpn) -> Option<(&Device, &QueuePair)> {
        let mut all = self.on(ifindex).flat_map(|d| d.qps.iter().filter(|q| q.lqpn == lqpn).map(move |q| (d, q)));
        all.next().filter(|_| all.next().is_none())
    }
}

/// Every device with its queue pairs. That there is none, or that they cannot be listed, is an answer too: nothing depends on
/// it but names.
pub fn list() -> Rdma {
    match devices() {
        Ok(devices) => Rdma::Available(devices),
        Err(error) if is_absence(&error) => Rdma::Unavailable(format!("the kernel has no RDMA ({error})")),
        Err(error) => Rdma::Unavailable(error.to_string()),
    }
}

fn devices() -> io::Result<Vec<Device>> {
    let mut session = Session { socket: open(NETLINK_RDMA)?, sequence: 0 };
    let mut devices = Vec::new();
    for answer in session.dump(Command::Devices, None)? {
        let Answer::Device { index, name } = answer else { continue };
        // One that goes away meanwhile has no queue pairs any more.
        match session.device(index, name) {
            Ok(device) => devices.push(device),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENODEV)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(devices)
}

/// The name of a process, where it can be seen.
pub fn process_name(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// Whether the error says that the kernel has no RDMA.
fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT | libc::ENOENT | libc::EOPNOTSUPP | libc::ECONNREFUSED)
    )
}

struct Session {
    socket: Socket,
    sequence: u32,
}

impl Session {
    fn dump(&mut self, command: Command, device: Option<u32>) -> io::Result<Vec<Answer>> {
        self.sequence = self.sequence.wrapping_add(1);
        let answers = exchange(&self.socket, self.sequence, RdmaMessage::request(command, device), NLM_F_DUMP)?;
        Ok(answers.into_iter().filter_map(RdmaMessage::into_answer).collect())
    }

    fn device(&mut self, index: u32, name: String) -> io::Result<Device> {
        let mut device = Device { index, name, ifindexes: Vec::new(), qps: Vec::new() };
        for answer in self.dump(Command::Ports, Some(index))? {
            if let Answer::Port { device: of, ifindex: Some(ifindex) } = answer
                && of == index
            {
                device.ifindexes.push(ifindex);
            }
        }
        device.ifindexes.sort_unstable();
        device.ifindexes.dedup();
        for answer in self.dump(Command::QueuePairs, Some(index))? {
            if let Answer::QueuePairs { device: of, qps } = answer
                && of == index
            {
                device.qps.extend(qps);
            }
        }
        Ok(device)
    }
}

#[cfg(test)]
mod tests;
