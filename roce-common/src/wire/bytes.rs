//! Where the parser reads from.

/// A source of packet bytes: a slice, or the linear part of a kernel packet.
///
/// Offsets count from the first byte of the frame. A source may hold fewer bytes than the frame had on the wire
/// (a capture's snap length, an XDP packet with an empty linear part); [`Bytes::wire_len`] is the length on the wire.
pub trait Bytes {
    /// Copies `N` bytes from `offset`, or `None` where the source does not hold all of them.
    fn get<const N: usize>(&self, offset: usize) -> Option<[u8; N]>;

    /// Length of the frame on the wire, in bytes.
    fn wire_len(&self) -> usize;
}

impl Bytes for [u8] {
    #[inline(always)]
    fn get<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..)?.first_chunk::<N>().copied()
    }

    fn wire_len(&self) -> usize {
        self.len()
    }
}

/// A captured frame: the bytes kept and the length it had on the wire.
impl Bytes for (&[u8], usize) {
    #[inline(always)]
    fn get<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        Bytes::get::<N>(self.0, offset)
    }

    fn wire_len(&self) -> usize {
        self.1
    }
}
