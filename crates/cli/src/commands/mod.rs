//! One module per subcommand: takes the parsed arguments, calls the crate that does the work,
//! prints the result. Each `main` returns the exit code.

pub mod answer;
pub mod attach;
pub mod audit;
pub mod bench;
pub mod blade;
pub mod blades;
pub mod collaborate;
pub mod config;
pub mod control;
pub mod core;
pub mod demo;
pub mod doctor;
pub mod donor_protection;
pub mod generate;
pub mod kv;
mod kv_access;
pub mod kv_bench;
mod kv_options;
pub mod kv_top;
pub mod lending;
pub mod limit;
pub mod node;
mod outliving;
pub mod pki;
pub mod plan;
pub mod rack;
pub mod run;
pub mod service;
pub mod sim;
pub mod stat;
pub mod trace;
pub mod vm;
pub mod vmm;

use std::path::PathBuf;

use anyhow::Context;
use farpool_run::{read_statistics, runs};

use crate::config::UsageError;
use crate::values::BladeAddress;

/// Refuses TCP addresses beyond loopback unless there is a certificate for them, or the user
/// allowed them without: nothing but pages is encrypted then, and nobody authenticated.
pub fn refuse_remote(addresses: &[BladeAddress], allowed: Option<bool>) -> Result<(), UsageError> {
    let remote = addresses.iter().find(|address| !address.0.is_local());
    match remote {
        Some(address) if allowed != Some(true) => Err(UsageError(format!(
            "{address} is beyond this machine, and without certificates anyone on the path could read \
             and change what is sent: give --pki DIR (farpool pki issue), or --allow-remote-tcp if \
             the network is trusted"
        ))),
        _ => Ok(()),
    }
}

/// Returns the board of a process's run.
pub fn board_of(pid: u32) -> anyhow::Result<PathBuf> {
    let belongs = |board: &PathBuf| {
        read_statistics(board).is_ok_and(|run| {
            run.keeper_pid == pid || run.processes.iter().any(|process| process.pid == pid)
        })
    };
    runs().into_iter().find(belongs).with_context(|| {
        format!("no run of yours has a process {pid}; farpool stat shows what runs")
    })
}
