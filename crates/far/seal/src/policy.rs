//! When pages are sealed.

/// When pages are sealed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SealPolicy {
    /// Always, also on blades of this host.
    Always,
    /// If they may pass a network: if a blade is reached by TCP, or the rack chooses the blades.
    #[default]
    Remote,
    /// Never: a blade and the network are trusted with the pages.
    Never,
}

impl SealPolicy {
    /// Whether pages are sealed that may pass a network, or may not.
    pub fn seals(self, is_remote: bool) -> bool {
        match self {
            SealPolicy::Always => true,
            SealPolicy::Remote => is_remote,
            SealPolicy::Never => false,
        }
    }
}
