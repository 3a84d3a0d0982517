//! The file with the rack key: read at the start and whenever it has changed.
//!
//! Invariants: a file that other users could read or replace is not used; what is wrong with a
//! changed file is told, and the keys that were read before stay in use.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use farpool_acms::{RACK_KEY_BYTES, RackKey, RackKeys};

/// Most bytes of the file: two keys of 44 characters, and lines that say whose they are.
const FILE_BYTES_MAX: u64 = 4_096;
/// Bits of a file's mode that let users other than its owner in.
const OTHERS: u32 = 0o077;

/// Why the file with the rack key is not used.
#[derive(Debug, thiserror::Error)]
pub enum RackKeyError {
    /// There is no such file, or the system refuses it.
    #[error("the rack key file {path} cannot be read")]
    Read {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Its mode lets other users in.
    #[error("other users may open the rack key file {path} (mode {mode:03o}): chmod 600 {path}")]
    Exposed {
        /// The path.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// Its owner could replace it.
    #[error(
        "the rack key file {path} belongs to user {owner}, who could replace it: \
         give it to root or to the user of this node (chown)"
    )]
    Owner {
        /// The path.
        path: PathBuf,
        /// The owner's user id.
        owner: u32,
    },
    /// It does not hold keys.
    #[error(
        "the rack key file {path} must have one or two keys, each 32 random bytes in base64 on a \
         line of its own; make one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    )]
    Content {
        /// The path.
        path: PathBuf,
    },
}

/// Reads the keys: the first signs, and a second one is accepted, too.
///
/// # Errors
/// See [`RackKeyError`].
pub(crate) fn read(path: &Path) -> Result<RackKeys, RackKeyError> {
    let failed = |source| RackKeyError::Read { path: path.to_owned(), source };
    let content = || RackKeyError::Content { path: path.to_owned() };
    // Before it is opened, which waits for a writer of a pipe.
    if !path.metadata().map_err(failed)?.is_file() {
        return Err(content());
    }
    let file = File::open(path).map_err(failed)?;
    let seen = file.metadata().map_err(failed)?;
    let (mode, owner) = (seen.mode() & 0o777, seen.uid());
    if mode & OTHERS != 0 {
        return Err(RackKeyError::Exposed { path: path.to_owned(), mode });
    }
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(RackKeyError::Owner { path: path.to_owned(), owner });
    }
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut text).map_err(failed)?;
    keys_of(&text).ok_or_else(content)
}

/// The keys of a file's text. Empty lines and those that begin with `#` say nothing.
fn keys_of(text: &[u8]) -> Option<RackKeys> {
    let text = std::str::from_utf8(text).ok()?;
    let lines = text.lines().map(str::trim).filter(|it| !it.is_empty() && !it.starts_with('#'));
    let keys: Option<Vec<RackKey>> = lines.map(key_of).collect();
    match keys?.as_slice() {
        [only] => Some(RackKeys::of(only.clone(), None)),
        [first, second] => Some(RackKeys::of(first.clone(), Some(second.clone()))),
        _ => None,
    }
}

fn key_of(line: &str) -> Option<RackKey> {
    let secret: [u8; RACK_KEY_BYTES] = STANDARD.decode(line).ok()?.try_into().ok()?;
    // A key of one byte again and again was not drawn at random.
    let is_random = secret.iter().any(|byte| *byte != secret[0]);
    is_random.then(|| RackKey::new(secret))
}

/// The keys' numbers, for people.
pub(crate) fn numbers(keys: &RackKeys) -> Vec<String> {
    keys.numbers().map(|number| format!("{number:08x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn line(byte: u8) -> String {
        let mut secret = [byte; RACK_KEY_BYTES];
        secret[0] ^= 1;
        STANDARD.encode(secret)
    }

    fn read_mode(text: &str, mode: u32) -> Result<RackKeys, RackKeyError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rack.key");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        read(&path)
    }

    #[test]
    fn one_or_two_keys_are_read() {
        let one = read_mode(&format!("{}\n", line(1)), 0o600).unwrap();
        assert_eq!(one.numbers().count(), 1);
        let text = format!("# since March\n{}\n\n# before\n  {}  \n", line(2), line(1));
        let two = read_mode(&text, 0o400).unwrap();
        assert_eq!(two.numbers().skip(1).collect::<Vec<_>>(), one.numbers().collect::<Vec<_>>());
    }

    #[test]
    fn a_file_that_others_may_open_is_refused_with_the_remedy() {
        for mode in [0o644, 0o640, 0o620, 0o604, 0o601] {
            let error = read_mode(&line(1), mode).unwrap_err().to_string();
            assert!(error.contains("rack.key") && error.contains("chmod 600"), "{error}");
            assert!(error.contains(&format!("{mode:o}")), "{error}");
        }
    }

    #[test]
    fn what_is_not_a_key_is_refused_and_never_shown() {
        let short = STANDARD.encode([1, 2, 3]);
        let same = STANDARD.encode([7; RACK_KEY_BYTES]);
        let three = format!("{}\n{}\n{}\n", line(1), line(2), line(3));
        let long = "A".repeat(9_000);
        for text in ["", "# none\n", "hunter2", &short, &same, &three, &long] {
            let error = read_mode(text, 0o600).unwrap_err();
            assert!(matches!(error, RackKeyError::Content { .. }), "{error}");
            assert!(!format!("{error:?}{error}").contains("hunter2"), "{error}");
            assert!(error.to_string().contains("/dev/urandom"), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(read(folder.path()), Err(RackKeyError::Content { .. })));
        let none = read(&folder.path().join("none"));
        assert!(matches!(none, Err(RackKeyError::Read { .. })));
    }
}
