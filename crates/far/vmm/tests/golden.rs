//! The bytes of both protocols, as the two monitors write them: each message is a file, written by
//! hand from their sources.

use farpool_vmm::wire::cloud_hypervisor::{
    Command, FAULT_ROLE, HEAD_BYTES, Memory, RANGE_BYTES, Range, Request, Response,
};
use farpool_vmm::wire::firecracker::{Incoming, Layout, Mapping, encode};

const FIRECRACKER: &[u8] = include_bytes!("golden/firecracker_regions.json");
const FIRECRACKER_OLD: &[u8] = include_bytes!("golden/firecracker_regions_kib.json");
const REQUESTS: &str = include_str!("golden/cloud_hypervisor_requests.txt");
const CONFIG: &[u8] = include_bytes!("golden/cloud_hypervisor_config.json");

/// The bytes of a line of the golden file, such as `start 0100 0000`.
fn line(name: &str) -> Vec<u8> {
    let found = REQUESTS.lines().filter_map(|line| line.split_once(' '));
    let (_, hex) = found.into_iter().find(|(own, _)| *own == name).expect("a line of that name");
    let digits: String = hex.split_whitespace().collect();
    let pairs = (0..digits.len()).step_by(2);
    pairs.map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("two digits")).collect()
}

fn regions() -> [Mapping; 2] {
    let region = |start, size, offset| Mapping {
        base_host_virt_addr: start,
        size,
        offset,
        page_size: Some(4096),
        page_size_kib: Some(4096),
    };
    [region(0x7f1c_4000_0000, 3 << 30, 0), region(0x7f1c_0000_0000, 1 << 30, 3 << 30)]
}

fn read(bytes: &[u8]) -> Vec<Mapping> {
    let mut incoming = Incoming::default();
    assert_eq!(incoming.take(bytes), Ok(true));
    incoming.regions().expect("regions")
}

#[test]
fn firecracker_names_its_regions() {
    let golden = FIRECRACKER.trim_ascii_end();
    assert_eq!(encode(&regions()), golden);
    assert_eq!(read(golden), regions());
    assert!(Layout::check(&regions(), 4 << 30).is_ok());
}

#[test]
fn an_older_firecracker_has_the_deprecated_name_only() {
    let old = read(FIRECRACKER_OLD);
    assert_eq!(old, regions().map(|it| Mapping { page_size: None, ..it }));
    assert_eq!(Layout::check(&old, 4 << 30), Layout::check(&regions(), 4 << 30));
}

#[test]
fn requests_of_cloud_hypervisor_are_16_bytes() {
    for (name, command, length) in [
        ("start", Command::Start, 0),
        ("config", Command::Config, 0x1234),
        ("state", Command::State, 0x0004_0000),
        ("memory", Command::Memory, 16),
        ("complete", Command::Complete, 0),
        ("abandon", Command::Abandon, 0),
        ("memory_fd", Command::MemoryFd, 4),
        ("complete_paused", Command::CompletePaused, 0),
        ("page_fault", Command::PageFault, 16),
    ] {
        let golden = <[u8; HEAD_BYTES]>::try_from(line(name)).expect("a head");
        let request = Request { command, length };
        assert_eq!(request.encode(), golden, "{name}");
        assert_eq!(Request::decode(&golden), Ok(request), "{name}");
    }
}

#[test]
fn answers_and_payloads_have_their_bytes() {
    for (name, response) in [("ok", Response::DONE), ("error", Response::Error)] {
        let golden = <[u8; HEAD_BYTES]>::try_from(line(name)).expect("a head");
        assert_eq!((response.encode(), Response::decode(&golden)), (golden, Ok(response)));
    }
    let golden = <[u8; RANGE_BYTES]>::try_from(line("range")).expect("a range");
    let range = Range { gpa: 0x1_0000_2000, length: 4096 };
    assert_eq!((range.encode(), Range::decode(&golden)), (golden, range));
    assert_eq!(line("slot"), 7_u32.to_le_bytes());
    assert_eq!(line("fault_role"), FAULT_ROLE);
}

#[test]
fn a_configuration_names_the_guests_memory() {
    let memory = Memory::of_config(CONFIG).expect("a configuration");
    let mappings: Vec<_> = memory
        .mappings()
        .map(|(it, first_page)| (it.slot, it.gpa, it.size, it.file_offset, first_page))
        .collect();
    let (gib, pages) = (1_u64 << 30, 3 << 18);
    assert_eq!(mappings, [(0, 0, 3 * gib, 0, 0), (1, 4 * gib, gib, 3 * gib, pages)]);
}
