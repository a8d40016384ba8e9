//! Turns at a cell that all CPUs share: departure times of a limiter, places in a virtual queue.

use roce_common::dcqcn::cp;

use crate::atomic;

/// Tries to take a turn this often before giving up: somebody else took one at just that moment.
const TRIES: u32 = 16;
/// What [`roce_take_turn`] says when it has given up. No turn starts then.
const CONTENDED: u64 = u64::MAX;

/// Takes a turn of `cost_ns` at `now_ns` or later, at most `horizon_ns` from now; when it starts, or `None` where others were always
/// faster. What costs nothing takes its turn behind the others, and leaves none.
///
/// # Safety
/// `cell` points to an aligned `u64` in a map value that is used for nothing else.
#[inline(always)]
pub(crate) unsafe fn take(cell: *mut u64, now_ns: u64, cost_ns: u64, horizon_ns: u64) -> Option<u64> {
    match roce_take_turn(cell, now_ns, cost_ns, horizon_ns) {
        CONTENDED => None,
        start_ns => Some(start_ns),
    }
}

/// A global function: the verifier follows its loop once, instead of once for each state in which a program takes a turn. Those were
/// more than half of all that it followed.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn roce_take_turn(cell: *mut u64, now_ns: u64, cost_ns: u64, horizon_ns: u64) -> u64 {
    // The verifier asks for it.
    if cell.is_null() {
        return CONTENDED;
    }
    for _ in 0..TRIES {
        // SAFETY: the contract of `take`.
        let next_ns = unsafe { cell.read_volatile() };
        let slot = cp::take(next_ns, now_ns, cost_ns, horizon_ns);
        // SAFETY: as above.
        if cost_ns == 0 || unsafe { atomic::replace_u64(cell, next_ns, slot.next_ns) } {
            return slot.start_ns;
        }
    }
    CONTENDED
}
