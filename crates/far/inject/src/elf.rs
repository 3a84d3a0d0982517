//! A small reader of ELF files: static position-independent executables only.
//!
//! Pure, and safe on any bytes: each field is read through [`field`], each sum is checked, and the
//! limits below bound what an image can demand of a program.

use crate::arch;

/// Largest image file; the sidecar is below 4 MiB. Larger ones are refused.
pub const MAX_FILE_BYTES: usize = 64 << 20;
/// Largest span of addresses of an image, with its zeroed memory. Larger ones are refused.
pub const MAX_SPAN_BYTES: u64 = 256 << 20;
/// Most loadable segments. Linkers make 4 to 6. More are refused.
pub const MAX_SEGMENTS: usize = 16;
/// Largest alignment of a segment that is honoured: a huge page.
pub const MAX_ALIGN_BYTES: u64 = 2 << 20;

const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: u16 = 56;
const PT_LOAD: u32 = 1;
const PT_INTERP: u32 = 3;
const ET_DYN: u16 = 3;

/// Why bytes cannot be used as a sidecar's image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ElfError {
    #[error("it is no ELF file of 64 bits, little-endian")]
    NotElf,
    #[error("it is for another processor (ELF machine {0})")]
    Machine(u16),
    #[error("it is no position-independent executable; link it with -static-pie")]
    NotPie,
    #[error("it wants a dynamic loader; link it with -static-pie")]
    Interpreter,
    #[error("its {0} reach outside the file or the limits")]
    Bounds(&'static str),
    #[error("a segment can be written and executed; link it without -z execstack and RWX sections")]
    WriteAndExecute,
    #[error("the file could not be kept in memory: {0}")]
    Memory(String),
}

/// How a segment's pages may be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub read: bool,
    pub write: bool,
    pub execute: bool,
}

/// A loadable segment, addresses relative to the image's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub offset: u64,
    pub address: u64,
    pub file_bytes: u64,
    pub memory_bytes: u64,
    pub access: Access,
}

