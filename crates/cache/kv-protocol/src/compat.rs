//! Which version of memcached answers are those of.
//!
//! Version 1.6.45 reads the text protocol more strictly than 1.6.18 does, and discards the value of
//! a command that it refuses, so that nobody's value is taken for commands. Clients of today are
//! written for it; tests and clients of the older one may want the older answers.

use super::token;

/// A version of memcached whose answers are given, byte for byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compat {
    V1_6_18,
    #[default]
    V1_6_45,
}

impl Compat {
    pub const ALL: [Self; 2] = [Self::V1_6_18, Self::V1_6_45];

    /// What `version` reports: clients derive from it which commands they may use.
    #[must_use]
    pub const fn version(self) -> &'static str {
        match self {
            Self::V1_6_18 => "1.6.18",
            Self::V1_6_45 => "1.6.45",
        }
    }

    /// The version with this number, if it is one of those that are known.
    #[must_use]
    pub fn named(version: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.version() == version)
    }

    /// Whether answers are those of 1.6.18.
    #[must_use]
    pub const fn is_old(self) -> bool {
        matches!(self, Self::V1_6_18)
    }

    /// A number of 32 bits with a sign, as this version reads it.
    #[must_use]
    pub fn signed_32(self, text: &[u8]) -> Option<i32> {
        if self.is_old() { token::signed_32(text) } else { token::strict_signed_32(text) }
    }

    /// A number of 32 bits, as this version reads it.
    #[must_use]
    pub fn unsigned_32(self, text: &[u8]) -> Option<u32> {
        if self.is_old() { token::unsigned_32(text) } else { token::strict_unsigned_32(text) }
    }

    /// A number of 64 bits, as this version reads it.
    #[must_use]
    pub fn unsigned_64(self, text: &[u8]) -> Option<u64> {
        if self.is_old() { token::unsigned_64(text) } else { token::strict_unsigned_64(text) }
    }

    /// Whether a word stands for a name in a command: the newer version also takes its beginning,
    /// and the whole name with a zero byte and anything behind it, because it compares with C's
    /// `strncmp`.
    #[must_use]
    pub fn means(self, word: &[u8], name: &str) -> bool {
        let name = name.as_bytes();
        if self.is_old() {
            return word == name;
        }
        match token::until_zero(word) {
            up_to_zero if up_to_zero.len() < word.len() => up_to_zero == name,
            whole => !whole.is_empty() && name.starts_with(whole),
        }
    }

    /// What a word stands for: the first of these names, with what belongs to it.
    #[must_use]
    pub fn find<'n, T>(
        self,
        word: &[u8],
        named: impl IntoIterator<Item = (&'n str, T)>,
    ) -> Option<T> {
        named.into_iter().find(|(name, _)| self.means(word, name)).map(|(_, it)| it)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_be_shortened_or_end_at_a_zero_byte() {
        let (old, new) = (Compat::V1_6_18, Compat::V1_6_45);
        for (word, by_old, by_new) in [
            (&b"ratio"[..], true, true),
            (b"r", false, true),
            (b"", false, false),
            (b"ratios", false, false),
            (b"ratio\0", false, true),
            (b"ratio\0x", false, true),
            (b"rat\0", false, false),
            (b"\0", false, false),
        ] {
            let means = [old, new].map(|it| it.means(word, "ratio"));
            assert_eq!(means, [by_old, by_new], "{}", word.escape_ascii());
        }
        assert_eq!(new.find(b"s", [("detail", 1), ("settings", 2), ("sizes", 3)]), Some(2));
        assert_eq!(old.find(b"s", [("settings", 2)]), None);
    }
}
