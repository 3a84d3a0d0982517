//! A rack client and its far memory, without a program: reports when the memory has moved, writes
//! pages and reads them back.

use farpool_api::{
    Client, ClientAnswer, ClientId, ClientReport, ClientSegment, ClientSegmentUse, ClientSpec,
    Place, SegmentId, SegmentSpec, SegmentState,
};
use farpool_pool::{
    Address, BladeSpec, Completion, Grant, GrantKey, Lane, PageRead, PageWrite, Pool, PoolConfig,
    SegmentHandle, SegmentPage,
};
use farpool_units::PAGE_BYTES;

use crate::PATIENCE;

/// A client of the rack with one segment, which it never returns.
#[derive(Debug)]
pub struct User {
    id: ClientId,
    /// Its segment.
    pub segment: SegmentId,
    rest: Client,
    sequence: u64,
}

impl User {
    /// Registers client `number` on this host and waits until its segment is ready.
    ///
    /// # Panics
    /// If the rack does not grant the segment.
    pub fn new(rest: Client, host: &str, number: u128, bytes: u64) -> Self {
        let (id, segment) = (ClientId::from_u128(number), SegmentId::from_u128(number << 64));
        let (host, name) = (host.to_owned(), "test".to_owned());
        let spec = ClientSpec { host, name, pid: 1, lease_ms: 600_000, tenant: None };
        rest.put_client(id, &spec).expect("the client is taken");
        let wish = SegmentSpec::of_client(id, bytes);
        rest.put_segment(segment, &wish).expect("the segment is granted");
        let ready = rest.wait_segment(segment, SegmentState::Ready, 20_000).expect("an answer");
        assert_eq!(ready.state, SegmentState::Ready);
        Self { id, segment, rest, sequence: 0 }
    }

    /// Uses another controller from now on.
    pub fn ask(&mut self, rest: Client) {
        self.rest = rest;
    }

    fn answer(&mut self, segments: Vec<ClientSegmentUse>) -> ClientAnswer {
        self.sequence += 1;
        let report = ClientReport { sequence: self.sequence, segments, ..ClientReport::default() };
        self.rest.report_client(self.id, &report).expect("the report is taken")
    }

    /// Its segment, as the controller reports it.
    ///
    /// # Panics
    /// If the controller does not answer, or knows no such segment.
    pub fn told(&mut self) -> ClientSegment {
        let answer = self.answer(Vec::new());
        answer.segments.into_iter().find(|segment| segment.id == self.segment).expect("its segment")
    }

    /// Reports that everything has moved to the target of this epoch.
    ///
    /// # Panics
    /// If the controller does not answer.
    pub fn evacuated(&mut self, epoch: u64) {
        let id = self.segment;
        self.answer(vec![ClientSegmentUse { id, epoch, used_bytes: 0, evacuated: true }]);
    }
}

/// Far memory on the blade of one place.
#[derive(Debug)]
pub struct Far {
    _pool: Pool,
    lane: Lane,
    segment: SegmentHandle,
}

#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

impl Far {
    /// Connects with the place's grant.
    ///
    /// # Panics
    /// If the blade refuses the connection.
    pub fn open(place: &Place, epoch: u64) -> Self {
        let grant = Some(Grant { key: GrantKey(place.key.expect("a key").0), epoch });
        let address = place.addresses.first().expect("an address").parse::<Address>();
        let address = address.expect("an address");
        let pool = Pool::connect(PoolConfig {
            blades: vec![BladeSpec { grant, ..BladeSpec::from(address) }],
            client: farpool_pool::fresh_client().expect("random numbers"),
            client_name: "rack test".into(),
            quota_bytes: place.bytes,
            sharing_group: None,
            deadline: PATIENCE,
            allow_remote_tcp: false,
            redundancy: farpool_pool::Redundancy::NONE,
            seals_pages: true,
            secures_tcp: false,
            asks: None,
            time: farpool_pool::Time::KERNEL,
        })
        .expect("the blade lets it in");
        let segment = pool.create_segment().expect("a segment");
        pool.allocate_superpage(segment, 0).expect("a superpage");
        Self { lane: pool.lane().expect("a lane"), _pool: pool, segment }
    }

    /// Writes a page. Returns whether the write succeeded.
    pub fn write(&mut self, page: u32, byte: u8) -> bool {
        let local = Page([byte; PAGE_BYTES]);
        let at = SegmentPage { segment: self.segment, page };
        let write = PageWrite { at, from: local.0.as_ptr(), token: 0 };
        // SAFETY: the page outlives the wait for its completion.
        let submitted = unsafe { self.lane.write(&[write]) };
        submitted.is_ok() && self.finish()
    }

    /// Reads a page whose bytes are all equal. Returns the byte, or None if the page cannot be
    /// read.
    ///
    /// # Panics
    /// If the bytes differ.
    pub fn read(&mut self, page: u32) -> Option<u8> {
        let mut local = Page([0; PAGE_BYTES]);
        let at = SegmentPage { segment: self.segment, page };
        let read = PageRead { at, into: local.0.as_mut_ptr(), token: 0 };
        // SAFETY: the page outlives the wait for its completion.
        let submitted = unsafe { self.lane.read(&[read]) };
        if submitted.is_err() || !self.finish() {
            return None;
        }
        assert!(local.0.iter().all(|byte| *byte == local.0[0]), "a page is torn");
        Some(local.0[0])
    }

    fn finish(&mut self) -> bool {
        let mut done: Vec<Completion> = Vec::new();
        while self.lane.in_flight() > 0 {
            self.lane.wait(&mut done);
        }
        done.iter().all(|completion| completion.result.is_ok())
    }
}
