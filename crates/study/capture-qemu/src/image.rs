// SPDX-License-Identifier: GPL-2.0-or-later
//! The program that this QEMU runs, and how QEMU was called for it. Read once from
//! /proc/self/cmdline, before the program can write there.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// How QEMU was called: its own words, then `-0 NAME FILE` and the program's arguments.
#[derive(Debug)]
pub struct Image {
    /// QEMU's name and options, before `-0`.
    pub qemu: Vec<OsString>,
    /// The program's file, which /proc/self/exe is for the program.
    pub file: PathBuf,
    /// The program's name and arguments.
    words: Vec<OsString>,
}

/// QEMU's option for the program's argument 0; the recorder always gives it.
pub const NAME_OPTION: &str = "-0";
/// QEMU's option for a plugin's file and, after commas, its settings.
const PLUGIN_OPTION: &str = "-plugin";
/// The longest description of a program, in bytes.
const TEXT_BYTES_MAX: usize = 240;

impl Image {
    /// Reads how this process was called.
    ///
    /// # Errors
    /// It was not called as the recorder does it.
    pub fn here() -> Result<Self, String> {
        let path = "/proc/self/cmdline";
        let text = std::fs::read(path).map_err(|error| format!("{path}: {error}"))?;
        let text = text.strip_suffix(b"\0").unwrap_or(&text);
        let all: Vec<OsString> =
            text.split(|byte| *byte == 0).map(|word| OsStr::from_bytes(word).into()).collect();
        Self::of(&all).ok_or_else(|| format!("{path}: QEMU was called without -0 NAME FILE"))
    }

    /// Divides QEMU's words. None if there is no `-0 NAME FILE` in them.
    #[must_use]
    pub fn of(all: &[OsString]) -> Option<Self> {
        let at = all.iter().position(|word| word == NAME_OPTION)?;
        let (name, file) = (all.get(at + 1)?, Path::new(all.get(at + 2)?));
        Some(Self {
            qemu: all[..at].to_vec(),
            file: file.canonicalize().unwrap_or_else(|_| file.to_owned()),
            words: std::iter::once(name).chain(&all[at + 3..]).cloned().collect(),
        })
    }

    /// True if the program is called `name`: its file, or its argument 0, without folders.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        let called = self.words.first().and_then(|word| Path::new(word).file_name());
        [self.file.file_name(), called].contains(&Some(OsStr::new(name)))
    }

    /// The plugin's file, as QEMU was given it.
    #[must_use]
    pub fn plugin(&self) -> Option<PathBuf> {
        let given = self.qemu.iter().skip_while(|word| *word != PLUGIN_OPTION).nth(1)?;
        let file = given.as_bytes().split(|byte| *byte == b',').next()?;
        Some(PathBuf::from(OsStr::from_bytes(file)))
    }

    /// Describes the program for people: its name and as many arguments as have room.
    #[must_use]
    pub fn text(&self) -> String {
        let words: Vec<_> = self.words.iter().map(|word| word.to_string_lossy()).collect();
        let mut text = words.join(" ");
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        text
    }
}
