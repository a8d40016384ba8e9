//! What `tc` of iproute2 6.1 sends for the same wish, taken down with `strace -e trace=sendmsg -xx`.

use netlink_packet_core::NetlinkMessage;

use super::*;

const OURS: TcHandle = TcHandle { major: 0x726f, minor: 0 };
const NO_HANDLE: TcHandle = TcHandle { major: 0, minor: 0 };

/// The message behind the netlink header, and its type.
fn bytes(message: RouteNetlinkMessage) -> (u16, String) {
    let mut message = NetlinkMessage::from(message);
    message.finalize();
    let mut out = vec![0; message.buffer_len()];
    message.serialize(&mut out);
    (message.header.message_type, out[16..].iter().map(|b| format!("{b:02x}")).collect())
}

/// `struct tcmsg` of interface 7: handle, parent, nothing else.
fn header(handle: u32, parent: u32) -> String {
    let words = [0, 7, handle, parent, 0];
    words.iter().flat_map(|w: &u32| w.to_ne_bytes()).map(|b| format!("{b:02x}")).collect()
}

/// `limit 10000000 flow_limit 1000000 orphan_mask 65535 horizon_cap`.
const FQ: &str = "07000100667100002400020008000100809698000800020040420f0008000a00ffff000005000f0000000000";

#[test]
fn fq_is_asked_for_as_tc_does() {
    let root = tc(7, OURS, ROOT, "fq", Some(TcAttribute::Options(fq_options())));
    let want = header(0x726f_0000, u32::MAX) + FQ;
    assert_eq!(bytes(RouteNetlinkMessage::NewQueueDiscipline(root)), (36, want));
    let parent = TcHandle { major: 0x726f, minor: 2 };
    let leaf = tc(7, NO_HANDLE, parent, "fq", Some(TcAttribute::Options(fq_options())));
    let want = header(0, 0x726f_0002) + FQ;
    assert_eq!(bytes(RouteNetlinkMessage::NewQueueDiscipline(leaf)), (36, want));
}

#[test]
fn mq_htb_and_pfifo_are_asked_for_as_tc_does() {
    let mq = tc(7, OURS, ROOT, "mq", None);
    let want = header(0x726f_0000, u32::MAX) + "070001006d710000";
    assert_eq!(bytes(RouteNetlinkMessage::NewQueueDiscipline(mq)), (36, want));

    let htb = tc(7, OURS, ROOT, "htb", Some(TcAttribute::Options(htb_root_options(100_000))));
    let want = header(0x726f_0000, u32::MAX)
        + "0800010068746200"
        + "2400020018000200030000000a00000000000000000000000000000008000500a0860100";
    assert_eq!(bytes(RouteNetlinkMessage::NewQueueDiscipline(htb)), (36, want));

    let parent = TcHandle { major: 0x726f, minor: 1 };
    let pfifo = tc(7, NO_HANDLE, parent, "pfifo", Some(pfifo_options(65_536)));
    let want = header(0, 0x726f_0001) + "0a000100706669666f000000" + "0800020000000100";
    assert_eq!(bytes(RouteNetlinkMessage::NewQueueDiscipline(pfifo)), (36, want));

    let mut gone = TcMessage::with_index(7);
    (gone.header.handle, gone.header.parent) = (OURS, ROOT);
    assert_eq!(bytes(RouteNetlinkMessage::DelQueueDiscipline(gone)), (37, header(0x726f_0000, u32::MAX)));
}

/// `tc` adds rate tables, which the kernel has not used since it counts by nanoseconds; rate, bursts and quantum are the
/// same (`rate 5000000bps burst 3028 quantum 3028`), the bursts but for its rounding.
#[test]
fn an_htb_class_has_the_rate_and_burst_that_tc_would_give_it() {
    let options = htb_class_options(5_000_000, 3_028);
    let TcOption::Other(parms) = &options[0] else { panic!("{options:?}") };
    let mut value = vec![0; parms.value_len()];
    parms.emit_value(&mut value);
    let word = |at: usize| u32::from_ne_bytes(value[at..at + 4].try_into().unwrap());
    assert_eq!((parms.kind(), value.len(), options.len()), (TCA_HTB_PARMS, 44, 1));
    assert_eq!((word(8), word(20)), (0x4c_4b40, 0x4c_4b40), "rate and ceiling");
    for burst in [word(24), word(28)] {
        assert!(burst.abs_diff(0x24ed) <= 0x24ed / 500, "{burst:#x}");
    }
    assert_eq!(word(32), 0x0bd4, "quantum");
    assert_eq!(htb_class_options(5_000_000_000, 3_028).len(), 3, "above 32 bits the 64-bit rates say it");
}
