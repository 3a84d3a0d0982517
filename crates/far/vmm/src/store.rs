//! A guest's memory in the pool: written once, frozen, and read by as many as want it.
//!
//! Pages of zeros are not stored. An image knows which pages it has; a page that it has and that a
//! blade no longer gives is an error, never zeros.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_kernel::lock;
use farpool_pool::{
    Lane, PageError, Pool, PoolConfig, PoolError, SUPERPAGE_PAGES, SegmentHandle, SegmentPage,
};
use farpool_units::{PAGE_BYTES, PAGE_BYTES_U64, exactly};
use rustix::io::Errno;

use crate::page_set::PageSet;
use crate::sys::LentPages;

/// Pages that are written at once: 256 KiB, beyond which a blade is not filled faster.
const WRITING_PAGES: usize = 64;
/// Pages that a reader may have under way. A guest has about one for each of its processors; more
/// faults wait for one of these to end.
pub(crate) const READING_PAGES: usize = 64;
/// Pages of a file that are read at once.
const PIECE_PAGES: usize = 256;
/// Longest time between two looks after the connections, whatever a blade's lease is.
const KEEP_TIME_MAX: Duration = Duration::from_secs(60);
/// Idle lanes that are kept for the next reader; beyond that they are closed.
const IDLE_LANES_MAX: usize = 16;

/// Why memory could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("page {page} of the guest's memory could not be stored: {error}")]
    NotStored { page: u32, error: PageError },
    #[error("page {page} of the guest's memory is lost: {error}")]
    Lost { page: u32, error: PageError },
    #[error("the guest's memory cannot be read: {0}")]
    Source(io::Error),
    #[error("there is no memory for {WRITING_PAGES} pages: {0}")]
    NoMemory(Errno),
    #[error("no thread can be started: {0}")]
    Thread(io::Error),
    #[error("it was stopped before all was stored")]
    Stopped,
}

/// The connection to the blades, kept alive by a thread of its own.
#[derive(Debug)]
pub struct Store {
    pool: Arc<Pool>,
    idle: Mutex<Vec<Lane>>,
    /// Ends the thread when it is dropped.
    ending: Option<Sender<()>>,
    keeper: Option<JoinHandle<()>>,
}

impl Store {
    /// Connects to the blades.
    ///
    /// # Errors
    /// One of them cannot be reached or refuses.
    pub fn connect(config: PoolConfig) -> Result<Arc<Store>, StoreError> {
        let pool = Arc::new(Pool::connect(config)?);
        let (ending, ended) = channel::<()>();
        let step = (pool.lease() / 3).min(KEEP_TIME_MAX);
        let kept = Arc::clone(&pool);
        let keep = move || {
            while ended.recv_timeout(step) == Err(RecvTimeoutError::Timeout) {
                kept.keep_alive();
            }
        };
        let keeper = std::thread::Builder::new().name("vmm-lease".into()).spawn(keep);
        let keeper = keeper.map_err(StoreError::Thread)?;
        let idle = Mutex::new(Vec::new());
        Ok(Arc::new(Store { pool, idle, ending: Some(ending), keeper: Some(keeper) }))
    }

    /// Begins to store the memory of a guest with so many pages.
    ///
    /// # Errors
    /// There are as many images as one process can have, or a blade cannot be reached.
    pub fn begin(self: &Arc<Self>, pages: u32) -> Result<Loader, StoreError> {
        let lane = self.lane()?;
        let lent = LentPages::new(lane, WRITING_PAGES).map_err(StoreError::NoMemory)?;
        let segment = self.pool.create_segment()?;
        let image = Image { store: Arc::clone(self), segment, present: PageSet::none_of(pages) };
        Ok(Loader {
            image,
            lent,
            free: (0..WRITING_PAGES).collect(),
            ready: Vec::with_capacity(WRITING_PAGES),
            pages: [0; WRITING_PAGES],
        })
    }

    fn lane(&self) -> Result<Lane, PoolError> {
        let idle = lock(&self.idle).pop();
        idle.map_or_else(|| self.pool.lane(), Ok)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        drop(self.ending.take());
        if let Some(keeper) = self.keeper.take() {
            // It does not panic: that would have ended the process.
            let _ = keeper.join();
        }
        self.pool.goodbye();
    }
}

