//! The harness of the end-to-end tests: real processes of the real binary, held by guards.
//!
//! * [`binaries`]: finds `farpool` and its preload library, and builds both if they are missing or
//!   stale;
//! * [`run`]: `farpool run` of a program, with its output, its exit code and its statistics;
//! * [`blade`]: a `farpool blade` of its own;
//! * [`checker`]: a program that checks what it reads, on blades that die;
//! * [`rack`]: a controller and nodes, and users' commands to them;
//! * [`lenders`]: a rack whose nodes die under a program that checks what it reads;
//! * [`far`]: a rack client and its far memory, without a program;
//! * [`guest`]: a virtual machine that checks its memory;
//! * [`jobs`]: real programs, compiled from source, compared with all-local and held to their
//!   limit;
//! * [`sources`]: sources of programs that are run through both doors;
//! * [`postgres`]: a PostgreSQL server that runs as its own user;
//! * [`redis`]: a redis-server that saves in the background, checked by redis-cli;
//! * [`kv`]: a client of a key-value server that checks every value;
//! * [`compaction`]: memory compaction, so that the kernel keeps migrating pages;
//! * [`merging`]: equal pages are merged by the kernel;
//! * [`hog`]: a program that takes much of its host's memory;
//! * [`steps`]: a process that is killed at a chosen system call;
//! * [`tree`]: the descendants of a process, to be counted, measured and ended;
//! * [`liar`]: a blade that answers with other pages than were stored;
//! * [`proxy`]: a proxy between program and blade that cuts, repeats, or corrupts the answers;
//! * [`network`]: two hosts back to back, each a network namespace;
//! * [`stage`]: a controller, nodes and programs on hosts of their own.
//!
//! Every guard ends the processes it started when it is dropped, also while a test panics. Waits
//! are for conditions and have a deadline; nothing relies on sleeping for a fixed time.
//!
//! The programs come from the target directory of the test's own profile, or from FARPOOL_E2E_DIR
//! (a directory with `farpool`, `libfarpool_preload.so` and this crate's programs, such as
//! target/release).

pub mod binaries;
pub mod blade;
pub mod checker;
pub mod compaction;
pub mod far;
pub mod guest;
pub mod hog;
pub mod jobs;
pub mod kv;
pub mod lenders;
pub mod liar;
pub mod merging;
pub mod network;
pub mod pki;
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

/// How long to wait for a condition before the test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two checks where a value is needed that [`wait_until`] does not give.
const STEP: Duration = Duration::from_millis(10);
/// Lets one test of a binary run at a time: tests share two cores, and some of them measure.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    lock(&TURN)
}
