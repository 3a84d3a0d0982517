//! The records: what every Debian or Ubuntu machine has a lot of, read once and kept in a file.
//!
//! `package:NAME` is a paragraph of the package index (`apt-cache dumpavail`, or what dpkg knows
//! is installed); `file:PATH#N` is the Nth KiB of a file under /usr, headed by its size and time.
//! The file is a plain sequence of (key length, value length, key, value), lengths u32
//! little-endian: redis is loaded from it and the Python job reads it, so both see the same bytes
//! in every row.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use farpool_units::exactly;
use twox_hash::XxHash3_64;

use crate::error::{During, Error};

/// Bytes of a file in one record.
const BLOCK_BYTES: u64 = 1024;
/// Longest paragraph of the package index that is kept whole.
const PARAGRAPH_LIMIT_BYTES: usize = 16 * 1024;
/// Most blocks taken of one file, so that one huge file is not all there is.
const BLOCKS_PER_FILE_LIMIT: u64 = 256;
/// Most files looked at: bounds the time on machines with millions.
const FILES_LIMIT: usize = 400_000;
/// Where the files come from.
const FILES_FOLDER: &str = "/usr";

/// What the client needs to know about a record to request it and to check the answer.
#[derive(Clone, Debug)]
pub struct Known {
    pub key: Vec<u8>,
    pub value_bytes: u32,
    pub value_hash: u64,
}

/// The records' file with the client's knowledge of it.
#[derive(Debug)]
pub struct Records {
    pub path: PathBuf,
    pub known: Vec<Known>,
    pub packages: usize,
    pub values_bytes: u64,
}

/// Collects records until their values fill `target_bytes`, or there are no more.
pub fn collect(path: PathBuf, target_bytes: u64) -> Result<Records, Error> {
    let file = File::create(&path).map_err(|error| Error::at("creating", &path, error))?;
    let mut writer = Writer {
        out: BufWriter::with_capacity(1 << 20, file),
        records: Records { path: path.clone(), known: Vec::new(), packages: 0, values_bytes: 0 },
        target_bytes: target_bytes / 2,
    };
    let written = "writing the records";
    writer.packages().during(written)?;
    writer.target_bytes = target_bytes;
    writer.files().during(written)?;
    writer.out.flush().during(written)?;
    match writer.records.known.is_empty() {
        true => Err(Error::Unavailable("neither a package index nor files under /usr".into())),
        false => Ok(writer.records),
    }
}

struct Writer {
    out: BufWriter<File>,
    records: Records,
    target_bytes: u64,
}

impl Writer {
    fn full(&self) -> bool {
        self.records.values_bytes >= self.target_bytes
    }

    fn add(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).map_err(io::Error::other);
        let value_bytes = length(value)?;
        self.out.write_all(&length(key)?.to_le_bytes())?;
        self.out.write_all(&value_bytes.to_le_bytes())?;
        self.out.write_all(key)?;
        self.out.write_all(value)?;
        self.records.values_bytes += u64::from(value_bytes);
        let value_hash = XxHash3_64::oneshot(value);
        self.records.known.push(Known { key: key.to_vec(), value_bytes, value_hash });
        Ok(())
    }

    fn packages(&mut self) -> io::Result<()> {
        let text = package_index();
        let mut seen = BTreeSet::new();
        for paragraph in text.split("\n\n") {
            let name = paragraph.trim_start().strip_prefix("Package: ");
            let Some(name) = name.and_then(|rest| rest.lines().next()) else {
                continue;
            };
            if self.full() {
                break;
            }
            if paragraph.len() <= PARAGRAPH_LIMIT_BYTES && seen.insert(name) {
                self.add(format!("package:{name}").as_bytes(), paragraph.trim().as_bytes())?;
            }
        }
        self.records.packages = self.records.known.len();
        Ok(())
    }

    fn files(&mut self) -> io::Result<()> {
        let mut files = Vec::new();
        walk(Path::new(FILES_FOLDER), &mut files);
        let wanted_bytes = self.target_bytes.saturating_sub(self.records.values_bytes);
        let blocks = blocks_per_file(&files, wanted_bytes);
        for (path, metadata) in &files {
            if self.full() {
                break;
            }
            self.file(path, metadata, blocks)?;
        }
        Ok(())
    }

    /// Adds the first `blocks` blocks of a file. Files that cannot be read are left out.
    fn file(&mut self, path: &Path, metadata: &fs::Metadata, blocks: u64) -> io::Result<()> {
        let mut content = Vec::new();
        let opened = File::open(path).map(|file| file.take(blocks * BLOCK_BYTES));
        if opened.and_then(|mut file| file.read_to_end(&mut content)).is_err() {
            return Ok(());
        }
        for (number, block) in content.chunks(exactly(BLOCK_BYTES)).enumerate() {
            let key = format!("file:{}#{number}", path.display());
            let mut value = format!("{} {}\n", metadata.len(), metadata.mtime()).into_bytes();
            value.extend_from_slice(block);
            self.add(key.as_bytes(), &value)?;
        }
        Ok(())
    }
}

