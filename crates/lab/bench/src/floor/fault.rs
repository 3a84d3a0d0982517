//! The bare fault: a thread touches missing pages one by one in random order, a handler thread on
//! the same core reads the message and answers with one `UFFDIO_COPY` of a warm page. Nothing else
//! is done.

use super::Fault;
use crate::BenchError;
use crate::latency::Latencies;
use crate::sys::{self, Mapping};
use crate::workload::Shuffle;
use farpool_uffd::{Message, Uffd, register_mode};
use farpool_units::PAGE_BYTES;
use std::time::Instant;

/// Opens a userfaultfd. Errors with [`BenchError::Lacking`] and the reason if this is not possible.
pub(super) fn open(features: u64) -> Result<Uffd, BenchError> {
    Uffd::open(features, false).map_err(|error| BenchError::Lacking(error.to_string()))
}

/// Measures the bare fault with the faulting thread and the handler pinned to core 0.
pub(super) fn same_core(pages: usize) -> Result<Fault, BenchError> {
    let memory = Mapping::small_pages(pages.max(2) * PAGE_BYTES)?;
    let uffd = open(0)?;
    let register = uffd.register(memory.address(), memory.len(), register_mode::MISSING);
    register.map_err(BenchError::os("register memory with userfaultfd"))?;
    let mut source = Mapping::small_pages(PAGE_BYTES)?;
    source.bytes_mut().fill(7);
    let (served, latencies) = std::thread::scope(|scope| {
        let handler = scope.spawn(|| {
            let served = serve(&uffd, &source, memory.pages());
            // Even after an error no thread may wait forever: unanswered pages read as zero now.
            let _ = uffd.unregister(memory.address(), memory.len());
            served
        });
        // A thread of its own, so that pinning it leaves the rest of the process free.
        let faulting = scope.spawn(|| touch_all(&memory));
        (handler.join(), faulting.join())
    });
    let panicked = |_| BenchError::Lacking("a thread of the bare fault panicked".to_owned());
    served.map_err(panicked)??;
    let latencies = latencies.map_err(panicked)?;
    Ok(Fault {
        p50_ns: latencies.quantile_ns(0.5),
        mean_ns: latencies.mean_ns(),
        p99_ns: latencies.quantile_ns(0.99),
    })
}

fn touch_all(memory: &Mapping) -> Latencies {
    sys::pin_to_core(0);
    let mut latencies = Latencies::new();
    let order = Shuffle::new(memory.pages(), 3);
    for page in (0..memory.pages()).map(|i| order.at(i)) {
        let start = Instant::now();
        memory.touch(page);
        latencies.record(start.elapsed());
    }
    latencies
}

/// Answers one fault for each page.
fn serve(uffd: &Uffd, source: &Mapping, pages: usize) -> Result<(), BenchError> {
    sys::pin_to_core(0);
    let mut messages = [Message::default(); 1];
    for _ in 0..pages {
        let read = uffd.read(&mut messages).map_err(BenchError::os("read a page fault"))?;
        let Some(page) = read.first().and_then(|message| message.event().page_address) else {
            continue;
        };
        if let Some(errno) = uffd.copy(page, source.address(), PAGE_BYTES, true).errno {
            let source = std::io::Error::from_raw_os_error(errno);
            return Err(BenchError::os("answer a page fault")(source));
        }
    }
    Ok(())
}
