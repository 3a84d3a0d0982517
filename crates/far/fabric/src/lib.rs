//! How requests move between one client and one blade.
//!
//! A [`Control`] connection carries the rare requests (allocate, freeze ...), one at a time. Pages
//! move over a [`Link`], one per thread: [`ShmLink`] copies from and to the blade's memory on the
//! same host, [`StreamLink`] sends requests over a unix socket or TCP. The blade's [`Address`]
//! chooses. Over TCP with certificates both are sealed in records (`farpool-record`); handshakes
//! are made elsewhere (`farpool-handshake`), by an [`Opener`].
//!
//! All of it runs on pager threads inside arbitrary programs: system calls are made directly,
//! nothing is printed, looked up or spawned, no signal is touched, and moving pages allocates
//! nothing once warm.

mod asked;
mod attention;
mod channel;
mod control;
mod descriptor;
mod dial;
mod flight;
mod limits;
mod link;
mod opening;
mod peer;
mod receive;
mod session;
mod shm;
mod spare;
mod stall;
mod stream;
mod sys;

pub use asked::{Ask, OpenFailure, Opener, answer, answer_secured, tell_untrusted};
pub use channel::Keys;
pub use control::{Answer, CallError, Control};
pub use descriptor::{DESCRIPTOR_FLOOR, DESCRIPTOR_LIMIT, Descriptor, DescriptorSet};
pub use farpool_kernel::Time;
pub use farpool_policy::Meters;
pub use farpool_policy::RateLimit;
pub use farpool_wire::{Address, AddressError, ClientId, Grant, GrantKey};
pub use limits::ClientLimits;
pub use link::{Link, LinkPage, PageDone, PageFault};
pub use session::{ConnectError, Met, Session};
pub use shm::ShmLink;
pub use spare::Spare;
pub use stream::StreamLink;
