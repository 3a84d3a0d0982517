//! `farpool config`: checks the configuration files and prints the combined settings.

use std::path::{Path, PathBuf};

use crate::args::{ConfigAction, ConfigArgs};
use crate::config::{self, Config};
use crate::terminal;

/// Checks or prints the settings. A wrong file is a usage error that names the key and the file.
pub fn main(args: &ConfigArgs, chosen: Option<&Path>) -> anyhow::Result<u8> {
    let files = config::files(chosen);
    let from_files = Config::from_files(&files)?;
    let mut all = Config::from_variables().unwrap_or_else(|error| error.exit());
    let text = match args.action {
        ConfigAction::Check if files.is_empty() => {
            let usual = paths(&config::usual_files()).join(", ");
            format!("no configuration file ({usual}); flags and variables decide\n")
        }
        ConfigAction::Check => paths(&files).iter().map(|file| format!("{file}: ok\n")).collect(),
        ConfigAction::Dump => {
            all.fill_from(from_files);
            toml::to_string(&all)?
        }
    };
    terminal::print(&text)?;
    Ok(0)
}

fn paths(files: &[PathBuf]) -> Vec<String> {
    files.iter().map(|file| file.display().to_string()).collect()
}
