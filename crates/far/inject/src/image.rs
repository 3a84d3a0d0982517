//! An immutable image in memory, from which sidecars are mapped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

use crate::elf::{self, ElfError, Layout};
use crate::error::InjectError;

/// A static position-independent executable, ready to be injected any number of times. All sidecars
/// share one copy of the text in memory.
#[derive(Debug)]
pub struct Image {
    file: OwnedFd,
    layout: Layout,
}

/// The page size of this machine.
pub(crate) fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

impl Image {
    /// Reads an ELF file and keeps it in a sealed memory file.
    pub fn new(elf: &[u8]) -> Result<Self, InjectError> {
        let layout = elf::parse(elf, page_bytes())?;
        let file = keep(elf).map_err(|error| ElfError::Memory(error.to_string()))?;
        Ok(Self { file, layout })
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Uses MFD_EXEC: with vm.memfd_noexec=1 a machine would refuse to map text otherwise. Kernels
/// before 6.3 do not know the flag and need none.
fn create() -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create("farpool-sidecar", flags | MemfdFlags::EXEC) {
        Err(Errno::INVAL) => memfd_create("farpool-sidecar", flags),
        made => made,
    }
}

fn keep(elf: &[u8]) -> Result<OwnedFd, Errno> {
    let file = create()?;
    let mut rest = elf;
    while !rest.is_empty() {
        let done = rustix::io::write(&file, rest)?;
        rest = &rest[done..];
    }
    fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(file)
}
