//! Tools of every encoder and decoder: append little-endian numbers, and take them off the front.

use crate::WireError;

/// Takes fields off the front of a meta. Running out of bytes is [`WireError::Length`].
#[derive(Debug)]
pub(crate) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn new(meta: &'a [u8]) -> Self {
        Fields(meta)
    }

    pub(crate) fn bytes<const N: usize>(&mut self) -> Result<&'a [u8; N], WireError> {
        let (front, rest) = self.0.split_first_chunk().ok_or(WireError::Length)?;
        self.0 = rest;
        Ok(front)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        self.bytes().map(|b| u16::from_le_bytes(*b))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        self.bytes().map(|b| u32::from_le_bytes(*b))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        self.bytes().map(|b| u64::from_le_bytes(*b))
    }

    pub(crate) fn u128(&mut self) -> Result<u128, WireError> {
        self.bytes().map(|b| u128::from_le_bytes(*b))
    }

    /// Takes a reserved field of `N` bytes, which must be zero.
    pub(crate) fn reserved<const N: usize>(&mut self) -> Result<(), WireError> {
        if *self.bytes::<N>()? == [0; N] { Ok(()) } else { Err(WireError::Reserved) }
    }

    /// Returns the remaining bytes.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Checks that no bytes are left.
    pub(crate) fn end(self) -> Result<(), WireError> {
        if self.0.is_empty() { Ok(()) } else { Err(WireError::Length) }
    }
}

/// Appends fields to the end of a frame under construction.
pub(crate) trait Append {
    fn put_u16(&mut self, value: u16);
    fn put_u32(&mut self, value: u32);
    fn put_u64(&mut self, value: u64);
    fn put_u128(&mut self, value: u128);
}

impl Append for Vec<u8> {
    fn put_u16(&mut self, value: u16) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u128(&mut self, value: u128) {
        self.extend_from_slice(&value.to_le_bytes());
    }
}

/// Refuses `found` over `limit`.
pub(crate) fn within(what: &'static str, found: u64, limit: u64) -> Result<(), WireError> {
    if found > limit { Err(WireError::TooLarge { what, found, limit }) } else { Ok(()) }
}
