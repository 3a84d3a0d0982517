//! What users see: help, mistakes and their messages, generated pages, the configuration.

mod common;

use std::path::Path;

use common::{ended, farpool};

fn home() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder for the test")
}

#[test]
fn help_names_every_subcommand_and_the_exit_codes() {
    let home = home();
    let (code, help, _) = ended(farpool(home.path()).arg("--help"));
    assert_eq!(code, 0);
    let daily = [
        "run",
        "attach",
        "detach",
        "core",
        "blade",
        "stat",
        "doctor",
        "plan",
        "completions",
        "man",
        "config",
        "vm",
        "vmm",
    ];
    let rack = ["control", "node", "segment", "circuit", "rack", "pki", "events", "task"];
    for name in daily.into_iter().chain(rack) {
        assert!(help.contains(&format!("\n  {name} ")), "{name} is not in\n{help}");
    }
    assert!(help.contains("Exit codes: 0 done, 1 failed, 2 wrong usage"), "{help}");
}

#[test]
fn mistakes_exit_with_2_and_name_what_is_wrong() {
    let home = home();
    let program = ["--", "true"];
    let mistakes: &[(&[&str], &str)] = &[
        (&["run", "--local", "12parsecs"], "12parsecs"),
        (&["run", "--local", "0%"], "from 1% to 100%"),
        (&["run"], "--local"),
        (&["run", "--local", "1G", "--blade", "http://x"], "http://x"),
        (&["run", "--local", "1G", "--blade", "tcp://localhost"], "a port"),
        (&["run", "--local", "1G", "--blade", "tcp://192.0.2.1:1"], "--allow-remote-tcp"),
        (&["run", "--local", "1G", "--when-full", "panic"], "panic"),
        (&["run", "--local", "1G", "--when-outside", "panic"], "panic"),
        (&["run", "--local", "1G", "--pager-threads", "0"], "0"),
        (&["run", "--local", "1G", "--policy", "oracle"], "oracle"),
        (&["run", "--local", "1G", "--prefetch", "oracle"], "oracle"),
        (&["run", "--local", "1G", "--redundancy", "7"], "none of none, 2, 3 and parity"),
        (&["run", "--local", "1G", "--redundancy", "2"], "0 failure domains"),
        (&["run", "--local", "1G", "--redundancy", "parity"], "needs blades on 5 hosts"),
        (
            &["run", "--local", "1G", "--redundancy", "2", "--seal", "never"],
            "seals tell what is right",
        ),
    ];
    for (words, expected) in mistakes {
        let (code, _, error) = ended(farpool(home.path()).args(*words).args(program));
        assert_eq!(code, 2, "{words:?}: {error}");
        assert!(error.contains(expected), "{words:?} says {error:?}, without {expected:?}");
    }
}

#[test]
fn a_virtual_machine_that_cannot_work_is_refused_before_it_starts() {
    let home = home();
    let run = ["vm", "run", "--name", "web1", "--local", "64MiB"];
    let memfd = "memory-backend-memfd,id=m,size=256M";
    let mistakes: &[(&[&str], &str)] = &[
        (&["--", "qemu-none", "-device", "vfio-pci,host=1"], "-device vfio-pci,host=1: the device"),
        (&["--", "qemu-none", "-netdev", "vhost-user,id=n"], "would see holes"),
        (&["--", "qemu-none", "-object", memfd], "use memory-backend-ram"),
        (&["--", "redis-server"], "is not QEMU by its name"),
        (&["--blade", "tcp://192.0.2.1:1", "--", "qemu-none"], "--allow-remote-tcp"),
        (&["--migratable", "--", "qemu-none"], "needs blades that both hosts reach"),
        (&["--migratable", "--", "qemu-none", "-machine", "memory-backend=m"], "with -m alone"),
        (&["--migratable", "--door", "sidecar", "--", "qemu-none"], "--door preload"),
        (&["--incoming", "here", "--", "qemu-none"], "must begin with unix://"),
    ];
    for (words, expected) in mistakes {
        let (code, _, error) = ended(farpool(home.path()).args(run).args(*words));
        assert_eq!(code, 2, "{words:?}: {error}");
        assert!(error.contains(expected), "{words:?} says {error:?}, without {expected:?}");
    }
    for words in [&["vm", "stat", "a/b"][..], &["vm", "limit", "web1"], &["vm", "run", "--", "x"]] {
        let (code, _, error) = ended(farpool(home.path()).args(words));
        assert_eq!(code, 2, "{words:?}: {error}");
    }
}

