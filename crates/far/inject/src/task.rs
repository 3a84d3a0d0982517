//! The kernel's types for tasks and signals.

/// A kernel thread id; for a process's first thread it is the process id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tid(pub i32);

/// A signal number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal(pub i32);

/// A set of signals, in the kernel's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalSet(pub u64);
