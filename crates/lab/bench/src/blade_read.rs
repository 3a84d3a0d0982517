//! Reading from a blade without a program in between: what blade, wire and client can move.
//!
//! Memory of one segment is written once, then read in blocks of 32 KiB in random order with many
//! requests in flight, from one thread. The ends of every page that is read are checked.

use crate::BenchError;
use crate::stage::lacking;
use crate::sys::{self, Mapping};
use crate::workload::{Shuffle, mix};
use farpool_fabric::{
    Control, DescriptorSet, Link, LinkPage, PageDone, Session, Spare, StreamLink,
};
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES, exactly};
use farpool_wire::{ClientId, PageNumber, Purpose, Request, Response, SegmentId, SuperpageNumber};
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages of one read: 32 KiB.
const BLOCK_PAGES: usize = 8;
/// Blocks in flight: 1 MiB, far more than a loopback connection holds at a time.
const BLOCKS_IN_FLIGHT: usize = 32;
/// A request unanswered for this long means that the blade is lost.
const DEADLINE: Duration = Duration::from_secs(10);
const WORDS: usize = PAGE_BYTES / 8;

/// Bytes a second of 32 KiB reads from `bytes` of memory on the blade at `address`.
pub(crate) fn bytes_s(address: &str, bytes: u64, time: Duration) -> Result<f64, BenchError> {
    let superpages = bytes.div_ceil(SUPERPAGE_BYTES).max(1);
    let session = session(address, superpages * SUPERPAGE_BYTES)?;
    let mut control = Control::connect(Arc::clone(&session), 0).map_err(blade)?;
    let segment = segment(&mut control, superpages)?;
    let mut reader = Reader::new(session, segment, superpages)?;
    reader.fill()?;
    let result = reader.read_for(time);
    // The blade forgets the client anyway when its lease ends.
    let _ = control.call(&Request::Goodbye);
    result
}

fn session(address: &str, quota_bytes: u64) -> Result<Arc<Session>, BenchError> {
    let mut id = [0u8; 16];
    let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut id));
    random.map_err(BenchError::os("read random numbers"))?;
    Ok(Arc::new(Session {
        address: address.parse().map_err(blade)?,
        client: ClientId(u128::from_le_bytes(id)),
        grant: None,
        limits: None,
        client_name: "farpool bench".to_owned(),
        purpose: Purpose::Client,
        quota_bytes,
        sharing_group: None,
        deadline: DEADLINE,
        spare: Spare::default(),
        allow_remote_tcp: false,
        secures_tcp: false,
        asks: None,
        time: farpool_fabric::Time::KERNEL,
        descriptors: Arc::new(DescriptorSet::default()),
        met: farpool_fabric::Met::default(),
    }))
}

/// Creates a segment in which every superpage has memory.
fn segment(control: &mut Control, superpages: u64) -> Result<SegmentId, BenchError> {
    let count = u32::try_from(superpages).map_err(blade)?;
    let create = Request::CreateSegment { span_superpages: count };
    let answer = control.call(&create).map_err(blade)?;
    let Response::SegmentCreated { segment, .. } = answer.response else {
        return Err(lacking("the blade answers a new segment with something else"));
    };
    let allocate = Request::AllocateSuperpages { segment, first: SuperpageNumber(0), count };
    control.call(&allocate).map_err(blade)?;
    Ok(segment)
}

/// The reads of one thread.
struct Reader {
    link: StreamLink,
    segment: SegmentId,
    blocks: usize,
    /// A place for each block in flight.
    memory: Mapping,
    /// Pages of the block at each place that are still under way.
    missing: [usize; BLOCKS_IN_FLIGHT],
    /// Block at each place.
    block_at: [usize; BLOCKS_IN_FLIGHT],
    /// Number of blocks whose last page has arrived.
    arrived: usize,
    done: Vec<PageDone>,
}

impl Reader {
    fn new(session: Arc<Session>, segment: SegmentId, superpages: u64) -> Result<Self, BenchError> {
        let block_bytes = (BLOCK_PAGES * PAGE_BYTES) as u64;
        Ok(Self {
            link: StreamLink::connect(session, 1).map_err(blade)?,
            segment,
            blocks: usize::try_from(superpages * SUPERPAGE_BYTES / block_bytes).map_err(blade)?,
            memory: Mapping::small_pages(BLOCKS_IN_FLIGHT * BLOCK_PAGES * PAGE_BYTES)?,
            missing: [0; BLOCKS_IN_FLIGHT],
            block_at: [0; BLOCKS_IN_FLIGHT],
            arrived: 0,
            done: Vec::with_capacity(BLOCKS_IN_FLIGHT * BLOCK_PAGES),
        })
    }

