//! The atomic operations BPF has, by intrinsic: 64 bits wide, since the base instruction set has no others.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd, atomic_xchg};

/// Tries to take a lock cell this often before giving up.
const LOCK_TRIES: u32 = 64;

/// Adds `n` to a shared counter.
///
/// # Safety
/// `cell` points to an aligned `u64` in a map value.
#[inline(always)]
pub(crate) unsafe fn add_u64(cell: *mut u64, n: u64) {
    // SAFETY: the caller's contract.
    let _before = unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::SeqCst }>(cell, n) };
}

/// Replaces `old` by `new` when the cell holds `old`; says whether it did.
///
/// # Safety
/// `cell` points to an aligned `u64` in a map value.
#[inline(always)]
pub(crate) unsafe fn replace_u64(cell: *mut u64, old: u64, new: u64) -> bool {
    // SAFETY: the caller's contract.
    let (found, _) =
        unsafe { atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(cell, old, new) };
    found == old
}

/// Empties a cell; returns what it held.
///
/// # Safety
/// `cell` points to an aligned `u64` in a map value.
#[inline(always)]
pub(crate) unsafe fn take_u64(cell: *mut u64) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { atomic_xchg::<u64, { AtomicOrdering::SeqCst }>(cell, 0) }
}

/// Takes a lock cell within a bounded number of tries; says whether it did.
///
/// # Safety
/// `cell` points to an aligned `u64` in a map value that is used for nothing else.
#[inline(always)]
pub(crate) unsafe fn try_lock(cell: *mut u64) -> bool {
    for _ in 0..LOCK_TRIES {
        // SAFETY: the caller's contract.
        let (found, _) =
            unsafe { atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(cell, 0, 1) };
        if found == 0 {
            return true;
        }
    }
    false
}

/// Releases a lock cell.
///
/// # Safety
/// The caller holds the lock of `cell` by [`try_lock`].
#[inline(always)]
pub(crate) unsafe fn unlock(cell: *mut u64) {
    // An exchange, because BPF has no store-release.
    // SAFETY: the caller's contract.
    let _held = unsafe { take_u64(cell) };
}