#[test]
fn a_monitor_that_cannot_be_served_is_refused_before_it_starts() {
    let home = home();
    let firecracker = ["vmm", "firecracker", "--image", "web.mem", "--listen", "vm.sock"];
    let monitor = ["vmm", "cloud-hypervisor", "--snapshot", "vm.sock"];
    let blade = ["--blade", "unix:///nowhere/blade.sock"];
    let mistakes: &[(&[&str], &[&str], &str)] = &[
        (&["vmm"], &[], "firecracker"),
        (&["vmm", "qemu"], &[], "unrecognized subcommand"),
        (&firecracker, &[], "--blade"),
        (&firecracker[..4], &blade, "--listen"),
        (&firecracker, &["--blade", "http://x"], "http://x"),
        (&firecracker, &["--blade", "unix:///b.sock", "--seal", "perhaps"], "perhaps"),
        (&monitor, &blade, "--restore"),
        (&monitor, &[&["--restore", "vm.sock"], &blade[..]].concat(), "are the same socket"),
        (&monitor, &["--restore", "in.sock", "--blade", "tcp://192.0.2.1:1"], "--allow-remote-tcp"),
    ];
    for (words, more, expected) in mistakes {
        let (code, _, error) = ended(farpool(home.path()).args(*words).args(*more));
        assert_eq!(code, 2, "{words:?} {more:?}: {error}");
        assert!(error.contains(expected), "{words:?} {more:?} says {error:?}, not {expected:?}");
    }
}

#[test]
fn what_fails_says_what_can_be_done() {
    let home = home();
    let folder = home.path().to_str().expect("a name");
    let own = std::process::id().to_string();
    let closed = ["--blade", "unix:///nowhere/blade.sock"];
    let attach = ["attach", &own, "--local", "64MiB"];
    let attach_closed = [&attach[..], &closed].concat();
    let run_closed = [&["run", "--local", "64MiB"][..], &closed, &["--", "true"]].concat();
    let pool = ["run", "--local", "64MiB", "--pool", "http://127.0.0.1:1", "--", "true"];
    let failures: &[(&[&str], i32, &str)] = &[
        (&["attach", "abc", "--local", "64MiB"], 2, "give its number"),
        (&["run", "--local", "64MiB", "--", "/etc/passwd"], 1, "chmod +x /etc/passwd"),
        (&["run", "--local", "64MiB", "--", folder], 1, "is a folder"),
        (&pool, 1, "farpool control runs there"),
        (&attach_closed, 1, "check that it runs"),
        (&run_closed, 1, "--no-check"),
    ];
    for (words, expected_code, expected) in failures {
        let (code, _, error) = ended(farpool(home.path()).args(*words));
        assert_eq!(code, *expected_code, "{words:?}: {error}");
        assert!(error.contains(expected), "{words:?} says {error:?}, without {expected:?}");
        assert!(words[0] == "run" || !error.contains("--no-check"), "{words:?}: {error}");
    }
}

/// Skipped if no kernel threads are visible, as in a container.
#[test]
fn a_thread_of_the_kernel_is_not_attached_to() {
    let name = std::fs::read_to_string("/proc/2/comm");
    if name.is_ok_and(|name| name == "kthreadd\n") {
        let home = home();
        let words = ["attach", "2", "--local", "64MiB"];
        let (code, _, error) = ended(farpool(home.path()).args(words));
        assert_eq!(code, 1, "{error}");
        assert!(error.contains("thread of the kernel (kthreadd)"), "{error}");
    } else {
        farpool_testkit::skip("no thread of the kernel can be seen here");
    }
}

#[test]
fn a_blade_needs_memory_and_an_address_of_this_machine() {
    let home = home();
    let mistakes: &[(&[&str], &str)] = &[
        (&["--listen", "unix:///x.sock"], "--memory"),
        (&["--memory", "1G"], "--listen"),
        (&["--memory", "1G", "--listen", "tcp://0.0.0.0:7070"], "--allow-remote-tcp"),
        (&["--memory", "1G", "--listen", "unix:///x", "--backing", "tape"], "tape"),
        (&["--memory", "1G", "--listen", "unix:///x", "--lease", "10"], "10s"),
    ];
    for (words, expected) in mistakes {
        let (code, _, error) = ended(farpool(home.path()).arg("blade").args(*words));
        assert_eq!(code, 2, "{words:?}: {error}");
        assert!(error.contains(expected), "{words:?} says {error:?}, without {expected:?}");
    }
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().expect("a file is in a folder")).expect("a folder");
    std::fs::write(path, text).expect("the file is written");
}

