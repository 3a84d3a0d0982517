//! Properties of all frames: they decode as they were encoded, and damaged ones are refused.

mod exercise;
mod samples;

use farpool_wire::*;
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// Duration of the mutation test. fuzz/ does the same for any length of time.
const MUTATION_TIME: Duration = Duration::from_secs(2);

fn any_extents() -> impl Strategy<Value = Vec<Extent>> {
    let extent = (any::<u32>(), 1..20u32)
        .prop_map(|(first, count)| Extent::new(PageNumber(first.min(u32::MAX - count)), count));
    prop::collection::vec(extent, 1..50)
}

/// Builds a request of each kind from the same random parts.
fn request_of<'a>(
    kind: usize,
    numbers: [u64; 3],
    extents: &'a [Extent],
    name: &'a str,
) -> Request<'a> {
    let segment = SegmentId(numbers[0]);
    let small = u32::try_from(numbers[1] % 4000).unwrap();
    let skip = u32::try_from(numbers[1] >> 32).unwrap();
    let (first, count) = (SuperpageNumber(small * 3), small + 1);
    match kind {
        0 => Request::Hello(Hello {
            client: ClientId(u128::from(numbers[0]) << 64 | u128::from(numbers[1])),
            grant: (numbers[2] % 2 == 1).then_some(Grant {
                key: GrantKey(u128::from(numbers[2]) << 64 | u128::from(numbers[0])),
                epoch: numbers[1],
            }),
            purpose: [Purpose::Client, Purpose::Keeper, Purpose::Monitor]
                [(numbers[2] % 3) as usize],
            pid: skip,
            slot: small,
            generation: count,
            quota_wanted_bytes: numbers[2],
            sharing_group: std::num::NonZeroU64::new(numbers[2]).map(SharingGroup),
            name,
        }),
        1 => Request::CreateSegment { span_superpages: count },
        2 => Request::AllocateSuperpages { segment, first, count },
        3 => Request::FreeSuperpages { segment, first, count },
        4 => Request::Freeze { segment },
        5 => Request::Thaw { segment },
        6 => Request::Attach { token: SegmentToken(u128::from(numbers[2])) },
        7 => Request::Detach { segment },
        8 => Request::ListSuperpages { segment, skip },
        9 => Request::Discard { segment, extents },
        10 => Request::Read { segment, extents },
        11 => Request::Write { segment, extents },
        12 => Request::ShmMap { segment },
        13 => Request::Stat { skip_clients: skip },
        14 => Request::Ping,
        15 => Request::Goodbye,
        _ => Request::Report { pages_read: numbers[1], pages_written: numbers[2] },
    }
}

proptest! {
    #[test]
    fn requests_come_back_as_sent(
        kind in 0..17usize,
        numbers: [u64; 3],
        extents in any_extents(),
        name in "[a-z\u{e9}]{0,16}",
        id: u64,
        checksum: u32,
    ) {
        let request = request_of(kind, numbers, &extents, &name);
        let checksum = if kind == 11 { checksum } else { 0 };
        let mut frame = b"before".to_vec();
        request.encode(RequestId(id), checksum, &mut frame).unwrap();
        let head = split_head(&frame[6..]).unwrap().unwrap();
        prop_assert_eq!(head.header.request_id, RequestId(id));
        prop_assert_eq!(head.header.pages_checksum, checksum);
        prop_assert_eq!(head.header.head_bytes(), frame.len() - 6);
        prop_assert_eq!(Request::decode(&head), Ok(request));
        prop_assert_eq!(Response::decode(&head), Err(WireError::Direction));
    }

    #[test]
    fn lists_of_superpages_come_back_as_sent(
        smas in prop::collection::btree_set(0..SPAN_LIMIT_SUPERPAGES, 0..4000),
        credits: u16,
    ) {
        let pair = |sma| SuperpagePair::new(SuperpageNumber(sma), SuperpageNumber(sma / 2));
        let pairs: Vec<_> = smas.into_iter().map(pair).collect();
        let response = Response::Allocated { superpages: &pairs };
        let mut frame = Vec::new();
        let opcode = Opcode::AllocateSuperpages;
        response.encode(opcode, RequestId(1), credits, 0, &mut frame).unwrap();
        let head = split_head(&frame).unwrap().unwrap();
        prop_assert_eq!(head.header.credits, credits);
        prop_assert_eq!(Response::decode(&head), Ok(response));
    }

    #[test]
    fn checksums_do_not_depend_on_where_slices_are_cut(
        bytes in prop::collection::vec(any::<u8>(), 0..9000),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        let mut checksum = PagesChecksum::new();
        at.windows(2).for_each(|pair| checksum.update(&bytes[pair[0]..pair[1]]));
        prop_assert_eq!(checksum.value(), PagesChecksum::of(&bytes));
    }

    #[test]
    fn any_bytes_are_decoded_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        exercise::decode_any(&bytes);
        exercise::decode_repaired(&mut bytes);
    }
}

