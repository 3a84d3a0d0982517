//! Opening flash at the start, and recovering what an earlier process left on it.

use std::thread::ScopedJoinHandle;

use farpool_kv_store::clock::Clock;
use farpool_kv_tier::flash::{FlashError, FlashFile, FlashMemory, FlashSettings};

use crate::worker::Worker;

/// Opens the file and gives each worker its part. `now_unix_s` is the present time.
pub(crate) fn attach(
    settings: &FlashSettings,
    workers: &mut [Worker],
    now_unix_s: i64,
) -> Result<FlashFile, FlashError> {
    let mut file = FlashFile::open(settings, workers.len(), now_unix_s)?;
    // The file's items are found by their hashes of then.
    workers.iter_mut().for_each(|worker| worker.set_hash_seed(file.hash_seed()));
    let path = file.path().to_owned();
    let path = path.display();
    if let Some(reason) = file.dropped() {
        tracing::error!(%path, %reason, "what was on flash is not served: it could be out of date");
    }
    if let Some(book) = file.book_path() {
        tracing::debug!(%path, book = %book.display(), "flash's book-keeping lies in memory");
    }
    // All shards read their parts at the same time.
    let open = |(shard, worker): (usize, &mut Worker)| {
        FlashMemory::log(&file, shard, settings, &mut |item| worker.take_recovered(item))
    };
    let parts = std::thread::scope(|scope| {
        let open = &open;
        let threads: Vec<_> =
            workers.iter_mut().enumerate().map(|it| scope.spawn(move || open(it))).collect();
        threads.into_iter().map(ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    let parts = parts
        .into_iter()
        .map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect::<Result<Vec<_>, _>>()?;
    let last_s = parts.iter().map(|(_, findings)| findings.promises.now_s).max().unwrap_or(0);
    let clock = Clock::resume(file.zero_unix_s(), last_s, now_unix_s);
    file.set_zero(clock.zero_unix_s())?;
    let items: u64 = parts.iter().map(|(_, findings)| findings.items).sum();
    let not_taken: u64 = parts.iter().map(|(_, findings)| findings.not_taken).sum();
    let damaged_zones: u64 = parts.iter().map(|(_, findings)| findings.damaged_zones).sum();
    for (worker, (flash, findings)) in workers.iter_mut().zip(parts) {
        worker.add_flash(flash, findings.promises, clock);
    }
    if damaged_zones > 0 {
        tracing::error!(%path, damaged_zones, "what lay in these zones is lost: they are not what \
            was written");
    }
    if not_taken > 0 {
        tracing::warn!(
            %path,
            items = not_taken,
            "there is too little memory to point at these items on flash: they are dropped; give \
             more --memory"
        );
    }
    if items > 0 {
        tracing::info!(%path, items, "items on flash are served again");
    }
    Ok(file)
}
