//! Ids as types, and the key of a grant.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// A text that is not a valid id or key.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{text}\" is not a {what}")]
pub struct IdError {
    text: String,
    what: &'static str,
}

macro_rules! uuid_id {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(
            Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize,
        )]
        #[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
        #[cfg_attr(feature = "schema", schema(value_type = Uuid))]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// Returns the id with these bits.
            #[must_use]
            pub fn from_u128(bits: u128) -> Self {
                Self(Uuid::from_u128(bits))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let wrong = |_| IdError { text: text.to_owned(), what: "UUID" };
                text.parse().map(Self).map_err(wrong)
            }
        }
    )*};
}

uuid_id! {
    /// A segment, named by its creator.
    SegmentId;
    /// A client, named by itself.
    ClientId;
    /// A task, named by the controller.
    TaskId;
}

/// The secret of a grant: a client that presents it to the node's blade owns the segment. New in
/// every epoch. 32 hexadecimal digits in JSON; never shown by `Debug`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(value_type = String, pattern = "^[0-9a-f]{32}$"))]
pub struct Key(pub u128);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl FromStr for Key {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let bits = u128::from_str_radix(text, 16).ok().filter(|_| digits);
        // The text may be a mistyped secret, so the error does not repeat it.
        bits.map(Self).ok_or_else(|| IdError { text: "...".to_owned(), what: "key" })
    }
}

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:032x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_back_and_never_shown() {
        let key = Key(0xab);
        let text = serde_json::to_string(&key).unwrap();
        assert_eq!(text, "\"000000000000000000000000000000ab\"");
        assert_eq!(serde_json::from_str::<Key>(&text).unwrap(), key);
        assert!(!format!("{key:?}").contains("ab"));
        for bad in ["", "ab", "+00000000000000000000000000000ab", &"g".repeat(32)] {
            assert!(!bad.parse::<Key>().unwrap_err().to_string().contains("ab"));
        }
    }

    #[test]
    fn an_id_that_is_none_is_refused() {
        assert!("x".parse::<SegmentId>().is_err());
        let id = SegmentId::from_u128(7);
        assert_eq!(id.to_string().parse(), Ok(id));
    }
}
