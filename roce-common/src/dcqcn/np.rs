//! Notification point: when CE is answered with a CNP.

/// Whether a CNP for a queue pair is due at `now_ns`, given when the last one was sent (0 = never): "if no CNP was sent
/// for the flow in the last N" (SIGCOMM'15 §3, NP algorithm). A clock read on another CPU may lie a little behind
/// `last_ns`: then none is due.
#[inline(always)]
pub const fn due(last_ns: u64, now_ns: u64, interval_ns: u64) -> bool {
    last_ns == 0 || now_ns.saturating_sub(last_ns) >= interval_ns
}

#[cfg(test)]
mod tests {
    use super::due;

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
}
