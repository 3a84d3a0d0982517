//! A blade and the process's limit on open descriptors. A program of its own, as it changes the
//! limit.

mod common;

use common::*;
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn the_limit_is_raised_and_then_named() {
    const HARD: u64 = 100;
    let limit = Rlimit { current: Some(40), maximum: Some(HARD) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let blade = TestBlade::of_superpages(HARD);
    assert_eq!(getrlimit(Resource::Nofile).current, Some(HARD));

    let mut client = blade.client(1);
    let mut segments = Vec::new();
    let refused = loop {
        let (segment, _) = client.create(1);
        let answer = client.allocate(segment, 0, 1);
        if answer.refused().is_some() {
            break answer;
        }
        segments.push(segment);
    };
    let expected = Response::Error { code: ErrorCode::NoDescriptors, detail: HARD };
    assert_eq!(refused.response(), expected);
    assert!(segments.len() > 40, "{} segments", segments.len());
    assert!(ErrorCode::NoDescriptors.to_string().contains("ulimit -n"));
    // The refusal took nothing, and what is freed can be used again.
    let used = u64::try_from(segments.len()).unwrap() * SUPERPAGE_BYTES;
    assert_eq!(blade.serving.stat().totals.used_bytes.get(), used);
    let segment = segments.pop().unwrap();
    client.write(segments[0], 0, &pages(1, 1)).done();
    client.ask(&Request::Detach { segment }).done();
    wait_until("the descriptor is free", || {
        let (segment, _) = client.create(1);
        client.allocate(segment, 0, 1).refused().is_none()
    });
}
