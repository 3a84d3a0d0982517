// SPDX-License-Identifier: GPL-2.0-or-later
//! The settings of a capture, from QEMU's command line.

use crate::cache::Cache;

/// What is recorded, and through which filter; 0 = no such level, no such filter.
#[derive(Debug, Default, Clone)]
pub struct Settings {
    /// The capture file.
    pub ring: String,
    /// Capacity and ways of each thread's first level.
    pub l1_bytes: u64,
    pub l1_ways: usize,
    /// Capacity and ways of the level that all threads share.
    pub llc_bytes: u64,
    pub llc_ways: usize,
    /// Record pages, each once in this many accesses of a thread; the caches are not used then.
    pub page_window: u64,
    /// Follow forks and `exec`.
    pub has_children: bool,
    /// Of the processes that are followed, record those of this program only.
    pub only: Option<String>,
}

impl Settings {
    /// Parses `NAME=VALUE` arguments.
    ///
    /// # Errors
    /// What is wrong with one, for people.
    pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut settings = Self::default();
        for argument in arguments {
            let (name, value) =
                argument.split_once('=').ok_or_else(|| format!("{argument}: not NAME=VALUE"))?;
            let no_number = || format!("{argument}: not a number");
            let number = || value.parse::<u64>().map_err(|_| no_number());
            let ways = || value.parse::<usize>().map_err(|_| no_number());
            match name {
                "ring" => value.clone_into(&mut settings.ring),
                "l1" => settings.l1_bytes = number()?,
                "l1ways" => settings.l1_ways = ways()?,
                "llc" => settings.llc_bytes = number()?,
                "llcways" => settings.llc_ways = ways()?,
                "pages" => settings.page_window = number()?,
                "children" => settings.has_children = number()? != 0,
                "only" => settings.only = Some(value.to_owned()),
                _ => return Err(format!("{argument}: unknown")),
            }
        }
        Ok(settings)
    }

    /// Creates a thread's first level, if there is one.
    ///
    /// # Errors
    /// The geometry is invalid.
    pub fn l1(&self) -> Result<Option<Cache>, String> {
        level(self.l1_bytes, self.l1_ways)
    }

    /// Creates the last level, if there is one.
    ///
    /// # Errors
    /// The geometry is invalid.
    pub fn llc(&self) -> Result<Option<Cache>, String> {
        level(self.llc_bytes, self.llc_ways)
    }
}

fn level(bytes: u64, ways: usize) -> Result<Option<Cache>, String> {
    if bytes == 0 {
        return Ok(None);
    }
    let cache = Cache::new(bytes, ways);
    cache.map(Some).ok_or_else(|| format!("no cache of {bytes} bytes has {ways} ways"))
}