    /// Writes every block once, with a value of its own at both ends of every page.
    fn fill(&mut self) -> Result<(), BenchError> {
        for first in (0..self.blocks).step_by(BLOCKS_IN_FLIGHT) {
            for place in 0..BLOCKS_IN_FLIGHT.min(self.blocks - first) {
                let pages = self.pages(first + place, place);
                for page in &pages {
                    let at = exactly::<usize, _>(page.token) * WORDS;
                    let value = mix(u64::from(page.page.0));
                    self.memory.words_mut()[at] = value;
                    self.memory.words_mut()[at + WORDS - 1] = value;
                }
                // SAFETY: the memory is ours, each place belongs to one block at a time, and
                // nothing is written to it before `settle` has seen all completions.
                unsafe { self.link.write(&pages) };
                (self.block_at[place], self.missing[place]) = (first + place, BLOCK_PAGES);
            }
            while self.link.in_flight() > 0 {
                self.settle()?;
            }
        }
        Ok(())
    }

    fn read_for(&mut self, time: Duration) -> Result<f64, BenchError> {
        sys::pin_to_core(0);
        let order = Shuffle::new(self.blocks, 5);
        let mut next = 0;
        self.arrived = 0;
        let start = Instant::now();
        while start.elapsed() < time {
            for place in 0..BLOCKS_IN_FLIGHT {
                if self.missing[place] == 0 {
                    self.read(order.at(next % self.blocks), place);
                    next += 1;
                }
            }
            self.settle()?;
        }
        let bytes = self.arrived * BLOCK_PAGES * PAGE_BYTES;
        let bytes_s = bytes as f64 / start.elapsed().as_secs_f64();
        while self.link.in_flight() > 0 {
            self.settle()?;
        }
        Ok(bytes_s)
    }

    fn read(&mut self, block: usize, place: usize) {
        let pages = self.pages(block, place);
        self.block_at[place] = block;
        self.missing[place] = BLOCK_PAGES;
        // SAFETY: the memory is ours, and each place belongs to one block until all of its pages
        // have come back (`missing`); nothing reads it before.
        unsafe { self.link.read(&pages) };
    }

    fn pages(&self, block: usize, place: usize) -> [LinkPage; BLOCK_PAGES] {
        std::array::from_fn(|i| {
            let token = place * BLOCK_PAGES + i;
            LinkPage {
                segment: self.segment,
                page: PageNumber(exactly(block * BLOCK_PAGES + i)),
                file: -1,
                file_page: 0,
                memory: self.memory.page_pointer(token),
                token: token as u64,
            }
        })
    }

    /// Waits for completions, counts them off and checks the blocks that are complete.
    fn settle(&mut self) -> Result<(), BenchError> {
        self.done.clear();
        self.link.wait(&mut self.done);
        self.link.expire(Instant::now(), &mut self.done);
        for done in &self.done {
            done.result.map_err(|fault| lacking(format!("the blade fails: {fault:?}")))?;
            let place = exactly::<usize, _>(done.token) / BLOCK_PAGES;
            self.missing[place] -= 1;
            if self.missing[place] == 0 {
                self.arrived += 1;
                check(&self.memory, place, self.block_at[place])?;
            }
        }
        Ok(())
    }
}

fn check(memory: &Mapping, place: usize, block: usize) -> Result<(), BenchError> {
    for i in 0..BLOCK_PAGES {
        let at = (place * BLOCK_PAGES + i) * WORDS;
        let page = block * BLOCK_PAGES + i;
        let expected = mix(page as u64);
        let words = memory.words();
        if [words[at], words[at + WORDS - 1]] != [expected; 2] {
            let detail = format!("page {page} came back different");
            return Err(BenchError::WrongData { workload: "blade.tcp", detail });
        }
    }
    Ok(())
}

fn blade(error: impl std::fmt::Display) -> BenchError {
    lacking(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_blade::{BladeConfig, Server};

    #[test]
    fn blocks_come_back_from_a_blade_as_they_were_written() {
        let config = BladeConfig { memory_bytes: 2 * SUPERPAGE_BYTES, ..BladeConfig::default() };
        let address = "tcp://127.0.0.1:0".parse().expect("an address");
        let serving = Server::bind(&[address], config).and_then(|server| server.serve());
        let serving = serving.expect("loopback can be listened on");
        let address = serving.addresses()[0].to_string();
        let bytes_s = bytes_s(&address, 2 * SUPERPAGE_BYTES, Duration::from_millis(100));
        assert!(bytes_s.expect("the blade serves") > 0.0);
        let refusal = super::bytes_s(&address, 9 * SUPERPAGE_BYTES, Duration::ZERO);
        assert!(matches!(refusal, Err(BenchError::Lacking(_))), "more than the blade has");
    }
}
