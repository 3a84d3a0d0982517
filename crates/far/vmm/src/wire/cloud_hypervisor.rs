//! Cloud Hypervisor's migration protocol (vm-migration/src/protocol.rs there), as far as the
//! hand-off of a snapshot and a restore with page faults need it.
//!
//! A request is 16 bytes and as many of payload as they say, a response likewise. All numbers are
//! little-endian.

use std::fmt;

use farpool_units::{PAGE_BYTES_U64, exactly};
use serde::Deserialize;

/// Bytes of a request or response without its payload.
pub const HEAD_BYTES: usize = 16;
/// Bytes of a request's payload that names a page: a guest's address and a length.
pub const RANGE_BYTES: usize = 16;
/// Bytes of the payload that names a memory slot.
pub const SLOT_BYTES: usize = 4;
/// Longest configuration. One has some ten KiB, of which most names devices; a longer one is
/// refused before it is read.
pub const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Longest state of a guest's processors and devices. One has about 100 KiB a processor; a longer
/// one is refused before it is read.
pub const STATE_BYTES_MAX: u64 = 256 << 20;
/// Most mappings of guest memory. A guest has one to three a zone; a configuration with more is
/// refused.
pub const MAPPINGS_MAX: usize = 256;
/// Longest part of a guest's memory that one fault may ask for: a huge page. A longer one is
/// refused.
pub const FAULT_BYTES_MAX: u64 = 2 << 20;
/// The only version of the protocol there is.
pub const VERSION: u16 = 0;
/// The first two bytes of the connection that carries page faults.
pub const FAULT_ROLE: [u8; 2] = 2_u16.to_le_bytes();

/// Why something is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MigrationError {
    #[error(
        "what connected does not speak Cloud Hypervisor's migration protocol: its command is \
         {number}; is this socket in the destination_url of send-migration?"
    )]
    Command { number: u16 },
    #[error(
        "it speaks version {version} of the migration protocol, and only version {VERSION} is \
         known here"
    )]
    Version { version: u16 },
    #[error("{command} has a payload of {given} bytes, and must have {expected}")]
    Length { command: Command, given: u64, expected: u64 },
    #[error("{command} has a payload of {given} bytes, and more than {limit} are not taken")]
    Long { command: Command, given: u64, limit: u64 },
    #[error(
        "the guest's memory is sent through the socket: hand the snapshot off on this host, with \
         local=on"
    )]
    NotLocal,
    #[error("{command} comes where {expected} must come")]
    Order { command: Command, expected: &'static str },
    #[error("Cloud Hypervisor refuses {command}; its log says why")]
    Refused { command: Command },
    #[error("what listens does not speak Cloud Hypervisor's migration protocol: status {number}")]
    Status { number: u16 },
    #[error("the answer to {command} has a payload of {given} bytes, and must have none")]
    AnswerLength { command: Command, given: u64 },
    #[error("the configuration is not as Cloud Hypervisor writes it: {reason}")]
    Config { reason: String },
    #[error(
        "memory slot {slot} is virtio-mem, of which it is not known what is plugged in: take the \
         snapshot of a guest without hotplug_method=virtio-mem"
    )]
    VirtioMem { slot: u32 },
    #[error(
        "the configuration names {given} mappings of memory, and must name 1 to {MAPPINGS_MAX}"
    )]
    Count { given: usize },
    #[error("memory slot {slot}: its {what} {value:#x} is no multiple of a page of 4096 bytes")]
    Unaligned { slot: u32, what: &'static str, value: u64 },
    #[error("memory slot {slot} is empty, or ends beyond all addresses")]
    Extent { slot: u32 },
    #[error("the configuration names memory slot {slot} twice")]
    Twice { slot: u32 },
    #[error("memory slots {one} and {other} lie on each other in the guest")]
    Overlap { one: u32, other: u32 },
    #[error("the guest's memory has more than {limit} pages, which one snapshot can hold")]
    Large { limit: u32 },
    #[error("memory slot {slot} is in the configuration, and its memory was not handed over")]
    NoMemory { slot: u32 },
    #[error("memory slot {slot} was handed over, and is not in the configuration")]
    Stray { slot: u32 },
    #[error("a fault asks for {length} bytes at {gpa:#x}, which is not memory of this guest")]
    Fault { gpa: u64, length: u64 },
}

/// What is asked of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Begins; the version is in the head.
    Start = 1,
    /// The VM's configuration as JSON.
    Config = 2,
    /// The state of processors and devices.
    State = 3,
    /// The guest's memory through the socket.
    Memory = 4,
    /// The end: the guest runs on at the other side.
    Complete = 5,
    /// The sender gives up.
    Abandon = 6,
    /// One memory slot as a file that is memory.
    MemoryFd = 7,
    /// The end: the guest is there and stands still.
    CompletePaused = 8,
    /// A part of the guest's memory is needed.
    PageFault = 9,
}

impl Command {
    const ALL: [Command; 9] = [
        Command::Start,
        Command::Config,
        Command::State,
        Command::Memory,
        Command::Complete,
        Command::Abandon,
        Command::MemoryFd,
        Command::CompletePaused,
        Command::PageFault,
    ];