#[test]
fn an_unknown_key_is_refused_by_name_with_its_file() {
    let home = home();
    let file = home.path().join("wrong.toml");
    write(&file, "[run]\nlocl = \"1GiB\"\n");
    let config = ["--config", file.to_str().expect("the path is text")];
    for words in [&["config", "check"][..], &["run", "--local", "1G", "--", "true"][..]] {
        let (code, _, error) = ended(farpool(home.path()).args(config).args(words));
        assert_eq!(code, 2, "{error}");
        assert!(error.contains("locl") && error.contains("wrong.toml"), "{error}");
    }
}

#[test]
fn a_wrong_value_in_a_file_is_refused_as_on_the_command_line() {
    let home = home();
    let file = home.path().join("farpool.toml");
    write(&file, "[run]\nlocal = \"lots\"\n");
    let (code, _, error) =
        ended(farpool(home.path()).arg("--config").arg(&file).args(["config", "check"]));
    assert_eq!(code, 2);
    assert!(error.contains("lots") && error.contains("farpool.toml"), "{error}");
}

#[test]
fn a_file_that_was_named_must_exist() {
    let home = home();
    let (code, _, error) =
        ended(farpool(home.path()).args(["--config", "/nowhere.toml", "config", "check"]));
    assert_eq!(code, 2);
    assert!(error.contains("/nowhere.toml"), "{error}");
}

#[test]
fn variables_are_stronger_than_files_and_the_users_file_than_none() {
    let home = home();
    write(
        &home.path().join(".config/farpool/config.toml"),
        "[run]\nlocal = \"1GiB\"\nquota = \"4GiB\"\nquiet = true\nblade = [\"unix:///a\"]\n\
         [blade]\nlease = \"30s\"\n\
         [control]\nstore = \"etcd://a:1,b:2\"\nlisten = [\"127.0.0.1:1\"]\n\
         [node]\ndonate = \"2GiB\"\nname = \"n1\"\ndrain-timeout = \"0\"\n",
    );
    let (code, dump, _) = ended(
        farpool(home.path())
            .args(["config", "dump"])
            .env("FARPOOL_RUN_LOCAL", "25%")
            .env("FARPOOL_NODE_NAME", "n2")
            .env("FARPOOL_CONTROL_SWITCH", "r0=/a,r1=/b")
            .env("FARPOOL_RUN_BLADE", "unix:///b,tcp://127.0.0.1:7"),
    );
    assert_eq!(code, 0);
    let dump: toml::Table = dump.parse().expect("the dump is TOML");
    assert_eq!(dump["run"]["local"].as_str(), Some("25%"));
    assert_eq!(dump["run"]["quota"].as_str(), Some("4GiB"));
    assert_eq!(dump["run"]["quiet"].as_bool(), Some(true));
    let blades = ["unix:///b", "tcp://127.0.0.1:7"].map(toml::Value::from).to_vec();
    assert_eq!(dump["run"]["blade"].as_array(), Some(&blades));
    assert_eq!(dump["blade"]["lease"].as_str(), Some("30s"));
    assert_eq!(dump["control"]["store"].as_str(), Some("etcd://a:1,b:2"));
    assert_eq!(dump["control"]["listen"][0].as_str(), Some("127.0.0.1:1"));
    assert_eq!(dump["control"]["switch"][1].as_str(), Some("r1=/b"));
    assert_eq!(dump["node"]["donate"].as_str(), Some("2GiB"));
    assert_eq!(dump["node"]["name"].as_str(), Some("n2"));
    assert_eq!(dump["node"]["drain-timeout"].as_str(), Some("0"));
}

#[test]
fn a_setting_of_a_file_is_used_by_its_command() {
    let home = home();
    let (file, store) = (home.path().join("farpool.toml"), home.path().join("rack/store"));
    let (peak, folder) = ("[run]\npeak = \"2GiB\"\nlocal = \"1GiB\"", store.display());
    write(&file, &format!("{peak}\n[control]\nstore = \"redb:{folder}\"\n"));
    let farpool = |words: &[&str]| {
        ended(
            farpool(home.path()).arg("--config").arg(&file).args(words).env("XDG_STATE_HOME", "/"),
        )
    };
    let (_, dump, _) = farpool(&["config", "dump"]);
    let dump: toml::Table = dump.parse().expect("the dump is TOML");
    assert_eq!(dump["run"]["peak"].as_str(), Some("2GiB"));
    let (code, _, error) = farpool(&["run", "--", "true"]);
    assert!(code == 2 && error.contains("--peak is for a share"), "{error}");
    let backup = home.path().join("backup");
    let text = farpool_control::store::backup::to_text(&[], 0).expect("a backup of nothing");
    write(&backup, &text);
    let (code, _, error) = farpool(&["control", "restore", &backup.display().to_string()]);
    assert_eq!(code, 0, "{error}");
    assert!(store.exists(), "the backup went elsewhere");
    let other = format!("redb:{}", home.path().join("other").display());
    let words = ["control", "restore", backup.to_str().expect("text"), "--store", &other];
    let (code, _, error) = farpool(&words);
    assert!(code == 0 && home.path().join("other").exists(), "the flag is stronger: {error}");
}

