//! Several hosts on one machine, for tests and demonstrations: each a network namespace with an
//! address and a link of its own, and with a memory control group where one is asked for.
//!
//! How the hosts are wired is chosen once: two of them back to back, any number on a packet network
//! (a kernel bridge), any number with their links ending as the ports of a switch, in a namespace
//! of the switch's own, where nothing forwards until a program does, or both a bridge and a switch.
//!
//! Invariants:
//! * namespaces have no names: descriptors of this process hold them, so they end with it;
//! * what descriptors do not hold (control groups, processes started in a host) is taken down by a
//!   janitor process, which sees this process's end whatever ended it (`janitor`);
//! * hosts speak IPv4 only and send nothing by themselves: IPv6 is off, so every frame that arrives
//!   was caused by a program.
//!
//! It takes root, or the capabilities `CAP_SYS_ADMIN` and `CAP_NET_ADMIN`, and iproute2's `ip`.
//! Where something is missing the error says what, so that a test can skip visibly.

mod cgroup;
mod error;
mod hosts;
mod janitor;
mod link;
mod namespace;
mod sys;
mod wiring;

pub use cgroup::{Cgroup, leftovers, remove_leftovers};
pub use error::HostsError;
pub use hosts::{Host, Hosts, HostsBuilder, MAX_HOSTS, MAX_SWITCH_LINKS, SwitchSide};
pub use link::LinkCounters;
pub use namespace::Namespace;
pub use wiring::Wiring;
