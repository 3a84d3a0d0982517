//! Batons: at no time two clients have one, whoever is quick, late, or ends.

mod common;

use common::{Blades, allocate, config, connect, read, sample, write};
use farpool_pool::{Baton, Pool, PoolConfig, PoolError, Revoked};

fn both(blades: &Blades) -> (Pool, Pool, Baton, Baton) {
    let (owner, receiver) = (connect(blades), connect(blades));
    let offered = owner.offer().expect("offered");
    let accepted = receiver.accept(offered.token()).expect("accepted");
    (owner, receiver, offered, accepted)
}

#[test]
fn a_baton_is_taken_only_once_its_owner_has_let_go() {
    for transport in ["shm", "tcp"] {
        let blades = Blades::start(&[transport]);
        let (owner, receiver, mut offered, accepted) = both(&blades);
        assert!(!receiver.take(&accepted).expect("asked"));
        owner.let_go(offered).expect("let go");
        assert!(receiver.take(&accepted).expect("taken"));
        // Who has taken it may ask again, after an answer that was lost.
        assert!(receiver.take(&accepted).expect("taken before"));
        assert_eq!(owner.revoke(&mut offered).expect("asked"), Revoked::Taken);
        receiver.goodbye();
        assert_eq!(owner.revoke(&mut offered).expect("asked"), Revoked::Gone);
        owner.goodbye();
        drop((owner, receiver));
        blades.wait_until_unused();
    }
}

#[test]
fn what_was_revoked_is_never_taken() {
    let blades = Blades::start(&["tcp"]);
    let (owner, receiver, mut offered, accepted) = both(&blades);
    owner.let_go(offered).expect("let go");
    assert_eq!(owner.revoke(&mut offered).expect("asked"), Revoked::Back);
    assert!(!receiver.take(&accepted).expect("asked"));
    // It can be let go once more.
    owner.let_go(offered).expect("let go");
    assert!(receiver.take(&accepted).expect("taken"));
    assert_eq!(owner.revoke(&mut offered).expect("asked"), Revoked::Taken);
}

#[test]
fn an_owner_that_ends_has_let_go_and_a_receiver_that_ends_has_nothing() {
    let blades = Blades::start(&["tcp"]);
    let (owner, receiver, mut offered, accepted) = both(&blades);
    receiver.goodbye();
    owner.let_go(offered).expect("let go");
    assert_eq!(owner.revoke(&mut offered).expect("asked"), Revoked::Gone);
    let (other, receiver, _, again) = both(&blades);
    assert!(owner.take(&accepted).is_err(), "a share is of one client");
    other.goodbye();
    drop(other);
    assert!(receiver.take(&again).expect("taken"));
}

#[test]
fn a_baton_on_a_blade_that_the_receiver_has_not_is_told() {
    let (ones, others) = (Blades::start(&["tcp"]), Blades::start(&["tcp"]));
    let offered = connect(&ones).offer().expect("offered");
    assert!(matches!(connect(&others).accept(offered.token()), Err(PoolError::NotOurBlade)));
}

/// Both at once, many times: never do both have it, and one always has.
#[test]
fn a_race_has_one_winner() {
    let blades = Blades::start(&["tcp"]);
    let (owner, receiver) = (connect(&blades), connect(&blades));
    let mut winners = [0, 0];
    for round in 0..300_u32 {
        let mut offered = owner.offer().expect("offered");
        let accepted = receiver.accept(offered.token()).expect("accepted");
        owner.let_go(offered).expect("let go");
        let (revoked, taken) = std::thread::scope(|scope| {
            let take = scope.spawn(|| receiver.take(&accepted).expect("asked"));
            (0..round % 7).for_each(|_| std::thread::yield_now());
            (owner.revoke(&mut offered).expect("asked"), take.join().expect("the receiver"))
        });
        assert_eq!(revoked == Revoked::Back, !taken, "round {round}: {revoked:?}");
        winners[usize::from(taken)] += 1;
        owner.let_go(offered).ok();
        receiver.let_go(accepted).expect("given up");
    }
    println!("revoked {} times, taken {} times", winners[0], winners[1]);
}

/// What is shared is found where the other client has the same blades in other slots.
#[test]
fn a_shared_segment_is_found_on_blades_in_other_slots() {
    let blades = Blades::start(&["tcp", "unix"]);
    let giver = connect(&blades);
    let segment = allocate(&giver, 2);
    let mut lane = giver.lane().expect("lane");
    write(&mut lane, segment, &sample(2), 0);
    let token = giver.freeze(segment).expect("frozen");
    let mut turned = config(&blades);
    turned.blades.reverse();
    let receiver = Pool::connect(turned).expect("connect");
    assert!(receiver.attach(&token, None).is_err(), "the blades are others");
    let translated = receiver.translate(&token).expect("the same blades");
    let shared = receiver.attach(&translated, None).expect("attached");
    let mut lane = receiver.lane().expect("lane");
    assert!(read(&mut lane, shared, &sample(2), 0).iter().all(|done| *done == Ok(true)));
    let fewer = PoolConfig { blades: config(&blades).blades[..1].to_vec(), ..config(&blades) };
    let fewer = Pool::connect(fewer).expect("connect");
    assert!(matches!(fewer.translate(&token), Err(PoolError::NotOurBlade)));
}
