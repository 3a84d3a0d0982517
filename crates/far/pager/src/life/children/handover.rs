//! What the pager of a forked child needs to take over from its parent's: the places of the pages
//! that the child lacks.
//!
//! Both pagers number superpages alike, because the number is the superpage's place in every
//! segment.

use std::os::fd::OwnedFd;

use farpool_pool::{FrozenToken, TOKEN_PARTS};
use rustix::fs::SealFlags;

use super::remains::Remains;
use crate::space::page::{MAX_LAYERS, PageState};
use crate::space::units::{MAX_SUPERPAGES, SUPERPAGE_PAGES};

/// Begins a handover; its last character is the version of the format.
const MAGIC: [u8; 8] = *b"fpchild3";

/// The parts of a token, each absent or a blade's id and the number that opens the part there.
type Parts = [Option<(u64, u128)>; TOKEN_PARTS];

/// What opens a layer for the child, in a form that can be written down.
#[derive(Clone, Debug)]
pub struct HandedLayer {
    /// Boxed: the pager's threads have small stacks.
    pub token: Box<FrozenToken>,
    /// What opens the pages, as [`farpool_pool::Pool::export_seals`] encodes it. None if pages are
    /// stored as they are.
    pub seals: Option<Vec<u8>>,
}

pub type HandedLayers = [Option<HandedLayer>; MAX_LAYERS];

/// Addresses of the superpages, by their numbers, and the pages that the child lacks of each, if
/// any.
pub type HandedPages = Vec<(usize, Option<Vec<PageState>>)>;

/// A child's far pages.
#[derive(Debug)]
pub struct Handover {
    /// Each layer that a page lies in.
    pub layers: HandedLayers,
    pub superpages: HandedPages,
}

/// Whether the caller is to serve the child from now on: the first of all holders of this memory to
/// ask. A seal can be set only once.
pub fn claim(memory: &OwnedFd) -> bool {
    rustix::fs::fcntl_add_seals(memory, SealFlags::SEAL).is_ok()
}

impl Handover {
    /// `bases`: addresses of all superpages that the parent's pager knows, by their numbers.
    pub fn new(
        remains: &Remains,
        bases: impl Iterator<Item = usize>,
        layers: HandedLayers,
    ) -> Handover {
        let superpages =
            bases.map(|base| (base, remains.superpage(base).map(<[_]>::to_vec))).collect();
        Handover { layers, superpages }
    }

    /// Encodes it as bytes, for another process on this machine.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for layer in &self.layers {
            bytes.push(u8::from(layer.is_some()));
            let Some(HandedLayer { token, seals }) = layer else { continue };
            for part in token.parts() {
                let (blade, token) = part.unwrap_or_default();
                bytes.push(u8::from(part.is_some()));
                bytes.extend_from_slice(&blade.to_le_bytes());
                bytes.extend_from_slice(&token.to_le_bytes());
            }
            bytes.push(u8::from(seals.is_some()));
            if let Some(seals) = seals {
                bytes.extend_from_slice(&seals.len().to_le_bytes());
                bytes.extend_from_slice(seals);
            }
        }
        for (base, pages) in &self.superpages {
            bytes.extend_from_slice(&base.to_le_bytes());
            bytes.push(u8::from(pages.is_some()));
            bytes.extend(pages.iter().flatten().map(|state| state.to_byte()));
        }
        bytes
    }

    /// The inverse of [`Handover::to_bytes`]. None: these bytes are something else.
    pub fn from_bytes(bytes: &[u8]) -> Option<Handover> {
        let mut left = Left(bytes);
        if left.take::<{ MAGIC.len() }>()? != MAGIC {
            return None;
        }
        let mut layers = [const { None }; MAX_LAYERS];
        for layer in &mut layers {
            if left.flag()? {
                let token = Box::new(left.token()?);
                let seals = if left.flag()? { Some(left.text()?) } else { None };
                *layer = Some(HandedLayer { token, seals });
            }
        }
        let mut superpages = Vec::new();
        while !left.0.is_empty() {
            let base = usize::from_le_bytes(left.take()?);
            let pages = if left.flag()? { Some(left.pages()?) } else { None };
            superpages.push((base, pages));
        }
        (superpages.len() <= MAX_SUPERPAGES).then_some(Handover { layers, superpages })
    }
}