/// A guest's memory that is being stored.
#[derive(Debug)]
pub struct Loader {
    /// Before the image, so that it is dropped first: no page is under way when that is given back.
    lent: LentPages,
    image: Image,
    free: Vec<usize>,
    /// Local pages that are filled and not yet given to the lane.
    ready: Vec<(usize, SegmentPage)>,
    /// The guest's page in each local one.
    pages: [u32; WRITING_PAGES],
}

impl Loader {
    /// Stores a page, once. Zeros are only noted by being absent.
    ///
    /// # Errors
    /// A blade is full or lost, or the quota is used up; nothing more is to be stored then.
    ///
    /// # Panics
    /// It has not 4096 bytes, or lies beyond the guest's memory.
    pub fn put(&mut self, page: u32, bytes: &[u8]) -> Result<(), StoreError> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let Image { store, segment, .. } = &self.image;
        let (pool, segment) = (Arc::clone(&store.pool), *segment);
        pool.allocate_superpage(segment, page / SUPERPAGE_PAGES)?;
        if self.free.is_empty() {
            self.flush();
            self.take_back()?;
        }
        let number = self.free.pop().expect("one has come back");
        self.lent.bytes_mut(number).copy_from_slice(bytes);
        self.pages[number] = page;
        self.image.present.add(page);
        self.ready.push((number, SegmentPage { segment, page }));
        Ok(())
    }

    /// Stores a part of a file as the pages from `first_page` on. Holes are not read. `watch` is
    /// called with the bytes that are done, and ends it by saying false.
    ///
    /// # Errors
    /// As for [`Loader::put`]; the file is shorter, or cannot be read.
    pub fn put_file(
        &mut self,
        file: &File,
        offset: u64,
        first_page: u32,
        pages: u32,
        mut watch: impl FnMut(u64) -> bool,
    ) -> Result<(), StoreError> {
        let end = u64::from(pages) * PAGE_BYTES_U64;
        let file_bytes = file.metadata().map_err(StoreError::Source)?.len();
        if offset.checked_add(end).is_none_or(|needed| file_bytes < needed) {
            let error = io::Error::new(io::ErrorKind::UnexpectedEof, "its file is too short");
            return Err(StoreError::Source(error));
        }
        let mut piece = vec![0; PIECE_PAGES * PAGE_BYTES];
        let mut at = 0;
        while at < end {
            if !watch(at) {
                return Err(StoreError::Stopped);
            }
            match next_data(file, offset + at) {
                Some(next) if next < offset + end => at = next - offset,
                _ => break,
            }
            at -= at % PAGE_BYTES_U64;
            let length = (end - at).min(piece.len() as u64);
            let piece = &mut piece[..exactly(length)];
            file.read_exact_at(piece, offset + at).map_err(StoreError::Source)?;
            for (bytes, page) in piece.chunks(PAGE_BYTES).zip(at / PAGE_BYTES_U64..) {
                self.put(first_page + exactly::<u32, _>(page), bytes)?;
            }
            at += length;
        }
        Ok(())
    }

    /// The image, once all of it is on the blades. It changes no more.
    ///
    /// # Errors
    /// A page could not be stored.
    pub fn finish(mut self) -> Result<Arc<Image>, StoreError> {
        self.flush();
        while !self.lent.is_idle() {
            self.take_back()?;
        }
        let Loader { image, lent, .. } = self;
        image.give_back(lent);
        image.store.pool.freeze(image.segment)?;
        Ok(Arc::new(image))
    }

    fn flush(&mut self) {
        self.lent.write(&self.ready);
        self.ready.clear();
    }

    fn take_back(&mut self) -> Result<(), StoreError> {
        let mut back = Vec::new();
        self.lent.wait(&mut back);
        for (number, result) in back {
            let page = self.pages[number];
            result.map_err(|error| StoreError::NotStored { page, error })?;
            self.free.push(number);
        }
        Ok(())
    }
}

/// Where the next data of a file begins: at `from` itself if the file system does not know. None:
/// there is none.
fn next_data(file: &File, from: u64) -> Option<u64> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(from)) {
        Ok(at) => Some(at),
        Err(Errno::NXIO) => None,
        Err(_) => Some(from),
    }
}

