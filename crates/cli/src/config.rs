//! Where settings come from: flags, then `FARPOOL_*` variables (clap reads both), then files.
//!
//! Files are TOML with one table per subcommand and the flag's long name as key. The user's file
//! overrides the machine's, key by key; `--config FILE` replaces both. An unknown key is an error
//! that names it and its file: a misspelt limit must not silently mean no limit.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::{CommandFactory, FromArgMatches};
use serde::{Deserialize, Serialize};

use crate::args::{
    BladeSettings, Cli, Command, ControlSettings, NodeSettings, RunSettings, StatSettings,
};

/// The machine's configuration file.
pub const SYSTEM_FILE: &str = "/etc/farpool.toml";
/// The user's configuration file, below `$XDG_CONFIG_HOME` or `~/.config`.
pub const USER_FILE: &str = "farpool/config.toml";

/// Wrong usage: reported on one line, exit code 2.
#[derive(Debug)]
pub struct UsageError(pub String);

impl fmt::Display for UsageError {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// One configuration file, or several laid over each other.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    pub run: RunSettings,
    pub blade: BladeSettings,
    pub stat: StatSettings,
    pub control: ControlSettings,
    pub node: NodeSettings,
}

/// Defines `fill_from` for the settings of a subcommand, of which all are named: a setting that is
/// left out here does not compile, so that none of a file is ignored. A stronger list replaces a
/// weaker one and is not merged with it.
macro_rules! fill_from {
    ($settings:ident: options $($option:ident),*; lists $($list:ident),*) => {
        impl $settings {
            /// Fills the unset fields from `weak`.
            pub fn fill_from(&mut self, weak: $settings) {
                let $settings { $($option,)* $($list,)* } = weak;
                $( self.$option = self.$option.take().or($option); )*
                $( if self.$list.is_empty() { self.$list = $list; } )*
            }
        }
    };
}

fill_from!(RunSettings:
    options local, peak, pool, pki, token_file, insecure, host, tenant, rate, spill, quota,
        share_with, policy, prefetch, when_full, deadline, pager_threads, threshold, stats, seal, redundancy,
        verify_every, allow_remote_tcp, no_check, door,
        when_outside, quiet;
    lists blade);
fill_from!(BladeSettings:
    options memory, flash, flash_write_rate, pack, lend, pack_after, backing, persist, quota,
        lease, threads, control_rate, pki, audit, allow_remote_tcp;
    lists listen);
fill_from!(StatSettings: options pki; lists blade);
fill_from!(ControlSettings:
    options topology, advertise, store, pki, token_file, insecure, audit;
    lists listen, switch);
fill_from!(NodeSettings:
    options control, donate, name, compute_brick, memory_brick, pki, token_file, insecure, persist,
        audit, bandwidth, allow_remote_tcp, drain_timeout, busy_rate, control_rate;
    lists listen, advertise);

impl Config {
    /// Fills the unset fields from `weak`.
    pub fn fill_from(&mut self, weak: Config) {
        self.run.fill_from(weak.run);
        self.blade.fill_from(weak.blade);
        self.stat.fill_from(weak.stat);
        self.control.fill_from(weak.control);
        self.node.fill_from(weak.node);
    }

    fn from_file(path: &Path) -> Result<Config, UsageError> {
        let wrong = |why: &dyn fmt::Display| {
            UsageError(format!("the configuration file {}: {why}", path.display()))
        };
        let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
        toml::from_str(&text).map_err(|error| wrong(&error.to_string().trim_end()))
    }

    /// Reads and merges the files, the strongest first.
    pub fn from_files(files: &[PathBuf]) -> Result<Config, UsageError> {
        let mut merged = Config::default();
        for file in files {
            merged.fill_from(Config::from_file(file)?);
        }
        Ok(merged)
    }

    /// Reads the settings of the variables, each through the definition of its flag.
    pub fn from_variables() -> Result<Config, clap::Error> {
        let parsed = |name: &str, rest: &[&str]| {
            let words = ["farpool", name].into_iter().chain(rest.iter().copied());
            Cli::from_arg_matches(&Cli::command().try_get_matches_from(words)?)
        };
        let mut config = Config::default();
        if let Command::Run(args) = parsed("run", &["--", "program"])?.command {
            config.run = args.settings;
        }
        if let Command::Blade(args) = parsed("blade", &[])?.command {
            config.blade = args.settings;
        }
        if let Command::Stat(args) = parsed("stat", &[])?.command {
            config.stat = args.settings;
        }
        if let Command::Control(args) = parsed("control", &[])?.command {
            config.control = args.settings;
        }
        if let Command::Node(args) = parsed("node", &[])?.command {
            config.node = args.settings;
        }
        Ok(config)
    }
}

/// Returns the files to read, the strongest first: the chosen one only, or the default ones that
/// exist.
pub fn files(chosen: Option<&Path>) -> Vec<PathBuf> {
    match chosen {
        Some(path) => vec![path.to_path_buf()],
        None => usual_files().into_iter().filter(|path| path.exists()).collect(),
    }
}

/// Returns the default files, the strongest first.
pub fn usual_files() -> Vec<PathBuf> {
    let variable =
        |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")));
    home.map(|home| home.join(USER_FILE)).into_iter().chain([PathBuf::from(SYSTEM_FILE)]).collect()
}
