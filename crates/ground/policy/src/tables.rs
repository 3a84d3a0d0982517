//! Tables of policies: sized to the page, and what they take.

/// Tables by the numbers of pages, which can be as long as the caller needs them.
pub trait Renumber {
    /// `from`, if it is known, is called `to` from now on, which must not be known.
    fn rename(&mut self, from: u32, to: u32);

    /// There are the pages `0..page_count` from now on; no other may be known.
    fn resize(&mut self, page_count: usize);

    /// The memory of the tables.
    fn bytes(&self) -> usize;
}

/// Makes a table exactly so long: what grows in steps must not take twice its memory.
pub(crate) fn resize_exactly<T: Clone>(table: &mut Vec<T>, len: usize, empty: T) {
    if len > table.len() {
        table.reserve_exact(len - table.len());
        table.resize(len, empty);
    } else {
        table.truncate(len);
        table.shrink_to_fit();
    }
}

/// The memory of a table.
pub(crate) fn table_bytes<T>(table: &Vec<T>) -> usize {
    table.capacity() * size_of::<T>()
}
