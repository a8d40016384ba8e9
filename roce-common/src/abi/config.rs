//! What user space tells the BPF programs.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What an attachment may do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Role {
    /// A soft-RoCE host: marks and paces what it sends, answers CE, consumes CNPs.
    Host = 0,
    /// A congestion point: turns ECT into CE by its virtual queue.
    Cp = 1,
    /// Writes nothing.
    Observe = 2,
}

/// When the marker writes a field.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum MarkPolicy {
    /// Only where the field is unset.
    Fill = 0,
    /// Always.
    Force = 1,
    /// Never.
    Keep = 2,
}

/// How limited queue pairs are paced.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Pacer {
    /// Not at all.
    Off = 0,
    /// Earliest departure time, for fq.
    Edt = 1,
    /// HTB classes.
    Htb = 2,
}

/// Which hook tracks and counts the ingress tap.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum IngressMode {
    /// Native XDP.
    Xdp = 0,
    /// Generic XDP.
    XdpGeneric = 1,
    /// tc ingress.
    Tc = 2,
}

/// Bits of [`Config::flags`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Flags;

impl Flags {
    /// Drop malformed packets for local addresses (an rxe device is on this interface).
    pub const GUARD: u32 = 1 << 0;
    /// tc ingress does the whole ingress work, not only the NP's.
    pub const TC_INGRESS: u32 = 1 << 1;
    /// The egress program is attached: clones will be taken.
    pub const EGRESS_READY: u32 = 1 << 2;
    /// Consume CNPs for local addresses (rxe is the target).
    pub const CONSUME_CNP: u32 = 1 << 3;
    /// A capture takes payload too, not only headers.
    pub const CAPTURE_PAYLOAD: u32 = 1 << 4;
    /// The congestion point stands where packets enter, not where they leave.
    pub const CP_INGRESS: u32 = 1 << 5;
}

/// The one entry of the configuration map.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// Age of the heartbeat beyond which rates are ignored, in nanoseconds.
    pub failsafe_ns: u64,
    /// Least time between two CNPs to one QP, in nanoseconds.
    pub cnp_interval_ns: u64,
    /// Rate of the virtual queue, bytes per second; 0 = no congestion point.
    pub vq_bytes_per_sec: u64,
    /// Rate at which the egress program limits a queue pair from its first data packet on, bytes per second; 0 = not at all.
    pub start_bytes_per_sec: u64,
    /// Until then (CLOCK_MONOTONIC, nanoseconds) the root qdisc is being replaced, and what this host sends is dropped in
    /// front of it; 0 = it is not. A time and not a flag, so that nothing is dropped for ever where who set it dies.
    pub swap_until_ns: u64,
    /// Number of a [`Role`].
    pub role: u32,
    /// Bits of [`Flags`].
    pub flags: u32,
    /// Number of a [`MarkPolicy`], for DSCP and priority.
    pub dscp_policy: u32,
    /// Number of a [`MarkPolicy`], for ECT(0).
    pub ecn_policy: u32,
    /// DSCP of data, ACKs and READ responses.
    pub data_dscp: u32,
    /// DSCP of CNPs.
    pub cnp_dscp: u32,
    /// skb->priority of data.
    pub data_priority: u32,
    /// skb->priority of CNPs.
    pub cnp_priority: u32,
    /// Number of a [`Pacer`].
    pub pacer: u32,
    /// One packet in this many is sampled; 0 = none. A power of two.
    pub sample_every: u32,
    /// Marking starts above this depth of the virtual queue, bytes.
    pub kmin_bytes: u32,
    /// Marking is certain above this depth, bytes.
    pub kmax_bytes: u32,
    /// Marking probability at `kmax_bytes`, in 1/65536.
    pub pmax: u32,
    /// The virtual queue holds no more than this, bytes.
    pub vq_limit_bytes: u32,
    /// Interface index of the attachment.
    pub ifindex: u32,
    /// Most telemetry events per 1/16 second and CPU.
    pub events_per_tick: u32,
    /// Most bytes of a packet that are copied for a capture; 0 = nothing is captured.
    pub capture_bytes: u32,
    /// Always 0.
    pub reserved: u32,
}

const _: () = assert!(size_of::<Config>() == 112);
