//! What goes from the host that hands a guest's memory over to the one that takes it: where every
//! page is, what opens that, and the baton. Pure.

use farpool_units::PAGE_BYTES_U64;

use crate::life::children::handover::Handover;
use crate::space::units::SUPERPAGE_BYTES;

/// Begins it; its last character is the version of the format.
const MAGIC: [u8; 8] = *b"fpguest1";

/// See the module's description.
#[derive(Debug)]
pub struct Handed {
    /// Length of the guest's memory.
    pub bytes: u64,
    /// The blade of the baton, and what opens it there. None: not made yet.
    pub baton: Option<(u64, u128)>,
    /// The layers, and the pages of each superpage; in place of an address, each has its offset in
    /// the guest's memory.
    pub pages: Handover,
}

impl Handed {
    /// Encodes it, without what is private to this host.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (blade, token) = self.baton.unwrap_or_default();
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&self.bytes.to_le_bytes());
        bytes.extend_from_slice(&blade.to_le_bytes());
        bytes.extend_from_slice(&token.to_le_bytes());
        bytes.extend(self.pages.to_bytes());
        bytes
    }

    /// The inverse of [`Handed::to_bytes`]. None: these bytes are something else.
    pub fn from_bytes(bytes: &[u8]) -> Option<Handed> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (blade, rest) = rest.split_first_chunk()?;
        let (token, rest) = rest.split_first_chunk()?;
        let handed = Handed {
            bytes: u64::from_le_bytes(*length),
            baton: Some((u64::from_le_bytes(*blade), u128::from_le_bytes(*token))),
            pages: Handover::from_bytes(rest)?,
        };
        (*magic == MAGIC && handed.is_whole()).then_some(handed)
    }

    /// Whether it has all superpages of the memory, in order, and nothing else.
    fn is_whole(&self) -> bool {
        let superpages = &self.pages.superpages;
        let is_in_place = |(number, (offset, pages)): (usize, &(usize, Option<Vec<_>>))| {
            *offset == number * SUPERPAGE_BYTES && pages.is_some()
        };
        self.bytes.is_multiple_of(PAGE_BYTES_U64)
            && self.bytes.div_ceil(SUPERPAGE_BYTES as u64) == superpages.len() as u64
            && superpages.iter().enumerate().all(is_in_place)
    }
}

#[cfg(test)]
mod tests {
    use farpool_pool::{FrozenToken, TOKEN_PARTS};
    use proptest::prelude::*;

    use super::*;
    use crate::life::children::handover::HandedLayer;
    use crate::space::page::{MAX_LAYERS, PageState, Phase};
    use crate::space::units::SUPERPAGE_PAGES;

    fn handed(superpages: usize) -> Handed {
        let far = PageState::UNTOUCHED.with_layer(3).with_phase(Phase::Far);
        let mut layers = [const { None }; MAX_LAYERS];
        let mut parts = [None; TOKEN_PARTS];
        parts[1] = Some((5, 9));
        let token = Box::new(FrozenToken::from_parts(&parts));
        layers[3] = Some(HandedLayer { token, seals: None });
        let superpages = (0..superpages)
            .map(|number| (number * SUPERPAGE_BYTES, Some(vec![far; SUPERPAGE_PAGES])))
            .collect::<Vec<_>>();
        let bytes = (superpages.len() * SUPERPAGE_BYTES) as u64;
        Handed { bytes, baton: Some((7, u128::MAX - 3)), pages: Handover { layers, superpages } }
    }

    #[test]
    fn what_is_handed_over_arrives() {
        let sent = handed(2);
        let got = Handed::from_bytes(&sent.to_bytes()).expect("it");
        assert_eq!((got.bytes, got.baton), (sent.bytes, sent.baton));
        assert_eq!(got.pages.superpages, sent.pages.superpages);
        assert!(got.pages.layers[3].is_some());
    }

    #[test]
    fn a_memory_with_a_hole_is_refused() {
        let mut holed = handed(3);
        holed.pages.superpages.remove(1);
        assert!(Handed::from_bytes(&holed.to_bytes()).is_none());
        let mut unknown = handed(2);
        unknown.pages.superpages[1].1 = None;
        assert!(Handed::from_bytes(&unknown.to_bytes()).is_none());
        let mut long = handed(2);
        long.bytes += PAGE_BYTES_U64;
        assert!(Handed::from_bytes(&long.to_bytes()).is_none());
        let whole = handed(1).to_bytes();
        assert!((0..whole.len()).all(|length| Handed::from_bytes(&whole[..length]).is_none()));
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes: Vec<u8>) {
            let _ = Handed::from_bytes(&bytes);
            let _ = Handed::from_bytes(&[&handed(1).to_bytes()[..40], &bytes].concat());
        }
    }
}
