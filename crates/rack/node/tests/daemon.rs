//! Real nodes with a real controller: grants follow its orders, and stay without it.

mod common;

use std::time::Duration;

use common::{Controller, Machine, SUPERPAGE, client_at, end_of, start_node, start_node_with};
use farpool_api::{NodeSpec, NodeState, ProblemKind, SegmentState};
use farpool_blade::{BackingKind, BladeConfig, Persist};
use farpool_e2e::far::{Far, User};
use farpool_e2e::ports::free_address;
use farpool_e2e::{PATIENCE, wait_until};
use farpool_node::{Ended, NodeError};

const DONATE: u64 = 4 * SUPERPAGE;

fn wait_for_offer(control: &Controller, bytes: u64) {
    wait_until("the offer to change", PATIENCE, || {
        let seen = control.client().node("n1").ok()?;
        (seen.lendable_bytes == Some(bytes)).then_some(())
    });
}

#[test]
fn a_segment_is_served_and_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let machine = Machine::new();
    let node = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let mut user = User::new(control.client(), "n1", 1, SUPERPAGE);
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    assert!(far.write(3, 0xab));
    assert_eq!(far.read(3), Some(0xab));
    wait_until("the use to be reported", PATIENCE, || {
        let seen = control.client().node("n1").unwrap();
        (seen.used_bytes == Some(SUPERPAGE) && seen.lendable_bytes == Some(DONATE)).then_some(())
    });
    control.client().delete_segment(user.segment, None).unwrap();
    wait_until("the grant to go", PATIENCE, || node.blade().grants().is_empty().then_some(()));
    assert!(!far.write(3, 1), "a grant that was taken back takes no page");
    wait_until("the segment to be gone", PATIENCE, || {
        control.client().segment(user.segment).err().filter(|e| e.is(ProblemKind::NotFound))
    });
}

#[test]
fn grants_stay_while_the_controller_is_down_and_after_it_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let address = control.address;
    let machine = Machine::new();
    let node = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let mut user = User::new(control.client(), "n1", 1, SUPERPAGE);
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    assert!(far.write(0, 7));
    let before = node.blade().grants();
    drop(control);
    for page in 0..100 {
        assert!(far.write(page, 9), "the blade goes on");
    }
    let control = Controller::start(address, folder.path(), None);
    wait_until("the controller to hear of it", PATIENCE, || {
        let segment = control.client().segment(user.segment).ok()?;
        (segment.state == SegmentState::Ready && segment.epoch == told.epoch).then_some(())
    });
    let after = node.blade().grants();
    assert_eq!(before[0].id, after[0].id);
    assert_eq!(before[0].epoch, after[0].epoch);
    assert_eq!(node.blade().grants_revoked(), 0);
    assert_eq!(far.read(99), Some(9), "nothing that was written is lost");
}

#[test]
fn a_controller_that_has_forgotten_everything_gets_the_registration_again() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let control = Controller::fresh(folder.path());
    let address = control.address;
    let machine = Machine::new();
    let node = start_node("n1", control.client(), &machine, DONATE).unwrap();
    drop(control);
    let control = Controller::start(address, other.path(), None);
    let seen = wait_until("the registration", PATIENCE, || control.client().node("n1").ok());
    assert_eq!(seen.blade_id, node.blade().id());
}

#[test]
fn a_node_that_starts_before_its_controller_waits_for_it() {
    let folder = tempfile::tempdir().unwrap();
    // A free port: a controller that has just ended had it.
    let address = Controller::fresh(folder.path()).address;
    let machine = Machine::new();
    let _node = start_node("early", client_at(address, None), &machine, DONATE).unwrap();
    let control = Controller::start(address, folder.path(), None);
    wait_until("the registration", PATIENCE, || control.client().node("early").ok());
}

#[test]
fn a_wrong_token_ends_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::start(free_address(), folder.path(), Some("right"));
    let machine = Machine::new();
    let wrong = client_at(control.address, Some("wrong"));
    let error = start_node("n1", wrong, &machine, DONATE).unwrap_err();
    assert!(matches!(error, NodeError::Unauthorized(_)), "{error}");
    let right = client_at(control.address, Some("right"));
    let node = start_node("n1", right.clone(), &machine, DONATE).unwrap();
    wait_until("the registration", PATIENCE, || right.node("n1").ok());
    // The token changes while the node runs and nothing is granted.
    let address = control.address;
    drop(control);
    let _control = Controller::start(address, folder.path(), Some("changed"));
    assert!(matches!(end_of(node), Err(NodeError::Unauthorized(_))));
}

