//! A key-value server whose far memory comes from a rack: it grows as memory is granted, returns
//! memory that the rack needs, and loses items when a node dies, but never returns a wrong value.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_e2e::kv::Client;
use farpool_e2e::ports::{free_address, free_port};
use farpool_e2e::rack::{Daemon, answer, ask};
use farpool_e2e::{binaries, turn, wait_until};

const PATIENCE: Duration = Duration::from_secs(60);
const FAR_BYTES: u64 = 128 << 20;
/// The number of keys: far more than fit into the server's memory, but they fit into memory and far
/// memory together.
const KEYS: usize = 60_000;
/// The longest that a batch of reads may take while memory is granted and reclaimed: the time that
/// a lower tier may take, and an allowance for a busy machine.
const REPLY_MAX: Duration = Duration::from_secs(15);

struct Rack {
    // The server first, so that it is dropped while the rack is still there.
    kv: Option<Daemon>,
    control: Daemon,
    nodes: Vec<(&'static str, Daemon)>,
    folder: tempfile::TempDir,
}

impl Rack {
    /// Starts a controller and nodes that each lend this much.
    fn start(names: &[&'static str], donate: &str) -> Rack {
        let folder = tempfile::tempdir().expect("folder");
        let listen = free_address().to_string();
        let control = Daemon::control(&listen, &folder.path().join("control.redb"));
        let mut rack = Rack { kv: None, control, nodes: Vec::new(), folder };
        names.iter().for_each(|name| rack.add_node(name, donate));
        rack
    }

    fn add_node(&mut self, name: &'static str, donate: &str) {
        self.nodes.push((name, Daemon::node(self.url(), name, donate)));
        wait_until("the node lends", PATIENCE, || {
            let node = self.answer(&["node", "show", name]);
            let lends = node["state"] == "up" && node["lendable_bytes"].as_u64() > Some(0);
            lends.then_some(())
        });
    }

    fn url(&self) -> &str {
        &self.control.address
    }

    fn answer(&self, arguments: &[&str]) -> serde_json::Value {
        answer(self.url(), arguments)
    }

    fn start_kv(&mut self, host: &str, flags: &[&str]) -> Client {
        let kv = kv_of(self.url(), host, flags);
        let client = Client::of(&kv);
        self.kv = Some(kv);
        client
    }

    /// The nodes on which the server has ready memory.
    fn lenders(&self) -> Vec<String> {
        let segments = self.answer(&["segment", "list"]);
        let segments = segments["segments"].as_array().cloned().expect("a list");
        let ready = segments.iter().filter(|segment| segment["state"] == "ready");
        ready.filter_map(|it| Some(it["place"]["node"].as_str()?.to_owned())).collect()
    }

    fn node_mut(&mut self, name: &str) -> &mut Daemon {
        let found = self.nodes.iter_mut().find(|(it, _)| *it == name);
        &mut found.expect("a node of the rack").1
    }

    /// Ends the server, which must succeed, and waits until all its memory is returned.
    fn end_kv(&mut self) {
        assert!(self.kv.take().expect("it was started").end(), "the server ends in order");
        wait_until("all memory is given back", PATIENCE, || {
            let segments = self.answer(&["segment", "list"]);
            segments["segments"].as_array()?.is_empty().then_some(())
        });
    }
}

/// Starts a server that requests 128 MiB from the pool for this host.
fn kv_of(pool: &str, host: &str, flags: &[&str]) -> Daemon {
    let port = free_port().to_string();
    let command = std::process::Command::new(binaries::program("farpool"));
    let own = ["kv", "-p", &port, "-t", "2", "--memory", "16MiB", "--far", "128MiB"];
    let pool = ["--pool", pool, "--host", host, "--rate", "1GiB"];
    Daemon::start_command(command, &[&own[..], &pool, flags].concat())
}

fn wait_for_figure(client: &mut Client, name: &str, what: &str, holds: impl Fn(u64) -> bool) {
    wait_until(what, PATIENCE, || holds(client.figure(name)).then_some(()));
}

fn wait_for_memory(client: &mut Client) {
    wait_for_figure(client, "far_granted_bytes", "far memory comes", |it| it == FAR_BYTES);
}

/// Stores all keys until most are kept: on a busy machine the blades refuse some.
fn fill(client: &mut Client, version: u32) {
    wait_until("most items are kept", PATIENCE, || {
        client.store(0..KEYS, version);
        (client.check(0..KEYS, version) > KEYS * 8 / 10).then_some(())
    });
    assert!(client.figure("far_items") > KEYS as u64 / 2, "most of it is far");
}

/// A client that stores and reads its own keys until [`Busy::end`].
struct Busy {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<(u32, usize, Duration)>>,
}

impl Busy {
    fn start(mut client: Client) -> Busy {
        let over = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let over = Arc::clone(&over);
            move || {
                let (mut rounds, mut found) = (0, 0);
                while !over.load(Ordering::Relaxed) {
                    rounds += 1;
                    client.store(KEYS..KEYS + 8_000, rounds);
                    found += client.check(KEYS..KEYS + 8_000, rounds);
                }
                (rounds, found, client.longest)
            }
        });
        Busy { over, thread: Some(thread) }
    }

