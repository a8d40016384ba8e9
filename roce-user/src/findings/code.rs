//! What can be found: stable codes, how much each matters, and what to check. `docs/findings.md` explains them at length;
//! a test holds the two together.

use serde::Serialize;

/// How much a finding matters. `roce inspect` ends with exit code 1 from [`Severity::Warning`] on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// A property of the traffic that is worth knowing and may be intended.
    Info,
    /// Something costs throughput or will, or is most likely configured wrongly.
    Warning,
    /// Data or a connection was lost, or what was captured cannot be trusted.
    Error,
}

impl Severity {
    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

macro_rules! codes {
    ($($variant:ident = $name:literal, $severity:ident, $seen:literal, $check:literal;)*) => {
        /// What was found. The names are a contract: codes are added, never renamed and never given another meaning.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum Code {
            $(
                #[doc = $name]
                $variant,
            )*
        }

        impl Code {
            /// Every code, in the order in which findings are listed.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used in tables and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// How much it matters.
            pub const fn severity(self) -> Severity {
                match self { $(Self::$variant => Severity::$severity,)* }
            }

            /// The sentence about what was seen `count` times.
            pub fn seen(self, count: u64) -> String {
                let template = match self { $(Self::$variant => $seen,)* };
                let (s, es) = if count == 1 { ("", "") } else { ("s", "es") };
                template.replace("{n}", &count.to_string()).replace("{s}", s).replace("{es}", es)
            }

            /// What to check.
            pub const fn check(self) -> &'static str {
                match self { $(Self::$variant => $check,)* }
            }
        }
    };
}

