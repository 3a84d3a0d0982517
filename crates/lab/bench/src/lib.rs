//! The measurements: programs that load memory in known ways, the machine's floors, and the rows
//! that compare Farpool with them.
//!
//! * [`workload_main`] runs one workload in this process and prints one line of JSON. It is what
//!   `farpool run` runs: an ordinary program with ordinary memory.
//! * [`bench_main`] measures floors in this process, starts programs with and without Farpool (and
//!   under the kernel's own swapping), and returns the rows of the table "how fast".
//! * [`tenant_main`] is a program of a given size that checks every byte it reads.
//! * [`stage`] runs programs in every place that memory can be; [`RedisClient`] and [`Zipf`] query
//!   redis. They are for other crates that measure programs.
//!
//! A value means little without the best that the machine can do, so each row carries the floor
//! measured in the same run. Nothing here is a test: no bar fails a build.

mod args;
mod blade_read;
mod costs;
mod error;
mod floor;
mod latency;
mod machine;
mod program;
mod report;
mod row;
pub mod stage;
mod sys;
mod tenant;
mod units;
mod workload;

pub use args::BenchArgs;
pub use costs::{CostsOptions, measure_costs, read_events};
pub use error::BenchError;
pub use machine::Machine;
pub use program::{RedisClient, Zipf, python_program};
pub use report::{Bar, Report, Row, Unit};
pub use row::bench_main;
pub use tenant::{TenantArgs, TenantReport, tenant_main};
pub use units::parse_bytes;
pub use workload::{WorkloadArgs, WorkloadName, WorkloadReport, workload_main};
