//! The harness of the end-to-end tests: real processes of the real binary, held by guards.
//!
//! * [`binaries`]: finds `farpool` and its preload library, building both when they are missing or
//!   stale;
//! * [`run`]: `farpool run` of a program, with its output, its exit code and its statistics;
//! * [`blade`]: a `farpool blade` of its own;
//! * [`rack`]: a controller and nodes, and what people ask them;
//! * [`far`]: a client of theirs and its far memory, without a program;
//! * [`jobs`]: real programs, made from their sources, compared with all-local and held to their
//!   limit;
//! * [`sources`]: those of programs that go through both doors;
//! * [`postgres`]: a PostgreSQL of its own user;
//! * [`redis`] asks a redis-server that saves in the background;
//! * [`kv`]: a client of a key-value server that checks every value;
//! * [`compaction`]: the kernel migrates pages all the while;
//! * [`hog`]: a program that takes much memory of its host;
//! * [`steps`]: a process that is killed at a chosen system call;
//! * [`tree`]: the processes below one, to be counted, measured and ended;
//! * [`proxy`]: a proxy between program and blade that cuts, repeats, or spoils what passes;
//! * [`network`]: two hosts back to back, each a network namespace;
//! * [`stage`]: a controller, nodes and programs on hosts of their own.
//!
//! Every guard ends what it started when it is dropped, also while a test panics. Waits are for
//! conditions and have a deadline; nothing sleeps for a fixed time and hopes.
//!
//! The programs come from the directory of the test's own profile, where `cargo build --workspace`
//! has put them, or from FARPOOL_E2E_DIR (a directory with `farpool`, `libfarpool_preload.so` and
//! this crate's programs, such as target/release).

pub mod binaries;
pub mod blade;
pub mod compaction;
pub mod far;
pub mod hog;
pub mod jobs;
pub mod kv;
pub mod network;
pub mod postgres;
pub mod proxy;
pub mod rack;
pub mod redis;
pub mod run;
pub mod sources;
pub mod stage;
pub mod steps;
pub mod tree;

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use farpool_kernel::lock;
pub use farpool_testkit::wait_for as wait_until;
pub use farpool_testkit::{have, ports, skip};

/// A condition that has not come true by then never will.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two checks where a value is needed that [`wait_until`] does not give.
const STEP: Duration = Duration::from_millis(10);
/// One test of a binary at a time: they share two cores, and some of them measure.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    lock(&TURN)
}