    /// The most that its payload may have, and whether it must have just that.
    fn payload(self) -> (u64, bool) {
        match self {
            Command::Config => (CONFIG_BYTES_MAX, false),
            Command::State => (STATE_BYTES_MAX, false),
            Command::Memory => (u64::MAX, false),
            Command::MemoryFd => (SLOT_BYTES as u64, true),
            Command::PageFault => (RANGE_BYTES as u64, true),
            Command::Start | Command::Complete | Command::Abandon | Command::CompletePaused => {
                (0, true)
            }
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, to)
    }
}

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub command: Command,
    /// Bytes of its payload, which follows.
    pub length: u64,
}

impl Request {
    /// Reads a head. What follows the command there counts in [`Command::Start`] alone, as in Cloud
    /// Hypervisor.
    ///
    /// # Errors
    /// The command, its version or the length of its payload is none that is known.
    pub fn decode(head: &[u8; HEAD_BYTES]) -> Result<Request, MigrationError> {
        let [a, b, c, d, .., _, _, _, _, _, _, _, _] = *head;
        let number = u16::from_le_bytes([a, b]);
        let command = Command::ALL.into_iter().find(|it| *it as u16 == number);
        let command = command.ok_or(MigrationError::Command { number })?;
        let version = u16::from_le_bytes([c, d]);
        if command == Command::Start && version != VERSION {
            return Err(MigrationError::Version { version });
        }
        let length = length_of(head);
        match command.payload() {
            (expected, true) if length != expected => {
                Err(MigrationError::Length { command, given: length, expected })
            }
            (limit, _) if length > limit => {
                Err(MigrationError::Long { command, given: length, limit })
            }
            _ => Ok(Request { command, length }),
        }
    }

    /// The head's bytes.
    pub fn encode(self) -> [u8; HEAD_BYTES] {
        // The version is 0, like all that is reserved.
        const _: () = assert!(VERSION == 0);
        head(self.command as u16, self.length)
    }
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response {
    /// It is done; so many bytes follow.
    Ok { length: u64 },
    /// It is not.
    Error,
}

impl Response {
    /// It is done, and nothing follows.
    pub const DONE: Response = Response::Ok { length: 0 };

    /// Reads a head.
    ///
    /// # Errors
    /// The status is none that is known.
    pub fn decode(head: &[u8; HEAD_BYTES]) -> Result<Response, MigrationError> {
        match u16::from_le_bytes([head[0], head[1]]) {
            1 => Ok(Response::Ok { length: length_of(head) }),
            2 => Ok(Response::Error),
            number => Err(MigrationError::Status { number }),
        }
    }

    /// The head's bytes.
    pub fn encode(self) -> [u8; HEAD_BYTES] {
        match self {
            Response::Ok { length } => head(1, length),
            Response::Error => head(2, 0),
        }
    }

    /// Checks that a command was done, and that nothing follows.
    ///
    /// # Errors
    /// It was not, or something follows.
    pub fn require_done(self, command: Command) -> Result<(), MigrationError> {
        match self {
            Response::Ok { length: 0 } => Ok(()),
            Response::Ok { length } => Err(MigrationError::AnswerLength { command, given: length }),
            Response::Error => Err(MigrationError::Refused { command }),
        }
    }
}

fn head(number: u16, length: u64) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..2].copy_from_slice(&number.to_le_bytes());
    head[8..].copy_from_slice(&length.to_le_bytes());
    head
}

fn length_of(head: &[u8; HEAD_BYTES]) -> u64 {
    let [.., a, b, c, d, e, f, g, h] = *head;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// A part of a guest's memory that a fault asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Its first address in the guest.
    pub gpa: u64,
    /// Its length in bytes.
    pub length: u64,
}

impl Range {
    /// Reads the payload of [`Command::PageFault`]. Whether there is such memory is for
    /// [`Memory::locate`] to say.
    pub fn decode(bytes: &[u8; RANGE_BYTES]) -> Range {
        let [a, b, c, d, e, f, g, h, ..] = *bytes;
        Range { gpa: u64::from_le_bytes([a, b, c, d, e, f, g, h]), length: length_of(bytes) }
    }

    /// The payload's bytes.
    pub fn encode(self) -> [u8; RANGE_BYTES] {
        let mut bytes = [0; RANGE_BYTES];
        bytes[..8].copy_from_slice(&self.gpa.to_le_bytes());
        bytes[8..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }
}

/// One mapping of guest memory, as the configuration has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Mapping {
    /// The number under which its memory is handed over.
    pub slot: u32,
    /// Its first address in the guest.
    pub gpa: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Where it begins in its file.
    pub file_offset: u64,
    #[serde(default)]
    virtio_mem: bool,
}

impl Mapping {
    /// Its pages.
    pub fn pages(&self) -> u32 {
        // Checked: all pages together are counted by a u32.
        exactly(self.size / PAGE_BYTES_U64)
    }
}

#[derive(Deserialize)]
struct Config {
    memory_manager_data: MemoryManager,
}

