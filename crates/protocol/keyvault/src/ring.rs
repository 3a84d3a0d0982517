//! One direction of a connection in shared memory: a ring of frames with one writer and one reader.
//!
//! A frame lies at the next multiple of [`LINE_BYTES`]; its first word is its length, written last,
//! so that the frame itself signals its arrival and no shared counter has to travel between the
//! processors. The reader clears what it has read, so the next round begins on zeros, and only now
//! and then reports its position to the writer. A length of `WRAP` means that the next frame is
//! at the start.
//!
//! The other side may be hostile: whatever it writes, we read inside the ring, copy before we
//! parse, and at worst reject its frames.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Frames begin at multiples of this, so that the two processors never write to the same line.
pub const LINE_BYTES: usize = 64;
/// Bytes in front of the ring for the reader's position and the sleepers' flags.
pub const CONTROL_BYTES: usize = 2 * LINE_BYTES;
/// The smallest ring.
pub const RING_BYTES_MIN: usize = 1 << 12;
/// The largest ring.
pub const RING_BYTES_MAX: usize = 1 << 28;
/// In place of a frame's length: continue at the start.
const WRAP: u32 = u32::MAX;
/// Each frame has its length in front.
const LENGTH_BYTES: usize = 4;

/// A region of shared memory that holds one ring: control lines, then frames.
///
/// Implementors guarantee that `address` stays mapped, readable and writable, aligned to a page,
/// for `CONTROL_BYTES + ring_bytes` as long as the value lives.
///
/// # Safety
/// This module's reads and writes rely on the guarantee above.
pub unsafe trait Region {
    /// Where the region begins.
    fn address(&self) -> *mut u8;
    /// The size of the ring, a power of two, without the control lines.
    fn ring_bytes(&self) -> usize;
}

fn control_word(region: &impl Region, at: usize) -> &AtomicU64 {
    debug_assert!(at + 8 <= CONTROL_BYTES && at.is_multiple_of(8));
    // SAFETY: the control lines are mapped (guarantee of `Region`), aligned, and only used as
    // atomics.
    unsafe { &*region.address().add(at).cast::<AtomicU64>() }
}

fn length_word(region: &impl Region, at: usize) -> &AtomicU32 {
    debug_assert!(at < region.ring_bytes() && at.is_multiple_of(LINE_BYTES));
    // SAFETY: inside the ring by the callers' masks, aligned to a line, and only used as an atomic.
    unsafe { &*region.address().add(CONTROL_BYTES + at).cast::<AtomicU32>() }
}

/// Returns the bytes that a frame takes in the ring.
const fn footprint(frame_bytes: usize) -> usize {
    (LENGTH_BYTES + frame_bytes).next_multiple_of(LINE_BYTES)
}

/// Returns the longest frame that a ring accepts: a quarter, so that wrapping never blocks it.
#[must_use]
pub const fn frame_bytes_max(ring_bytes: usize) -> usize {
    ring_bytes / 4 - LENGTH_BYTES
}

/// The writing end.
#[derive(Debug)]
pub struct Writer<R> {
    region: R,
    /// Bytes ever written; the position in the ring is this modulo its size.
    written: u64,
    /// The reader's last reported position.
    read: u64,
}

impl<R: Region> Writer<R> {
    /// The writing end of a ring in which nothing was written yet.
    pub const fn new(region: R) -> Self {
        Self { region, written: 0, read: 0 }
    }

