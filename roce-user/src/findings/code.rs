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
        pub enum Code { $(#[doc = $seen] $variant,)* }

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

            /// The sentence about what was seen; `{n}` stands for the number of occurrences.
            pub(super) const fn seen(self) -> &'static str {
                match self { $(Self::$variant => $seen,)* }
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
        "{n} PSNs were lost before they reached this tap",
        "drop counters of every queue and port between the sender and this tap; PFC and buffer settings of the RDMA class";
    LossAfterTap = "loss-after-tap", Warning,
        "{n} losses after this tap: the peer asked again for packets that had passed here",
        "drop counters of every queue and port between this tap and the receiver, and of the receiver's NIC";
    LossUnexplained = "loss-unexplained", Warning,
        "{n} PSNs never passed this tap, and nobody asked for them",
        "whether the capture itself dropped packets (the counters of tcpdump or of the mirror port), or the tap sees one way of several";
    UcLoss = "uc-loss", Error,
        "{n} PSNs of unreliable connections are missing: nothing repeats them, their messages are gone",
        "drop counters on the path; whether the application expects an unreliable transport";
    TimeoutRetransmit = "timeout-retransmit", Warning,
        "{n} retransmissions after a silence, without a NAK: the sender's ACK timer ran out",
        "tail loss, lost ACKs or NAKs, a stalled receiver; the ACK timeout of the queue pairs";
    SpuriousRetransmit = "spurious-retransmit", Warning,
        "{n} retransmissions of what had been acknowledged or had not been missed: they only cost bandwidth",
        "whether the ACK timeout is shorter than the round trip under load; ACKs lost or delayed on the way back";
    ReadReasked = "read-reasked", Warning,
        "{n} READs were asked again: their responses were lost, late or overtaken (implied NAK)",
        "drop counters on the responder's path; whether ACKs and READ responses travel in one traffic class";
    RnrNotLoss = "rnr-not-loss", Warning,
        "{n} RNR NAKs: the receiver was not ready, and the repeats after them are no network loss",
        "the application posts receive buffers too late or too few; SRQ limits; min_rnr_timer";
    NakFatal = "nak-fatal", Error,
        "{n} NAKs that end a queue pair (invalid request, remote access or remote operational error)",
        "memory registration, keys and access flags, message sizes and queue depths of the application";
    Reordering = "reordering", Info,
        "{n} PSNs arrived late but arrived: the path reorders packets",
        "packet spraying, adaptive routing or several queues on the path; whether the receiving NIC accepts reordering";
    ReorderingNaked = "reordering-naked", Warning,
        "{n} times the receiver took reordering for loss and asked again: no packet was missing",
        "packet spraying or adaptive routing towards a receiver that does not accept reordering";
    PsnDiscontinuity = "psn-discontinuity", Info,
        "{n} times a flow went on at a PSN far from where it was",
        "whether the capture was interrupted, or a queue pair was connected anew";
    Stall = "stall", Warning,
        "{n} times a flow with unanswered requests was silent",
        "paused ports (PFC), ACK timeouts, a stopped receiver";
    DuplicateCapture = "duplicate-capture", Warning,
        "{n} packets were captured twice: retransmission counters of these flows mean nothing",
        "capture on one interface instead of `any`, and on one port of a mirror";
    TruncatedCapture = "truncated-capture", Warning,
        "the capture lacks data: {n} frames cut before the end of their headers, or a damaged file",
        "snap length of at least 128 bytes; the end of the file";
    BadIcrc = "bad-icrc", Error,
        "{n} packets carry a wrong ICRC: receivers drop them in silence",
        "NAT or header rewriting on the path, faulty links or memory; frames made by tools";
    MalformedOn4791 = "malformed-on-4791", Warning,
        "{n} packets for UDP port 4791 contradict themselves; some of them crash soft-RoCE receivers",
        "who sends them; fragmentation on the path; filters in front of RDMA hosts";
    NotRoceOn4791 = "not-roce-on-4791", Info,
        "{n} datagrams for UDP port 4791 are something else than RoCEv2",
        "who sends them; a resolver or tunnel that uses 4791 as its port";
    Rocev1 = "rocev1-present", Info,
        "{n} RoCEv1 frames: they were counted and not looked into",
        "whether these hosts are meant to use RoCEv2 (GID index)";
    NotEct = "not-ect", Info,
        "{n} flows send only Not-ECT packets: switches cannot mark them, ECN and DCQCN cannot work",
        "traffic class of the queue pairs or of the NIC's RoCE settings: ECN bits 10";
    DscpUnmarked = "dscp-unmarked", Info,
        "{n} flows send with DSCP 0, the class of everything else",
        "traffic class of the queue pairs, trust mode and the DSCP map of the switches";
    DscpAsymmetric = "dscp-asymmetric", Warning,
        "{n} connections are answered in another DSCP than they are asked in",
        "traffic class on both ends; remarking by one switch of the path";
    DscpMixedInFlow = "dscp-mixed-in-flow", Warning,
        "{n} flows change their DSCP: classes overtake each other, which looks like loss",
        "remarking on the path, or an application that changes the traffic class";
    DscpMixedOnHost = "dscp-mixed-on-host", Info,
        "{n} hosts send RDMA data in several DSCPs",
        "whether all applications are meant to be in one class";
    CeAtSource = "ce-at-source", Warning,
        "{n} flows in which every packet is marked CE",
        "a sender whose traffic class has both ECN bits set, or a switch that marks everything";
    CeWithoutCnp = "ce-without-cnp", Warning,
        "{n} flows carry CE marks, and no CNP came back",
        "whether the receiver's NIC has congestion control (NP) enabled; soft-RoCE never answers CE by itself";
    CnpWithoutCe = "cnp-without-ce", Info,
        "{n} flows are told to slow down, and none of their packets is CE here",
        "nothing where the marks are made behind this tap; else who makes the CNPs";
    CnpUnmatched = "cnp-unmatched", Info,
        "{n} CNPs name a queue pair of which nothing is seen here",
        "queue pairs that are gone, one-sided captures, or forged CNPs";
    CnpBecnMissing = "cnp-becn-missing", Info,
        "{n} CNPs lack the BECN bit",
        "CNP settings of the receiver's NIC";
    CnpDscpUnexpected = "cnp-dscp-unexpected", Info,
        "{n} CNPs do not travel in DSCP 48",
        "CNP DSCP of the receiver's NIC; whether the switches give that DSCP strict priority";
    OnePortManyQps = "one-port-many-qps", Warning,
        "{n} host pairs send all their queue pairs from one UDP source port: ECMP puts them all on one path",
        "flow labels or source-port settings of the sender";
    MtuSegmentMismatch = "mtu-segment-mismatch", Warning,
        "{n} flows whose packets are not cut by one path MTU",
        "path MTU of both ends of the queue pairs; MTU of the interfaces";
    ConnectUnanswered = "connect-unanswered", Warning,
        "{n} connection requests were not answered",
        "whether something listens; filters on the way back; the address and GID of the peer";
    ConnectRejected = "connect-rejected", Warning,
        "{n} connection requests were rejected",
        "the reason in the evidence: service, path or resources of the listening side";
    QpnReuse = "qpn-reuse", Info,
        "{n} queue pair numbers were used again by a new connection",
        "nothing by itself; frequent reuse means connections that do not live";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_in_one_style() {
        let names: BTreeSet<_> = Code::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Code::ALL.len());
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        assert!(names.iter().all(|n| n.chars().all(plain)), "{names:?}");
    }
}