/// The bytes that are not read yet.
struct Left<'a>(&'a [u8]);

impl Left<'_> {
    fn take<const COUNT: usize>(&mut self) -> Option<[u8; COUNT]> {
        let (taken, left) = self.0.split_first_chunk()?;
        self.0 = left;
        Some(*taken)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.take()? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }

    fn token(&mut self) -> Option<FrozenToken> {
        let mut parts: Parts = [None; TOKEN_PARTS];
        for part in &mut parts {
            let is_there = self.flag()?;
            let (blade, token) =
                (u64::from_le_bytes(self.take()?), u128::from_le_bytes(self.take()?));
            *part = is_there.then_some((blade, token));
        }
        Some(FrozenToken::from_parts(&parts))
    }

    /// As many bytes as the number before them says.
    fn text(&mut self) -> Option<Vec<u8>> {
        let length = usize::from_le_bytes(self.take()?);
        let (text, left) = self.0.split_at_checked(length)?;
        self.0 = left;
        Some(text.to_vec())
    }

    fn pages(&mut self) -> Option<Vec<PageState>> {
        let (pages, left) = self.0.split_at_checked(SUPERPAGE_PAGES)?;
        self.0 = left;
        pages.iter().map(|byte| PageState::of_child(*byte)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::page::Phase;
    use crate::space::units::SUPERPAGE_BYTES;
    use proptest::prelude::*;

    fn state(layer: usize) -> PageState {
        PageState::UNTOUCHED.with_layer(layer).with_phase(Phase::Far)
    }

    #[test]
    fn what_was_handed_over_arrives() {
        let (first, second) = (7 << 30, 3 << 30);
        let mut remains = Remains::default();
        remains.add(second, [state(2), PageState::UNTOUCHED, state(5)].into_iter());
        let mut parts: Parts = [None; TOKEN_PARTS];
        parts[3] = Some((11, u128::MAX - 1));
        let mut layers = [const { None }; MAX_LAYERS];
        let token = Box::new(FrozenToken::from_parts(&parts));
        layers[2] = Some(HandedLayer { token, seals: Some(vec![3, 4]) });
        let sent = Handover::new(&remains, [first, second].into_iter(), layers);
        let got = Handover::from_bytes(&sent.to_bytes()).expect("a handover");
        assert_eq!(got.superpages, sent.superpages);
        assert_eq!(got.superpages[1].1.as_ref().map(|pages| pages[2]), Some(state(5)));
        let opened = got.layers[2].as_ref().map(|it| (it.token.parts(), it.seals.clone()));
        assert_eq!(opened, Some((parts, Some(vec![3, 4]))));
        assert_eq!(got.layers.iter().flatten().count(), 1);
    }

    #[test]
    fn a_child_is_claimed_once() {
        use rustix::fs::{MemfdFlags, memfd_create};
        let memory = memfd_create("child", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let memory = memory.expect("memory");
        let other = memory.try_clone().expect("a duplicate");
        assert!(claim(&other));
        assert!(!claim(&memory) && !claim(&other));
    }

    #[test]
    fn a_part_of_one_is_none() {
        let mut remains = Remains::default();
        remains.add(SUPERPAGE_BYTES, [state(1)].into_iter());
        let layers = [const { None }; MAX_LAYERS];
        let bytes = Handover::new(&remains, [SUPERPAGE_BYTES].into_iter(), layers).to_bytes();
        let whole_without_superpages = MAGIC.len() + MAX_LAYERS;
        for length in (0..bytes.len()).filter(|length| *length != whole_without_superpages) {
            assert!(Handover::from_bytes(&bytes[..length]).is_none(), "{length} bytes");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes: Vec<u8>) {
            let _ = Handover::from_bytes(&bytes);
            let _ = Handover::from_bytes(&[&MAGIC[..], &bytes].concat());
        }
    }
}
