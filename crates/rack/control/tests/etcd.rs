//! Three controllers on a real etcd: one leads, another takes over, and a leader that was stopped
//! beyond its lease cannot write any more.

mod common;

use std::process::{Child, Command, Stdio};

use common::{Agent, Process, SUPERPAGE, join_client, small, wait_for};
use farpool_api::{Client, ClientReport, Health, ProblemKind, SegmentId, SegmentState};
use farpool_control::store::backup::{RestoreError, restore_etcd};
use farpool_e2e::ports::free_address;

/// An etcd of one member in a folder of its own; ends when it is dropped.
struct Etcd {
    child: Child,
    url: String,
    _folder: tempfile::TempDir,
}

impl Etcd {
    /// Starts etcd. Returns None, with a message, if it is not installed.
    fn start() -> Option<Self> {
        if Command::new("etcd").arg("--version").output().is_err() {
            farpool_testkit::skip("etcd is not installed (apt-get install etcd-server)");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let (client, peer) = (free_address(), free_address());
        let (url, peer) = (format!("http://{client}"), format!("http://{peer}"));
        let mut command = Command::new("etcd");
        command
            .arg("--data-dir")
            .arg(folder.path().join("data"))
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        end_with_parent(&mut command);
        let child = command.spawn().unwrap();
        let etcd = Self { child, url, _folder: folder };
        wait_for("etcd", || {
            std::net::TcpStream::connect(client).ok()?;
            let mut curl = ureq::get(format!("{}/health", etcd.url)).call().ok()?;
            curl.body_mut().read_to_string().ok()?.contains("true").then_some(())
        });
        Some(etcd)
    }

    fn ask(&self, path: &str, body: &str) -> serde_json::Value {
        let mut answer = ureq::post(format!("{}{path}", self.url)).send(body).unwrap();
        serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap()
    }

    /// Waits until the only lease has been renewed this often: it runs down, and is longer again.
    fn wait_for_renewals(&self, count: u32) {
        let (mut renewals, mut before) = (0, i64::MAX);
        wait_for("the lease to be renewed", || {
            let leases = self.ask("/v3/lease/leases", "{}");
            let id = leases["leases"][0]["ID"].as_str().expect("the lease has ended").to_owned();
            let left = self.ask("/v3/lease/timetolive", &format!(r#"{{"ID":"{id}"}}"#));
            let left: i64 = left["TTL"].as_str().map_or(0, |text| text.parse().unwrap());
            renewals += u32::from(left > before);
            before = left;
            (renewals >= count).then_some(())
        });
    }

    fn controller(&self) -> Process {
        Process::start(&format!("etcd:{}", self.url))
    }
}

/// Kills the child when the thread that starts it ends, for whatever reason.
fn end_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: between fork and exec only one system call is made.
    unsafe {
        command.pre_exec(|| {
            let signal = Some(rustix::process::Signal::KILL);
            rustix::process::set_parent_process_death_signal(signal).map_err(Into::into)
        });
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn health(process: &Process) -> Health {
    process.client().health().unwrap()
}

/// A node that is silent for as long as a slow disk may take to store many segments is given none.
fn report_now_and_then(node: &mut Agent, api: &Client, number: u128) {
    if number.is_multiple_of(10) {
        node.step(api);
    }
}

fn signal(process: &Process, signal: rustix::process::Signal) {
    let pid = i32::try_from(process.child.id()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn a_standby_takes_over_and_the_old_leader_cannot_write() {
    let Some(etcd) = Etcd::start() else { return };
    let mut first = etcd.controller();
    wait_for("a leader", || health(&first).leader.then_some(()));
    let second = etcd.controller();
    wait_for("a standby that knows its leader", || {
        (health(&second).leader_address.as_deref() == Some(first.url.as_str())).then_some(())
    });
    let refused = second.client().nodes().unwrap_err();
    assert!(refused.is(ProblemKind::NotLeader), "{refused:?}");

    let both = Client::new(&format!("{},{}", second.url, first.url), None).unwrap();
    let mut node = Agent::join(&both, "n0", 1_000 * SUPERPAGE);
    let client = join_client(&both, 1, "n0");
    let id = SegmentId::from_u128;
    for number in 0..50 {
        both.put_segment(id(number), &small(client)).unwrap();
        report_now_and_then(&mut node, &both, number);
    }
    node.settle(&both);
    let before = both.report_client(client, &ClientReport::default()).unwrap().segments;
    assert!(before.iter().all(|segment| segment.state == SegmentState::Ready));

    // Killed: the other one has everything that was acknowledged.
    first.kill();
    wait_for("a new leader", || health(&second).leader.then_some(()));
    node.step(&both);
    let after = both.report_client(client, &ClientReport::default()).unwrap().segments;
    assert_eq!(after, before);
    both.put_segment(id(50), &small(client)).unwrap();

    // Stopped beyond its lease: when it continues, it must not answer as if it led.
    let third = etcd.controller();
    signal(&second, rustix::process::Signal::STOP);
    wait_for("the third to lead", || health(&third).leader.then_some(()));
    third.client().put_segment(id(51), &small(client)).unwrap();
    let (stale, spec) = (second.client(), small(client));
    let writer = std::thread::spawn(move || stale.put_segment(id(52), &spec));
    signal(&second, rustix::process::Signal::CONT);
    let refused = writer.join().unwrap().unwrap_err();
    assert!(refused.is(ProblemKind::NotLeader) || refused.is(ProblemKind::Ending), "{refused:?}");
    let now = third.client().report_client(client, &ClientReport::default()).unwrap().segments;
    assert_eq!(now.len(), 52);
    assert!(!now.iter().any(|segment| segment.id == id(52)));
    let newest = |number| now.iter().find(|segment| segment.id == id(number)).unwrap().epoch;
    assert!(newest(51) > newest(50) && newest(50) > newest(49));
}

#[test]
fn a_restore_into_etcd_leads_however_long_it_takes() {
    let Some(etcd) = Etcd::start() else { return };
    let (client, backup) = {
        let first = etcd.controller();
        wait_for("a leader", || health(&first).leader.then_some(()));
        let api = first.client();
        let mut node = Agent::join(&api, "n0", 1_000 * SUPERPAGE);
        let client = join_client(&api, 1, "n0");
        // More than one transaction of etcd takes.
        for number in 0..150 {
            api.put_segment(SegmentId::from_u128(number), &small(client)).unwrap();
            report_now_and_then(&mut node, &api, number);
        }
        node.settle(&api);
        let backup = api.backup().unwrap();
        api.put_segment(SegmentId::from_u128(150), &small(client)).unwrap();
        let urls = vec![etcd.url.clone()];
        let led = restore_etcd(urls, &backup, true, &mut |_| {}).unwrap_err();
        assert!(matches!(led, RestoreError::Led(_)), "{led}");
        (client, backup)
    };
    let restore = |replace, on_step: &mut dyn FnMut(&str)| {
        wait_for("the killed leader's lease to end", || {
            let urls = vec![etcd.url.clone()];
            match restore_etcd(urls, &backup, replace, on_step) {
                Err(RestoreError::Led(_)) => None,
                other => Some(other),
            }
        })
    };
    let refused = restore(false, &mut |_| {}).unwrap_err();
    assert!(matches!(refused, RestoreError::NotEmpty(_)), "{refused}");
    let mut renewals = 0;
    let restored = restore(true, &mut |step| {
        if step == "loaded" {
            etcd.wait_for_renewals(3);
            renewals += 3;
        }
    });
    assert!(restored.unwrap() > 150 && renewals > 0);
    let second = etcd.controller();
    wait_for("a leader", || health(&second).leader.then_some(()));
    let api = second.client();
    let told = api.report_client(client, &ClientReport::default()).unwrap().segments;
    assert_eq!(told.len(), 150, "what came after the backup is gone");
    let fresh = api.put_segment(SegmentId::from_u128(200), &small(client)).unwrap();
    assert!(told.iter().all(|segment| segment.epoch < fresh.epoch));
}
