//! The policies' tables: exact resizing, and the memory they take.

/// Tables indexed by page numbers, as long as the caller needs them.
pub trait Renumber {
    /// Renumbers `from`, if it is known, to `to`, which must not be known.
    fn rename(&mut self, from: u32, to: u32);

    /// Resizes to the pages `0..page_count`; no page beyond may be known.
    fn resize(&mut self, page_count: usize);

    /// Returns the memory of the tables.
    fn bytes(&self) -> usize;
}

/// Resizes a table to exactly `len` entries: growth in small steps must not take twice the memory.
pub(crate) fn resize_exactly<T: Clone>(table: &mut Vec<T>, len: usize, empty: T) {
    if len > table.len() {
        table.reserve_exact(len - table.len());
        table.resize(len, empty);
    } else {
        table.truncate(len);
        table.shrink_to_fit();
    }
}

/// Returns the memory of a table.
pub(crate) fn table_bytes<T>(table: &Vec<T>) -> usize {
    table.capacity() * size_of::<T>()
}