#[test]
fn truncated_heads_ask_for_more() {
    samples::visit(|name, sample, pages| {
        let frame = samples::encode(sample, pages);
        let head_bytes = split_head(&frame).unwrap().unwrap().header.head_bytes();
        for length in 0..head_bytes {
            assert_eq!(split_head(&frame[..length]), Ok(None), "{name} cut to {length}");
        }
    });
}

#[test]
fn every_flipped_bit_is_refused() {
    samples::visit(|name, sample, pages| {
        let mut frame = samples::encode(sample, pages);
        let length = frame.len();
        frame.resize(HEAD_LIMIT_BYTES * 2, 0); // so that a longer meta is there to be looked at
        for bit in 0..length * 8 {
            frame[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_intact(&frame, pages.len()), "{name} with bit {bit} flipped");
            frame[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(is_intact(&frame, pages.len()), "{name}");
    });
}

#[test]
fn a_damaged_header_is_refused_before_anything_behind_it_is_waited_for() {
    samples::visit(|name, sample, pages| {
        let mut header = samples::encode(sample, pages);
        header.truncate(HEADER_BYTES);
        for bit in 0..HEADER_BYTES * 8 {
            header[bit / 8] ^= 1 << (bit % 8);
            assert!(split_head(&header).is_err(), "{name} with bit {bit} flipped");
            header[bit / 8] ^= 1 << (bit % 8);
        }
    });
}

fn is_intact(frame: &[u8], pages_bytes: usize) -> bool {
    let Ok(Some(head)) = split_head(frame) else {
        return false;
    };
    let start = head.header.head_bytes();
    let pages = &frame[start..start + pages_bytes];
    PagesChecksum::of(pages) == head.header.pages_checksum
}

#[test]
fn limits_are_kept_when_encoding() {
    let mut out = b"as it was".to_vec();
    let segment = SegmentId(1);
    let too_many = vec![Extent::page(PageNumber(1)); EXTENTS_LIMIT + 1];
    let too_long = [Extent::new(PageNumber(0), 1025)];
    let beyond = [Extent::new(PageNumber(u32::MAX), 2)];
    let nothing = [Extent::new(PageNumber(5), 0)];
    for extents in [&too_many[..], &too_long, &beyond, &nothing, &[]] {
        let read = Request::Read { segment, extents };
        assert!(read.encode(RequestId(1), 0, &mut out).is_err(), "{extents:?}");
    }
    for (first, count) in [(0, 0), (0, SUPERPAGES_PER_REQUEST_LIMIT + 1), (u32::MAX, 1)] {
        let first = SuperpageNumber(first);
        let allocate = Request::AllocateSuperpages { segment, first, count };
        assert!(allocate.encode(RequestId(1), 0, &mut out).is_err(), "{count} from {first:?}");
    }
    for span_superpages in [0, SPAN_LIMIT_SUPERPAGES + 1] {
        let create = Request::CreateSegment { span_superpages };
        assert!(create.encode(RequestId(1), 0, &mut out).is_err(), "{span_superpages}");
    }
    assert_eq!(out, b"as it was");
}

#[test]
fn numbers_on_the_wire_are_the_documented_ones() {
    for code in ErrorCode::ALL {
        assert_eq!(ErrorCode::from_number(code.number()), Some(*code));
    }
    for opcode in Opcode::ALL {
        assert_eq!(Opcode::from_number(opcode.number()), Some(*opcode));
    }
    let text = include_str!("../../../../docs/contributors/protocol.md");
    for code in ErrorCode::ALL {
        let entry = format!("\n- **{} {code:?}**\n", code.number());
        assert!(text.contains(&entry), "docs/contributors/protocol.md lacks {entry:?}");
    }
    for opcode in Opcode::ALL {
        let entry = format!("\n- **{} {opcode:?}**\n", opcode.number());
        assert!(text.contains(&entry), "docs/contributors/protocol.md lacks {entry:?}");
    }
}

#[test]
fn a_grant_without_a_key_is_none() {
    let name = "";
    let Request::Hello(hello) = request_of(0, [1, 2, 0], &[], name) else { unreachable!() };
    assert_eq!(hello.grant, None);
    let without = Grant { key: GrantKey(0), epoch: 1 };
    let request = Request::Hello(Hello { grant: Some(without), ..hello });
    let refused = Err(WireError::Value { what: "grant" });
    assert_eq!(request.encode(RequestId(1), 0, &mut Vec::new()), refused);
    // The same on the wire: an epoch without a key.
    let mut frame = Vec::new();
    Request::Hello(hello).encode(RequestId(1), 0, &mut frame).unwrap();
    let mut meta = frame.split_off(HEADER_BYTES);
    meta.truncate(meta.len() - META_CHECKSUM_BYTES);
    meta[32] = 1;
    let header = Header::decode(frame.first_chunk().unwrap()).unwrap();
    let head = Head { header, meta: &meta };
    assert_eq!(Request::decode(&head), Err(WireError::Value { what: "grant" }));
}

#[test]
fn a_key_is_not_shown() {
    let grant = Grant { key: GrantKey(0xfeed), epoch: 3 };
    assert_eq!(format!("{grant:?}"), "Grant { key: GrantKey(secret), epoch: 3 }");
}

/// xorshift64: the same mutations in each run, as many as the time allows.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).unwrap()
    }
}

