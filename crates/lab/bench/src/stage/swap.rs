//! The kernel's own swap, set up for one program: a file on this machine's disk, or zram.
//!
//! It has the highest priority, so that swap the machine already has is not used in its place, and
//! is taken down when dropped, whatever happened.

use super::lacking;
use crate::BenchError;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const PRIORITY: &str = "32767";
const FILE_NAME: &str = "kernel.swap";
const NOTE_NAME: &str = "kernel.zram";
const ZRAM_CONTROL: &str = "/sys/class/zram-control";

/// Swap in use.
#[derive(Debug)]
pub(super) struct Swap {
    device: PathBuf,
    zram: Option<Zram>,
}

/// A zram device.
#[derive(Debug)]
struct Zram {
    number: u32,
    /// File that records that the device is this stage's, in case its process is killed; see
    /// [`remove_leftovers`].
    note: PathBuf,
}

impl Swap {
    /// Sets up a swap file of `bytes` in `folder`.
    pub(super) fn file(folder: &Path, bytes: u64) -> Result<Self, BenchError> {
        let swap = Self { device: folder.join(FILE_NAME), zram: None };
        allocate(&swap.device, bytes).map_err(|error| refused(&swap.device, &error))?;
        swap.activate()?;
        Ok(swap)
    }

    /// Sets up a zram device of its own that takes up to `bytes`, and a note about it in `folder`.
    pub(super) fn zram(folder: &Path, bytes: u64) -> Result<Self, BenchError> {
        let control = Path::new(ZRAM_CONTROL);
        if !control.exists() {
            return Err(lacking("this kernel has no zram (modprobe zram)"));
        }
        let added = fs::read_to_string(control.join("hot_add"));
        let added = added.map_err(|error| refused(control, &error))?;
        let number: u32 = added
            .trim()
            .parse()
            .map_err(|_| lacking(format!("zram names its device {:?}", added.trim())))?;
        let swap = Self::of_zram(folder, number);
        let note = folder.join(NOTE_NAME);
        fs::write(&note, format!("{number} {}", boot_id()))
            .map_err(|error| refused(&note, &error))?;
        let size = zram_folder(number).join("disksize");
        fs::write(&size, bytes.to_string()).map_err(|error| refused(&size, &error))?;
        swap.activate()?;
        Ok(swap)
    }

    fn of_zram(folder: &Path, number: u32) -> Self {
        let zram = Zram { number, note: folder.join(NOTE_NAME) };
        Self { device: PathBuf::from(format!("/dev/zram{number}")), zram: Some(zram) }
    }

    fn activate(&self) -> Result<(), BenchError> {
        call(Command::new("mkswap").arg("--quiet").arg(&self.device))?;
        call(Command::new("swapon").args(["--priority", PRIORITY]).arg(&self.device))
    }

    /// Returns the most memory in bytes that zram itself has taken for what it holds. Returns None
    /// for a file.
    pub(super) fn memory_bytes(&self) -> Option<u64> {
        let stat =
            fs::read_to_string(zram_folder(self.zram.as_ref()?.number).join("mm_stat")).ok()?;
        stat.split_whitespace().nth(4)?.parse().ok()
    }

    fn remove(&self) -> io::Result<()> {
        let Some(Zram { number, note }) = &self.zram else {
            return fs::remove_file(&self.device);
        };
        fs::write(zram_folder(*number).join("reset"), "1")?;
        fs::write(format!("{ZRAM_CONTROL}/hot_remove"), number.to_string())?;
        fs::remove_file(note)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let device = self.device.display();
        let swapoff = || call(Command::new("swapoff").arg(&self.device));
        if let Some(Err(error)) = is_active(&self.device).then(swapoff) {
            eprintln!("farpool: {error}; run: swapoff {device}");
            return;
        }
        match self.remove() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                eprintln!("farpool: {device} cannot be removed: {error}");
            }
            _ => {}
        }
    }
}

/// Deactivates and removes the swap that a killed process had set up: the file in `folder`, and the
/// zram device named by a note in `folder`.
pub(super) fn remove_leftovers(folder: &Path) {
    drop(Swap { device: folder.join(FILE_NAME), zram: None });
    let note = fs::read_to_string(folder.join(NOTE_NAME)).unwrap_or_default();
    // After a reboot the number may be another process's.
    let number = note.split_once(' ').filter(|(_, boot)| *boot == boot_id());
    if let Some(number) = number.and_then(|(number, _)| number.parse().ok()) {
        drop(Swap::of_zram(folder, number));
    }
}

/// Returns the identifier of the current boot.
fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// Creates a file with all its blocks allocated, as swap needs it.
fn allocate(path: &Path, bytes: u64) -> io::Result<()> {
    let file = File::options().create(true).truncate(true).write(true).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
    Ok(())
}

fn zram_folder(number: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/zram{number}"))
}

fn refused(path: &Path, error: &io::Error) -> BenchError {
    lacking(format!("no swap can be set up here ({}: {error})", path.display()))
}

/// Runs a small system program. If it fails, its stderr is the reason.
fn call(command: &mut Command) -> Result<(), BenchError> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| lacking(format!("{name}: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(lacking(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

fn is_active(device: &Path) -> bool {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let device = device.to_string_lossy();
    swaps.lines().any(|line| line.split_whitespace().next() == Some(&device))
}