#[derive(Deserialize)]
struct MemoryManager {
    guest_ram_mappings: Vec<Mapping>,
}

/// A guest's memory by its configuration, checked: its mappings are ordered by address, do not
/// overlap, and each has a slot of its own. Its image has one mapping after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    mappings: Vec<Mapping>,
    pages: u32,
}

/// Where a part of a guest's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub slot: u32,
    /// Its first byte in the slot's file.
    pub file_offset: u64,
    /// Its first page in the image.
    pub first_page: u32,
    pub pages: u32,
}

impl Memory {
    /// Reads the mappings of a configuration; all else in it is the business of Cloud Hypervisor.
    ///
    /// # Errors
    /// The first rule that they break.
    pub fn of_config(json: &[u8]) -> Result<Memory, MigrationError> {
        let config: Config = serde_json::from_slice(json)
            .map_err(|error| MigrationError::Config { reason: error.to_string() })?;
        let mut mappings = config.memory_manager_data.guest_ram_mappings;
        if !(1..=MAPPINGS_MAX).contains(&mappings.len()) {
            return Err(MigrationError::Count { given: mappings.len() });
        }
        mappings.iter().try_for_each(check)?;
        mappings.sort_unstable_by_key(|it| it.slot);
        if let Some(pair) = mappings.windows(2).find(|pair| pair[0].slot == pair[1].slot) {
            return Err(MigrationError::Twice { slot: pair[0].slot });
        }
        mappings.sort_unstable_by_key(|it| it.gpa);
        let overlap = mappings.windows(2).find(|pair| pair[0].gpa + pair[0].size > pair[1].gpa);
        if let Some(pair) = overlap {
            return Err(MigrationError::Overlap { one: pair[0].slot, other: pair[1].slot });
        }
        // Mappings that do not overlap have less than 2^64 bytes together.
        let pages = mappings.iter().map(|it| it.size / PAGE_BYTES_U64).sum::<u64>();
        let pages = u32::try_from(pages).map_err(|_| MigrationError::Large { limit: u32::MAX })?;
        Ok(Memory { mappings, pages })
    }

    /// Pages of the guest, and of its image.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// The mappings by address, each with its first page in the image.
    pub fn mappings(&self) -> impl Iterator<Item = (Mapping, u32)> + '_ {
        self.mappings.iter().scan(0, |next, mapping| {
            let first_page = *next;
            *next += mapping.pages();
            Some((*mapping, first_page))
        })
    }

    /// Checks that the memory of just these slots was handed over.
    ///
    /// # Errors
    /// One is missing, or one too many.
    pub fn check_slots(&self, slots: &[u32]) -> Result<(), MigrationError> {
        if let Some(it) = self.mappings.iter().find(|it| !slots.contains(&it.slot)) {
            return Err(MigrationError::NoMemory { slot: it.slot });
        }
        match slots.iter().find(|slot| !self.mappings.iter().any(|it| it.slot == **slot)) {
            Some(slot) => Err(MigrationError::Stray { slot: *slot }),
            None => Ok(()),
        }
    }

    /// Where the memory is that a fault asks for.
    ///
    /// # Errors
    /// It is not whole pages within one mapping, or more than [`FAULT_BYTES_MAX`].
    pub fn locate(&self, range: Range) -> Result<Place, MigrationError> {
        let Range { gpa, length } = range;
        let wrong = || MigrationError::Fault { gpa, length };
        let is_whole = gpa.is_multiple_of(PAGE_BYTES_U64) && length.is_multiple_of(PAGE_BYTES_U64);
        if !is_whole || !(1..=FAULT_BYTES_MAX).contains(&length) {
            return Err(wrong());
        }
        let within = |it: &Mapping| {
            let offset = gpa.checked_sub(it.gpa)?;
            (offset.checked_add(length)? <= it.size).then_some(offset)
        };
        let found = self.mappings().find_map(|(it, first)| Some((it, first, within(&it)?)));
        let (mapping, first, offset) = found.ok_or_else(wrong)?;
        Ok(Place {
            slot: mapping.slot,
            file_offset: mapping.file_offset + offset,
            first_page: first + exactly::<u32, _>(offset / PAGE_BYTES_U64),
            pages: exactly(length / PAGE_BYTES_U64),
        })
    }
}

fn check(mapping: &Mapping) -> Result<(), MigrationError> {
    let Mapping { slot, gpa, size, file_offset, virtio_mem } = *mapping;
    if virtio_mem {
        return Err(MigrationError::VirtioMem { slot });
    }
    for (what, value) in [("address", gpa), ("size", size), ("offset", file_offset)] {
        if !value.is_multiple_of(PAGE_BYTES_U64) {
            return Err(MigrationError::Unaligned { slot, what, value });
        }
    }
    // A file's offsets are signed.
    let file_end = file_offset.checked_add(size).filter(|end| i64::try_from(*end).is_ok());
    match (gpa.checked_add(size), file_end) {
        (Some(_), Some(_)) if size > 0 => Ok(()),
        _ => Err(MigrationError::Extent { slot }),
    }
}

#[cfg(test)]
mod tests;
