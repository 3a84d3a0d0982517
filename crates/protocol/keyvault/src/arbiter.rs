//! Decides whose turn it is: the distributor's arbitration of Gutierrez's KeyVault (section
//! 4.3.3.1), least recently granted first.
//!
//! Every member that wants a turn gets one before any gets a second one.

/// Orders members by how long ago they were last granted a turn.
#[derive(Debug, Default, Clone)]
pub struct LeastRecentlyGranted {
    /// Least recently granted first.
    members: Vec<u32>,
    /// Members granted in this round, kept so that a round allocates nothing.
    granted: Vec<u32>,
}

impl LeastRecentlyGranted {
    /// Adds a member, which counts as having waited longest.
    pub fn join(&mut self, member: u32) {
        if !self.members.contains(&member) {
            self.members.insert(0, member);
        }
    }

    /// A member that wants no more turns.
    pub fn leave(&mut self, member: u32) {
        self.members.retain(|&it| it != member);
    }

    /// Whether there are no members.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// How many members there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns all members, in the order of the next round.
    pub fn members(&self) -> impl Iterator<Item = u32> + '_ {
        self.members.iter().copied()
    }

    /// Runs one round: calls `serve` for each member, least recently granted first; true means that
    /// it was granted a turn. Returns whether any was.
    pub fn round(&mut self, mut serve: impl FnMut(u32) -> bool) -> bool {
        self.granted.clear();
        let granted = &mut self.granted;
        self.members.retain(|&member| {
            let was = serve(member);
            if was {
                granted.push(member);
            }
            !was
        });
        self.members.extend_from_slice(&self.granted);
        !self.granted.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// No member that wants a turn waits while another is granted two, however greedy the
        /// others are.
        #[test]
        fn nobody_is_passed_over(wants in prop::collection::vec(prop::collection::vec(any::<bool>(), 5), 1..60)) {
            let mut arbiter = LeastRecentlyGranted::default();
            (0..5).for_each(|member| arbiter.join(member));
            let mut since = [0u32; 5];
            for round in wants {
                // Only one turn per round, so that the order matters.
                let mut left = 1;
                let mut served = None;
                arbiter.round(|member| {
                    let granted = left > 0 && round[member as usize];
                    if granted {
                        left -= 1;
                        served = Some(member);
                    }
                    granted
                });
                prop_assert_eq!(served.is_some(), round.contains(&true));
                for member in 0..5u32 {
                    let at = member as usize;
                    since[at] = if served == Some(member) || !round[at] { 0 } else { since[at] + 1 };
                    prop_assert!(since[at] < 5, "member {} waits for the {}th \
                        time", member, since[at]);
                }
            }
        }
    }
}