#[test]
fn what_is_granted_outlives_a_token_that_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let address = control.address;
    let machine = Machine::new();
    let node = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let mut user = User::new(control.client(), "n1", 1, SUPERPAGE);
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    drop(control);
    let control = Controller::start(address, folder.path(), Some("secret"));
    let rest = client_at(address, Some("secret"));
    // The node is refused until it counts as late.
    wait_until("the node to be late", PATIENCE, || {
        rest.node("n1").ok().filter(|node| node.state == NodeState::Late)
    });
    assert!(far.write(1, 5));
    drop(control);
    let control = Controller::start(address, folder.path(), None);
    wait_until("the node to be back", PATIENCE, || {
        control.client().node("n1").ok().filter(|node| node.state == NodeState::Up)
    });
    assert_eq!(far.read(1), Some(5));
    assert_eq!(node.blade().grants_revoked(), 0);
}

#[test]
fn a_second_daemon_of_one_name_is_refused_and_the_first_keeps_what_it_lends() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let machine = Machine::new();
    let first = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let mut user = User::new(control.client(), "n1", 1, SUPERPAGE);
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    assert!(far.write(0, 7));
    let second = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let refused = end_of(second).unwrap_err();
    assert!(matches!(refused, NodeError::Refused { .. }), "{refused}");
    assert_eq!(far.read(0), Some(7), "the first has kept what it lent");
    assert_eq!(first.blade().grants_revoked(), 0);
    let seen = control.client().node("n1").unwrap();
    assert_eq!((seen.blade_id, seen.state), (first.blade().id(), NodeState::Up));
}

#[test]
fn a_hundred_second_daemons_harm_the_first_in_nothing() {
    const TRIES: usize = 100;
    /// How many try at a time.
    const AT_ONCE: usize = 50;
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let machine = Machine::new();
    let first = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let mut user = User::new(control.client(), "n1", 1, SUPERPAGE);
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    let pages = 0..64_u8;
    pages.clone().for_each(|page| assert!(far.write(page.into(), page)));
    for round in 0..TRIES / AT_ONCE {
        let twin = |_| start_node("n1", control.client(), &machine, DONATE).unwrap();
        let twins: Vec<_> = (0..AT_ONCE).map(twin).collect();
        for twin in twins {
            let refused = end_of(twin).unwrap_err();
            assert!(matches!(refused, NodeError::Refused { .. }), "{refused}");
        }
        for page in pages.clone() {
            assert_eq!(far.read(page.into()), Some(page), "page {page} after round {round}");
        }
        assert_eq!(first.blade().grants_revoked(), 0);
        let seen = control.client().node("n1").unwrap();
        assert_eq!((seen.blade_id, seen.state), (first.blade().id(), NodeState::Up));
    }
    assert_eq!(user.told().epoch, told.epoch);
}

#[test]
fn a_daemon_that_comes_back_waits_until_the_earlier_one_is_late() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let machine = Machine::new();
    // A daemon that was killed: it has registered and reports no more.
    let killed = NodeSpec::new(vec!["tcp://127.0.0.1:1".to_owned()], DONATE, 1, 1);
    control.client().put_node("n1", &killed).unwrap();
    let node = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let seen = wait_until("a report of the second", PATIENCE, || {
        control.client().node("n1").ok().filter(|node| node.capacity_bytes.is_some())
    });
    assert_eq!(seen.blade_id, node.blade().id());
}

#[test]
fn a_name_that_another_daemon_took_is_left_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let address = control.address;
    let machine = Machine::new();
    let first = start_node("n1", control.client(), &machine, DONATE).unwrap();
    // While the first is cut off, the name becomes another's.
    drop(control);
    let other = tempfile::tempdir().unwrap();
    let elsewhere = Controller::fresh(other.path());
    let second = NodeSpec::new(vec!["tcp://127.0.0.1:1".to_owned()], DONATE, 1, 1);
    elsewhere.client().put_node("n1", &second).unwrap();
    drop(elsewhere);
    let control = Controller::start(address, other.path(), None);
    first.handle().drain(Duration::ZERO);
    assert_eq!(end_of(first).unwrap(), Ended::Empty);
    let seen = control.client().node("n1").unwrap();
    assert_eq!(seen.blade_id, 1, "the first did not delete the second's name");
}

#[test]
fn an_empty_node_signs_off() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let machine = Machine::new();
    let node = start_node("n1", control.client(), &machine, DONATE).unwrap();
    node.handle().drain(PATIENCE);
    assert_eq!(end_of(node).unwrap(), Ended::Empty);
    let error = control.client().node("n1").unwrap_err();
    assert!(error.is(ProblemKind::NotFound), "{error}");
}

