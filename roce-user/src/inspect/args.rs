//! The command line of `roce inspect`.

use std::path::PathBuf;

use super::filter::{FlowPattern, TimePoint};

const LONG_ABOUT: &str = "\
Inspect captures with the same parser and tracker that run in the kernel

Captures are pcap or pcapng of either byte order, also packed with gzip; their frames Ethernet, raw IP or Linux cooked \
(v1, v2). A capture interface is a tap: flows are counted per tap, and no sum is over taps. A capture that is damaged or \
cut off is read up to there: the report says at which packet and why.

Exit codes: 0 nothing found; 1 a finding of severity warning or error, or a capture that could not be read to its end; \
2 a capture that could not be read at all, or wrong usage.";

const EXAMPLES: &str = "\
Examples:
  roce inspect trace.pcapng                          what the capture holds, what was found, the flows
  tcpdump -i eth0 -s 128 -w - udp port 4791 | roce inspect --packets -
                                                     live from tcpdump; Ctrl-C prints the report so far
  roce inspect --join ring.pcap0 ring.pcap1          several files in order as one capture
  roce inspect --between before.pcap behind.pcap     two taps of one path: what was lost before, between and behind them
  roce inspect --packets --flow host=10.0.0.1,qpn=17 --from +1.5s --to +2s trace.pcap
  roce inspect --decap --json trace.pcap.gz          RoCEv2 inside VXLAN or GENEVE
  roce inspect --plot story.svg --write-findings evidence.pcapng trace.pcap

--flow PATTERN is NAME=VALUE, several of them separated by commas must all fit:
  src=ADDR[/BITS]  dst=ADDR[/BITS]  host=ADDR[/BITS] (either)  qpn=N | 0xN | N-M (the destination queue pair)
  space=request|response  tap=NAME
It chooses what is shown: packets, findings, flows, the sums over flows, the plot. Everything is still counted, because a NAK or CNP
of one flow explains another.

--from T and --to T choose the frames that are read at all, as if the capture had been cut: +1.5s, +200ms, +30us after the
first frame, seconds since 1970 (1700000000.25), or a date (2026-11-29T12:00:00Z, or with an offset).";

/// Arguments of `roce inspect`.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(long_about = LONG_ABOUT, after_long_help = EXAMPLES)]
pub struct InspectArgs {
    /// Captures to read, in this order; `-` is stdin
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Print one JSON object per capture, one per line, instead of tables
    #[arg(long)]
    pub json: bool,
    /// Print the flows as comma-separated values, with a header
    #[arg(long, conflicts_with_all = ["json", "packets"])]
    pub csv: bool,
    /// Read the files in order as one capture: flows go on from one to the next
    #[arg(long)]
    pub join: bool,
    /// Read two files as two taps of one path, and tell what was lost between them
    #[arg(long, conflicts_with_all = ["csv", "join", "packets", "detail", "plot", "write_findings"])]
    pub between: bool,
    /// Print a line for every packet with what it was, before the report; with --json an object
    #[arg(long)]
    pub packets: bool,
    /// Also print the facts of each flow: messages, round trips, ACKs, recovery, waits
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub detail: bool,
    /// Show these flows only; may be repeated (patterns: see --help)
    #[arg(long = "flow", value_name = "PATTERN")]
    pub flows: Vec<FlowPattern>,
    /// Leave out what was captured before this time
    #[arg(long, value_name = "T")]
    pub from: Option<TimePoint>,
    /// Leave out what was captured from this time on
    #[arg(long, value_name = "T")]
    pub to: Option<TimePoint>,
    /// Look into VXLAN and GENEVE tunnels
    #[arg(long)]
    pub decap: bool,
    /// Do not check invariant CRCs: the report has all packets as not checked
    #[arg(long, conflicts_with = "verify_icrc")]
    pub no_icrc: bool,
    /// Check the invariant CRC of every packet that was captured whole; this is the default
    #[arg(long)]
    pub verify_icrc: bool,
    /// Draw the PSNs of the most eventful flows over time, with losses, retransmissions, CE, CNPs and NAKs, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Write the packets that show what was found, and those around them, as pcapng with comments for Wireshark
    #[arg(long, value_name = "FILE")]
    pub write_findings: Option<PathBuf>,
}

impl InspectArgs {
    /// No options.
    pub fn of(files: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        Self { files: files.into_iter().map(Into::into).collect(), ..Self::default() }
    }
}
