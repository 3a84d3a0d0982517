//! What the blade is to be told, from what the controller wants and what the blade was told; pure.

use std::collections::BTreeMap;

use farpool_api::{NodeGrant, SegmentId};

/// One thing to tell the blade.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// The grant is over.
    Revoke {
        /// Whose.
        segment: SegmentId,
        /// The epoch it had.
        epoch: u64,
    },
    /// The grant is new, or its terms are.
    Set(NodeGrant),
}

/// The grants as the blade was told.
pub type Standing = BTreeMap<SegmentId, NodeGrant>;

/// What leads from `standing` to what is wanted: first what is to be taken back, so that its memory is there for
/// the rest. A grant whose epoch would fall is refused by the blade; it is asked all the same, and stays as it is.
#[must_use]
pub fn actions(wanted: &[NodeGrant], standing: &Standing) -> Vec<Action> {
    let wanted: Standing = wanted.iter().map(|grant| (grant.segment, grant.clone())).collect();
    let over = standing.values().filter(|grant| !wanted.contains_key(&grant.segment));
    let over = over.map(|grant| Action::Revoke { segment: grant.segment, epoch: grant.epoch });
    let news = wanted.values().filter(|grant| standing.get(&grant.segment) != Some(*grant));
    over.chain(news.cloned().map(Action::Set)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_api::Key;
    use proptest::prelude::*;

    fn grants() -> impl Strategy<Value = Vec<NodeGrant>> {
        let grant = (0_u128..6, 1_u64..4, 1_u64..3).prop_map(|(id, epoch, superpages)| NodeGrant {
            segment: SegmentId::from_u128(id),
            epoch,
            key: Key((u128::from(epoch) << 64) | (id + 1)),
            bytes: superpages << 24,
            read_bytes_per_s: 1 << 20,
            write_bytes_per_s: 1 << 20,
        });
        proptest::collection::btree_map(0_u8..6, grant, 0..6).prop_map(|map| {
            let by_id: Standing = map.into_values().map(|grant| (grant.segment, grant)).collect();
            by_id.into_values().collect()
        })
    }

    proptest! {
        #[test]
        fn the_actions_lead_to_what_is_wanted_and_take_back_first(
            before in grants(),
            wanted in grants(),
        ) {
            let mut standing: Standing =
                before.into_iter().map(|grant| (grant.segment, grant)).collect();
            let actions = actions(&wanted, &standing);
            let first_set = actions.iter().position(|it| matches!(it, Action::Set(_)));
            let last_revoke = actions.iter().rposition(|it| matches!(it, Action::Revoke { .. }));
            prop_assert!(first_set.is_none_or(|set| last_revoke.is_none_or(|last| last < set)));
            for action in actions {
                match action {
                    Action::Revoke { segment, epoch } => {
                        let ended = standing.remove(&segment);
                        prop_assert_eq!(ended.map(|grant| grant.epoch), Some(epoch));
                    }
                    Action::Set(grant) => {
                        let before = standing.insert(grant.segment, grant.clone());
                        prop_assert!(before != Some(grant), "nothing is told twice");
                    }
                }
            }
            let wanted: Standing =
                wanted.into_iter().map(|grant| (grant.segment, grant)).collect();
            prop_assert_eq!(standing, wanted);
        }
    }
}
