//! The provenance of an answer: enough to reproduce it, and to check that the inputs are the same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::ReportError;

/// One input file, or one data set that ships with the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Input {
    /// The path as the user wrote it.
    pub path: String,
    pub bytes: u64,
    /// In hexadecimal.
    pub sha256: String,
}

impl Input {
    /// Hashes a file, reading it once; memory use does not depend on its size.
    pub fn of_file(path: &Path) -> Result<Input, ReportError> {
        let hashed = File::open(path).and_then(hash);
        let unreadable = |source| ReportError::Unreadable { path: path.to_owned(), source };
        let (bytes, sha256) = hashed.map_err(unreadable)?;
        Ok(Input { path: path.display().to_string(), bytes, sha256 })
    }

    /// Hashes data in memory, under the name that the user knows.
    pub fn of_bytes(name: impl Into<String>, bytes: &[u8]) -> Input {
        let sha256 = hexadecimal(&Sha256::digest(bytes));
        Input { path: name.into(), bytes: bytes.len() as u64, sha256 }
    }
}

fn hash(mut from: impl Read) -> io::Result<(u64, String)> {
    let (mut hasher, mut bytes) = (Sha256::new(), 0);
    let mut block = vec![0; 1 << 16];
    loop {
        match from.read(&mut block) {
            Ok(0) => return Ok((bytes, hexadecimal(&hasher.finalize()))),
            Ok(read) => {
                hasher.update(&block[..read]);
                bytes += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Tool, command, parameters and inputs of an answer. No time and no machine: the same question
/// gives the same bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Provenance {
    pub tool: String,
    pub version: String,
    /// The arguments of `farpool` that reproduce this answer, without those on how it is printed.
    pub command: Vec<String>,
    /// Every setting with its value, including defaults.
    pub parameters: BTreeMap<String, serde_json::Value>,
    pub inputs: Vec<Input>,
}

impl Provenance {
    pub fn new<Word: Into<String>>(
        version: impl Into<String>,
        command: impl IntoIterator<Item = Word>,
    ) -> Provenance {
        Provenance {
            tool: "farpool".into(),
            version: version.into(),
            command: command.into_iter().map(Into::into).collect(),
            parameters: BTreeMap::new(),
            inputs: Vec::new(),
        }
    }

    /// Adds a setting. If it cannot be written as JSON, it becomes null.
    #[must_use]
    pub fn parameter(mut self, name: impl Into<String>, value: impl Serialize) -> Provenance {
        let value = serde_json::to_value(value).unwrap_or(serde_json::Value::Null);
        self.parameters.insert(name.into(), value);
        self
    }

    /// Adds every field of a structure as a setting of its own.
    #[must_use]
    pub fn parameters(mut self, settings: impl Serialize) -> Provenance {
        if let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(settings) {
            self.parameters.extend(fields);
        }
        self
    }

    /// Adds an input.
    #[must_use]
    pub fn input(mut self, input: Input) -> Provenance {
        self.inputs.push(input);
        self
    }

    /// Returns the command as a person would type it.
    pub fn command_line(&self) -> String {
        let words = self.command.iter().map(|word| quoted(word));
        std::iter::once(self.tool.clone()).chain(words).collect::<Vec<_>>().join(" ")
    }
}

/// Quotes a word for a POSIX shell.
fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:,=%+@".contains(&byte);
    match !word.is_empty() && word.bytes().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The digest of FIPS 180-2's example "abc".
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn an_input_has_its_size_and_its_hash() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("abc");
        std::fs::write(&path, "abc").expect("written");
        let input = Input::of_file(&path).expect("readable");
        assert_eq!((input.bytes, input.sha256.as_str()), (3, ABC));
        assert_eq!(Input::of_bytes("abc", b"abc").sha256, ABC);
        let missing = Input::of_file(&folder.path().join("none")).expect_err("no such file");
        assert!(missing.to_string().contains("none"));
    }

    #[test]
    fn settings_are_noted_one_by_one_or_all_at_once() {
        let settings = serde_json::json!({"group": 16, "seed": 42});
        let asked = Provenance::new("1", ["plan"]).parameters(settings).parameter("seed", 7);
        let noted: Vec<(&str, String)> = asked
            .parameters
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_string()))
            .collect();
        assert_eq!(noted, [("group", "16".into()), ("seed", "7".into())]);
    }

    #[test]
    fn the_command_line_can_be_pasted_into_a_shell() {
        let asked = Provenance::new("1", ["plan", "pool", "my vms.csv", "it's"]);
        assert_eq!(asked.command_line(), r"farpool plan pool 'my vms.csv' 'it'\''s'");
    }
}
