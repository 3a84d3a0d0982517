//! Traces for other simulators: libCacheSim's `oracleGeneral`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use farpool_units::exactly;

use crate::dense::{Densifier, MAX_PAGES};
use crate::error::TraceError;
use crate::import::oracle_general_record;
use crate::output::Output;
use crate::reader::{Columns, TraceReader};
use crate::record::Batch;

/// The value in `oracleGeneral` for an object that is not requested again.
const NEVER_AGAIN: i64 = -1;

/// Writes every record of `from` as a request for its page of `page_bytes`. Returns their number.
///
/// Next requests are exact (one pass backwards), so Belady works on the result. Time is the number
/// of the request: seconds, all that the format has, would be zero for most programs. Compressed if
/// the name ends in `.zst`. Memory: 12 bytes a record and the table of pages.
///
/// # Errors
/// The trace is damaged or the disk refuses; then nothing is left at `to`.
pub fn oracle_general(from: &Path, to: &Path, page_bytes: u64) -> Result<u64, TraceError> {
    let mut reader = TraceReader::open(from, Columns::BLOCKS)?;
    let shift = page_shift(from, reader.info().block_bytes, page_bytes)?;
    let bytes = u32::try_from(page_bytes).map_err(|_| {
        let reason = format!("pages of {page_bytes} bytes; oracleGeneral has 32 bits for them");
        TraceError::foreign(from, reason)
    })?;
    let mut blocks: Vec<u64> = Vec::new();
    let mut batch = Batch::default();
    while reader.next_batch(&mut batch)? {
        blocks.extend(batch.blocks.iter().map(|block| block >> shift));
    }
    if u32::try_from(blocks.len()).is_err() {
        let reason = format!("{} records; oracleGeneral has 32 bits for their times", blocks.len());
        return Err(TraceError::foreign(from, reason));
    }
    let next = next_requests(from, &blocks)?;
    let mut output = Output::begin(to)?;
    let is_compressed = to.extension().is_some_and(|extension| extension == "zst");
    write_all(output.file(), is_compressed, &blocks, &next, bytes).map_err(TraceError::io(to))?;
    output.finish()?;
    Ok(blocks.len() as u64)
}

/// Returns the shift from a block's number to a page's.
///
/// # Errors
/// The page size is not a power of two, or smaller than the trace's blocks.
pub fn page_shift(path: &Path, block_bytes: u64, page_bytes: u64) -> Result<u32, TraceError> {
    if !page_bytes.is_power_of_two() || page_bytes < block_bytes {
        let reason = format!(
            "pages of {page_bytes} bytes; the trace has blocks of {block_bytes}, and a page must \
             be a power of two at least as large"
        );
        return Err(TraceError::foreign(path, reason));
    }
    Ok(page_bytes.trailing_zeros() - block_bytes.trailing_zeros())
}

fn next_requests(path: &Path, blocks: &[u64]) -> Result<Vec<i64>, TraceError> {
    let mut densifier = Densifier::new(MAX_PAGES);
    let mut numbers = Vec::with_capacity(blocks.len());
    densifier.number(blocks.iter().copied(), &mut numbers).map_err(|reached| {
        let (row, limit) = (reached.at as u64 + 1, reached.limit);
        TraceError::TooManyPages { path: path.to_owned(), row, limit, remedy: "export part of it" }
    })?;
    let mut following = vec![NEVER_AGAIN; densifier.page_count()];
    let mut next = vec![NEVER_AGAIN; blocks.len()];
    for (at, &number) in numbers.iter().enumerate().rev() {
        // Requests count from 1 in the format.
        let this = exactly(at + 1);
        next[at] = std::mem::replace(&mut following[number as usize], this);
    }
    Ok(next)
}

fn write_all(
    file: &mut File,
    is_compressed: bool,
    blocks: &[u64],
    next: &[i64],
    bytes: u32,
) -> std::io::Result<()> {
    let write_to = |out: &mut dyn Write| -> std::io::Result<()> {
        for (at, (&block, &next)) in blocks.iter().zip(next).enumerate() {
            out.write_all(&oracle_general_record(exactly(at), block, bytes, next))?;
        }
        Ok(())
    };
    let mut out = BufWriter::new(file);
    if is_compressed {
        let mut encoder = zstd::Encoder::new(&mut out, 3)?;
        write_to(&mut encoder)?;
        encoder.finish()?;
    } else {
        write_to(&mut out)?;
    }
    out.flush()
}
