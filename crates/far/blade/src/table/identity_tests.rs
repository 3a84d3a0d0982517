//! A client that began with a certificate is used with certificates of that identity only, also
//! after its blade's restart.

use super::*;
use farpool_wire::{ClientId, Hello, Purpose, SharingGroup};
use std::time::Duration;

const LIMITS: Limits = Limits {
    capacity_superpages: 8,
    quota_default_superpages: 8,
    quota_limit_superpages: 8,
    quota_stranger_superpages: 1,
    lease: Duration::from_secs(1),
    clients: 8,
    segments: 8,
    require_grants: false,
};

fn certified(path: &str, is_here: bool) -> Origin {
    let tenant = path.split('/').nth(1).map(Into::into);
    Origin::Certified { identity: format!("spiffe://rack/{path}").into(), tenant, is_here }
}

fn connect(table: &mut Table<u32>, origin: Origin, purpose: Purpose) -> Result<u64, ErrorCode> {
    let hello = Hello { purpose, ..Hello::first(ClientId(1), "a program") };
    let connected = table.connect(&hello, origin).map_err(|refused| refused.code)?;
    Ok(connected.quota_bytes / farpool_units::SUPERPAGE_BYTES)
}

fn check_owner(table: &mut Table<u32>) {
    let refused = Err(ErrorCode::NotPermitted);
    for origin in [
        certified("program/other", true),
        certified("program/payroll/web", true),
        Origin::User(7),
        Origin::Loopback,
        Origin::Network,
    ] {
        for purpose in [Purpose::Client, Purpose::Keeper] {
            assert_eq!(connect(table, origin.clone(), purpose), refused, "{origin:?}");
        }
    }
    let own = certified("program/payroll", false);
    assert_eq!(connect(table, own, Purpose::Client), Ok(1));
    assert_eq!(connect(table, Origin::User(super::client::ROOT), Purpose::Keeper), Ok(1));
}

#[test]
fn a_client_is_its_identitys_from_its_first_connection_on() {
    for first in [Purpose::Client, Purpose::Keeper] {
        let mut table = Table::new(LIMITS);
        assert_eq!(connect(&mut table, certified("program/payroll", false), first), Ok(1));
        check_owner(&mut table);
        let image = table.image();
        let mut restored =
            Table::restore(LIMITS, &image, |segment| Ok::<_, ImageError>(segment.row.limit_rmma));
        check_owner(restored.as_mut().expect("a table"));
    }
}

#[test]
fn a_client_without_a_certificate_is_not_taken_over_with_one() {
    for origin in [Origin::Network, Origin::Loopback, Origin::User(7)] {
        let mut table = Table::new(LIMITS);
        assert!(connect(&mut table, origin, Purpose::Client).is_ok());
        let taken = connect(&mut table, certified("program/payroll", true), Purpose::Client);
        assert_eq!(taken, Err(ErrorCode::NotPermitted));
    }
}

#[test]
fn on_the_blades_own_host_a_program_with_a_certificate_is_no_stranger() {
    let mut table = Table::new(LIMITS);
    let quota = connect(&mut table, certified("program/payroll", true), Purpose::Client);
    assert_eq!(quota, Ok(8));
}

/// Whoever says the same name is of the same group only with those of the same tenant or user.
#[test]
fn a_sharing_group_is_its_tenants_or_users() {
    let mut table = Table::<u32>::new(Limits { clients: 9, ..LIMITS });
    let mut sharing = |id, origins: &[(Origin, Purpose)], name| {
        let sharing_group = std::num::NonZeroU64::new(name).map(SharingGroup);
        let hello = Hello { sharing_group, ..Hello::first(ClientId(id), "") };
        let mut number = None;
        for (origin, purpose) in origins {
            let hello = Hello { purpose: *purpose, ..hello };
            number = table.connect(&hello, origin.clone()).ok().map(|it| it.number);
        }
        table.sharing_of(number.expect("connected"))
    };
    let client = |origin| [(origin, Purpose::Client)];
    let payroll = sharing(1, &client(certified("program/payroll/web", true)), 7);
    assert!(payroll.is_some());
    assert_eq!(sharing(2, &client(certified("program/payroll/db", false)), 7), payroll);
    assert_ne!(sharing(3, &client(certified("program/other/web", true)), 7), payroll);
    assert_ne!(sharing(4, &client(certified("program/payroll/web", true)), 8), payroll);
    assert_eq!(sharing(5, &client(certified("program/payroll/web", true)), 0), None);
    let user = sharing(6, &client(Origin::User(1000)), 7);
    assert!(user.is_some() && user != payroll);
    assert_ne!(sharing(7, &client(Origin::User(1001)), 7), user);
    assert_ne!(sharing(8, &client(Origin::Loopback), 7), user);
    // A keeper of root's does not make the program's group root's.
    let root = (Origin::User(super::client::ROOT), Purpose::Keeper);
    let kept = [root, (Origin::User(1000), Purpose::Client)];
    assert_eq!(sharing(9, &kept, 7), user);
}