codes! {
    LossBeforeTap = "loss-before-tap", Warning,
        "{n} PSN{s} lost before this tap",
        "drop counters of every queue and port between the sender and this tap; PFC and buffers of the RDMA class";
    LossAfterTap = "loss-after-tap", Warning,
        "{n} loss{es} after this tap: packets that had passed here were asked for again",
        "drop counters of every queue and port beyond this tap, and of the NIC they were for";
    LossUnexplained = "loss-unexplained", Warning,
        "{n} PSN{s} never passed this tap, and nobody asked for them",
        "drops of the capture itself (tcpdump's counters, the mirror port); whether the tap sees one path of several";
    UcLoss = "uc-loss", Error,
        "{n} PSN{s} of unreliable connections lost: nothing repeats them, their messages are gone",
        "drop counters on the path; whether the application can do without these messages";
    TimeoutRetransmit = "timeout-retransmit", Warning,
        "{n} repeat{s} after a silence, not asked for: the sender's ACK timer ran out",
        "loss of the last packets of a message, of ACKs or NAKs; a receiver that stopped; the ACK timeout of the queue pairs";
    SpuriousRetransmit = "spurious-retransmit", Warning,
        "{n} repeat{s} of what had been acknowledged or was not missed: bandwidth spent for nothing",
        "an ACK timeout below the round trip under load; ACKs lost or late on the way back";
    ReadReasked = "read-reasked", Warning,
        "{n} READ{s} asked again: answers were lost, late or overtaken (implied NAK)",
        "drop counters on the responder's way to the requester; ACKs and READ responses in different traffic classes";
    RnrNotLoss = "rnr-not-loss", Warning,
        "{n} RNR NAK{s}: the receiver was not ready, the repeats after them are no network loss",
        "receive buffers posted too late or too few, SRQ limits; min_rnr_timer";
    NakFatal = "nak-fatal", Error,
        "{n} NAK{s} that end a queue pair: invalid request, remote access or remote operational error",
        "the application: memory registration, keys and access flags, message sizes, outstanding READs";
    ReorderingNaked = "reordering-naked", Warning,
        "{n} time{s} the receiver took reordering for loss and asked again: nothing was missing",
        "packet spraying or adaptive routing towards a receiver that does not take packets out of order";
    ConnectUnanswered = "connect-unanswered", Warning,
        "{n} connection{s} asked for and neither granted nor refused",
        "whether the other host runs RDMA on that address; firewalls and paths for UDP port 4791 both ways; the listener";
    ConnectRejected = "connect-rejected", Warning,
        "{n} connection{s} refused",
        "the reason in the evidence: most often nobody listens there, or the application refused";
    Stall = "stall", Warning,
        "{n} silence{s} of 50 ms or more with requests unanswered",
        "ACK timeouts, ports paused by PFC, a receiver that stopped";
    DuplicateCapture = "duplicate-capture", Warning,
        "{n} packet{s} captured twice: what these flows say about retransmission means nothing",
        "capture on one interface instead of `any`, and mirror one port or one direction";
    TruncatedCapture = "truncated-capture", Warning,
        "{n} frame{s} cut inside the headers, or a file cut short",
        "a snap length of at least 128 bytes; how the capture was ended";
    BadIcrc = "bad-icrc", Error,
        "{n} packet{s} with a wrong ICRC: receivers drop them in silence",
        "NAT or rewriting of headers on the path, faulty links or memory; tools that make packets";
    MalformedOn4791 = "malformed-on-4791", Warning,
        "{n} datagram{s} for UDP port 4791 that no RDMA sender makes; some crash soft-RoCE receivers",
        "who sends them, fragmentation on the path; filters in front of RDMA hosts";
    MtuSegmentMismatch = "mtu-segment-mismatch", Warning,
        "{n} packet{s} or flow{s} not cut by one path MTU",
        "path MTU of both ends of the queue pairs, MTU of the interfaces";
    DscpAsymmetric = "dscp-asymmetric", Warning,
        "{n} flow{s} answered in another DSCP",
        "traffic class on both ends; remarking on one of the two ways";
    DscpMixedInFlow = "dscp-mixed-in-flow", Warning,
        "{n} flow{s} in changing DSCPs: classes overtake each other, and that looks like loss",
        "remarking on the path; an application that changes the traffic class of a queue pair";
    CeAtSource = "ce-at-source", Warning,
        "{n} flow{s} with CE on every packet: no queue measures that",
        "both ECN bits set in the sender's traffic class; a switch that marks everything";
    CeWithoutCnp = "ce-without-cnp", Warning,
        "{n} flow{s} with CE, and no CNP came back: the sender does not slow down",
        "congestion control (NP) on the receiver's NIC; soft-RoCE never answers CE by itself";
    OnePortManyQps = "one-port-many-qps", Warning,
        "{n} host pair{s} with one UDP source port for all queue pairs: ECMP puts them on one path",
        "flow labels or source-port settings of the sender's queue pairs";
    Reordering = "reordering", Info,
        "{n} PSN{s} late, but there: the path reorders packets",
        "packet spraying, adaptive routing, or several queues on the path; whether the receiver takes it";
    PsnDiscontinuity = "psn-discontinuity", Info,
        "{n} time{s} a flow went on at a PSN far from where it was",
        "interruptions of the capture; queue pairs connected anew";
    QpnReuse = "qpn-reuse", Info,
        "{n} queue pair number{s} used again by a new connection",
        "connections that do not live, where it happens often";
    NotRoceOn4791 = "not-roce-on-4791", Info,
        "{n} datagram{s} for UDP port 4791 other than RoCEv2",
        "who sends them: a client whose own port is 4791, a scanner";
    Rocev1 = "rocev1-present", Info,
        "{n} RoCEv1 frame{s}, counted and not looked into",
        "whether these hosts should use a RoCEv2 GID";
    NotEct = "not-ect", Info,
        "{n} flow{s} of Not-ECT packets only: switches cannot mark them, ECN and DCQCN cannot work",
        "ECN bits (10) in the traffic class of the queue pairs or in the NIC's RoCE settings";
    DscpUnmarked = "dscp-unmarked", Info,
        "{n} flow{s} in DSCP 0, the class of everything else",
        "traffic class of the queue pairs; DSCP trust and map of the switches";
    DscpMixedOnHost = "dscp-mixed-on-host", Info,
        "{n} host{s} with data in several DSCPs",
        "whether all applications of the host are meant to be in one class";
    CnpWithoutCe = "cnp-without-ce", Info,
        "{n} flow{s} told to slow down without a CE packet here",
        "nothing where the marks are made behind this tap; else, who makes the CNPs";
    CnpUnmatched = "cnp-unmatched", Info,
        "{n} CNP{s} for queue pairs that send nothing here",
        "captures of one direction, queue pairs that are gone, forged CNPs";
    CnpBecnMissing = "cnp-becn-missing", Info,
        "{n} CNP{s} without BECN",
        "CNP settings of the receiver's NIC";
    CnpDscpUnexpected = "cnp-dscp-unexpected", Info,
        "{n} CNP{s} outside DSCP 48",
        "CNP DSCP of the receiver's NIC; whether switches give that DSCP strict priority";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn sentences_count() {
        assert_eq!(Code::BadIcrc.seen(1), "1 packet with a wrong ICRC: receivers drop them in silence");
        assert!(
            Code::LossAfterTap.seen(1).starts_with("1 loss after")
                && Code::LossAfterTap.seen(0).starts_with("0 losses")
        );
        assert!(Code::ALL.iter().all(|c| c.seen(7).contains('7') && !c.seen(7).contains('{')));
    }

    #[test]
    fn names_are_unique_and_in_one_style() {
        let names: BTreeSet<_> = Code::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Code::ALL.len());
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        assert!(names.iter().all(|n| n.chars().all(plain)), "{names:?}");
    }
}
