//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).

/// The one's-complement checksum of a sum of 16-bit words.
#[inline(always)]
pub const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    !(sum as u16)
}

/// The checksum after one 16-bit word it covers changed from `old` to `new` (RFC 1624, equation 3).
#[inline(always)]
pub const fn update(checksum: u16, old: u16, new: u16) -> u16 {
    fold((!checksum) as u32 + (!old) as u32 + new as u32)
}

#[cfg(test)]
mod tests {
    use super::update;

    /// The reference packet of the ICRC vectors: ToS 6A → 6B and 6A → C2.
    #[test]
    fn incremental_update_matches_the_reference_packet() {
        assert_eq!(update(0x1401, 0x456a, 0x456b), 0x1400);
        assert_eq!(update(0x1401, 0x456a, 0x45c2), 0x13a9);
    }
}