    /// Stops the client, which must have read only right values. Returns the number of rounds, the
    /// number of items found, and the longest time that a batch of reads took.
    fn end(mut self) -> (u32, usize, Duration) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().expect("once").join().expect("every value was right, in time")
    }
}

#[test]
fn a_drained_node_is_left_while_clients_read_and_write() {
    let _turn = turn();
    let mut rack = Rack::start(&["A", "B", "C"], "256MiB");
    let mut client = rack.start_kv("A", &[]);
    wait_for_memory(&mut client);
    let first = rack.lenders();
    assert!(!first.contains(&"A".to_owned()), "not on its own host: {first:?}");
    fill(&mut client, 1);
    let busy = Busy::start(Client::of(rack.kv.as_ref().expect("started")));
    let task = rack.answer(&["node", "drain", &first[0], "--wait"]);
    assert_eq!(task["state"], "done", "{task}");
    let (rounds, found, longest) = busy.end();
    assert!(rounds > 0 && found > 0, "{rounds} rounds, {found} found");
    assert!(longest < REPLY_MAX, "{longest:?}");
    assert!(client.figure("far_reclaims") > 0);
    assert!(client.figure("far_reclaimed_moved") > 0, "there was room at the new place");
    assert_eq!(client.figure("far_grants_lost"), 0);
    let kept = client.check(0..KEYS, 1);
    eprintln!("{kept} of {KEYS} were kept, {rounds} rounds, longest {longest:?}");
    assert!(kept > KEYS / 3, "what has moved is still there");
    wait_for_memory(&mut client);
    wait_for_figure(&mut client, "far_leaving_bytes", "all is given back", |it| it == 0);
    let second = rack.lenders();
    assert!(!second.is_empty() && !second.contains(&first[0]), "{first:?}, then {second:?}");
    fill(&mut client, 2);
    rack.end_kv();
}

