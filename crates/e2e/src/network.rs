//! Two network namespaces joined by a veth pair: two hosts on one machine.

use std::path::Path;
use std::process::{Command, Output};

/// Both ends' addresses, from a network that is set aside for documentation.
pub const BLADE_IP: &str = "192.0.2.1";
pub const PROGRAM_IP: &str = "192.0.2.2";

/// The two namespaces; deleted when dropped.
#[derive(Debug)]
pub struct Network {
    blade: String,
    program: String,
}

impl Network {
    /// Makes them. None, with a visible reason, where that cannot be done.
    pub fn make() -> Option<Network> {
        let name = |side: &str| format!("farpool-{side}-{}", std::process::id());
        let network = Network { blade: name("b"), program: name("p") };
        let (blade, program) = (network.blade.as_str(), network.program.as_str());
        let steps: &[&[&str]] = &[
            &["netns", "add", blade],
            &["netns", "add", program],
            &[
                "link", "add", "fpv0", "netns", blade, "type", "veth", "peer", "name", "fpv1",
                "netns", program,
            ],
            &["-n", blade, "address", "add", &format!("{BLADE_IP}/24"), "dev", "fpv0"],
            &["-n", program, "address", "add", &format!("{PROGRAM_IP}/24"), "dev", "fpv1"],
            &["-n", blade, "link", "set", "fpv0", "up"],
            &["-n", program, "link", "set", "fpv1", "up"],
            &["-n", program, "link", "set", "lo", "up"],
        ];
        for step in steps {
            if let Err(reason) = ip(step) {
                crate::skip(&format!(
                    "no network namespaces here: ip {}: {reason}",
                    step.join(" ")
                ));
                return None;
            }
        }
        Some(network)
    }

    /// A command that runs a program on the blade's side.
    pub fn blade_side(&self, program: &Path) -> Command {
        inside(&self.blade, program)
    }

    /// A command that runs a program on the other side.
    pub fn program_side(&self, program: &Path) -> Command {
        inside(&self.program, program)
    }

    /// Takes the link down, or up again.
    pub fn link(&self, up: bool) {
        let state = if up { "up" } else { "down" };
        ip(&["-n", &self.blade, "link", "set", "fpv0", state]).expect("ip link");
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in [&self.blade, &self.program] {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn inside(namespace: &str, program: &Path) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace]).arg(program);
    command
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let said = |output: Output| String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match Command::new("ip").args(arguments).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(said(output)),
        Err(error) => Err(error.to_string()),
    }
}
