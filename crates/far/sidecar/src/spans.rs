//! Which addresses of the shared address space are the sidecar's own.
//!
//! Pure: a sorted table of disjoint, non-adjacent spans, of fixed size, because it is filled by the
//! functions that the allocator builds on.

/// Most spans in the table. Neighbours merge and the allocator grows in pieces of
/// `heap::GRANULARITY_BYTES`, so a sidecar needs some dozens; when it is full, a mapping is refused
/// (ENOMEM) rather than left unknown to the pager.
pub const CAPACITY: usize = 2048;

/// Addresses from `start` up to `end`, `end` not included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub start: usize,
    pub end: usize,
}

/// The table is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The spans, ascending.
#[derive(Debug)]
pub struct Table {
    len: usize,
    spans: [Span; CAPACITY],
}

impl Table {
    pub const fn new() -> Self {
        Self { len: 0, spans: [Span { start: 0, end: 0 }; CAPACITY] }
    }

    pub fn spans(&self) -> &[Span] {
        &self.spans[..self.len]
    }

    /// Adds `new`, which may overlap or touch existing spans.
    pub fn add(&mut self, new: Span) -> Result<(), Full> {
        if new.start >= new.end {
            return Ok(());
        }
        let first = self.spans().partition_point(|span| span.end < new.start);
        let last = self.spans().partition_point(|span| span.start <= new.end);
        if first == last {
            return self.insert(first, new);
        }
        let merged = Span {
            start: new.start.min(self.spans[first].start),
            end: new.end.max(self.spans[last - 1].end),
        };
        self.spans[first] = merged;
        self.cut(first + 1, last);
        Ok(())
    }

    /// Removes `gone`; a span that extends beyond both its ends becomes two.
    pub fn remove(&mut self, gone: Span) -> Result<(), Full> {
        if gone.start >= gone.end {
            return Ok(());
        }
        let first = self.spans().partition_point(|span| span.end <= gone.start);
        let last = self.spans().partition_point(|span| span.start < gone.end);
        if first == last {
            return Ok(());
        }
        let head = Span { start: self.spans[first].start, end: gone.start };
        let tail = Span { start: gone.end, end: self.spans[last - 1].end };
        let pieces = usize::from(head.start < head.end) + usize::from(tail.start < tail.end);
        if pieces > last - first && self.len == CAPACITY {
            return Err(Full);
        }
        self.cut(first, last);
        for piece in [tail, head].into_iter().filter(|piece| piece.start < piece.end) {
            self.insert(first, piece)?;
        }
        Ok(())
    }

    fn insert(&mut self, at: usize, span: Span) -> Result<(), Full> {
        if self.len == CAPACITY {
            return Err(Full);
        }
        self.spans.copy_within(at..self.len, at + 1);
        self.spans[at] = span;
        self.len += 1;
        Ok(())
    }

    fn cut(&mut self, from: usize, to: usize) {
        self.spans.copy_within(to..self.len, from);
        self.len -= to - from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small generator, so that this crate needs no dependency for its model test.
    fn next(seed: &mut u64) -> usize {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        farpool_units::exactly(*seed >> 33)
    }

    fn as_bits(table: &Table) -> [bool; 64] {
        let mut bits = [false; 64];
        for span in table.spans() {
            assert!(span.start < span.end);
            bits[span.start..span.end].fill(true);
        }
        assert!(table.spans().windows(2).all(|pair| pair[0].end < pair[1].start));
        bits
    }

    #[test]
    fn the_table_is_the_set_of_its_addresses() {
        let (mut table, mut model, mut seed) = (Table::new(), [false; 64], 7);
        for _ in 0..20_000 {
            let (a, b) = (next(&mut seed) % 65, next(&mut seed) % 65);
            let span = Span { start: a.min(b), end: a.max(b) };
            let adds = next(&mut seed).is_multiple_of(2);
            let done = if adds { table.add(span) } else { table.remove(span) };
            assert_eq!(done, Ok(()));
            model[span.start..span.end].fill(adds);
            assert_eq!(as_bits(&table), model);
        }
    }

    #[test]
    fn a_full_table_says_so_and_stays_as_it_is() {
        let mut table = Table::new();
        for i in 0..CAPACITY {
            assert_eq!(table.add(Span { start: 4 * i, end: 4 * i + 3 }), Ok(()));
        }
        assert_eq!(table.add(Span { start: 4 * CAPACITY, end: 4 * CAPACITY + 1 }), Err(Full));
        assert_eq!(table.remove(Span { start: 1, end: 2 }), Err(Full));
        assert_eq!(table.spans().len(), CAPACITY);
    }
}