#[test]
fn a_node_that_dies_costs_its_items_and_a_controller_that_dies_nothing() {
    let _turn = turn();
    let mut rack = Rack::start(&["A", "B", "C"], "256MiB");
    let mut client = rack.start_kv("A", &[]);
    wait_for_memory(&mut client);
    fill(&mut client, 1);

    rack.control.kill();
    assert_eq!(ask(rack.url(), &["node", "list"]).status.code(), Some(5), "nobody answers");
    let before = client.check(0..KEYS, 1);
    assert!(before > KEYS * 7 / 10, "{before} without a controller");
    assert!(client.longest < REPLY_MAX, "{:?}", client.longest);
    let listen = rack.url().trim_start_matches("http://").to_owned();
    rack.control = Daemon::control(&listen, &rack.folder.path().join("control.redb"));
    wait_until("the controller finds the truth again", PATIENCE, || {
        (!rack.lenders().is_empty()).then_some(())
    });
    assert_eq!(client.figure("far_granted_bytes"), FAR_BYTES);
    assert!(client.check(0..KEYS, 1) > KEYS * 7 / 10);

    let lender = rack.lenders().remove(0);
    let busy = Busy::start(Client::of(rack.kv.as_ref().expect("started")));
    rack.node_mut(&lender).kill();
    let start = Instant::now();
    let after = client.check(0..KEYS, 1);
    assert!(after < before, "its items are misses");
    eprintln!("{after} of {before} are left, read in {:?}", start.elapsed());
    wait_for_figure(&mut client, "far_grants_lost", "the loss is noticed", |it| it > 0);
    wait_until("another node gives memory", PATIENCE, || {
        let lenders = rack.lenders();
        (!lenders.is_empty() && !lenders.contains(&lender)).then_some(())
    });
    wait_for_memory(&mut client);
    let (_, _, longest) = busy.end();
    assert!(longest < REPLY_MAX && client.longest < REPLY_MAX, "{longest:?} {client:?}");
    fill(&mut client, 2);
    wait_for_figure(&mut client, "far_items_lost", "the index forgets what is lost", |it| it > 0);
}

#[test]
fn a_server_without_a_pool_serves_and_takes_what_comes() {
    let _turn = turn();
    let listen = free_address().to_string();
    let kv = kv_of(&format!("http://{listen}"), "B", &[]);
    let mut client = Client::of(&kv);
    client.store(0..KEYS, 1);
    let found = client.check(0..KEYS, 1);
    assert!(found > 0 && found < KEYS / 2, "only memory is there: {found}");
    assert_eq!(
        (client.figure("far_granted_bytes"), client.figure("far_wanted_bytes")),
        (0, FAR_BYTES)
    );
    let folder = tempfile::tempdir().expect("folder");
    let control = Daemon::control(&listen, &folder.path().join("control.redb"));
    let mut rack = Rack { kv: Some(kv), control, nodes: Vec::new(), folder };
    // The first node has less than is requested; the second has the rest.
    rack.add_node("B", "80MiB");
    wait_for_figure(&mut client, "far_granted_bytes", "what there is comes", |it| it > 0);
    let some = client.figure("far_granted_bytes");
    assert!(some < FAR_BYTES, "{some}");
    rack.add_node("C", "256MiB");
    wait_for_figure(&mut client, "far_granted_bytes", "the rest comes", |it| it >= FAR_BYTES);
    fill(&mut client, 2);
    rack.end_kv();
}

#[test]
fn what_far_memory_must_give_back_is_still_served_from_flash() {
    let _turn = turn();
    let mut rack = Rack::start(&["B"], "256MiB");
    let flash = rack.folder.path().join("flash");
    let part = format!("{}:256MiB", flash.display());
    // If a failing test kills the server, the files that it leaves in memory are deleted with this
    // folder.
    let books = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let books = books.path().to_str().expect("a path");
    let mut client = rack.start_kv("B", &["--flash", &part, "--flash-books", books]);
    wait_for_memory(&mut client);
    fill(&mut client, 1);
    let far = client.figure("far_items");
    // There is no other node: the rack finds no place, but the drain must still complete.
    let task = rack.answer(&["node", "drain", "B", "--wait"]);
    assert_eq!(task["state"], "done", "{task}");
    assert_eq!(client.figure("far_granted_bytes"), 0);
    wait_for_figure(&mut client, "far_items", "nothing is far any more", |it| it == 0);
    let spilled = client.figure("far_reclaimed_spilled");
    let dropped = client.figure("far_reclaimed_dropped");
    assert!(spilled > far * 8 / 10, "{spilled} of {far} went to flash, {dropped} were dropped");
    let found = client.check(0..KEYS, 1);
    eprintln!("{spilled} of {far} spilled, {dropped} dropped, {found} of {KEYS} found");
    assert!(found > KEYS * 7 / 10, "{found}");
    rack.answer(&["node", "drain", "B", "--undo"]);
    wait_for_memory(&mut client);
    rack.end_kv();
}