#[test]
fn flags_are_stronger_than_variables() {
    let home = home();
    // Only the flag's address is checked: the flag replaces the variable before it is read.
    let words = ["blade", "--memory", "1G", "--listen", "tcp://192.0.2.1:1"];
    let (code, _, error) = ended(
        farpool(home.path()).args(words).env("FARPOOL_BLADE_LISTEN", "unix:///never-used.sock"),
    );
    assert_eq!(code, 2);
    assert!(error.contains("tcp://192.0.2.1:1"), "{error}");
    let (code, _, error) = ended(
        farpool(home.path())
            .args(words)
            .arg("--allow-remote-tcp=false")
            .env("FARPOOL_BLADE_ALLOW_REMOTE_TCP", "true"),
    );
    assert_eq!(code, 2);
    assert!(error.contains("--allow-remote-tcp"), "{error}");
}

#[test]
fn completions_and_pages_come_for_every_subcommand() {
    let home = home();
    let (code, script, _) = ended(farpool(home.path()).args(["completions", "bash"]));
    assert_eq!(code, 0);
    assert!(script.contains("--when-full"), "the flags are completed");
    assert!(script.contains("--when-outside"), "the flags are completed");
    let out = home.path().join("man");
    let (code, ..) = ended(farpool(home.path()).args(["man", "--out"]).arg(&out));
    assert_eq!(code, 0);
    for name in [
        "farpool.1",
        "farpool-run.1",
        "farpool-blade.1",
        "farpool-doctor.1",
        "farpool-control.1",
        "farpool-node.1",
        "farpool-node-drain.1",
        "farpool-segment-create.1",
    ] {
        let page = std::fs::read_to_string(out.join(name)).expect(name);
        assert!(page.starts_with(".ie") && page.contains(".TH"), "{name} is roff");
    }
}

#[test]
fn doctor_gives_every_lack_a_remedy_and_a_matching_exit_code() {
    let home = home();
    let (code, json, _) = ended(farpool(home.path()).args(["doctor", "--json"]));
    let report: serde_json::Value = serde_json::from_str(&json).expect("it prints JSON");
    let checks = report["checks"].as_array().expect("there are checks");
    let named = |name: &str| checks.iter().any(|check| check["name"] == name);
    for name in [
        "kernel",
        "userfaultfd",
        "uffd-move",
        "uffd-poison",
        "pagemap-scan",
        "memfd",
        "io-uring",
        "memory-cgroup",
        "open-files",
        "address-space-bytes",
        "preload",
    ] {
        assert!(named(name), "{name} is not checked");
    }
    for check in checks {
        let lacks = check["status"] == "missing" || check["status"] == "absent";
        assert_eq!(lacks, check["remedy"].is_string(), "{check}");
    }
    let can_run = checks.iter().all(|check| check["status"] != "missing");
    assert_eq!(report["can_run"], can_run);
    assert_eq!(code, i32::from(!can_run));
}

/// Without the library beside it, the binary can still use sidecars.
#[test]
fn doctor_misses_the_library_only_where_no_sidecar_can_work() {
    let home = home();
    let binary = home.path().join("farpool");
    std::fs::copy(farpool(home.path()).get_program(), &binary).expect("a copy");
    let (_, json, _) = ended(std::process::Command::new(&binary).args(["doctor", "--json"]));
    let report: serde_json::Value = serde_json::from_str(&json).expect("it prints JSON");
    let status = |name: &str| {
        let checks = report["checks"].as_array().expect("there are checks");
        checks.iter().find(|check| check["name"] == name).expect(name)["status"].clone()
    };
    let expected = if status("door") == "ok" { "absent" } else { "missing" };
    assert_eq!(status("preload"), expected, "{report}");
}
