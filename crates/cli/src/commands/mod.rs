//! One module per subcommand: takes the parsed arguments, calls the room that does the work,
//! prints what it says. Each `main` returns the exit code.

pub mod bench;
pub mod blade;
pub mod config;
pub mod demo;
pub mod doctor;
pub mod generate;
pub mod limit;
pub mod run;
pub mod stat;

use crate::config::UsageError;
use crate::values::BladeAddress;

/// Refuses TCP addresses beyond loopback unless the user allowed them: nothing on that path is
/// encrypted or authenticated yet.
pub fn refuse_remote(addresses: &[BladeAddress], allowed: Option<bool>) -> Result<(), UsageError> {
    let remote = addresses.iter().find(|address| !address.0.is_local());
    match remote {
        Some(address) if allowed != Some(true) => Err(UsageError(format!(
            "{address} is beyond this machine: pages would travel unencrypted and anyone on the \
             path could read them; give --allow-remote-tcp if that is what you want"
        ))),
        _ => Ok(()),
    }
}
