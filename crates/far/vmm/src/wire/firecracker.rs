//! Firecracker's one message to the process that serves its guest's page faults: a JSON list of the
//! guest's memory regions, with the userfaultfd beside it (src/vmm/src/persist.rs there).

use farpool_units::{PAGE_BYTES, PAGE_BYTES_U64, exactly};
use serde::{Deserialize, Serialize};

/// Longest message. One of [`REGIONS_MAX`] regions has 38 KiB at most; a longer one is refused
/// before more of it is read.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Most regions of a guest. Firecracker has two, and some more with memory that is plugged in; a
/// message with more is refused.
pub const REGIONS_MAX: usize = 256;

/// Why a message is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    #[error(
        "what connected does not speak Firecracker's page fault protocol: its message is no JSON \
         list; is this socket named in mem_backend.backend_path, with backend_type Uffd?"
    )]
    NotList,
    #[error(
        "the message is longer than {MESSAGE_BYTES_MAX} bytes; Firecracker's have some hundred"
    )]
    Long,
    #[error("the message goes on after its list of regions; Firecracker's ends there")]
    Trailing,
    #[error(
        "the message is no list of memory regions as of Firecracker 1.6 and newer: {reason}; \
         another version may speak otherwise"
    )]
    Fields { reason: String },
    #[error("the message names {given} regions, and must name 1 to {REGIONS_MAX}")]
    Count { given: usize },
    #[error(
        "region {region} has pages of {page_bytes} bytes, and only pages of 4096 bytes can be \
         served: take the snapshot of a guest without huge_pages"
    )]
    PageSize { region: usize, page_bytes: u64 },
    #[error("region {region} names two page sizes, {one} and {other} bytes")]
    TwoPageSizes { region: usize, one: u64, other: u64 },
    #[error("region {region}: its {what} {value:#x} is no multiple of a page of 4096 bytes")]
    Unaligned { region: usize, what: &'static str, value: u64 },
    #[error("region {region} is empty")]
    Empty { region: usize },
    #[error("region {region} ends beyond all addresses")]
    Beyond { region: usize },
    #[error(
        "region {region} ends at byte {end} of the guest's memory, and the image has \
         {image_bytes}: it is the memory file of another snapshot"
    )]
    OutsideImage { region: usize, end: u128, image_bytes: u64 },
    #[error("regions {one} and {other} lie on each other")]
    Overlap { one: usize, other: usize },
}

/// A region as Firecracker writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// Its first address in Firecracker's process.
    pub base_host_virt_addr: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Where its bytes begin in the snapshot's memory file.
    pub offset: u64,
    /// Size of its pages in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_size: Option<u64>,
    /// The same in bytes, whatever it is called: the deprecated name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_size_kib: Option<u64>,
}

/// The message as it arrives, in any pieces.
#[derive(Debug, Default)]
pub struct Incoming {
    bytes: Vec<u8>,
    /// Lists and objects that are open.
    depth: usize,
    is_in_text: bool,
    is_after_backslash: bool,
    is_complete: bool,
}

impl Incoming {
    /// Takes the next bytes. True once the list has ended.
    ///
    /// # Errors
    /// They cannot belong to such a message; nothing more is to be read then.
    pub fn take(&mut self, bytes: &[u8]) -> Result<bool, MessageError> {
        for &byte in bytes {
            self.take_byte(byte)?;
        }
        Ok(self.is_complete)
    }

    fn take_byte(&mut self, byte: u8) -> Result<(), MessageError> {
        let is_blank = byte.is_ascii_whitespace();
        match self.bytes.len() {
            _ if self.is_complete && is_blank => return Ok(()),
            _ if self.is_complete => return Err(MessageError::Trailing),
            0 if is_blank => return Ok(()),
            0 if byte != b'[' => return Err(MessageError::NotList),
            MESSAGE_BYTES_MAX => return Err(MessageError::Long),
            _ => self.bytes.push(byte),
        }
        match byte {
            _ if self.is_after_backslash => self.is_after_backslash = false,
            b'\\' if self.is_in_text => self.is_after_backslash = true,
            b'"' => self.is_in_text = !self.is_in_text,
            _ if self.is_in_text => {}
            b'[' | b'{' => self.depth += 1,
            b']' | b'}' => self.depth -= 1,
            _ => {}
        }
        self.is_complete = self.depth == 0;
        Ok(())
    }

