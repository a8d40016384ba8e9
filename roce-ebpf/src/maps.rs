//! Every map. The catalogue with writers, readers and lifetimes is in ARCHITECTURE.md.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, PerCpuArray, Queue, RingBuf},
};
use roce_common::{
    abi::{
        CAPTURE_RING_BYTES, CNP_RING_BYTES, CP_CLASSES as MAX_CP_CLASSES, CnpCount, CnpJob, Config, Counters, CpClass,
        CpStats, EventBudget, FlowKey, MAX_CNPS, MAX_FLOWS, MAX_LOCAL_ADDRS, MAX_PAIRS, MAX_PATH_MTUS, MAX_RATES,
        MAX_ROUND_TRIPS, PaceCell, PairKey, PairValue, PeerQp, RateValue, START_CLASSES as MAX_START_CLASSES,
        TELEMETRY_RING_BYTES, VirtualQueue,
    },
    facts::RoundTrips,
    flow::Flow,
    units::Addr,
    wire::{Packet, emit::CNP_FRAME_V6},
};

use crate::capture::Record;

/// `BPF_F_NO_PREALLOC`: entries cost memory only while they exist.
const NO_PREALLOC: u32 = 1;
/// Bytes of headers that the slow path copies: Ethernet, two tags, the longest IPv4 header, UDP, BTH, the longest
/// extension headers, rounded up.
pub(crate) const HEADER_BYTES: usize = 192;

#[map]
pub(crate) static CONFIG: Array<Config> = Array::with_max_entries(1, 0);
#[map]
pub(crate) static HEARTBEAT: Array<u64> = Array::with_max_entries(1, 0);
#[map]
pub(crate) static COUNTERS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(2, 0);
#[map]
pub(crate) static LOCAL: HashMap<Addr, u32> = HashMap::with_max_entries(MAX_LOCAL_ADDRS, NO_PREALLOC);
#[map]
pub(crate) static FLOWS: HashMap<FlowKey, Flow> = HashMap::with_max_entries(MAX_FLOWS, NO_PREALLOC);
/// Round trips, by the flow of the answers.
#[map]
pub(crate) static ROUND_TRIPS: HashMap<FlowKey, RoundTrips> = HashMap::with_max_entries(MAX_ROUND_TRIPS, NO_PREALLOC);
/// CNPs by tap, source, destination and the queue pair they name.
#[map]
pub(crate) static CNPS: HashMap<FlowKey, CnpCount> = HashMap::with_max_entries(MAX_CNPS, NO_PREALLOC);
#[map]
pub(crate) static PAIRS: HashMap<PairKey, PairValue> = HashMap::with_max_entries(MAX_PAIRS, NO_PREALLOC);
/// Path MTUs that connections were made with, in bytes; by whom their packets go to.
#[map]
pub(crate) static PATH_MTUS: HashMap<PairKey, u32> = HashMap::with_max_entries(MAX_PATH_MTUS, NO_PREALLOC);
#[map]
pub(crate) static RATES: HashMap<PeerQp, RateValue> = HashMap::with_max_entries(MAX_RATES, NO_PREALLOC);
#[map]
pub(crate) static PACE: HashMap<PeerQp, PaceCell> = HashMap::with_max_entries(MAX_RATES, NO_PREALLOC);
/// HTB classes at the start rate, for queue pairs that start.
#[map]
pub(crate) static START_CLASSES: Queue<u32> = Queue::with_max_entries(MAX_START_CLASSES, 0);
#[map]
pub(crate) static VQUEUE: Array<VirtualQueue> = Array::with_max_entries(MAX_CP_CLASSES, 0);
#[map]
pub(crate) static CP_CLASSES: Array<CpClass> = Array::with_max_entries(MAX_CP_CLASSES, 0);
/// The class of each DSCP.
#[map]
pub(crate) static CP_DSCP: Array<u32> = Array::with_max_entries(64, 0);
#[map]
pub(crate) static CP_STATS: PerCpuArray<CpStats> = PerCpuArray::with_max_entries(MAX_CP_CLASSES, 0);
#[map]
pub(crate) static CNP_RING: RingBuf = RingBuf::with_byte_size(CNP_RING_BYTES, 0);
#[map]
pub(crate) static TELEMETRY: RingBuf = RingBuf::with_byte_size(TELEMETRY_RING_BYTES, 0);
#[map]
pub(crate) static JOB: PerCpuArray<CnpJob> = PerCpuArray::with_max_entries(1, 0);
#[map]
pub(crate) static EVENT_BUDGET: PerCpuArray<EventBudget> = PerCpuArray::with_max_entries(1, 0);
/// Copies of packets; resized to next to nothing where nothing is captured.
#[map]
pub(crate) static CAPTURE: RingBuf = RingBuf::with_byte_size(CAPTURE_RING_BYTES, 0);
/// Where a packet is copied before it goes into CAPTURE.
#[map]
pub(crate) static CAPTURED: PerCpuArray<Record> = PerCpuArray::with_max_entries(1, 0);
/// Where the egress program builds a CNP.
#[map]
pub(crate) static CNP_FRAME: PerCpuArray<[u8; CNP_FRAME_V6]> = PerCpuArray::with_max_entries(1, 0);
/// A zeroed flow to insert: too large for the stack. Nobody writes it.
#[map]
pub(crate) static NEW_FLOW: PerCpuArray<Flow> = PerCpuArray::with_max_entries(1, 0);
/// Likewise.
#[map]
pub(crate) static NEW_ROUND_TRIPS: PerCpuArray<RoundTrips> = PerCpuArray::with_max_entries(1, 0);
/// The parsed packet, one entry per program (the egress program runs inside tc ingress when a CNP is made).
#[map]
pub(crate) static PACKET: PerCpuArray<Packet> = PerCpuArray::with_max_entries(4, 0);
/// Headers copied out of packets whose linear part does not hold them.
#[map]
pub(crate) static HEADERS: PerCpuArray<[u8; HEADER_BYTES]> = PerCpuArray::with_max_entries(1, 0);