#[test]
fn priorities_follow_from_operation_and_flag() {
    let one = [Extent::page(PageNumber(7))];
    let segment = SegmentId(1);
    let read = Request::Read { segment, extents: &one };
    let write = Request::Write { segment, extents: &one };
    for (request, usual) in
        [(read, Priority::Demand), (Request::Ping, Priority::Demand), (write, Priority::Eviction)]
    {
        let (mut plain, mut background) = (Vec::new(), Vec::new());
        request.encode(RequestId(1), 0, &mut plain).unwrap();
        request.encode_in_background(RequestId(1), 0, &mut background).unwrap();
        let priority = |frame: &[u8]| split_head(frame).unwrap().unwrap().header.priority();
        assert_eq!((priority(&plain), priority(&background)), (usual, Priority::Background));
    }
    assert!(Priority::ALL.is_sorted());
    // A response has none.
    for flags in [5u16, 7, 6, 8, 0x8000] {
        let mut frame = Vec::new();
        Request::Ping.encode(RequestId(1), 0, &mut frame).unwrap();
        frame[6..8].copy_from_slice(&flags.to_le_bytes());
        let checksum = PagesChecksum::of(&frame[..28]);
        frame[28..32].copy_from_slice(&checksum.to_le_bytes());
        assert_eq!(split_head(&frame), Err(WireError::Flags { found: flags }));
    }
}

#[test]
fn mutated_frames_never_panic_and_have_one_encoding() {
    let mut seeds = Vec::new();
    samples::visit(|_, sample, _| seeds.push(samples::encode(sample, &[])));
    let mut random = Random(0x5eed_f00d);
    let start = Instant::now();
    while start.elapsed() < MUTATION_TIME {
        for seed in &seeds {
            let mut frame = seed.clone();
            for _ in 0..=random.below(4) {
                mutate(&mut frame, &mut random);
            }
            exercise::decode_any(&frame);
            exercise::decode_repaired(&mut frame);
        }
    }
}

fn mutate(frame: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(frame.len());
    match random.below(5) {
        0 => frame[at] ^= 1 << random.below(8),
        1 => frame[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
        2 => frame.truncate(at.max(1)),
        3 => frame.extend_from_within(at..),
        _ => {
            let meta_bytes = u16::try_from(random.below(600)).unwrap();
            if frame.len() >= HEADER_BYTES {
                frame[16..18].copy_from_slice(&meta_bytes.to_le_bytes());
            }
        }
    }
    frame.truncate(2000);
}