    /// The regions of the message, which must be complete.
    ///
    /// # Errors
    /// It is no list of regions.
    pub fn regions(&self) -> Result<Vec<Mapping>, MessageError> {
        let reason = |error: serde_json::Error| MessageError::Fields { reason: error.to_string() };
        serde_json::from_slice(&self.bytes).map_err(reason)
    }
}

/// The message with these regions, as Firecracker sends it.
pub fn encode(regions: &[Mapping]) -> Vec<u8> {
    serde_json::to_vec(regions).expect("numbers under fixed names can be written")
}

/// A region that was checked, in pages and addresses of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first address.
    pub start: usize,
    /// Its pages.
    pub pages: u32,
    /// The page of the image that is its first.
    pub first_page: u32,
}

impl Region {
    /// Its length.
    pub fn bytes(&self) -> usize {
        exactly::<usize, _>(self.pages) * PAGE_BYTES
    }

    fn end(&self) -> usize {
        self.start + self.bytes()
    }
}

/// A guest's memory regions, checked: they are ordered by address, and neither two addresses nor
/// two regions share a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout(Vec<Region>);

impl Layout {
    /// Checks the regions against each other and against an image of so many bytes.
    ///
    /// # Errors
    /// The first rule that they break.
    pub fn check(mappings: &[Mapping], image_bytes: u64) -> Result<Layout, MessageError> {
        let given = mappings.len();
        if !(1..=REGIONS_MAX).contains(&given) {
            return Err(MessageError::Count { given });
        }
        let mut regions = Vec::with_capacity(given);
        for (number, mapping) in mappings.iter().enumerate() {
            regions.push((number, check(number, mapping, image_bytes)?));
        }
        regions.sort_unstable_by_key(|(_, it)| it.first_page);
        none_overlaps(&regions, |it| u64::from(it.first_page), |it| u64::from(it.pages))?;
        regions.sort_unstable_by_key(|(_, it)| it.start);
        none_overlaps(&regions, |it| it.start as u64, |it| it.bytes() as u64)?;
        Ok(Layout(regions.into_iter().map(|(_, it)| it).collect()))
    }

    /// The regions by address.
    pub fn regions(&self) -> &[Region] {
        &self.0
    }

    /// The page of the image at an address, if it lies in a region.
    pub fn page_at(&self, address: usize) -> Option<u32> {
        let after = self.0.partition_point(|it| it.start <= address);
        let region = self.0[..after].last().filter(|it| address < it.end())?;
        let within = (address - region.start) / PAGE_BYTES;
        Some(region.first_page + exactly::<u32, _>(within))
    }

    /// The address of a page of the image, if it lies in a region.
    pub fn address_of(&self, page: u32) -> Option<usize> {
        let region = self
            .0
            .iter()
            .find(|it| page.checked_sub(it.first_page).is_some_and(|within| within < it.pages))?;
        Some(region.start + exactly::<usize, _>(page - region.first_page) * PAGE_BYTES)
    }

    /// The pages of the image in a range of addresses, as runs: first page and count.
    pub fn runs(&self, start: usize, end: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.0.iter().filter_map(move |it| {
            let (from, to) = (start.max(it.start), end.min(it.end()));
            let first = (from.checked_sub(it.start)?) / PAGE_BYTES;
            let last = to.checked_sub(it.start)?.div_ceil(PAGE_BYTES);
            let count = last.checked_sub(first).filter(|count| *count > 0)?;
            Some((it.first_page + exactly::<u32, _>(first), exactly(count)))
        })
    }
}

fn check(region: usize, mapping: &Mapping, image_bytes: u64) -> Result<Region, MessageError> {
    let page_bytes = page_bytes(region, mapping)?;
    if page_bytes != PAGE_BYTES_U64 {
        return Err(MessageError::PageSize { region, page_bytes });
    }
    let Mapping { base_host_virt_addr: start, size, offset, .. } = *mapping;
    for (what, value) in [("address", start), ("size", size), ("offset", offset)] {
        if !value.is_multiple_of(PAGE_BYTES_U64) {
            return Err(MessageError::Unaligned { region, what, value });
        }
    }
    if size == 0 {
        return Err(MessageError::Empty { region });
    }
    let end = u128::from(offset) + u128::from(size);
    if end > u128::from(image_bytes) {
        return Err(MessageError::OutsideImage { region, end, image_bytes });
    }
    // An image has at most 2^32 pages; see `PageSet`.
    let page = |bytes: u64| u32::try_from(bytes / PAGE_BYTES_U64);
    let beyond = MessageError::Beyond { region };
    let (Ok(pages), Ok(first_page)) = (page(size), page(offset)) else { return Err(beyond) };
    match start.checked_add(size) {
        Some(end) if end <= isize::MAX as u64 => {
            Ok(Region { start: exactly(start), pages, first_page })
        }
        _ => Err(beyond),
    }
}

