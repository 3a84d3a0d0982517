use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn mapping(slot: u32, gpa: u64, size: u64, file_offset: u64) -> Value {
    json!({"slot": slot, "gpa": gpa, "size": size, "file_offset": file_offset, "virtio_mem": false})
}

fn memory(mappings: &[Value]) -> Result<Memory, MigrationError> {
    let config = json!({
        "vm_config": {"cpus": 2},
        "memory_manager_data": {"guest_ram_mappings": mappings, "next_slot": 7},
    });
    Memory::of_config(config.to_string().as_bytes())
}

fn request(command: u16, version: u16, length: u64) -> Result<Request, MigrationError> {
    let mut bytes = head(command, length);
    bytes[2..4].copy_from_slice(&version.to_le_bytes());
    Request::decode(&bytes)
}

#[test]
fn a_request_that_breaks_a_rule_is_refused() {
    assert_eq!(request(0, 0, 0), Err(MigrationError::Command { number: 0 }));
    assert_eq!(request(10, 0, 0), Err(MigrationError::Command { number: 10 }));
    assert_eq!(request(1, 1, 0), Err(MigrationError::Version { version: 1 }));
    assert_eq!(request(5, 1, 0), Ok(Request { command: Command::Complete, length: 0 }));
    let wrong = |command, given, expected| MigrationError::Length { command, given, expected };
    assert_eq!(request(1, 0, 1), Err(wrong(Command::Start, 1, 0)));
    assert_eq!(request(7, 0, 8), Err(wrong(Command::MemoryFd, 8, 4)));
    assert_eq!(request(9, 0, u64::MAX), Err(wrong(Command::PageFault, u64::MAX, 16)));
    let long = request(2, 0, CONFIG_BYTES_MAX + 1);
    assert!(matches!(long, Err(MigrationError::Long { .. })), "{long:?}");
    assert!(request(3, 0, STATE_BYTES_MAX).is_ok());
}

#[test]
fn an_answer_is_done_refused_or_wrong() {
    let decoded = |number, length| Response::decode(&head(number, length));
    assert_eq!(decoded(1, 0), Ok(Response::DONE));
    assert_eq!(decoded(2, 9), Ok(Response::Error));
    for number in [0, 3, u16::MAX] {
        assert_eq!(decoded(number, 0), Err(MigrationError::Status { number }));
    }
    let command = Command::State;
    assert_eq!(Response::Error.require_done(command), Err(MigrationError::Refused { command }));
    let inline = Response::Ok { length: 4096 }.require_done(command);
    assert_eq!(inline, Err(MigrationError::AnswerLength { command, given: 4096 }));
}

#[test]
fn a_guest_of_two_mappings_has_one_image() {
    let gib = 1_u64 << 30;
    let memory = memory(&[mapping(1, 4 * gib, gib, 3 * gib), mapping(0, 0, 3 * gib, 0)]);
    let memory = memory.expect("right");
    assert_eq!(memory.pages(), 1 << 20);
    let firsts: Vec<_> = memory.mappings().map(|(it, first)| (it.slot, first)).collect();
    assert_eq!(firsts, [(0, 0), (1, 3 << 18)]);
    let place = memory.locate(Range { gpa: 4 * gib + 8192, length: 4096 });
    let expected =
        Place { slot: 1, file_offset: 3 * gib + 8192, first_page: (3 << 18) + 2, pages: 1 };
    assert_eq!(place, Ok(expected));
    let end = 3 * gib;
    for (gpa, length) in [
        (end, 4096),
        (end - 4096, 8192),
        (1, 4096),
        (0, 1),
        (0, 0),
        (0, FAULT_BYTES_MAX + 4096),
        (u64::MAX - 4095, 4096),
        (0, u64::MAX - 4095),
    ] {
        let wrong = Err(MigrationError::Fault { gpa, length });
        assert_eq!(memory.locate(Range { gpa, length }), wrong);
    }
    assert_eq!(memory.check_slots(&[1, 0]), Ok(()));
    assert_eq!(memory.check_slots(&[1]), Err(MigrationError::NoMemory { slot: 0 }));
    assert_eq!(memory.check_slots(&[0, 1, 2]), Err(MigrationError::Stray { slot: 2 }));
}

#[test]
fn mappings_that_break_a_rule_are_refused() {
    let refused = |mappings: &[Value]| memory(mappings).err();
    assert_eq!(refused(&[]), Some(MigrationError::Count { given: 0 }));
    let mut plugged = mapping(3, 0, 4096, 0);
    plugged["virtio_mem"] = true.into();
    assert_eq!(refused(&[plugged]), Some(MigrationError::VirtioMem { slot: 3 }));
    let unaligned = refused(&[mapping(3, 0, 100, 0)]);
    assert_eq!(unaligned, Some(MigrationError::Unaligned { slot: 3, what: "size", value: 100 }));
    for wrong in
        [mapping(3, 0, 0, 0), mapping(3, u64::MAX - 4095, 8192, 0), mapping(3, 0, 4096, 1 << 63)]
    {
        assert_eq!(refused(&[wrong]), Some(MigrationError::Extent { slot: 3 }));
    }
    let twice = refused(&[mapping(3, 0, 4096, 0), mapping(3, 4096, 4096, 0)]);
    assert_eq!(twice, Some(MigrationError::Twice { slot: 3 }));
    let overlap = refused(&[mapping(3, 0, 8192, 0), mapping(4, 4096, 4096, 0)]);
    assert_eq!(overlap, Some(MigrationError::Overlap { one: 3, other: 4 }));
    let large = refused(&[mapping(3, 0, 1 << 62, 0)]);
    assert_eq!(large, Some(MigrationError::Large { limit: u32::MAX }));
    let strange = Memory::of_config(b"{\"memory_manager_data\": []}");
    assert!(matches!(strange, Err(MigrationError::Config { .. })), "{strange:?}");
}

proptest! {
    #[test]
    fn heads_survive_the_wire(number in 1_u16..10, length in any::<u64>()) {
        if let Ok(request) = request(number, 0, length) {
            prop_assert_eq!(request.command as u16, number);
            prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
        }
        let response = Response::Ok { length };
        prop_assert_eq!(Response::decode(&response.encode()), Ok(response));
    }

    #[test]
    fn ranges_survive_the_wire(gpa in any::<u64>(), length in any::<u64>()) {
        let range = Range { gpa, length };
        prop_assert_eq!(Range::decode(&range.encode()), range);
    }

    /// Every page of a guest is at one place of one file and one page of the image.
    #[test]
    fn pages_have_one_place(
        gaps in proptest::collection::vec((0_u64..3, 1_u64..5, 0_u64..9), 1..6),
    ) {
        let (mut gpa, mut mappings) = (0, Vec::new());
        for ((gap, pages, offset), slot) in gaps.iter().zip(0..) {
            gpa += gap * 4096;
            mappings.push(mapping(slot, gpa, pages * 4096, offset * 4096));
            gpa += pages * 4096;
        }
        let memory = memory(&mappings).expect("right");
        let places = (0..gpa / 4096)
            .filter_map(|page| memory.locate(Range { gpa: page * 4096, length: 4096 }).ok());
        let firsts: Vec<u32> = places.map(|it| it.first_page).collect();
        prop_assert_eq!(firsts, (0..memory.pages()).collect::<Vec<_>>());
    }
}
