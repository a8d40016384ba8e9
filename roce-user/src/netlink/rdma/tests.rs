//! Golden answers: what the kernel sent to `rdma -j resource show qp`, recorded by strace, and what that printed.
//!
//! Each line of a recording is one datagram.

use netlink_packet_core::NetlinkPayload;
use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::netlink::next_message;

/// A recording: kernel, queue pairs, datagrams, and what `rdma` made of them.
const RECORDED: [(&str, usize, &str, &str); 2] = [
    ("6.12", 9, include_str!("recorded/qp-6.12.hex"), include_str!("recorded/qp-6.12.json")),
    ("6.1", 14, include_str!("recorded/qp-6.1.hex"), include_str!("recorded/qp-6.1.json")),
];

fn datagrams(hex: &str) -> Vec<Vec<u8>> {
    let byte = |line: &str, i: usize| u8::from_str_radix(&line[i..i + 2], 16).expect("hexadecimal digits");
    hex.lines().map(|line| (0..line.len()).step_by(2).map(|i| byte(line, i)).collect()).collect()
}

/// The answers in a datagram.
fn answers(datagram: &[u8]) -> io::Result<Vec<Answer>> {
    let (mut rest, mut answers) = (datagram, Vec::new());
    while let Some(message) = next_message::<RdmaMessage>(&mut rest)? {
        if let NetlinkPayload::InnerMessage(inner) = message.payload {
            answers.extend(inner.into_answer());
        }
    }
    Ok(answers)
}

/// A queue pair by the names that `rdma` gives its parts.
fn as_rdma_shows(device: &str, index: u32, qp: &QueuePair) -> Value {
    let qp_type = match qp.qp_type {
        QpType::Smi => "SMI",
        QpType::Gsi => "GSI",
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::Other(_) => "other",
    };
    let mut shown = serde_json::json!({
        "ifindex": index,
        "ifname": device,
        "lqpn": qp.lqpn.get(),
        "type": qp_type,
        "state": format!("{:?}", qp.state).to_uppercase(),
    });
    let mut set = |name: &str, value: Option<Value>| {
        if let (Some(value), Some(all)) = (value, shown.as_object_mut()) {
            all.insert(name.into(), value);
        }
    };
    set("rqpn", qp.rqpn.map(|q| q.get().into()));
    set("rq-psn", qp.rq_psn.map(|p| p.get().into()));
    set("sq-psn", qp.sq_psn.map(|p| p.get().into()));
    match &qp.owner {
        Owner::Process(pid) => set("pid", Some((*pid).into())),
        Owner::Kernel(name) => set("comm", Some(name.as_str().into())),
        Owner::Unknown => {}
    }
    shown
}

#[test]
fn queue_pairs_are_read_as_rdma_reads_them() {
    for (kernel, count, hex, json) in RECORDED {
        let mut devices = Vec::new();
        let mut ours: Vec<Value> = Vec::new();
        for answer in datagrams(hex).iter().flat_map(|d| answers(d).expect("well-formed")) {
            match answer {
                Answer::Device { index, name } => devices.push((index, name)),
                Answer::QueuePairs { device, qps } => {
                    let (index, name) = devices.iter().find(|(i, _)| *i == device).expect("a device of the list");
                    ours.extend(qps.iter().map(|q| as_rdma_shows(name, *index, q)));
                }
                Answer::Port { .. } => panic!("nobody asked for ports"),
            }
        }
        let mut theirs: Vec<Value> = serde_json::from_str(json).expect("JSON");
        for qp in &mut theirs {
            let qp = qp.as_object_mut().expect("an object");
            for not_asked in ["port", "path-mig-state", "pdn"] {
                qp.remove(not_asked);
            }
            // The name of a process comes from /proc; that of an owner in the kernel is in the message, without brackets.
            if qp.contains_key("pid") {
                qp.remove("comm");
            }
        }
        assert_eq!(ours.len(), count, "{kernel}");
        assert_eq!(ours, theirs, "{kernel}");
    }
}

#[test]
fn ports_name_their_interface() {
    let found: Vec<Answer> = datagrams(include_str!("recorded/link-6.12.hex"))
        .iter()
        .flat_map(|d| answers(d).expect("well-formed"))
        .filter(|a| matches!(a, Answer::Port { .. }))
        .collect();
    // `rdma -j link show` of the same moment: rxea (0) on va (2), rxeb (1) on vb (3).
    let port = |device, ifindex| Answer::Port { device, ifindex: Some(ifindex) };
    assert_eq!(found, [port(0, 2), port(1, 3)]);
}

fn qp(lqpn: u32) -> QueuePair {
    QueuePair {
        lqpn: Qpn::new(lqpn),
        rqpn: Some(Qpn::new(42)),
        qp_type: QpType::Rc,
        state: QpState::Rts,
        rq_psn: None,
        sq_psn: None,
        owner: Owner::Unknown,
    }
}

#[test]
fn a_number_that_two_devices_of_an_interface_use_names_neither() {
    let device = |index: u32, ifindexes: &[u32], qps: Vec<QueuePair>| Device {
        index,
        name: format!("rxe{index}"),
        ifindexes: ifindexes.to_vec(),
        qps,
    };
    let rdma = Rdma::Available(vec![
        device(0, &[2], vec![qp(17), qp(18)]),
        device(1, &[2, 3], vec![qp(17)]),
        // In another network namespace: no index.
        device(2, &[], vec![qp(18), qp(19)]),
    ]);
    let found = |ifindex, lqpn| rdma.find(ifindex, Qpn::new(lqpn)).map(|(d, _)| d.index);
    assert_eq!((found(2, 17), found(2, 18), found(3, 17), found(2, 19)), (None, Some(0), Some(1), None));
    assert_eq!(Rdma::Unavailable("no".into()).devices(), []);
}

#[test]
fn absence_is_an_answer() {
    // Where this kernel has RDMA there may be no device; where it has none the reason is told.
    match list() {
        Rdma::Available(devices) => assert!(devices.iter().all(|d| !d.name.is_empty())),
        Rdma::Unavailable(why) => assert!(why.contains("the kernel has no RDMA"), "{why}"),
    }
    for (errno, absent) in [(libc::EPROTONOSUPPORT, true), (libc::ENOENT, true), (libc::EMFILE, false)] {
        assert_eq!(is_absence(&io::Error::from_raw_os_error(errno)), absent);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Damaged recordings and plain noise end in an answer or an error, never in a panic, and no answer is larger than
    /// what it was read from.
    #[test]
    fn no_datagram_is_too_strange(
        recording in 0usize..RECORDED.len(),
        at in any::<proptest::sample::Index>(),
        damage in prop::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..12),
        cut in any::<Option<proptest::sample::Index>>(),
    ) {
        let all = datagrams(RECORDED[recording].2);
        let mut datagram = all[at.index(all.len())].clone();
        for (place, value) in damage {
            let place = place.index(datagram.len());
            datagram[place] = value;
        }
        if let Some(cut) = cut {
            datagram.truncate(cut.index(datagram.len() + 1));
        }
        for answer in answers(&datagram).unwrap_or_default() {
            if let Answer::QueuePairs { qps, .. } = answer {
                prop_assert!(qps.len() * 24 <= datagram.len());
            }
        }
    }

    #[test]
    fn nor_are_attributes(kind in any::<u16>(), nldev in any::<bool>(), payload in prop::collection::vec(any::<u8>(), 0..200)) {
        let kind = if nldev { (5 << 10) | (kind % 16) } else { kind };
        let _any_verdict = message::parse(kind, &payload);
    }
}
