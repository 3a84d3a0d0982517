//! Which test programs may run beside each other.

use crate::programs::TestProgram;

/// How a test program uses the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Holds programs to limits or measures them: one at a time.
    Steady,
    /// Starts daemons and mostly waits for them, or takes long: beside one that is not steady.
    Waiting,
    /// Unit and property tests without other processes: beside any other, in the background of
    /// steady ones, and all that `make test-fast` runs.
    Quick,
}

/// Packages whose test programs are not quick unless [`OTHERS`] says so.
const PACKAGES: [(&str, Class); 2] = [("farpool-e2e", Class::Steady), ("farpool", Class::Waiting)];

/// Test programs that differ from the rest of their package.
const OTHERS: [(&str, &str, Class); 44] = [
    ("farpool-e2e", "lib", Class::Quick),
    ("farpool-vopr", "seeds", Class::Waiting),
    ("farpool-e2e", "rack_parity", Class::Waiting),
    ("farpool-e2e", "copies", Class::Waiting),
    ("farpool-e2e", "vm_migrate", Class::Waiting),
    ("farpool-e2e", "parity", Class::Waiting),
    ("farpool-e2e", "migration", Class::Waiting),
    ("farpool-e2e", "restart", Class::Waiting),
    ("farpool-e2e", "vm", Class::Waiting),
    ("farpool-e2e", "certificates", Class::Waiting),
    ("farpool-e2e", "refused", Class::Waiting),
    ("farpool-e2e", "rack_copies", Class::Waiting),
    ("farpool-e2e", "told", Class::Waiting),
    ("farpool-e2e", "flash", Class::Waiting),
    ("farpool-e2e", "pack", Class::Waiting),
    ("farpool-e2e", "fault_trace", Class::Waiting),
    ("farpool-e2e", "secrets", Class::Waiting),
    ("farpool-e2e", "door", Class::Waiting),
    ("farpool-e2e", "spill", Class::Waiting),
    ("farpool-e2e", "collaborate", Class::Waiting),
    ("farpool-e2e", "rack_hosts", Class::Waiting),
    ("farpool-e2e", "deadline", Class::Waiting),
    ("farpool-e2e", "failures", Class::Waiting),
    ("farpool-e2e", "sidecar_kills", Class::Waiting),
    ("farpool-e2e", "sidecar_births", Class::Waiting),
    ("farpool-e2e", "rack", Class::Waiting),
    ("farpool-e2e", "kv_pool", Class::Waiting),
    ("farpool-e2e", "hosts", Class::Waiting),
    ("farpool-e2e", "cut_off", Class::Waiting),
    ("farpool-e2e", "circuits", Class::Waiting),
    ("farpool-e2e", "switch", Class::Waiting),
    ("farpool", "bin", Class::Quick),
    ("farpool-identity", "rotation", Class::Waiting),
    ("farpool-kv-server", "flash", Class::Waiting),
    ("farpool-kv-server", "far", Class::Waiting),
    ("farpool-kv-protocol", "any_bytes", Class::Waiting),
    ("farpool-kv-store", "store_model", Class::Waiting),
    ("farpool-acms", "scale", Class::Waiting),
    ("farpool-control", "etcd", Class::Waiting),
    ("farpool-control", "rest", Class::Waiting),
    ("farpool-control", "schemathesis", Class::Waiting),
    ("farpool-switch", "circuits", Class::Waiting),
    ("farpool-vmm", "peer_firecracker", Class::Waiting),
    ("farpool-vmm", "peer_cloud_hypervisor", Class::Waiting),
];

/// Whether a line of [`OTHERS`] is about a program.
fn is_about((package, name, _): &(&str, &str, Class), program: &TestProgram) -> bool {
    *package == program.package && (*name == program.name || *name == program.kind)
}

pub(crate) fn class_of(program: &TestProgram) -> Class {
    let of_package = || PACKAGES.iter().find(|(package, _)| *package == program.package);
    let own = OTHERS.iter().find(|line| is_about(line, program)).map(|(_, _, class)| *class);
    own.or_else(|| of_package().map(|(_, class)| *class)).unwrap_or(Class::Quick)
}

/// Lines of [`OTHERS`] whose program does not exist: a renamed program would be classed like its
/// package.
pub(crate) fn unknown(programs: &[TestProgram]) -> Vec<String> {
    let is_known = |line: &&_| programs.iter().any(|program| is_about(line, program));
    let unknown = OTHERS.iter().filter(|line| !is_known(line));
    unknown.map(|(package, name, _)| format!("{package} {name}")).collect()
}

/// The programs in the order in which they start, those that take long first, so that no long one
/// is left alone at the end.
pub(crate) fn in_order(
    mut programs: Vec<TestProgram>,
    class: impl Fn(Class) -> bool,
) -> Vec<TestProgram> {
    programs.retain(|it| class(class_of(it)));
    let is_long = |it: &TestProgram| class_of(it) == Class::Waiting;
    let place = |it: &TestProgram| OTHERS.iter().position(|line| is_about(line, it));
    programs.sort_by_key(|it| (!is_long(it), place(it)));
    programs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(package: &str, name: &str, kind: &str) -> TestProgram {
        TestProgram {
            package: package.into(),
            name: name.into(),
            kind: kind.into(),
            path: "/nowhere".into(),
            folder: "/".into(),
        }
    }

    #[test]
    fn what_nobody_classed_goes_with_its_package() {
        assert_eq!(class_of(&program("farpool-e2e", "sidecar", "test")), Class::Steady);
        assert_eq!(class_of(&program("farpool-e2e", "farpool_e2e", "lib")), Class::Quick);
        assert_eq!(class_of(&program("farpool-e2e", "spill", "test")), Class::Waiting);
        assert_eq!(class_of(&program("farpool", "kv", "test")), Class::Waiting);
        assert_eq!(class_of(&program("farpool", "farpool", "bin")), Class::Quick);
        assert_eq!(class_of(&program("farpool-wire", "vectors", "test")), Class::Quick);
    }

    #[test]
    fn a_class_for_nobody_is_noticed() {
        let all: Vec<_> =
            OTHERS.iter().map(|(package, name, _)| program(package, name, "test")).collect();
        assert_eq!(unknown(&all), [""; 0]);
        assert_eq!(unknown(&all[1..]), ["farpool-e2e lib"]);
    }

    #[test]
    fn waiting_programs_start_before_quick_ones() {
        let programs = vec![
            program("farpool-wire", "vectors", "test"),
            program("farpool-e2e", "collaborate", "test"),
            program("farpool-e2e", "spill", "test"),
            program("farpool-e2e", "stress", "test"),
        ];
        let names = |it: Vec<TestProgram>| it.into_iter().map(|it| it.name).collect::<Vec<_>>();
        let beside = in_order(programs.clone(), |it| it != Class::Steady);
        assert_eq!(names(beside), ["spill", "collaborate", "vectors"]);
        assert_eq!(names(in_order(programs, |it| it == Class::Steady)), ["stress"]);
    }
}
