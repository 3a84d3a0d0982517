//! What a request demands of the revision that it would read or change (RFC 9110, 13.1).

/// The tags of one precondition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Tags {
    /// `*`: anything that is there.
    Any,
    /// The revisions named. A tag that was never given names none.
    Of(Vec<u64>),
}

impl Tags {
    fn match_revision(&self, revision: Option<u64>) -> bool {
        match (self, revision) {
            (_, None) => false,
            (Self::Any, Some(_)) => true,
            (Self::Of(all), Some(revision)) => all.contains(&revision),
        }
    }
}

/// The preconditions of a request; by default there are none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Condition {
    /// `If-Match`: one of these must be there.
    pub if_match: Option<Tags>,
    /// `If-None-Match`: none of these may be there.
    pub if_none_match: Option<Tags>,
}

impl Condition {
    /// Whether they hold for what is at this revision, or for what is not there.
    #[must_use]
    pub fn admits(&self, revision: Option<u64>) -> bool {
        let matches = |tags: &Option<Tags>| tags.as_ref().map(|tags| tags.match_revision(revision));
        matches(&self.if_match) != Some(false) && matches(&self.if_none_match) != Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preconditions_mean_what_the_rfc_says() {
        let tags = |all: &[u64]| Some(Tags::Of(all.to_vec()));
        let cases = [
            (None, None, [true, true, true]),
            (Some(Tags::Any), None, [false, true, true]),
            (tags(&[1, 7]), None, [false, true, false]),
            (tags(&[]), None, [false, false, false]),
            (None, Some(Tags::Any), [true, false, false]),
            (None, tags(&[7, 1]), [true, false, true]),
            (tags(&[1, 2]), tags(&[1]), [false, false, true]),
        ];
        for (if_match, if_none_match, admitted) in cases {
            let condition = Condition { if_match, if_none_match };
            let now = [None, Some(1), Some(2)].map(|revision| condition.admits(revision));
            assert_eq!(now, admitted, "{condition:?}");
        }
    }
}
