//! Path MTUs that connections were made with, as the BPF programs are told of them: a flow of READs shows its own nowhere.

use std::collections::{BTreeMap, HashMap};

use roce_common::abi::{MAX_PATH_MTUS, PairKey};

/// What the maps are to be told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PathMtu {
    /// The packets that it is about.
    pub(super) key: PairKey,
    /// In bytes; `None`: no longer known.
    pub(super) bytes: Option<u32>,
}

/// What the maps were told. Where more is known than they hold, the oldest goes.
#[derive(Debug)]
pub(super) struct PathMtus {
    most: usize,
    /// Path MTU, and when it was told.
    told: HashMap<PairKey, (u32, u64)>,
    order: BTreeMap<u64, PairKey>,
    next: u64,
}

impl Default for PathMtus {
    fn default() -> Self {
        Self::holding(MAX_PATH_MTUS as usize)
    }
}

impl PathMtus {
    fn holding(most: usize) -> Self {
        Self { most, told: HashMap::new(), order: BTreeMap::new(), next: 0 }
    }

    /// A connection was made, or made again, with a path MTU of so many bytes.
    pub(super) fn learn(&mut self, key: PairKey, bytes: u32) -> Vec<PathMtu> {
        if self.told.get(&key).is_some_and(|(told, _)| *told == bytes) {
            return Vec::new();
        }
        let mut changes = Vec::from_iter(self.forget(key));
        if self.told.len() >= self.most
            && let Some((_, oldest)) = self.order.pop_first()
        {
            changes.extend(self.forget(oldest));
        }
        self.told.insert(key, (bytes, self.next));
        self.order.insert(self.next, key);
        self.next += 1;
        changes.retain(|change| change.key != key);
        changes.push(PathMtu { key, bytes: Some(bytes) });
        changes
    }

    /// A connection has ended: the number of its queue pair may be another's soon.
    pub(super) fn forget(&mut self, key: PairKey) -> Option<PathMtu> {
        let (_, at) = self.told.remove(&key)?;
        self.order.remove(&at);
        Some(PathMtu { key, bytes: None })
    }
}

#[cfg(test)]
mod tests {
    use roce_common::units::{Addr, Qpn};

    use super::*;

    fn key(qpn: u32) -> PairKey {
        PairKey::new(Addr::v4([10, 0, 0, 1]), Addr::v4([10, 0, 0, 2]), Qpn::new(qpn))
    }

    #[test]
    fn only_changes_are_told_and_the_oldest_makes_room() {
        let told = |qpn, bytes| PathMtu { key: key(qpn), bytes };
        let mut mtus = PathMtus::holding(2);
        assert_eq!(mtus.learn(key(17), 1024), [told(17, Some(1024))]);
        assert_eq!(mtus.learn(key(17), 1024), []);
        assert_eq!(mtus.learn(key(18), 1024), [told(18, Some(1024))]);
        // The number is another connection's now, and younger than the other one.
        assert_eq!(mtus.learn(key(17), 4096), [told(17, Some(4096))]);
        assert_eq!(mtus.learn(key(19), 256), [told(18, None), told(19, Some(256))]);
        assert_eq!(mtus.forget(key(17)), Some(told(17, None)));
        assert_eq!(mtus.forget(key(17)), None);
        assert_eq!(mtus.learn(key(20), 256), [told(20, Some(256))]);
        assert_eq!((mtus.told.len(), mtus.order.len()), (2, 2));
    }
}
