//! Certificates, lists and names of any content: what is read is refused or means one thing only,
//! and nothing panics.

mod common;
mod exercise;

use exercise::{good, read_certificate, read_list, read_outside, spoiled};
use farpool_identity::{Certificate, Identity, Name, RackName, RevocationList, Role, Serial};
use proptest::prelude::*;

fn changes() -> impl Strategy<Value = Vec<(usize, u8, u8)>> {
    prop::collection::vec(any::<(usize, u8, u8)>(), 1..6)
}

fn roles() -> impl Strategy<Value = Role> {
    let name =
        || "[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}".prop_map(|it| it.parse::<Name>().expect("one"));
    prop_oneof![
        name().prop_map(Role::Viewer),
        name().prop_map(Role::Operator),
        name().prop_map(Role::Controller),
        name().prop_map(Role::Node),
        (name(), prop::option::of(name()))
            .prop_map(|(tenant, name)| Role::Program { tenant, name }),
    ]
}

fn racks() -> impl Strategy<Value = RackName> {
    "[a-z0-9][a-z0-9._-]{0,60}".prop_map(|it| it.parse().expect("a name"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn an_identity_is_its_uri(rack in racks(), role in roles()) {
        let identity = Identity { rack, role };
        prop_assert_eq!(identity.to_string().parse::<Identity>(), Ok(identity));
    }

    #[test]
    fn two_roles_have_two_labels(one in roles(), other in roles()) {
        prop_assert_eq!(one == other, one.label() == other.label());
    }

    /// No second spelling: what is read is written the same.
    #[test]
    fn a_text_is_refused_or_is_the_identity_it_names(text in "(spiffe://)?[ -~]{0,40}") {
        if let Ok(identity) = text.parse::<Identity>() {
            prop_assert_eq!(identity.to_string(), text);
        }
    }

    #[test]
    fn a_uri_with_changes_is_refused_or_is_the_identity_it_names(
        rack in racks(), role in roles(), changes in changes(),
    ) {
        let uri = Identity { rack, role }.to_string();
        if let Ok(text) = String::from_utf8(spoiled(uri.as_bytes(), &changes))
            && let Ok(identity) = text.parse::<Identity>()
        {
            prop_assert_eq!(identity.to_string(), text);
        }
    }

    #[test]
    fn any_text_and_any_bytes_are_read_or_refused(text in any::<String>(), bytes in any::<Vec<u8>>()) {
        if let Ok(identity) = text.parse::<Identity>() {
            prop_assert_eq!(identity.to_string(), text.clone());
        }
        if let Ok(serial) = text.parse::<Serial>() {
            prop_assert_eq!(serial.to_string().parse(), Ok(serial));
        }
        let _ = Certificate::read(&bytes);
        prop_assert!(RevocationList::read(&bytes, &[]).is_err());
    }

    #[test]
    fn a_certificate_with_changes_is_refused(changes in changes()) {
        read_certificate(&spoiled(&good().leaf, &changes));
    }

    #[test]
    fn a_list_with_changes_is_refused(changes in changes()) {
        read_list(&spoiled(&good().list, &changes));
    }

    #[test]
    fn whatever_comes_from_outside_is_refused_or_means_one_thing(input in any::<Vec<u8>>()) {
        read_outside(&input);
    }
}

#[test]
fn what_is_good_is_taken() {
    let good = good();
    read_certificate(&good.leaf);
    read_list(&good.list);
    // No change to any of the four files.
    (0..4).for_each(|which| read_outside(&[which * 8 + 7]));
}
