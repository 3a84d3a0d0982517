//! An emulated circuit switch as a process of its own: runs until SIGINT or SIGTERM.
//!
//! It prints one line once its control socket answers. Its circuits end with the process.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use farpool_switch::{EmulatedError, EmulatedSwitch};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Forwards Ethernet frames between network interfaces along circuits that are set up on its
/// control socket.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Name in messages
    #[arg(long, default_value = "switch")]
    name: String,
    /// Unix socket to be controlled by
    #[arg(long)]
    control: PathBuf,
    /// Interfaces that are its ports, port 0 first
    #[arg(required = true)]
    interfaces: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("farpool-switch: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), EmulatedError> {
    // Before anything is set up, so that a signal always ends the switch cleanly.
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(EmulatedError::Forward)?;
    let switch = EmulatedSwitch::open(&arguments.name, &arguments.interfaces)?;
    let control = switch.serve(&arguments.control)?;
    println!("{} ports, control at {}", switch.ports(), control.path().display());
    let _ = signals.forever().next();
    Ok(())
}
