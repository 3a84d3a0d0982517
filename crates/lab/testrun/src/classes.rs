//! Which test programs may run beside each other.

use crate::programs::TestProgram;

/// How a test program uses the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Holds programs to limits or measures them: alone.
    Steady,
    /// Starts daemons and mostly waits for them: beside one that is not steady.
    Waiting,
    /// Unit and property tests without other processes: beside one that is not steady, and all
    /// that `make test-fast` runs.
    Quick,
}

/// Packages whose test programs are not quick unless [`OTHERS`] says so.
const PACKAGES: [(&str, Class); 2] = [("farpool-e2e", Class::Steady), ("farpool", Class::Waiting)];

/// Test programs that differ from the rest of their package.
const OTHERS: [(&str, &str, Class); 22] = [
    ("farpool-e2e", "lib", Class::Quick),
    ("farpool-e2e", "spill", Class::Waiting),
    ("farpool-e2e", "collaborate", Class::Waiting),
    ("farpool-e2e", "rack_hosts", Class::Waiting),
    ("farpool-e2e", "deadline", Class::Waiting),
    ("farpool-e2e", "failures", Class::Waiting),
    ("farpool-e2e", "rack", Class::Waiting),
    ("farpool-e2e", "kv_pool", Class::Waiting),
    ("farpool-e2e", "hosts", Class::Waiting),
    ("farpool-e2e", "cut_off", Class::Waiting),
    ("farpool-e2e", "circuits", Class::Waiting),
    ("farpool-e2e", "switch", Class::Waiting),
    ("farpool", "bin", Class::Quick),
    ("farpool-kv", "flash", Class::Waiting),
    ("farpool-kv", "far", Class::Waiting),
    ("farpool-kv", "any_bytes", Class::Waiting),
    ("farpool-kv", "store_model", Class::Waiting),
    ("farpool-acms", "scale", Class::Waiting),
    ("farpool-control", "etcd", Class::Waiting),
    ("farpool-control", "rest", Class::Waiting),
    ("farpool-control", "schemathesis", Class::Waiting),
    ("farpool-switch", "circuits", Class::Waiting),
];

pub fn class_of(program: &TestProgram) -> Class {
    let is_own = |(package, name, _): &&(&str, &str, Class)| {
        *package == program.package && (*name == program.name || *name == program.kind)
    };
    let of_package = || PACKAGES.iter().find(|(package, _)| *package == program.package);
    OTHERS
        .iter()
        .find(is_own)
        .map(|(_, _, class)| *class)
        .or_else(|| of_package().map(|(_, class)| *class))
        .unwrap_or(Class::Quick)
}

/// The programs in the order in which they start, those that take long first, so that no long one
/// is left alone at the end.
pub fn in_order(mut programs: Vec<TestProgram>, class: impl Fn(Class) -> bool) -> Vec<TestProgram> {
    programs.retain(|it| class(class_of(it)));
    programs.sort_by_key(|it| match class_of(it) {
        Class::Waiting => OTHERS.iter().position(|(_, name, _)| *name == it.name).unwrap_or(0),
        Class::Steady | Class::Quick => OTHERS.len(),
    });
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
