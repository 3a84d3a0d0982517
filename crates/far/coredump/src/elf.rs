//! The ELF structure of a core file: header, segments, and the table that counts them where the
//! header cannot. Pure.

use farpool_units::{PAGE_BYTES_U64, at_most};
use zerocopy::{Immutable, IntoBytes};

/// Most segments that a header can count; with more it says so, and section 0 has the number.
const MOST_COUNTED: usize = 0xffff;

const TYPE_CORE: u16 = 4;
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_NOTE: u32 = 4;

pub const RIGHT_EXECUTE: u32 = 1;
pub const RIGHT_WRITE: u32 = 2;
pub const RIGHT_READ: u32 = 4;

/// `Elf64_Ehdr`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct Header {
    identity: [u8; 16],
    kind: u16,
    machine: u16,
    version: u32,
    entry: u64,
    segments_at: u64,
    sections_at: u64,
    flags: u32,
    header_bytes: u16,
    segment_bytes: u16,
    segments: u16,
    section_bytes: u16,
    sections: u16,
    names_section: u16,
}

const _: () = assert!(size_of::<Header>() == 64);

/// `Elf64_Phdr`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct Segment {
    kind: u32,
    rights: u32,
    offset: u64,
    address: u64,
    physical: u64,
    file_bytes: u64,
    memory_bytes: u64,
    align: u64,
}

const _: () = assert!(size_of::<Segment>() == 56);

/// `Elf64_Shdr`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct Section {
    name: u32,
    kind: u32,
    flags: u64,
    address: u64,
    offset: u64,
    bytes: u64,
    link: u32,
    info: u32,
    align: u64,
    entry_bytes: u64,
}

const _: () = assert!(size_of::<Section>() == 64);

/// Memory of the process, of which the first `file_bytes` are in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub address: u64,
    pub bytes: u64,
    pub file_bytes: u64,
    pub rights: u32,
}

/// The layout of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The beginning of the file: headers and notes.
    pub start: Vec<u8>,
    /// Offsets of the contents of each load.
    pub offsets: Vec<u64>,
    /// Length of the whole file.
    pub bytes: u64,
}

/// Computes the layout of a core.
pub fn lay_out(notes: &[u8], loads: &[Load]) -> Layout {
    let segments = loads.len() + 1;
    let has_section = segments >= MOST_COUNTED;
    let sections_bytes = if has_section { size_of::<Section>() } else { 0 };
    let segments_at = size_of::<Header>();
    let sections_at = segments_at + segments * size_of::<Segment>();
    let notes_at = (sections_at + sections_bytes) as u64;
    let mut at = (notes_at + notes.len() as u64).next_multiple_of(PAGE_BYTES_U64);
    let note = Segment {
        kind: SEGMENT_NOTE,
        rights: 0,
        offset: notes_at,
        address: 0,
        physical: 0,
        file_bytes: notes.len() as u64,
        memory_bytes: 0,
        align: 4,
    };
    let mut start = header(segments, has_section.then_some(sections_at as u64)).as_bytes().to_vec();
    start.extend_from_slice(note.as_bytes());
    let mut offsets = Vec::with_capacity(loads.len());
    for load in loads {
        start.extend_from_slice(segment(load, at).as_bytes());
        offsets.push(at);
        at += load.file_bytes;
    }
    if has_section {
        start.extend_from_slice(count_section(segments).as_bytes());
    }
    start.extend_from_slice(notes);
    Layout { start, offsets, bytes: at }
}

#[allow(clippy::cast_possible_truncation)] // The sizes of three small structs, asserted above.
fn header(segments: usize, sections_at: Option<u64>) -> Header {
    const LITTLE_64_SYSTEM_V: [u8; 16] = *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0";
    Header {
        identity: LITTLE_64_SYSTEM_V,
        kind: TYPE_CORE,
        machine: MACHINE,
        version: 1,
        entry: 0,
        segments_at: size_of::<Header>() as u64,
        sections_at: sections_at.unwrap_or(0),
        flags: 0,
        header_bytes: size_of::<Header>() as u16,
        segment_bytes: size_of::<Segment>() as u16,
        // PN_XNUM if there are more: the one section has their number.
        segments: at_most(segments),
        section_bytes: if sections_at.is_some() { size_of::<Section>() as u16 } else { 0 },
        sections: u16::from(sections_at.is_some()),
        names_section: 0,
    }
}

fn segment(load: &Load, offset: u64) -> Segment {
    Segment {
        kind: SEGMENT_LOAD,
        rights: load.rights,
        offset,
        address: load.address,
        physical: 0,
        file_bytes: load.file_bytes,
        memory_bytes: load.bytes,
        align: PAGE_BYTES_U64,
    }
}

/// Section 0, which holds the number of segments that does not fit the header.
fn count_section(segments: usize) -> Section {
    Section {
        name: 0,
        kind: 0,
        flags: 0,
        address: 0,
        offset: 0,
        bytes: 1,
        link: 0,
        info: u32::try_from(segments).expect("no process has 4 billion mappings"),
        align: 0,
        entry_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    }

    fn half(bytes: &[u8], at: usize) -> u16 {
        u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
    }

    #[test]
    fn contents_follow_each_other_on_page_boundaries() {
        let load =
            |address, bytes, file_bytes| Load { address, bytes, file_bytes, rights: RIGHT_READ };
        let loads = [load(0x1000, 8192, 8192), load(0x9000, 4096, 0), load(0xb000, 4096, 4096)];
        let layout = lay_out(&[7; 20], &loads);
        assert_eq!(layout.offsets, [4096, 12288, 12288]);
        assert_eq!(layout.bytes, 16384);
        let start = &layout.start;
        assert_eq!(start.len(), 64 + 4 * 56 + 20);
        assert_eq!((half(start, 16), half(start, 56)), (TYPE_CORE, 4));
        // The second segment: offset, address, file bytes, memory bytes.
        let fields: Vec<u64> = [8, 16, 32, 40].map(|at| word(start, 64 + 56 + at)).to_vec();
        assert_eq!(fields, [4096, 0x1000, 8192, 8192]);
        assert_eq!(start[start.len() - 20..], [7; 20]);
    }

    #[test]
    fn more_segments_than_a_header_can_count() {
        let load = Load { address: 0, bytes: 4096, file_bytes: 0, rights: 0 };
        let layout = lay_out(&[], &vec![load; 70_000]);
        let start = &layout.start;
        assert_eq!(half(start, 56), u16::MAX);
        let section = usize::try_from(word(start, 40)).expect("an offset");
        let count = u32::from_le_bytes(start[section + 44..section + 48].try_into().expect("four"));
        assert_eq!(count, 70_001);
    }
}