/// A guest's memory on the blades. It is given back when the last user drops it.
#[derive(Debug)]
pub struct Image {
    store: Arc<Store>,
    segment: SegmentHandle,
    present: PageSet,
}

impl Image {
    /// Pages of the guest.
    pub fn pages(&self) -> u32 {
        self.present.end()
    }

    /// Pages that are stored: those that are not zeros.
    pub fn stored_pages(&self) -> u32 {
        self.present.count()
    }

    pub(crate) fn present(&self) -> &PageSet {
        &self.present
    }

    /// A reader for one thread.
    ///
    /// # Errors
    /// A blade refuses another connection.
    pub(crate) fn reader(self: &Arc<Self>) -> Result<Reader, StoreError> {
        let lane = self.store.lane()?;
        let lent = LentPages::new(lane, READING_PAGES).map_err(StoreError::NoMemory)?;
        let free = (0..lent.count()).collect();
        Ok(Reader { image: Arc::clone(self), lent: Some(lent), free, pages: [0; READING_PAGES] })
    }

    /// Keeps a lane for the next user.
    fn give_back(&self, lent: LentPages) {
        let mut idle = lock(&self.store.idle);
        if let Some(lane) = lent.into_lane().filter(|_| idle.len() < IDLE_LANES_MAX) {
            idle.push(lane);
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // What a blade refuses to give back ends with the connection.
        let _ = self.store.pool.detach(self.segment);
    }
}

/// A page that was fetched.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) page: u32,
    /// The local page that holds its bytes, to be released.
    pub(crate) number: usize,
}

/// One thread's way to read an image.
#[derive(Debug)]
pub(crate) struct Reader {
    image: Arc<Image>,
    /// None only while it is dropped.
    lent: Option<LentPages>,
    free: Vec<usize>,
    /// The guest's page in each local one.
    pages: [u32; READING_PAGES],
}

impl Reader {
    fn lent(&mut self) -> &mut LentPages {
        self.lent.as_mut().expect("a reader that lives")
    }

    /// How many pages may be begun now.
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// True if pages are under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.lent.as_ref().is_some_and(|it| !it.is_idle())
    }

    /// Begins to fetch pages.
    ///
    /// # Panics
    /// There is no [`room`](Self::room) for all of them.
    pub(crate) fn fetch(&mut self, pages: &[u32]) {
        let segment = self.image.segment;
        let mut reads = Vec::with_capacity(pages.len());
        for &page in pages {
            let number = self.free.pop().expect("there is room");
            self.pages[number] = page;
            reads.push((number, SegmentPage { segment, page }));
        }
        self.lent().read(&reads);
    }

    /// The pages that have come, without blocking; what is older than the deadline at `now` is
    /// lost.
    ///
    /// # Errors
    /// A page is lost. No later page is to be trusted to come.
    pub(crate) fn poll(&mut self, now: Instant) -> Result<Vec<Fetched>, StoreError> {
        let mut back = Vec::new();
        self.lent().poll(now, &mut back);
        self.check(back)
    }

    /// The same, and blocks until one has come.
    pub(crate) fn wait(&mut self) -> Result<Vec<Fetched>, StoreError> {
        let mut back = Vec::new();
        self.lent().wait(&mut back);
        self.check(back)
    }

    fn check(&self, back: Vec<(usize, Result<(), PageError>)>) -> Result<Vec<Fetched>, StoreError> {
        let fetched = |(number, result): (usize, Result<(), PageError>)| {
            let page = self.pages[number];
            result.map_err(|error| StoreError::Lost { page, error })?;
            Ok(Fetched { page, number })
        };
        back.into_iter().map(fetched).collect()
    }

    /// The bytes of a page that has come.
    pub(crate) fn bytes(&self, number: usize) -> &[u8] {
        self.lent.as_ref().expect("a reader that lives").bytes(number)
    }

    /// Lets the local page be used again.
    pub(crate) fn release(&mut self, number: usize) {
        self.free.push(number);
    }

    /// What becomes readable when pages come.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.lent.iter().flat_map(LentPages::descriptors)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(lent) = self.lent.take() {
            self.image.give_back(lent);
        }
    }
}
