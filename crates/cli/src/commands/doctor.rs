//! `farpool doctor`: checks what this machine supports; each lack has a remedy in one sentence.
//!
//! Every check tries the feature itself and ignores the kernel's version, which is printed for
//! information only. Exit code 0 if `farpool run` works here and the certificates of `--pki` can be
//! used, 1 otherwise.

mod pki;

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, stdout};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use farpool_run::{DoorLack, PAGER_ADDRESS_BYTES, UserfaultfdLack};
use farpool_uffd::{Pagemap, category, features};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::probe;
use crate::terminal::{self, Tone};

/// Descriptors the keeper should have: one userfaultfd and a few sockets per process of the tree.
const NOFILE_WANTED: u64 = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    /// Present and working.
    Ok,
    /// Not present; `farpool run` needs it.
    Missing,
    /// Not present; `farpool run` works without it, slower or with fewer features.
    Absent,
    /// Not as it has to be, though `farpool run` does not need it.
    Wrong,
    /// For information only.
    Info,
}

#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    found: String,
    remedy: Option<&'static str>,
}

impl Check {
    /// A feature that `run` needs.
    fn needed<T>(
        name: &'static str,
        tried: &Result<T, impl Display>,
        remedy: &'static str,
    ) -> Check {
        Check::tried(name, tried, Status::Missing, remedy)
    }

    /// A feature that `run` can do without.
    fn wanted<T>(
        name: &'static str,
        tried: &Result<T, impl Display>,
        remedy: &'static str,
    ) -> Check {
        Check::tried(name, tried, Status::Absent, remedy)
    }

    fn tried<T>(
        name: &'static str,
        tried: &Result<T, impl Display>,
        lack: Status,
        remedy: &'static str,
    ) -> Check {
        match tried {
            Ok(_) => Check { name, status: Status::Ok, found: "works".into(), remedy: None },
            Err(error) => {
                Check { name, status: lack, found: error.to_string(), remedy: Some(remedy) }
            }
        }
    }

