//! What happens when: a heap of events, in the order of their times, and of their making where times are equal.

/// A data packet on its way; all have the size of the scenario.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) flow: u32,
    pub(super) psn: u32,
    /// Ports behind it.
    pub(super) hop: u8,
    pub(super) ce: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// A host may send.
    Host(u32),
    /// A packet reaches the port `hop` of its path.
    Arrive(Packet),
    /// A port has sent its head.
    Port(u32),
    /// Everything below is acknowledged.
    Ack { flow: u32, psn: u32 },
    /// The receiver misses this one.
    Nak { flow: u32, psn: u32 },
    /// A CNP reaches the controller.
    Cnp(u32),
    /// The controller looks at a flow.
    Tick(u32),
    /// The ACK timer of a flow.
    Timeout(u32),
    /// A flow starts, or its next message comes.
    Message(u32),
    /// A transmitter is told to pause or to go on.
    Pause { transmitter: u32, on: bool },
}

#[derive(Clone, Copy)]
struct Entry {
    time: u64,
    order: u64,
    event: Event,
}

impl Entry {
    #[inline]
    const fn before(&self, other: &Self) -> bool {
        self.time < other.time || (self.time == other.time && self.order < other.order)
    }
}

/// Children of a node. Four keep siblings in two cache lines and the heap half as deep as two.
const ARITY: usize = 4;

/// The events to come.
#[derive(Default)]
pub(super) struct Events {
    heap: Vec<Entry>,
    order: u64,
}

impl Events {
    /// `event` happens at `time`.
    #[inline]
    pub(super) fn push(&mut self, time: u64, event: Event) {
        self.order += 1;
        let entry = Entry { time, order: self.order, event };
        let mut hole = self.heap.len();
        self.heap.push(entry);
        while hole > 0 {
            let parent = (hole - 1) / ARITY;
            if !entry.before(&self.heap[parent]) {
                break;
            }
            self.heap[hole] = self.heap[parent];
            hole = parent;
        }
        self.heap[hole] = entry;
    }

    /// The next event and its time.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<(u64, Event)> {
        let last = self.heap.pop()?;
        let Some(&first) = self.heap.first() else { return Some((last.time, last.event)) };
        let len = self.heap.len();
        let mut hole = 0;
        loop {
            let child = hole * ARITY + 1;
            if child >= len {
                break;
            }
            let mut least = child;
            for i in child + 1..(child + ARITY).min(len) {
                if self.heap[i].before(&self.heap[least]) {
                    least = i;
                }
            }
            if !self.heap[least].before(&last) {
                break;
            }
            self.heap[hole] = self.heap[least];
            hole = least;
        }
        self.heap[hole] = last;
        Some((first.time, first.event))
    }
}

#[cfg(test)]
impl Events {
    /// What is still to come.
    pub(super) fn pending(&self) -> impl Iterator<Item = Event> {
        self.heap.iter().map(|e| e.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::engine::random::Random;

    #[test]
    fn events_come_in_order_of_time_and_then_of_making() {
        let (mut events, mut random, mut want) = (Events::default(), Random::new(7), Vec::new());
        for i in 0..5_000u32 {
            let time = u64::from(random.next_u32() % 500);
            events.push(time, Event::Port(i));
            want.push((time, i));
        }
        want.sort_unstable();
        for (time, i) in want {
            assert!(matches!(events.pop(), Some((t, Event::Port(p))) if (t, p) == (time, i)));
        }
        assert!(events.pop().is_none());
    }
}
