//! The victim buffer, which is also the reserve of free frames.
//!
//! It is a range of addresses cut into trays of 64 slots. The evictor moves a chunk's pages into an
//! empty tray, writes them to the blade, and queues the tray: its frames are free then, yet still
//! hold the pages. A fault on such a page takes it back (a second chance without network); a fault
//! that needs frames takes the oldest ones, whose pages are then only far. A run of fetched pages
//! is read into such frames, which are moved into the program, so they circulate without the
//! kernel's allocator (FluidMem's idea with stock kernels' UFFDIO_MOVE). Lone pages are copied into
//! new memory instead, and the evictor returns the oldest trays to the kernel for it.
//!
//! Bits of a tray, one for each slot:
//! * `filled`: a frame is mapped at the slot;
//! * `valid`: the frame holds the page of the tray's chunk with the same index, and that page is in
//!   phase Victim or is being taken back;
//! * `writing`: the frame is being sent to the blade, and must stay where it is;
//! * `busy`: the frame was handed out and has not been returned;
//! * `kept`: the page may not be on the blade, so the frame is not free until the page goes back.
//!
//! A tray holds pages of one chunk, and a chunk has pages in one tray at most. The pages of a tray
//! had the same rights as its frames (`zones`).

mod buffer;
mod filling;
mod queues;
mod releasing;
mod retiring;
mod slots;
mod taking;
mod trays;
mod victims;
mod zones;

pub use buffer::Frames;
pub use slots::{FrameRun, FrameSlot, TakenTray};
pub use zones::{TRAY_BYTES, TRAYS, Zone};
