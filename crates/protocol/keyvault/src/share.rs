//! Two rings in one piece of memory that two processes map: requests in one, answers in the other.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use farpool_kernel::{MappedMemory, memfd_of, receive_with_descriptors};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::ring::{CONTROL_BYTES, RING_BYTES_MAX, RING_BYTES_MIN, Region};

/// The sizes of the two rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSizes {
    /// The ring for requests.
    pub request_bytes: usize,
    /// The ring for answers.
    pub answer_bytes: usize,
}

impl RingSizes {
    /// Rounds both sizes up to valid ones: powers of two within the rings' bounds.
    #[must_use]
    pub fn fitting(request_bytes: u32, answer_bytes: u32) -> Self {
        let fit =
            |bytes: u32| (bytes as usize).next_power_of_two().clamp(RING_BYTES_MIN, RING_BYTES_MAX);
        Self { request_bytes: fit(request_bytes), answer_bytes: fit(answer_bytes) }
    }

    const fn total(self) -> usize {
        2 * CONTROL_BYTES + self.request_bytes + self.answer_bytes
    }
}

/// One ring's part of shared memory.
#[derive(Debug, Clone)]
pub struct Ring {
    shared: Arc<MappedMemory>,
    offset: usize,
    ring_bytes: usize,
}

// SAFETY: `map` checked that the whole lies in the mapping, which the `Arc` keeps; it begins at a
// page and offsets are multiples of a line; the file is sealed against shrinking, so its pages
// stay.
unsafe impl Region for Ring {
    fn address(&self) -> *mut u8 {
        self.shared.start().as_ptr().wrapping_add(self.offset)
    }

    fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }
}

/// Creates the memory for two rings.
pub fn create(sizes: RingSizes) -> Result<OwnedFd, Errno> {
    memfd_of("farpool-kv-rings", sizes.total() as u64)
}

/// Maps both rings: requests, answers. Refuses a file that is too short or may shrink.
pub fn map(file: impl AsFd, sizes: RingSizes) -> Result<(Ring, Ring), Errno> {
    let seals = rustix::fs::fcntl_get_seals(&file)?;
    let length = usize::try_from(rustix::fs::fstat(&file)?.st_size).map_err(|_| Errno::INVAL)?;
    if !seals.contains(SealFlags::SHRINK) || length < sizes.total() {
        return Err(Errno::INVAL);
    }
    let shared = Arc::new(MappedMemory::shared(&file, 0, sizes.total())?);
    let requests = Ring { shared: Arc::clone(&shared), offset: 0, ring_bytes: sizes.request_bytes };
    let offset = CONTROL_BYTES + sizes.request_bytes;
    Ok((requests, Ring { shared, offset, ring_bytes: sizes.answer_bytes }))
}

/// Receives bytes and the file descriptors sent with them.
pub fn receive_with_files(
    socket: impl AsFd,
    bytes: &mut [u8],
) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut files = Vec::new();
    let take = |file| files.push(file);
    let received = receive_with_descriptors(socket, bytes, RecvFlags::empty(), take)?;
    Ok((received, files))
}
