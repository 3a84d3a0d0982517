//! Computes the actions that lead from the standing grants to the intent. Pure.
//!
//! Invariant: carrying out the actions in order gives exactly the intent, and grants are revoked
//! before new ones are set, so that the memory they free is available.

use std::collections::BTreeMap;

use farpool_api::{Key, NodeGrant, SegmentId};
use farpool_blade::{GrantId, GrantKey, GrantSpec};

/// The grants that stand, as the controller gave them.
pub type Standing = BTreeMap<SegmentId, NodeGrant>;

/// One order to the blade.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Revoke a grant.
    Revoke {
        /// The grant's segment.
        segment: SegmentId,
        /// The epoch that stands.
        epoch: u64,
    },
    /// Set a new grant, or replace one.
    Set(NodeGrant),
}

/// Returns the actions that lead from `have` to `intent`. If a segment is in the intent twice, the
/// higher epoch counts, because the other one is stale.
#[must_use]
pub fn diff(intent: &[NodeGrant], have: &Standing) -> Vec<Action> {
    let mut wanted: BTreeMap<SegmentId, &NodeGrant> = BTreeMap::new();
    for grant in intent {
        let known = wanted.entry(grant.segment).or_insert(grant);
        if grant.epoch > known.epoch {
            *known = grant;
        }
    }
    let gone = have.values().filter(|grant| !wanted.contains_key(&grant.segment));
    let revoke = |grant: &NodeGrant| Action::Revoke { segment: grant.segment, epoch: grant.epoch };
    let new = wanted.values().filter(|grant| have.get(&grant.segment) != Some(**grant));
    gone.map(revoke).chain(new.map(|grant| Action::Set((*grant).clone()))).collect()
}

/// Returns the id of the segment's grant in the blade's terms.
#[must_use]
pub fn grant_id(segment: SegmentId) -> GrantId {
    GrantId(segment.0.as_u128())
}

/// Returns a grant in the blade's terms.
#[must_use]
pub fn grant_spec(grant: &NodeGrant) -> GrantSpec {
    GrantSpec {
        id: grant_id(grant.segment),
        epoch: grant.epoch,
        key: GrantKey(grant.key.0),
        bytes: grant.bytes,
        read_bytes_per_s: grant.read_bytes_per_s,
        write_bytes_per_s: grant.write_bytes_per_s,
    }
}

/// Returns the grants that a blade has from an earlier process, as the controller gave them.
#[must_use]
pub fn standing(kept: &[GrantSpec]) -> Standing {
    let grant = |spec: &GrantSpec| NodeGrant {
        segment: SegmentId::from_u128(spec.id.0),
        epoch: spec.epoch,
        key: Key(spec.key.0),
        bytes: spec.bytes,
        read_bytes_per_s: spec.read_bytes_per_s,
        write_bytes_per_s: spec.write_bytes_per_s,
    };
    kept.iter().map(grant).map(|grant| (grant.segment, grant)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_blade::{Blade, BladeConfig};
    use proptest::prelude::*;

    const SUPERPAGE: u64 = 16 << 20;

    fn grant() -> impl Strategy<Value = NodeGrant> {
        (0u128..6, 1u64..4, 1u64..4, 1u64..3).prop_map(|(segment, epoch, superpages, rate)| {
            NodeGrant {
                segment: SegmentId::from_u128(segment),
                epoch,
                key: Key(segment << 8 | u128::from(epoch)),
                bytes: superpages * SUPERPAGE,
                read_bytes_per_s: rate,
                write_bytes_per_s: rate,
            }
        })
    }

    fn distinct(grants: Vec<NodeGrant>) -> Standing {
        grants.into_iter().map(|grant| (grant.segment, grant)).collect()
    }

    proptest! {
        #[test]
        fn carried_out_it_gives_exactly_the_intent(
            intent in prop::collection::vec(grant(), 0..8).prop_map(distinct),
            have in prop::collection::vec(grant(), 0..8).prop_map(distinct),
        ) {
            let wanted: Vec<NodeGrant> = intent.values().cloned().collect();
            let actions = diff(&wanted, &have);
            let mut model = have.clone();
            let mut sets_begun = false;
            for action in &actions {
                match action {
                    Action::Revoke { segment, epoch } => {
                        prop_assert!(!sets_begun);
                        let gone = model.remove(segment);
                        prop_assert_eq!(gone.map(|grant| grant.epoch), Some(*epoch));
                    }
                    Action::Set(grant) => {
                        sets_begun = true;
                        model.insert(grant.segment, grant.clone());
                    }
                }
            }
            prop_assert_eq!(&model, &intent);
            prop_assert!(diff(&wanted, &model).is_empty());
        }

        /// Carries out intents on a real blade, as a controller gives them: what has changed has a
        /// higher epoch.
        #[test]
        fn a_blade_has_what_the_last_intent_says(
            intents in prop::collection::vec(prop::collection::vec(grant(), 0..6), 1..6),
        ) {
            let memory_bytes = 4 * SUPERPAGE;
            let config = BladeConfig { memory_bytes, require_grants: true, ..Default::default() };
            let blade = Blade::new(config).unwrap();
            let mut have = Standing::new();
            for (round, intent) in (1u64..).zip(intents) {
                let mut intent = distinct(intent);
                for grant in intent.values_mut() {
                    grant.epoch += round * 10;
                    grant.key = Key(grant.segment.0.as_u128() << 64 | u128::from(grant.epoch));
                }
                let wanted: Vec<NodeGrant> = intent.values().cloned().collect();
                for action in diff(&wanted, &have) {
                    match action {
                        Action::Revoke { segment, epoch } => {
                            blade.revoke_grant(grant_id(segment), epoch).unwrap();
                        }
                        Action::Set(grant) => blade.set_grant(&grant_spec(&grant)).unwrap(),
                    }
                }
                let stands: Vec<_> = blade.grants().iter().map(|grant| (grant.id, grant.epoch)).collect();
                let mut all: Vec<_> =
                    wanted.iter().map(|grant| (grant_id(grant.segment), grant.epoch)).collect();
                all.sort_unstable();
                prop_assert_eq!(stands, all);
                have = intent;
            }
        }
    }

    #[test]
    fn of_two_epochs_of_a_segment_the_higher_counts() {
        let segment = SegmentId::from_u128(1);
        let of = |epoch| NodeGrant {
            segment,
            epoch,
            key: Key(u128::from(epoch)),
            bytes: SUPERPAGE,
            read_bytes_per_s: 1,
            write_bytes_per_s: 1,
        };
        for intent in [[of(2), of(3)], [of(3), of(2)]] {
            assert_eq!(diff(&intent, &Standing::new()), [Action::Set(of(3))]);
        }
    }
}
