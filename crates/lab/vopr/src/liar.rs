//! A blade that lies: it answers reads with other pages than those that were stored, under right
//! checksums. What it says instead are pages that it returned before (older versions, other pages,
//! those of other segments), zeros, and the page itself with one bit flipped.

use farpool_acms::Rng;
use farpool_units::PAGE_BYTES;
use farpool_wire::{Header, Kind, Opcode, PagesChecksum, Response};

/// Pages that it remembers; a trial uses a few dozen.
const MEMORY_PAGES: usize = 64;

type Page = [u8; PAGE_BYTES];

/// What a blade returned, and whether it lies.
#[derive(Debug, Default)]
pub struct Liar {
    returned: Vec<Page>,
    is_lying: bool,
    /// Pages replaced.
    told: u64,
}

impl Liar {
    /// Begins to lie, or stops.
    pub fn set_lying(&mut self, is_lying: bool) {
        self.is_lying = is_lying;
    }

    /// Pages replaced so far.
    #[must_use]
    pub fn told(&self) -> u64 {
        self.told
    }

    /// What it says instead of an answer: a head and its pages.
    pub(crate) fn say(&mut self, header: Header, mut answer: Vec<u8>, random: &mut Rng) -> Vec<u8> {
        let is_of_pages = header.opcode == Opcode::Read && header.kind == Kind::Response;
        if !is_of_pages || header.page_count == 0 {
            return answer;
        }
        let (pages, _) = answer[header.head_bytes()..].as_chunks_mut::<PAGE_BYTES>();
        for page in pages.iter_mut() {
            let is_told = self.is_lying && random.below(2) == 0;
            let lie = is_told.then(|| self.lie(page, random)).filter(|lie| lie != page);
            self.remember(*page, random);
            if let Some(lie) = lie {
                *page = lie;
                self.told += 1;
            }
        }
        let pages = answer.split_off(header.head_bytes());
        let mut forged = Vec::new();
        let response = Response::Pages { page_count: header.page_count };
        let (id, checksum) = (header.request_id, PagesChecksum::of(&pages));
        let encoded = response.encode(Opcode::Read, id, header.credits, checksum, &mut forged);
        encoded.expect("as long as the answer was");
        forged.extend(pages);
        forged
    }

    fn lie(&self, page: &Page, random: &mut Rng) -> Page {
        match random.below(4) {
            0 => [0; PAGE_BYTES],
            1 => {
                let mut flipped = *page;
                flipped[random.index(PAGE_BYTES)] ^= 1 << random.below(8);
                flipped
            }
            _ if self.returned.is_empty() => *page,
            _ => self.returned[random.index(self.returned.len())],
        }
    }

    fn remember(&mut self, page: Page, random: &mut Rng) {
        if self.returned.len() < MEMORY_PAGES {
            self.returned.push(page);
        } else {
            self.returned[random.index(MEMORY_PAGES)] = page;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: farpool_wire::RequestId = farpool_wire::RequestId(7);

    fn answer_of(pages: &[Page]) -> Vec<u8> {
        let mut answer = Vec::new();
        let response = Response::Pages { page_count: pages.len().try_into().expect("few") };
        let checksum = PagesChecksum::of(pages.as_flattened());
        response.encode(Opcode::Read, ID, 9, checksum, &mut answer).expect("an answer");
        answer.extend_from_slice(pages.as_flattened());
        answer
    }

    #[test]
    fn a_lie_is_a_right_answer_with_other_pages() {
        let (mut liar, mut random) = (Liar::default(), Rng::new(3));
        let honest = answer_of(&[[1; PAGE_BYTES], [2; PAGE_BYTES]]);
        let header = Header::decode(honest.first_chunk().expect("a header")).expect("a header");
        assert_eq!(liar.say(header, honest.clone(), &mut random), honest);
        liar.set_lying(true);
        for _ in 0..20 {
            let before = liar.told();
            let said = liar.say(header, honest.clone(), &mut random);
            assert_eq!(said.len(), honest.len());
            let head = Header::decode(said.first_chunk().expect("a header")).expect("a header");
            let checksum = PagesChecksum::of(&said[head.head_bytes()..]);
            assert_eq!((head.request_id, head.pages_checksum), (ID, checksum));
            assert_eq!(said == honest, liar.told() == before);
        }
        assert!(liar.told() > 5, "{}", liar.told());
    }
}
