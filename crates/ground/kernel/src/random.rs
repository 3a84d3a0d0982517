//! Random bytes of the kernel.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Fills all of `bytes`. An error leaves them in part as they were.
pub fn fill_random(bytes: &mut [u8]) -> Result<(), Errno> {
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            // Many bytes come in several pieces if a signal does.
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_filled() {
        let mut bytes = vec![0_u8; 1 << 20];
        fill_random(&mut bytes).expect("random bytes");
        // By chance a piece is all zeros once in 2^512 times.
        assert!(bytes.chunks(64).all(|piece| piece.iter().any(|byte| *byte != 0)));
    }
}