#[test]
fn a_drained_node_ends_when_its_client_has_moved() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let machine = Machine::new();
    let first = start_node("n1", control.client(), &machine, DONATE).unwrap();
    control.client().put_node("host", &NodeSpec::new(Vec::new(), 0, 1, 1)).unwrap();
    let mut user = User::new(control.client(), "host", 1, SUPERPAGE);
    let second = start_node("n2", control.client(), &machine, DONATE).unwrap();
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    assert!(far.write(0, 3));
    first.handle().drain(PATIENCE);
    let target = wait_until("a target", PATIENCE, || user.told().target);
    assert!(far.write(1, 4), "the old place serves until the client has moved");
    let mut there = Far::open(&target.place, target.epoch);
    for page in 0..2 {
        assert!(there.write(page, far.read(page).unwrap()));
    }
    user.evacuated(target.epoch);
    assert_eq!(end_of(first).unwrap(), Ended::Empty);
    assert_eq!(user.told().place.node, "n2");
    assert_eq!((there.read(0), there.read(1)), (Some(3), Some(4)));
    assert_eq!(second.blade().grants().len(), 1);
    assert!(control.client().node("n1").unwrap_err().is(ProblemKind::NotFound));
}

#[test]
fn a_node_that_cannot_be_emptied_ends_in_time_and_is_not_left_drained() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let machine = Machine::new();
    let node = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let user = User::new(control.client(), "n1", 1, SUPERPAGE);
    node.handle().drain(Duration::from_millis(300));
    assert_eq!(end_of(node).unwrap(), Ended::Overdue);
    assert!(!control.client().node("n1").unwrap().draining);
    // The next daemon has another blade: the segment's memory is gone.
    let _again = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let segment = control.client().segment(user.segment).unwrap();
    assert_eq!(segment.state, SegmentState::Lost);
}

#[test]
fn the_offer_falls_at_once_when_the_machine_needs_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let machine = Machine::new();
    let node = start_node("n1", control.client(), &machine, DONATE).unwrap();
    wait_for_offer(&control, DONATE);
    machine.set_available(1 << 30); // below the reserve of 16 GiB
    wait_for_offer(&control, 0);
    assert_eq!(node.blade().capacity_bytes(), 0);
}

/// What a program was given and has not written takes up no memory, so it is not the donor's own
/// use that lies in it.
#[test]
fn memory_that_was_lent_and_never_written_hides_no_need_of_the_donor() {
    let folder = tempfile::tempdir().unwrap();
    let control = Controller::fresh(folder.path());
    let machine = Machine::new();
    let node = start_node("n1", control.client(), &machine, DONATE).unwrap();
    let mut user = User::new(control.client(), "n1", 1, SUPERPAGE);
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    assert!(far.write(3, 0xab));
    wait_for_offer(&control, DONATE);
    assert!(node.blade().lent().unwrap().backed_bytes < SUPERPAGE / 2);
    // The donor's own programs use all that they may, but for 1 MiB: less than a superpage.
    machine.set_available((16 << 30) / 100 * 20 + (1 << 20));
    wait_for_offer(&control, 0);
}

/// What an earlier process has granted stands, is offered from the first moment on, and ends by the
/// controller's order only, even if that refuses the node at first.
#[test]
fn what_outlives_its_process_ends_by_order_only() {
    let (folder, memory) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let control = Controller::fresh(folder.path());
    let (address, machine) = (control.address, Machine::new());
    machine.set(1 << 30, 768 << 20); // its offer rises by 3 superpages a second, of 4
    let start = || {
        let blade = BladeConfig {
            threads: 1,
            backing: BackingKind::File(memory.path().join("memory")),
            persist: Some(Persist::Restart),
            ..BladeConfig::default()
        };
        start_node_with("n1", client_at(address, None), &machine, DONATE, blade)
    };
    let node = start().unwrap();
    wait_for_offer(&control, DONATE);
    let mut user = User::new(control.client(), "n1", 1, DONATE);
    let told = user.told();
    assert!(Far::open(&told.place, told.epoch).write(3, 0xab));
    let before = (node.blade().id(), node.blade().grant_specs());
    assert_eq!(before.1.len(), 1);
    node.handle().stop();
    assert_eq!(end_of(node).unwrap(), Ended::AtOnce);
    drop(control);
    let control = Controller::start(address, folder.path(), Some("secret"));
    // Its threads may hold the memory for a moment.
    let node = wait_until("the memory to be free", PATIENCE, || start().ok());
    assert_eq!((node.blade().id(), node.blade().grant_specs()), before);
    assert_eq!(node.blade().capacity_bytes(), DONATE, "what is granted is not asked back");
    drop(control);
    let control = Controller::start(address, folder.path(), None);
    wait_until("the node to be back", PATIENCE, || {
        let seen = control.client().node("n1").ok()?;
        (seen.state == NodeState::Up && seen.incarnation == node.spec().incarnation).then_some(())
    });
    wait_until("the segment to be ready", PATIENCE, || {
        let segment = control.client().segment(user.segment).ok()?;
        (segment.state == SegmentState::Ready).then_some(())
    });
    assert_eq!(node.blade().grant_specs(), before.1, "by the grant it had");
    control.client().delete_segment(user.segment, None).unwrap();
    wait_until("the grant to go", PATIENCE, || node.blade().grants().is_empty().then_some(()));
}
