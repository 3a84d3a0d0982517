//! Every backing store: pages are kept, and no client sees another's bytes.

mod common;

use common::*;
use farpool_blade::{BackingKind, BladeConfig, Server};
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES};
use farpool_wire::*;
use std::os::unix::fs::PermissionsExt;

/// Each client in turn uses all of the blade's memory, and finds nothing but zeros.
fn check_kept_and_scrubbed(backing: BackingKind) {
    let blade = TestBlade::start(BladeConfig { backing, ..config_of(3) });
    for id in 1..4 {
        let mut client = blade.client(id);
        let (segment, _) = client.segment(3);
        let data = pages(1, 16);
        for page in [0, 4096 + 4072, 2 * 4096] {
            let fresh = client.read(segment, page, 16).pages;
            assert!(fresh.iter().all(|byte| *byte == 0), "client {id} sees old bytes at {page}");
            client.write(segment, page, &data).done();
        }
        // Freed and allocated again within one segment: zero as well, though it is the same client.
        client.free(segment, 1, 1).done();
        let again = client.allocate(segment, 1, 1);
        assert!(matches!(again.response(), Response::Allocated { .. }), "{again:?}");
        let fresh = client.read(segment, 4096 + 4080, 16).pages;
        assert!(fresh.iter().all(|byte| *byte == 0));
        assert!(client.read(segment, 2 * 4096, 16).pages == data);
        let extents = [Extent::new(PageNumber(2 * 4096), 8)];
        client.ask(&Request::Discard { segment, extents: &extents }).done();
        let kept = client.read(segment, 2 * 4096 + 8, 8).pages;
        assert!(kept == data[8 * PAGE_BYTES..], "only what was named is discarded");
        client.ask(&Request::Goodbye).done();
        wait_until("the memory is free", || blade.serving.stat().totals.used_bytes.get() == 0);
    }
    // 3 whole segments of 3 and, in each, 1 superpage that was freed before.
    assert_eq!(blade.serving.stat().totals.superpages_scrubbed.get(), 3 * (3 + 1));
}

#[test]
fn memfd() {
    check_kept_and_scrubbed(BackingKind::Memfd);
}

/// What a donor adds to its free memory: not what others were given and have not written.
fn check_backed(backing: BackingKind) {
    const WRITTEN: u64 = 16 * PAGE_BYTES as u64;
    let blade = TestBlade::start(BladeConfig { backing, ..config_of(3) });
    let mut client = blade.client(1);
    let (segment, _) = client.segment(3);
    let backed_bytes = || blade.serving.blade().lent().unwrap().backed_bytes;
    assert_eq!(blade.serving.stat().totals.used_bytes.get(), 3 * SUPERPAGE_BYTES);
    assert_eq!(backed_bytes(), 0);
    client.write(segment, 4096, &pages(1, 16)).done();
    let backed = backed_bytes();
    // The kernel may have taken huge pages for it.
    assert!((WRITTEN..SUPERPAGE_BYTES).contains(&backed), "{backed}");
    let everything = [Extent::new(PageNumber(4096), 4096)];
    client.ask(&Request::Discard { segment, extents: &everything }).done();
    assert_eq!(backed_bytes(), 0);
    assert_eq!(blade.serving.blade().backed_bytes_of(|_| true).unwrap(), 0, "it has no grant");
}

#[test]
fn a_memfd_takes_up_only_what_was_written() {
    check_backed(BackingKind::Memfd);
}

#[test]
fn anonymous_memory_takes_up_only_what_was_written() {
    check_backed(BackingKind::Anonymous);
}

#[test]
fn a_file_is_reserved_so_all_that_is_given_counts() {
    let directory = tempfile::tempdir().unwrap();
    let backing = BackingKind::File(directory.path().join("memory"));
    let blade = TestBlade::start(BladeConfig { backing, ..config_of(3) });
    let mut client = blade.client(1);
    client.segment(2);
    assert_eq!(blade.serving.blade().lent().unwrap().backed_bytes, 2 * SUPERPAGE_BYTES);
}

#[test]
fn anonymous() {
    check_kept_and_scrubbed(BackingKind::Anonymous);
}

#[test]
fn file_with_old_bytes_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memory");
    std::fs::write(&path, vec![0xee; 20 << 20]).unwrap();
    let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode));
    mode(0o640).unwrap();
    let config = || BladeConfig { backing: BackingKind::File(path.clone()), ..config_of(3) };
    let refused = refusal(config());
    assert!(refused.contains("mode 640"), "{refused}");
    mode(0o600).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(1), None).unwrap();
        let refused = refusal(config());
        assert!(refused.contains("belongs to user 1"), "{refused}");
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    }
    check_kept_and_scrubbed(BackingKind::File(path.clone()));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 3 * SUPERPAGE_BYTES);
}

#[test]
fn hugetlb() {
    let address: Address = "tcp://127.0.0.1:0".parse().unwrap();
    let config = BladeConfig { backing: BackingKind::Hugetlb, ..config_of(3) };
    if let Err(error) = Server::bind(&[address], config) {
        let source = std::error::Error::source(&error).map(ToString::to_string);
        println!("SKIP hugetlb: {error}: {source:?}; needs 24 free huge pages (vm.nr_hugepages)");
        return;
    }
    check_kept_and_scrubbed(BackingKind::Hugetlb);
}

#[test]
fn one_file_serves_one_blade() {
    let directory = tempfile::tempdir().unwrap();
    let backing = BackingKind::File(directory.path().join("memory"));
    let config = BladeConfig { backing, ..config_of(1) };
    let bind = || Server::bind(&["tcp://127.0.0.1:0".parse().unwrap()], config.clone());
    let first = bind().unwrap();
    assert!(bind().is_err());
    drop(first);
    assert!(bind().is_ok());
}

#[test]
fn memory_in_a_file_or_device_is_not_shared_by_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let backing = BackingKind::File(directory.path().join("memory"));
    let blade = TestBlade::start(BladeConfig { backing, ..config_of(1) });
    let mut client = blade.client(1);
    let (segment, _) = client.segment(1);
    assert_eq!(client.ask(&Request::ShmMap { segment }).refused(), Some(ErrorCode::Unsupported));
}

#[test]
fn backings_are_named() {
    let parse = |text: &str| text.parse::<BackingKind>();
    assert_eq!(parse("memfd"), Ok(BackingKind::Memfd));
    assert_eq!(parse("anonymous"), Ok(BackingKind::Anonymous));
    assert_eq!(parse("hugetlb"), Ok(BackingKind::Hugetlb));
    assert_eq!(parse("file:/dev/dax0.0"), Ok(BackingKind::File("/dev/dax0.0".into())));
    assert!(parse("file:").is_err() && parse("disk").is_err());
}