/// The size of a region's pages, by either name.
fn page_bytes(region: usize, mapping: &Mapping) -> Result<u64, MessageError> {
    match (mapping.page_size, mapping.page_size_kib) {
        (Some(one), Some(other)) if one != other => {
            Err(MessageError::TwoPageSizes { region, one, other })
        }
        (Some(bytes), _) | (None, Some(bytes)) => Ok(bytes),
        (None, None) => {
            Err(MessageError::Fields { reason: format!("region {region} has no page_size") })
        }
    }
}

/// Of regions in order, each must begin after the end of the one before.
fn none_overlaps(
    regions: &[(usize, Region)],
    first: impl Fn(&Region) -> u64,
    length: impl Fn(&Region) -> u64,
) -> Result<(), MessageError> {
    for pair in regions.windows(2) {
        let [(one, before), (other, after)] = pair else { continue };
        if first(before) + length(before) > first(after) {
            return Err(MessageError::Overlap { one: *one, other: *other });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IMAGE_BYTES: u64 = 64 << 20;
    /// As Firecracker has them with `huge_pages: 2M`.
    const HUGE_PAGE_BYTES: u64 = 2 << 20;

    fn mapping(start: u64, size: u64, offset: u64) -> Mapping {
        Mapping {
            base_host_virt_addr: start,
            size,
            offset,
            page_size: Some(4096),
            page_size_kib: Some(4096),
        }
    }

    fn read(bytes: &[u8]) -> Result<Vec<Mapping>, MessageError> {
        let mut incoming = Incoming::default();
        assert!(incoming.take(bytes)?, "the message is complete");
        incoming.regions()
    }

    #[test]
    fn a_message_may_come_byte_by_byte() {
        let bytes = encode(&[mapping(0x7f00_0000_0000, 8192, 0)]);
        let mut incoming = Incoming::default();
        for (at, byte) in bytes.iter().enumerate() {
            assert_eq!(incoming.take(&[*byte]), Ok(at + 1 == bytes.len()), "byte {at}");
        }
        assert_eq!(incoming.regions(), Ok(vec![mapping(0x7f00_0000_0000, 8192, 0)]));
        assert_eq!(incoming.take(b" \n"), Ok(true));
        assert_eq!(incoming.take(b"["), Err(MessageError::Trailing));
    }

    #[test]
    fn either_name_of_the_page_size_will_do() {
        let text = |fields| {
            format!("[{{\"base_host_virt_addr\":4096,\"size\":4096,\"offset\":0{fields}}}]")
        };
        let checked = |fields| Layout::check(&read(text(fields).as_bytes())?, IMAGE_BYTES);
        for fields in [",\"page_size\":4096", ",\"page_size_kib\":4096,\"page_size\":4096"] {
            assert!(checked(fields).is_ok(), "{fields}");
        }
        assert!(checked(",\"page_size_kib\":4096,\"new\":[1]").is_ok());
        let two = MessageError::TwoPageSizes { region: 0, one: 4096, other: 4 };
        assert_eq!(checked(",\"page_size\":4096,\"page_size_kib\":4"), Err(two));
        let huge = MessageError::PageSize { region: 0, page_bytes: HUGE_PAGE_BYTES };
        assert_eq!(checked(",\"page_size\":2097152"), Err(huge));
        assert!(matches!(checked(""), Err(MessageError::Fields { .. })));
    }

    #[test]
    fn what_is_no_message_is_refused_at_once() {
        assert_eq!(read(b"GET / HTTP/1.1"), Err(MessageError::NotList));
        assert_eq!(read(b"{}"), Err(MessageError::NotList));
        let endless = vec![b'['; MESSAGE_BYTES_MAX + 1];
        assert_eq!(Incoming::default().take(&endless), Err(MessageError::Long));
        assert!(matches!(read(b"[1]"), Err(MessageError::Fields { .. })));
        assert!(matches!(read(b"[}"), Err(MessageError::Fields { .. })));
        assert!(matches!(read(b"[\"\\\"]\"]"), Err(MessageError::Fields { .. })));
        assert!(matches!(read(b"[{\"size\":-1}]"), Err(MessageError::Fields { .. })));
    }

    #[test]
    fn regions_that_break_a_rule_are_refused() {
        let checked = |regions: &[Mapping]| Layout::check(regions, IMAGE_BYTES).map(|_| ());
        assert_eq!(checked(&[]), Err(MessageError::Count { given: 0 }));
        let many = vec![mapping(4096, 4096, 0); REGIONS_MAX + 1];
        assert_eq!(checked(&many), Err(MessageError::Count { given: REGIONS_MAX + 1 }));
        for (region, what, value) in [
            (mapping(1, 4096, 0), "address", 1),
            (mapping(4096, 4097, 0), "size", 4097),
            (mapping(4096, 4096, 512), "offset", 512),
        ] {
            assert_eq!(checked(&[region]), Err(MessageError::Unaligned { region: 0, what, value }));
        }
        assert_eq!(checked(&[mapping(4096, 0, 0)]), Err(MessageError::Empty { region: 0 }));
        let far = mapping(u64::MAX - 4095, 8192, 0);
        assert_eq!(checked(&[far]), Err(MessageError::Beyond { region: 0 }));
        let outside = checked(&[mapping(4096, IMAGE_BYTES, 4096)]);
        assert!(matches!(outside, Err(MessageError::OutsideImage { .. })), "{outside:?}");
        let wide = checked(&[mapping(4096, u64::MAX - 4095, 4096)]);
        assert!(matches!(wide, Err(MessageError::OutsideImage { .. })), "{wide:?}");
        let by_offset = [mapping(4096, 8192, 0), mapping(1 << 20, 4096, 4096)];
        assert_eq!(checked(&by_offset), Err(MessageError::Overlap { one: 0, other: 1 }));
        let by_address = [mapping(8192, 8192, 0), mapping(4096, 8192, 1 << 20)];
        assert_eq!(checked(&by_address), Err(MessageError::Overlap { one: 1, other: 0 }));
    }

    #[test]
    fn addresses_and_pages_lead_to_each_other() {
        let regions = [mapping(0x20_0000, 0x3000, 0x1000), mapping(0x10_0000, 0x1000, 0)];
        let layout = Layout::check(&regions, IMAGE_BYTES).expect("right");
        assert_eq!(layout.page_at(0x10_0fff), Some(0));
        assert_eq!(layout.page_at(0x20_2000), Some(3));
        assert_eq!((layout.page_at(0x10_1000), layout.page_at(0xf_ffff)), (None, None));
        assert_eq!((layout.address_of(3), layout.address_of(4)), (Some(0x20_2000), None));
        let runs = |start, end| layout.runs(start, end).collect::<Vec<_>>();
        assert_eq!(runs(0, usize::MAX), [(0, 1), (1, 3)]);
        assert_eq!(runs(0x20_1000, 0x20_2000), [(2, 1)]);
        assert_eq!(runs(0x20_3000, 0x20_4000), []);
        assert_eq!(runs(0x20_2000, 0x20_1000), []);
    }

    proptest! {
        /// What Firecracker can say is read as it was said, in any pieces.
        #[test]
        fn regions_survive_the_wire(
            regions in proptest::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 1..9),
            step in 1_usize..200,
        ) {
            let said: Vec<Mapping> = regions.iter().map(|it| mapping(it.0, it.1, it.2)).collect();
            let mut incoming = Incoming::default();
            let mut is_complete = false;
            for piece in encode(&said).chunks(step) {
                prop_assert!(!is_complete);
                is_complete = incoming.take(piece).expect("a message");
            }
            prop_assert!(is_complete);
            prop_assert_eq!(incoming.regions(), Ok(said));
        }

        /// Any bytes are refused or are regions; a layout has each page and each address once.
        #[test]
        fn any_regions_are_checked(
            regions in proptest::collection::vec((0_u64..24, 0_u64..9, 0_u64..24), 0..5),
        ) {
            let page = |it: u64| it * 4096;
            let said: Vec<Mapping> = regions
                .iter()
                .map(|it| mapping(page(it.0 + 16), page(it.1), page(it.2)))
                .collect();
            let Ok(layout) = Layout::check(&said, page(24)) else { return Ok(()) };
            let mut pages = 0;
            for address in (0..page(64)).step_by(4096) {
                let Some(at) = layout.page_at(exactly(address)) else { continue };
                prop_assert_eq!(layout.address_of(at), Some(exactly(address)));
                pages += 1;
            }
            prop_assert_eq!(pages, regions.iter().map(|it| it.1).sum::<u64>());
        }
    }
}