    fn info(name: &'static str, found: impl Into<String>) -> Check {
        Check { name, status: Status::Info, found: found.into(), remedy: None }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    can_run: bool,
    /// Whether peers accept what is in the folder of `--pki`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pki_works: Option<bool>,
    checks: Vec<Check>,
}

/// Prints the report.
pub fn main(args: &DoctorArgs) -> anyhow::Result<u8> {
    let mut checks = examine();
    let can_run = checks.iter().all(|check| check.status != Status::Missing);
    let pki_works = args.pki.as_deref().map(|folder| {
        let (works, found) = pki::examine(folder);
        checks.extend(found);
        works
    });
    let report = Report { can_run, pki_works, checks };
    if args.json {
        terminal::print(&format!("{}\n", serde_json::to_string_pretty(&report)?))?;
    } else {
        terminal::print(&for_people(&report))?;
    }
    Ok(u8::from(!can_run || pki_works == Some(false)))
}

fn for_people(report: &Report) -> String {
    let colour = terminal::may_colour(&stdout());
    let widest = report.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Check { name, status, found, remedy } in &report.checks {
        let (mark, tone) = match status {
            Status::Ok => ("ok     ", Tone::Good),
            Status::Missing => ("MISSING", Tone::Bad),
            Status::Absent => ("absent ", Tone::Faint),
            Status::Wrong => ("WRONG  ", Tone::Bad),
            Status::Info => ("info   ", Tone::Faint),
        };
        text += &format!("{}  {name:<widest$}  {found}\n", terminal::toned(mark, tone, colour));
        if let Some(remedy) = remedy {
            text += &format!("{:9}{:<widest$}  -> {remedy}\n", "", "");
        }
    }
    let can = |works| if works { "can" } else { "can NOT" };
    text += &format!("\nfarpool run {} work here\n", can(report.can_run));
    if let Some(works) = report.pki_works {
        text += &format!("these certificates {} be used here\n", can(works));
    }
    text
}

fn examine() -> Vec<Check> {
    let mut checks = vec![
        Check::info("kernel", read("/proc/sys/kernel/osrelease")),
        Check::info("cores", cores()),
        page_size(),
    ];
    checks.extend(userfaultfd());
    checks.extend(kernel_interfaces());
    checks.extend(limits());
    checks.extend(memory());
    let sidecars = farpool_run::sidecar_lack();
    checks.push(preload(sidecars.is_ok()));
    checks.push(door(&sidecars));
    checks
}

fn userfaultfd() -> Vec<Check> {
    let device = File::options().read(true).write(true).open("/dev/userfaultfd");
    let features = farpool_run::userfaultfd_features();
    let remedy = features.as_ref().map_or_else(UserfaultfdLack::remedy, |_| "");
    let mut checks = vec![
        // Root and users who may call userfaultfd(2) do not need it.
        Check::wanted(
            "userfaultfd-device",
            &device,
            "let a group of yours open it: sudo chgrp GROUP /dev/userfaultfd && sudo chmod 660 \
             /dev/userfaultfd",
        ),
        Check::info("unprivileged-userfaultfd", read("/proc/sys/vm/unprivileged_userfaultfd")),
        Check::needed("userfaultfd", &features, remedy),
    ];
    let offered = features.ok();
    checks.extend(FEATURES.iter().map(|feature| feature.check(offered)));
    checks
}

/// A userfaultfd feature that the pager uses, and what its lack means.
struct Feature {
    name: &'static str,
    bit: u64,
    lack: Status,
    remedy: &'static str,
}

/// In the order of `UFFD_FEATURE_*`. A feature that the pager needs is `Missing` when not present.
const FEATURES: [Feature; 6] = [
    Feature {
        name: "uffd-thread-id",
        bit: features::THREAD_ID,
        lack: Status::Absent,
        remedy: "faults are then not counted per thread",
    },
    Feature {
        name: "uffd-exact-address",
        bit: features::EXACT_ADDRESS,
        lack: Status::Absent,
        remedy: "faults are then reported by page only, which is all the pager needs",
    },
    Feature {
        name: "uffd-wp-unpopulated",
        bit: features::WP_UNPOPULATED,
        lack: Status::Absent,
        remedy: "clean pages are then written to the blade again",
    },
    Feature {
        name: "uffd-poison",
        bit: features::POISON,
        lack: Status::Missing,
        remedy: "use a kernel with UFFDIO_POISON: lost pages must give SIGBUS, never zeros",
    },
    Feature {
        name: "uffd-wp-async",
        bit: features::WP_ASYNC,
        lack: Status::Absent,
        remedy: "use a kernel with UFFD_FEATURE_WP_ASYNC, or clean pages are written again",
    },
    Feature {
        name: "uffd-move",
        bit: features::MOVE,
        lack: Status::Missing,
        remedy: "use a kernel with UFFDIO_MOVE: pages must leave a program without a lost write",
    },
];

impl Feature {
    /// Checks the feature. Without a userfaultfd the kernel's features are not known.
    fn check(&self, offered: Option<u64>) -> Check {
        let Some(offered) = offered else {
            return Check::info(self.name, "not known: userfaultfd cannot be used, see above");
        };
        let there = offered & self.bit != 0;
        Check {
            name: self.name,
            status: if there { Status::Ok } else { self.lack },
            found: if there { "works" } else { "not offered by this kernel" }.into(),
            remedy: (!there).then_some(self.remedy),
        }
    }
}

fn kernel_interfaces() -> Vec<Check> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memfd = rustix::fs::memfd_create("farpool-doctor", flags).map_err(io::Error::from);
    vec![
        Check::wanted(
            "pagemap-scan",
            &pagemap_scan(),
            "use a kernel with PAGEMAP_SCAN, or clean pages are written to the blade again",
        ),
        Check::needed(
            "memfd",
            &memfd,
            "allow memfd_create (seccomp filters of containers sometimes forbid it)",
        ),
        Check::wanted(
            "io-uring",
            &probe::io_uring(),
            "blades then use epoll; to allow io_uring: sudo sysctl kernel.io_uring_disabled=0",
        ),
    ]
}

/// Scans an empty range, with the call that the evictor uses.
fn pagemap_scan() -> io::Result<()> {
    Pagemap::open()?.scan(0, 0, category::WRITTEN, &mut []).map(drop)
}

fn limits() -> Vec<Check> {
    let limit = |which| getrlimit(which).current;
    let shown = |limit: Option<u64>| limit.map_or("unlimited".into(), |limit| limit.to_string());
    let nofile = limit(Resource::Nofile);
    let enough = nofile.is_none_or(|limit| limit >= NOFILE_WANTED);
    vec![
        Check {
            name: "open-files",
            status: if enough { Status::Ok } else { Status::Absent },
            found: shown(nofile),
            remedy: (!enough).then_some("raise it for large process trees: ulimit -n 4096"),
        },
        address_space(limit(Resource::As)),
        Check::info("locked-memory-bytes", shown(limit(Resource::Memlock))),
        Check::info("max-map-count", read("/proc/sys/vm/max_map_count")),
    ]
}