    /// Writes a frame to the ring. False if there is no room now.
    pub fn push(&mut self, frame: &[u8]) -> bool {
        let size = self.region.ring_bytes() as u64;
        let needs = footprint(frame.len()) as u64;
        debug_assert!(
            frame.len() <= frame_bytes_max(self.region.ring_bytes()),
            "callers bound frames"
        );
        let place = self.written & (size - 1);
        let skip = if place + needs > size { size - place } else { 0 };
        if self.written + skip + needs - self.read > size {
            self.read = control_word(&self.region, 0).load(Ordering::Acquire);
            let in_use = self.written.wrapping_sub(self.read);
            if in_use > size || in_use + skip + needs > size {
                return false;
            }
        }
        let mut at = usize::try_from(place).expect("a ring fits into memory");
        if skip > 0 {
            length_word(&self.region, at).store(WRAP, Ordering::Release);
            at = 0;
        }
        // SAFETY: `footprint` bytes from `at` lie inside the ring, and the reader does not access
        // them before the length is written.
        unsafe {
            let to = self.region.address().add(CONTROL_BYTES + at + LENGTH_BYTES);
            std::ptr::copy_nonoverlapping(frame.as_ptr(), to, frame.len());
        }
        let length = u32::try_from(frame.len()).expect("frames are below 16 MiB");
        length_word(&self.region, at).store(length, Ordering::Release);
        self.written += skip + needs;
        true
    }

    /// True if the reader sleeps and must be woken. To be checked after a push.
    #[must_use]
    pub fn reader_sleeps(&self) -> bool {
        fence(Ordering::SeqCst);
        control_word(&self.region, LINE_BYTES).load(Ordering::Relaxed) != 0
    }
}

/// The result of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Popped {
    /// There is no frame now.
    Nothing,
    /// One frame was appended.
    Frame,
    /// The other side broke the ring's rules; nothing more can be read.
    Broken,
}

/// The reading end.
#[derive(Debug)]
pub struct Reader<R> {
    region: R,
    read: u64,
    told: u64,
}

impl<R: Region> Reader<R> {
    /// The reading end of a ring in which nothing was written yet.
    pub const fn new(region: R) -> Self {
        Self { region, read: 0, told: 0 }
    }

    /// Appends the next frame to `out`.
    pub fn pop(&mut self, out: &mut Vec<u8>) -> Popped {
        let size = self.region.ring_bytes();
        let mut at =
            usize::try_from(self.read & (size as u64 - 1)).expect("a ring fits into memory");
        let mut length = length_word(&self.region, at).load(Ordering::Acquire);
        if length == 0 {
            return Popped::Nothing;
        }
        if length == WRAP {
            let next = length_word(&self.region, 0).load(Ordering::Acquire);
            if next == 0 {
                return Popped::Nothing;
            }
            length_word(&self.region, at).store(0, Ordering::Relaxed);
            self.read += (size - at) as u64;
            at = 0;
            length = next;
        }
        let bytes = length as usize;
        if bytes > frame_bytes_max(size) || at + footprint(bytes) > size {
            return Popped::Broken;
        }
        let start = out.len();
        out.reserve(bytes);
        // SAFETY: the frame lies inside the ring (checked above), `out` has room for it, and any
        // bytes are valid, whatever the writer does meanwhile. The cleared lines are the reader's
        // until it reports that it has read them.
        unsafe {
            let from = self.region.address().add(CONTROL_BYTES + at);
            std::ptr::copy_nonoverlapping(
                from.add(LENGTH_BYTES),
                out.as_mut_ptr().add(start),
                bytes,
            );
            out.set_len(start + bytes);
            // Only the words that may later hold a frame's length must be zero.
            for line in (0..footprint(bytes)).step_by(LINE_BYTES) {
                (*from.add(line).cast::<AtomicU32>()).store(0, Ordering::Relaxed);
            }
        }
        self.read += footprint(bytes) as u64;
        if self.read - self.told > size as u64 / 4 {
            self.tell();
        }
        Popped::Frame
    }

    /// Reports the reader's position to the writer. `pop` does so by itself now and then.
    pub fn tell(&mut self) {
        self.told = self.read;
        control_word(&self.region, 0).store(self.read, Ordering::Release);
    }

