//! Counting, per CPU and per direction.

use roce_common::abi::{Counter, Counters, Direction};

use crate::maps::COUNTERS;

/// The counters of one direction on this CPU.
#[derive(Clone, Copy)]
pub(crate) struct Tally(*mut Counters);

impl Tally {
    /// Looks them up; `None` only where the map is not the one this program was built with.
    #[inline(always)]
    pub(crate) fn of(direction: Direction) -> Option<Self> {
        COUNTERS.get_ptr_mut(direction as u32).map(Self)
    }

    /// Adds one.
    #[inline(always)]
    pub(crate) fn add(self, counter: Counter) {
        // SAFETY: the pointer is a live per-CPU map value, and the slot of a `Counter` is below its length.
        unsafe {
            let slot = (self.0.cast::<u64>()).add(counter as usize);
            *slot = (*slot).wrapping_add(1);
        }
    }
}
