//! Any bytes as what a monitor says, for property tests and fuzzing.

use farpool_vmm::wire::cloud_hypervisor::{
    Command, HEAD_BYTES, Memory, RANGE_BYTES, Range, Request, Response,
};
use farpool_vmm::wire::firecracker::{Incoming, Layout, MESSAGE_BYTES_MAX, encode};
use farpool_vmm::wire::hand_off::{HandOff, Step};

/// Bytes of the image against which regions are checked.
const IMAGE_BYTES: u64 = 1 << 32;

/// Any bytes as Firecracker's message, in pieces of different lengths.
pub(crate) fn read_message(bytes: &[u8]) {
    let whole = take_pieces(bytes, bytes.len().max(1));
    assert_eq!(whole, take_pieces(bytes, 1 + bytes.len() % 7), "pieces make no difference");
    let Some(regions) = whole else { return };
    assert!(bytes.len() >= 2);
    let again = take_pieces(&encode(&regions), MESSAGE_BYTES_MAX);
    assert!(again.is_none_or(|again| again == regions), "what is read can be said");
    let Ok(layout) = Layout::check(&regions, IMAGE_BYTES) else { return };
    for region in layout.regions() {
        let last = region.start + region.bytes() - 1;
        assert_eq!(layout.page_at(region.start), Some(region.first_page));
        assert_eq!(layout.page_at(last), Some(region.first_page + region.pages - 1));
        assert_eq!(layout.address_of(region.first_page), Some(region.start));
        assert_eq!(layout.runs(region.start, last).count(), 1);
    }
}

type Regions = Vec<farpool_vmm::wire::firecracker::Mapping>;

fn take_pieces(bytes: &[u8], length: usize) -> Option<Regions> {
    let (mut incoming, mut is_complete) = (Incoming::default(), false);
    for piece in bytes.chunks(length) {
        is_complete = incoming.take(piece).ok()?;
    }
    is_complete.then(|| incoming.regions().ok())?
}

/// Any bytes as requests of Cloud Hypervisor with their payloads, in a hand-off; what follows as
/// answers, faults and a configuration.
pub(crate) fn read_migration(bytes: &[u8]) {
    let (mut hand_off, mut rest) = (HandOff::default(), bytes);
    while let Some((head, after)) = rest.split_first_chunk::<HEAD_BYTES>() {
        if let Ok(response) = Response::decode(head) {
            let _ = response.require_done(Command::State);
            assert_eq!(Response::decode(&response.encode()), Ok(response));
        }
        let Ok(request) = Request::decode(head) else { break };
        assert_eq!(Request::decode(&request.encode()), Ok(request));
        let length = request.length.min(after.len() as u64);
        let length = usize::try_from(length).expect("no more than there is");
        let (payload, after) = after.split_at(length);
        rest = after;
        match hand_off.take(request.command, payload.to_vec()) {
            Ok(Step::Answer) => {}
            Ok(Step::Keep) => {
                let parts = hand_off.parts().expect("a whole one is kept");
                return locate(&parts.memory, rest);
            }
            Ok(Step::Abandoned) | Err(_) => break,
        }
    }
    if let Ok(memory) = Memory::of_config(rest) {
        locate(&memory, bytes);
    }
}

/// Any bytes as faults of a guest with this memory.
fn locate(memory: &Memory, bytes: &[u8]) {
    for (mapping, first_page) in memory.mappings().take(9) {
        let place = memory.locate(Range { gpa: mapping.gpa, length: 4096 });
        assert_eq!(place.map(|it| (it.slot, it.first_page)), Ok((mapping.slot, first_page)));
    }
    for range in bytes.chunks_exact(RANGE_BYTES) {
        let range = Range::decode(range.try_into().expect("a range"));
        if let Ok(place) = memory.locate(range) {
            assert!(place.first_page + place.pages <= memory.pages());
        }
    }
}