    /// Announces that the reader is about to sleep. False if a frame has arrived meanwhile.
    pub fn fall_asleep(&mut self) -> bool {
        self.tell();
        control_word(&self.region, LINE_BYTES).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.has_frame() {
            self.wake_up();
            return false;
        }
        true
    }

    /// Announces that the reader polls again.
    pub fn wake_up(&self) {
        control_word(&self.region, LINE_BYTES).store(0, Ordering::Relaxed);
    }

    /// True if a frame is waiting.
    #[must_use]
    #[inline]
    pub fn has_frame(&self) -> bool {
        let size = self.region.ring_bytes() as u64;
        let at = usize::try_from(self.read & (size - 1)).expect("a ring fits into memory");
        length_word(&self.region, at).load(Ordering::Acquire) != 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Debug, Clone)]
    struct Heap {
        memory: Arc<Vec<AtomicU64>>,
        ring_bytes: usize,
        offset: usize,
    }

    impl Heap {
        fn new(ring_bytes: usize) -> Self {
            let words = (CONTROL_BYTES + ring_bytes + LINE_BYTES) / 8;
            let memory: Arc<Vec<AtomicU64>> =
                Arc::new((0..words).map(|_| AtomicU64::new(0)).collect());
            let offset = memory.as_ptr().cast::<u8>().align_offset(LINE_BYTES);
            Self { memory, ring_bytes, offset }
        }
    }

    // SAFETY: the vector lives as long as the value and is long enough behind `offset`.
    unsafe impl Region for Heap {
        fn address(&self) -> *mut u8 {
            self.memory.as_ptr().cast_mut().cast::<u8>().wrapping_add(self.offset)
        }
        fn ring_bytes(&self) -> usize {
            self.ring_bytes
        }
    }

    fn frame(number: usize) -> Vec<u8> {
        let mut frame = vec![u8::try_from(number % 251).unwrap(); 8 + number * 37 % 900];
        frame[..8].copy_from_slice(&number.to_le_bytes());
        frame
    }

    #[test]
    fn frames_come_through_in_order_and_whole() {
        let heap = Heap::new(RING_BYTES_MIN);
        let mut writer = Writer::new(heap.clone());
        let mut reader = Reader::new(heap);
        let total = 200_000;
        let sender = std::thread::spawn(move || {
            for number in 0..total {
                while !writer.push(&frame(number)) {
                    std::thread::yield_now();
                }
            }
        });
        let mut out = Vec::new();
        for number in 0..total {
            out.clear();
            while reader.pop(&mut out) != Popped::Frame {
                // A waiting reader reports its position, or a full ring would stay full.
                reader.tell();
                std::thread::yield_now();
            }
            assert_eq!(out, frame(number), "frame {number}");
        }
        sender.join().unwrap();
        assert_eq!(reader.pop(&mut out), Popped::Nothing);
    }

    #[test]
    fn nonsense_is_found_and_stays_inside() {
        let heap = Heap::new(RING_BYTES_MIN);
        let mut reader = Reader::new(heap.clone());
        length_word(&heap, 0).store(5000, Ordering::Relaxed);
        assert_eq!(reader.pop(&mut Vec::new()), Popped::Broken);
        let mut writer = Writer::new(heap.clone());
        control_word(&heap, 0).store(u64::MAX / 2, Ordering::Relaxed);
        let pushed = (0..100).take_while(|_| writer.push(&[1; 600])).count();
        assert!(pushed <= 6, "a lying reader does not make the writer pass it: {pushed}");
    }

    #[test]
    fn a_sleeper_is_known() {
        let heap = Heap::new(RING_BYTES_MIN);
        let mut writer = Writer::new(heap.clone());
        let mut reader = Reader::new(heap);
        assert!(reader.fall_asleep());
        writer.push(b"frame");
        assert!(writer.reader_sleeps());
        reader.wake_up();
        assert!(!writer.reader_sleeps());
        assert!(!reader.fall_asleep(), "a frame waits");
    }
}
