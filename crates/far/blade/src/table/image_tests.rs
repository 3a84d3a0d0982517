//! Images that no table has left are refused; places follow the last that was said.

use super::*;

const LIMITS: Limits = Limits {
    capacity_superpages: 8,
    quota_default_superpages: 8,
    quota_limit_superpages: 8,
    quota_stranger_superpages: 8,
    lease: Duration::from_secs(1),
    clients: 8,
    segments: 8,
    require_grants: false,
};

fn client(number: u64) -> Row {
    let row = ClientRow {
        number,
        id: number.into(),
        name: String::new(),
        pid: 1,
        user: None,
        identity: None,
        quota_superpages: 8,
        grant: None,
    };
    Row::Client(row)
}

fn grant(id: u128, key: u128) -> Row {
    let row = GrantRow {
        id,
        epoch: 1,
        key,
        key_before: None,
        quota_superpages: 8,
        read_bytes_per_s: 1,
        write_bytes_per_s: 1,
    };
    Row::Grant(row)
}

fn client_under(number: u64, grant: u128) -> Row {
    let Row::Client(row) = client(number) else { panic!("a client") };
    Row::Client(ClientRow { grant: Some(grant), ..row })
}

fn segment(id: u64) -> SegmentRow {
    SegmentRow {
        id,
        token: id.into(),
        span_superpages: 4,
        limit_rmma: 4,
        is_frozen: false,
        users: vec![(1, 1)],
        charged: 1,
    }
}

fn image(rows: Vec<Row>) -> Result<Image, ImageError> {
    let mut image = Image::default();
    rows.into_iter().try_for_each(|row| image.apply(row))?;
    Ok(image)
}

fn restored(rows: Vec<Row>) -> Result<Table<u32>, ImageError> {
    Table::restore(LIMITS, &image(rows)?, |segment| Ok(segment.row.limit_rmma))
}

#[test]
fn rows_that_no_table_leaves_are_refused() {
    let with = |change: fn(&mut SegmentRow)| {
        let mut row = segment(1);
        change(&mut row);
        restored(vec![client(1), Row::Segment(row)]).map(drop)
    };
    assert_eq!(with(|_| ()), Ok(()));
    let users = Err(ImageError::Users { segment: 1 });
    assert_eq!(with(|row| row.users.clear()), users);
    assert_eq!(with(|row| row.users[0].0 = 2), users, "no such client");
    assert_eq!(with(|row| row.users[0].1 = 2), users, "two uses of what can be written");
    assert_eq!(with(|row| row.charged = 2), users);
    let allocated = |pairs| {
        let row = Row::Allocated { segment: 1, pairs };
        restored(vec![client(1), Row::Segment(segment(1)), row]).map(drop)
    };
    assert_eq!(allocated(vec![(0, 1), (3, 0)]), Ok(()));
    assert_eq!(allocated(vec![(4, 0)]), Err(ImageError::Superpage { segment: 1, sma: 4 }));
    assert_eq!(allocated(vec![(0, 4)]), Err(ImageError::Superpage { segment: 1, sma: 0 }));
    assert_eq!(allocated(vec![(0, 1), (2, 1)]), Err(ImageError::Superpage { segment: 1, sma: 2 }));
    let twice = restored(vec![
        client(1),
        Row::Segment(segment(1)),
        Row::Segment(SegmentRow { id: 2, ..segment(1) }),
    ]);
    assert_eq!(twice.map(drop), Err(ImageError::Twice { number: 2 }));
    let key = |rows| restored(rows).map(drop);
    assert_eq!(key(vec![grant(1, 5), grant(2, 6), client_under(1, 2)]), Ok(()));
    assert_eq!(key(vec![grant(1, 5), grant(2, 5)]), Err(ImageError::Key { id: 2 }));
    assert_eq!(key(vec![grant(1, 0)]), Err(ImageError::Key { id: 1 }));
    assert_eq!(key(vec![client_under(1, 2)]), Err(ImageError::NoGrant { number: 1 }));
    let ended = Row::GrantEnded { id: 2, epoch: 1 };
    let rows = vec![grant(2, 6), ended, client_under(1, 2)];
    assert_eq!(key(rows), Err(ImageError::NoGrant { number: 1 }));
    let shared = SegmentRow { is_frozen: true, users: vec![(1, 1), (2, 1)], ..segment(1) };
    let rows = |other| {
        let clients = vec![client_under(1, 2), client_under(2, other)];
        [vec![grant(2, 6), grant(3, 7)], clients, vec![Row::Segment(shared.clone())]].concat()
    };
    assert_eq!(key(rows(2)), Ok(()));
    assert_eq!(key(rows(3)), users, "a segment is of one grant");
    let nowhere = Row::Freed { segment: 7, first: 0, count: 1 };
    assert_eq!(image(vec![nowhere]).map(drop), Err(ImageError::NoSegment { segment: 7 }));
}

#[test]
fn a_place_has_one_superpage_and_an_unplaced_superpage_none() {
    let placed = |segment, pairs: &[(u32, u32)]| Row::Placed { segment, pairs: pairs.to_vec() };
    let allocated = |segment| Row::Allocated { segment, pairs: vec![(0, 0), (1, 1)] };
    let mut image = image(vec![
        client(1),
        Row::Segment(segment(1)),
        Row::Segment(segment(2)),
        allocated(1),
        placed(1, &[(0, 5), (1, 6)]),
        Row::Freed { segment: 1, first: 1, count: 1 },
        allocated(2),
        placed(2, &[(0, 6)]),
        placed(9, &[(0, 7)]),
    ])
    .unwrap();
    image.drop_unplaced();
    let kept: Vec<_> = image.segments().map(|it| (it.map.clone(), it.places.clone())).collect();
    let one = |place| (BTreeMap::from([(0, 0)]), BTreeMap::from([(0, place)]));
    assert_eq!(kept, [one(5), one(6)]);
    assert_eq!((image.counts(), image.superpages()), ((1, 2), 2));
}

#[test]
fn numbers_are_not_given_out_again() {
    let rows =
        vec![client(4), Row::Segment(SegmentRow { users: vec![(4, 1)], charged: 4, ..segment(9) })];
    let ended = vec![Row::SegmentEnded { id: 9 }, Row::ClientEnded { number: 4 }];
    let image = image([rows, ended].concat()).unwrap();
    assert_eq!(image.rows().next(), Some(Row::Next { client: 5, segment: 10 }));
    let table: Table<u32> =
        Table::restore(LIMITS, &image, |_| Err(ImageError::NoSegment { segment: 0 })).unwrap();
    assert_eq!((table.next_client, table.next_segment), (5, 10));
}