/// Checks the address space, of which the pager needs some in each process besides the program's.
fn address_space(limit_bytes: Option<u64>) -> Check {
    let enough = limit_bytes.is_none_or(|limit| limit > PAGER_ADDRESS_BYTES);
    Check {
        name: "address-space-bytes",
        status: if enough { Status::Ok } else { Status::Missing },
        found: limit_bytes.map_or("unlimited".into(), |limit| limit.to_string()),
        remedy: (!enough).then_some(
            "raise it to what the program needs and 656 MiB for the pager, or lift it: ulimit -v \
             unlimited",
        ),
    }
}

fn memory() -> Vec<Check> {
    vec![
        Check::info("memory-cgroup", memory_cgroup()),
        Check::info("swap", swap()),
        Check::info("zram", if exists("/sys/class/zram-control") { "there" } else { "none" }),
        Check::info("transparent-huge-pages", read("/sys/kernel/mm/transparent_hugepage/enabled")),
        Check::info("huge-pages-free", meminfo("HugePages_Free:")),
        Check::info("memory-available-kib", meminfo("MemAvailable:")),
    ]
}

fn memory_cgroup() -> &'static str {
    let v2 = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    if v2.split_whitespace().any(|name| name == "memory") {
        "v2"
    } else if exists("/sys/fs/cgroup/memory/memory.limit_in_bytes") {
        "v1"
    } else {
        "none"
    }
}

fn swap() -> String {
    let devices = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let names: Vec<&str> =
        devices.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    if names.is_empty() { "none".into() } else { names.join(" ") }
}

fn meminfo(key: &str) -> String {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|rest| rest.split_whitespace().next()).unwrap_or("unknown").to_owned()
}

fn cores() -> String {
    std::thread::available_parallelism().map_or("unknown".into(), |cores| cores.to_string())
}

/// Checks the page size: the pager, the blades and the protocol support only one.
fn page_size() -> Check {
    let bytes = rustix::param::page_size();
    let fits = bytes == farpool_units::PAGE_BYTES;
    Check {
        name: "page-bytes",
        status: if fits { Status::Ok } else { Status::Missing },
        found: bytes.to_string(),
        remedy: (!fits).then_some("boot a kernel with pages of 4096 bytes"),
    }
}

fn exists(path: &str) -> bool {
    fs::exists(path).unwrap_or(false)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).map_or("unknown".into(), |text| text.trim().to_owned())
}

/// Reports which door `farpool run` takes, and why not the other.
fn door(sidecars: &Result<(), DoorLack>) -> Check {
    match sidecars {
        Ok(()) => Check {
            name: "door",
            status: Status::Ok,
            found: "sidecar: any program, static ones too".into(),
            remedy: None,
        },
        Err(lack) => Check {
            name: "door",
            status: Status::Absent,
            found: format!("preload: no sidecar can work: {lack}"),
            remedy: Some(lack.remedy()),
        },
    }
}

/// Starts a small program with the library preloaded; the loader reports failures on stderr. If
/// sidecars work, only `--door preload` needs the library.
fn preload(has_sidecars: bool) -> Check {
    const REMEDY: &str =
        "build or install the library beside the binary: make build, or make install";
    let lack = if has_sidecars { Status::Absent } else { Status::Missing };
    Check::tried("preload", &try_preload(), lack, REMEDY)
}

fn try_preload() -> io::Result<()> {
    let library = preload_library()?;
    let output = Command::new("true")
        .env("LD_PRELOAD", &library)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()?;
    match output.status.success() && output.stderr.is_empty() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// Finds the library where `make build` and `make install` put it, relative to the binary.
fn preload_library() -> io::Result<PathBuf> {
    const NAME: &str = "libfarpool_preload.so";
    let binary = std::env::current_exe()?.canonicalize()?;
    let folder = binary.parent().unwrap_or(&binary);
    [folder.join(NAME), folder.join("../lib/farpool").join(NAME)]
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| io::Error::other(format!("{NAME} is not beside {}", binary.display())))
}
