//! Notification point: when CE is answered with a CNP.

/// What the NP does about a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Nothing: no mark waits for an answer.
    Nothing,
    /// It sends a CNP now.
    Cnp,
    /// A mark waits, and the last CNP was sent less than an interval ago.
    HeldBack,
}

/// What to do about a packet for a queue pair at `now_ns`. `marked`: the packet is CE; `owed`: an earlier packet was, and has been
/// held back; `last_ns`: when the last CNP was sent (0 = never).
///
/// "If a marked packet arrives for a flow, and no CNP has been sent for the flow in last N microseconds, a CNP is sent immediately.
/// Then, the NIC generates at most one CNP packet every N microseconds for the flow, if any packet that arrives within that time
/// window was marked" (SIGCOMM'15 §3, NP algorithm). There is no timer here: what was held back is answered with the first packet
/// behind the window; with none behind it, nobody sends too fast. Whoever forgets such marks passes `owed` as false.
#[inline(always)]
pub const fn answer(marked: bool, owed: bool, last_ns: u64, now_ns: u64, interval_ns: u64) -> Answer {
    if !marked && !owed {
        Answer::Nothing
    } else if due(last_ns, now_ns, interval_ns) {
        Answer::Cnp
    } else {
        Answer::HeldBack
    }
}

/// Whether a CNP may be sent at `now_ns`, given when the last one was (0 = never). A clock read on another CPU may lie a little
/// behind `last_ns`: then none may.
#[inline(always)]
pub const fn due(last_ns: u64, now_ns: u64, interval_ns: u64) -> bool {
    last_ns == 0 || now_ns.saturating_sub(last_ns) >= interval_ns
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[test]
    fn one_cnp_per_interval() {
        assert!(due(0, 5, 50_000));
        assert!(!due(1_000, 1_000, 50_000));
        assert!(!due(1_000, 50_999, 50_000));
        assert!(due(1_000, 51_000, 50_000));
        assert!(!due(2_000, 1_000, 50_000), "a clock that runs behind sends none");
        assert!(due(1_000, 1_000, 0), "interval 0: every packet");
        assert!(due(1, u64::MAX, u64::MAX - 1));
    }

    #[test]
    fn a_mark_that_was_held_back_is_answered_behind_the_window() {
        // Packets every 10 us, marked as listed; the paper's 50 us.
        let cnps = |marks: &[u64], keeps: bool| {
            let (mut last, mut owed, mut sent) = (0, false, Vec::new());
            for us in (10..300).step_by(10) {
                match answer(marks.contains(&us), owed, last, us * 1_000, 50_000) {
                    Answer::Nothing => {}
                    Answer::Cnp => {
                        (last, owed) = (us * 1_000, false);
                        sent.push(us);
                    }
                    Answer::HeldBack => owed = keeps,
                }
            }
            sent
        };
        assert_eq!(cnps(&[20], true), [20]);
        // Within the window: at its end, once, however many there were.
        assert_eq!(cnps(&[20, 40, 50], true), [20, 70]);
        assert_eq!(cnps(&[20, 40, 50], false), [20]);
        // The second window holds another mark.
        assert_eq!(cnps(&[20, 40, 100], true), [20, 70, 120]);
        // A window without one ends the series, and the next mark is answered at once.
        assert_eq!(cnps(&[20, 40, 150], true), [20, 70, 150]);
        // Every packet marked: one CNP per window either way.
        let all: Vec<u64> = (10..300).step_by(10).collect();
        assert_eq!(cnps(&all, true), cnps(&all, false));
        assert_eq!(cnps(&all, true), [10, 60, 110, 160, 210, 260]);
    }
}