/// Returns the index of all packages or the list of those installed, whichever is longer.
fn package_index() -> String {
    let mut apt_cache = Command::new("apt-cache");
    let apt_cache = apt_cache.arg("dumpavail").stdin(Stdio::null()).stderr(Stdio::null());
    let available = apt_cache.output().map(|output| output.stdout).unwrap_or_default();
    let installed = fs::read("/var/lib/dpkg/status").unwrap_or_default();
    let longer = if available.len() > installed.len() { available } else { installed };
    String::from_utf8_lossy(&longer).into_owned()
}

/// Regular files below `folder` in a fixed order; links are not followed.
fn walk(folder: &Path, files: &mut Vec<(PathBuf, fs::Metadata)>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort_unstable();
    for path in paths {
        match fs::symlink_metadata(&path) {
            _ if files.len() >= FILES_LIMIT => return,
            Ok(metadata) if metadata.is_dir() => walk(&path, files),
            Ok(metadata) if metadata.is_file() && metadata.len() > 0 => {
                files.push((path, metadata))
            }
            _ => {}
        }
    }
}

/// The smallest number of blocks per file that fills `wanted_bytes`.
fn blocks_per_file(files: &[(PathBuf, fs::Metadata)], wanted_bytes: u64) -> u64 {
    let bytes_with = |blocks: u64| -> u64 {
        files.iter().map(|(_, metadata)| metadata.len().min(blocks * BLOCK_BYTES)).sum()
    };
    (1..BLOCKS_PER_FILE_LIMIT)
        .find(|&blocks| bytes_with(blocks) >= wanted_bytes)
        .unwrap_or(BLOCKS_PER_FILE_LIMIT)
}

/// Reads the records' file again from the start.
#[derive(Debug)]
pub struct Reader {
    file: BufReader<File>,
}

impl Reader {
    pub fn open(path: &Path) -> Result<Reader, Error> {
        let file = File::open(path).map_err(|error| Error::at("opening", path, error))?;
        Ok(Reader { file: BufReader::with_capacity(1 << 20, file) })
    }

    /// Reads the next key and value into buffers that can be reused. Returns false at the end.
    pub fn next(&mut self, key: &mut Vec<u8>, value: &mut Vec<u8>) -> io::Result<bool> {
        let mut lengths = [0; 8];
        match self.file.read_exact(&mut lengths) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            read => read?,
        }
        let [a, b, c, d, e, f, g, h] = lengths;
        let length = |bytes| usize::try_from(u32::from_le_bytes(bytes)).map_err(io::Error::other);
        key.resize(length([a, b, c, d])?, 0);
        value.resize(length([e, f, g, h])?, 0);
        self.file.read_exact(key)?;
        self.file.read_exact(value)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_collected_reads_back_as_it_is_known() {
        let folder = tempfile::tempdir().expect("a folder for the test");
        let records = collect(folder.path().join("records"), 1 << 20).expect("there are records");
        assert!(records.values_bytes >= 1 << 20, "{} bytes", records.values_bytes);
        let mut reader = Reader::open(&records.path).expect("the file opens");
        let (mut key, mut value) = (Vec::new(), Vec::new());
        for known in &records.known {
            assert!(reader.next(&mut key, &mut value).expect("it reads"));
            assert_eq!((&key, XxHash3_64::oneshot(&value)), (&known.key, known.value_hash));
        }
        assert!(!reader.next(&mut key, &mut value).expect("it ends"));
    }
}
