//! Takes the fields of a TLS message one by one.

use super::NotTls;

/// What is left of a message.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], NotTls> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(NotTls)?;
        self.0 = rest;
        Ok(bytes)
    }

    /// A list behind its length, which takes `size` bytes.
    pub(super) fn list(&mut self, size: usize) -> Result<Self, NotTls> {
        let length = number(self.bytes(size)?);
        Ok(Self(self.bytes(length)?))
    }

    pub(super) fn kind(&mut self) -> Result<u16, NotTls> {
        let kind = self.bytes(2)?;
        Ok(u16::from_be_bytes([kind[0], kind[1]]))
    }
}

/// A number of up to three bytes, in network order.
pub(super) fn number(bytes: &[u8]) -> usize {
    bytes.iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
}
