//! What depends on the processor: registers, numbers and conventions of system calls, ELF machine.
//!
//! One file each; the rest of the crate names none of them.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub use aarch64::*;

/// The other file's encodings are checked here too; it was never run.
#[cfg(all(test, not(target_arch = "aarch64")))]
#[allow(dead_code)]
mod aarch64;
