//! Sidecars in real programs: they work, and the programs notice nothing.

mod common;

use common::{Host, Link, ask, await_end};
use rustix::process::{Signal, kill_process};

fn works_in(link: Link) {
    let Some(mut host) = Host::c(link, &["check"]) else { return };
    let injected = host.injected();
    assert_eq!(ask(&injected, "WORK"), "WORK ok");
    assert_eq!(ask(&injected, "NET"), "NET over");
    assert!(ask(&injected, "MAPS").starts_with("MAPS "));
    assert_eq!(host.finish(), "ok");
    await_end(&injected);
}

#[test]
fn works_in_a_static_program() {
    works_in(Link::Static);
}

#[test]
fn works_in_a_static_pie_program() {
    works_in(Link::StaticPie);
}

#[test]
fn works_in_a_dynamic_program() {
    works_in(Link::Dynamic);
}

#[test]
fn the_end_of_the_program_ends_the_sidecar() {
    let Some(host) = Host::c(Link::Static, &["obey"]) else { return };
    let injected = host.injected();
    kill_process(host.pid(), Signal::KILL).expect("kill");
    assert!(await_end(&injected).as_millis() < 1000);
}
