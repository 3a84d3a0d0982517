//! What the two monitors say and hear, without sockets: bytes in, values out, and back.
//!
//! Whoever connects need not be a monitor, and a monitor can be taken over by its guest. So nothing
//! that arrives is trusted: every length has a limit, every number is checked against the others,
//! and what is not understood is an error that names it.

pub mod cloud_hypervisor;
pub mod firecracker;
pub mod hand_off;