/// What is needed to map an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub segments: Vec<Segment>,
    /// First instruction, relative.
    pub entry: u64,
    /// Where the program headers lie in memory, relative.
    pub headers: u64,
    pub header_count: u16,
    /// The image's addresses go from 0 up to here; a multiple of the page size.
    pub span_bytes: u64,
    /// Required alignment of the image's start; at least the page size.
    pub align_bytes: u64,
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], ElfError> {
    let end = at.checked_add(N).ok_or(ElfError::Bounds("headers"))?;
    let part = bytes.get(at..end).ok_or(ElfError::Bounds("headers"))?;
    part.try_into().map_err(|_| ElfError::Bounds("headers"))
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16, ElfError> {
    field(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, ElfError> {
    field(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, ElfError> {
    field(bytes, at).map(u64::from_le_bytes)
}

/// True if the first bytes of a file are those of a 64-bit program for this processor.
pub fn is_native(start: &[u8]) -> bool {
    start.starts_with(b"\x7fELF\x02\x01") && u16_at(start, 18) == Ok(arch::ELF_MACHINE)
}

/// Reads the layout of an image for pages of `page_bytes`.
pub fn parse(bytes: &[u8], page_bytes: u64) -> Result<Layout, ElfError> {
    if bytes.len() > MAX_FILE_BYTES {
        return Err(ElfError::Bounds("bytes"));
    }
    let start: [u8; HEADER_BYTES] = field(bytes, 0).map_err(|_| ElfError::NotElf)?;
    if !start.starts_with(b"\x7fELF\x02\x01") {
        return Err(ElfError::NotElf);
    }
    let machine = u16_at(bytes, 18)?;
    if machine != arch::ELF_MACHINE {
        return Err(ElfError::Machine(machine));
    }
    if u16_at(bytes, 16)? != ET_DYN {
        return Err(ElfError::NotPie);
    }
    let table = u64_at(bytes, 32)?;
    let (size, count) = (u16_at(bytes, 54)?, u16_at(bytes, 56)?);
    if size != PROGRAM_HEADER_BYTES {
        return Err(ElfError::Bounds("program headers"));
    }
    let (segments, align_bytes) = segments(bytes, table, count, page_bytes)?;
    check_order(&segments, page_bytes)?;
    let end = segments.last().map_or(0, |last| last.address + last.memory_bytes);
    let layout = Layout {
        entry: u64_at(bytes, 24)?,
        headers: headers_in_memory(&segments, table, u64::from(count) * u64::from(size))?,
        header_count: count,
        span_bytes: end.next_multiple_of(page_bytes),
        align_bytes,
        segments,
    };
    check_entry(&layout)?;
    Ok(layout)
}

fn segments(
    bytes: &[u8],
    table: u64,
    count: u16,
    page_bytes: u64,
) -> Result<(Vec<Segment>, u64), ElfError> {
    let table = usize::try_from(table).map_err(|_| ElfError::Bounds("program headers"))?;
    let (mut found, mut align_bytes) = (Vec::new(), page_bytes);
    for index in 0..usize::from(count) {
        let at = table.checked_add(index * usize::from(PROGRAM_HEADER_BYTES));
        let at = at.ok_or(ElfError::Bounds("program headers"))?;
        match u32_at(bytes, at)? {
            PT_INTERP => return Err(ElfError::Interpreter),
            PT_LOAD => {
                found.push(segment(bytes, at)?);
                align_bytes = align_bytes.max(u64_at(bytes, at + 48)?);
            }
            _ => {}
        }
    }
    if found.is_empty() || found.len() > MAX_SEGMENTS {
        return Err(ElfError::Bounds("segments"));
    }
    if !align_bytes.is_power_of_two() || align_bytes > MAX_ALIGN_BYTES {
        return Err(ElfError::Bounds("alignments"));
    }
    Ok((found, align_bytes))
}

fn segment(bytes: &[u8], at: usize) -> Result<Segment, ElfError> {
    let flags = u32_at(bytes, at + 4)?;
    let access = Access { read: flags & 4 != 0, write: flags & 2 != 0, execute: flags & 1 != 0 };
    if access.write && access.execute {
        return Err(ElfError::WriteAndExecute);
    }
    let segment = Segment {
        offset: u64_at(bytes, at + 8)?,
        address: u64_at(bytes, at + 16)?,
        file_bytes: u64_at(bytes, at + 32)?,
        memory_bytes: u64_at(bytes, at + 40)?,
        access,
    };
    let file_end = segment.offset.checked_add(segment.file_bytes);
    let end = segment.address.checked_add(segment.memory_bytes);
    let is_in_file = file_end.is_some_and(|end| end <= bytes.len() as u64);
    let is_in_span = end.is_some_and(|end| end <= MAX_SPAN_BYTES);
    if is_in_file && is_in_span && segment.file_bytes <= segment.memory_bytes {
        Ok(segment)
    } else {
        Err(ElfError::Bounds("segments"))
    }
}

/// Checks that segments ascend, share no page, start at page 0, and are aligned in memory as in the
/// file.
fn check_order(segments: &[Segment], page_bytes: u64) -> Result<(), ElfError> {
    let mut free = 0;
    for segment in segments {
        let first_page = segment.address - segment.address % page_bytes;
        if first_page < free || segment.address % page_bytes != segment.offset % page_bytes {
            return Err(ElfError::Bounds("segments"));
        }
        free = (segment.address + segment.memory_bytes).next_multiple_of(page_bytes);
    }
    if segments.first().is_some_and(|first| first.address >= page_bytes) {
        return Err(ElfError::Bounds("segments"));
    }
    Ok(())
}

fn headers_in_memory(segments: &[Segment], table: u64, bytes: u64) -> Result<u64, ElfError> {
    let end = table.checked_add(bytes).ok_or(ElfError::Bounds("program headers"))?;
    let holds = |s: &&Segment| table >= s.offset && end <= s.offset + s.file_bytes;
    let segment = segments.iter().find(holds).ok_or(ElfError::Bounds("program headers"))?;
    Ok(table - segment.offset + segment.address)
}

fn check_entry(layout: &Layout) -> Result<(), ElfError> {
    let is_in = |s: &Segment| {
        s.access.execute && layout.entry >= s.address && layout.entry < s.address + s.file_bytes
    };
    let found = layout.segments.iter().any(is_in);
    if found { Ok(()) } else { Err(ElfError::Bounds("entry")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A minimal image: one segment that holds the headers and eight bytes of text.
    fn small() -> Vec<u8> {
        let mut bytes = vec![0; 128];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[16..18].copy_from_slice(&ET_DYN.to_le_bytes());
        bytes[18..20].copy_from_slice(&arch::ELF_MACHINE.to_le_bytes());
        bytes[24..32].copy_from_slice(&120u64.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&PROGRAM_HEADER_BYTES.to_le_bytes());
        bytes[56..58].copy_from_slice(&1u16.to_le_bytes());
        bytes[64..68].copy_from_slice(&PT_LOAD.to_le_bytes());
        bytes[68..72].copy_from_slice(&5u32.to_le_bytes());
        bytes[96..104].copy_from_slice(&128u64.to_le_bytes());
        bytes[104..112].copy_from_slice(&8192u64.to_le_bytes());
        bytes[112..120].copy_from_slice(&4096u64.to_le_bytes());
        bytes
    }

    #[test]
    fn a_small_image_is_read() {
        let layout = parse(&small(), 4096).expect("an image");
        assert_eq!((layout.entry, layout.headers, layout.span_bytes), (120, 64, 8192));
        assert!(is_native(&small()));
    }

    #[test]
    fn what_cannot_be_mapped_is_refused_by_name() {
        let changed = |at: usize, value: u8| {
            let mut bytes = small();
            bytes[at] = value;
            parse(&bytes, 4096)
        };
        assert_eq!(changed(0, 0), Err(ElfError::NotElf));
        assert_eq!(changed(4, 1), Err(ElfError::NotElf));
        assert_eq!(changed(18, 3), Err(ElfError::Machine(3)));
        assert_eq!(changed(16, 2), Err(ElfError::NotPie));
        assert_eq!(changed(64, 3), Err(ElfError::Interpreter));
        assert_eq!(changed(68, 7), Err(ElfError::WriteAndExecute));
        assert_eq!(changed(24, 200), Err(ElfError::Bounds("entry")));
        assert_eq!(changed(110, 200), Err(ElfError::Bounds("segments")));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes, 4096);
        }

        #[test]
        fn a_damaged_image_keeps_its_promises(
            damage in proptest::collection::vec((0usize..128, any::<u8>()), 0..6)
        ) {
            let mut bytes = small();
            damage.iter().for_each(|(at, value)| bytes[*at] = *value);
            if let Ok(layout) = parse(&bytes, 4096) {
                prop_assert!(layout.span_bytes <= MAX_SPAN_BYTES);
                for segment in &layout.segments {
                    prop_assert!(segment.offset + segment.file_bytes <= 128);
                    prop_assert!(segment.address + segment.memory_bytes <= layout.span_bytes);
                }
            }
        }
    }
}
