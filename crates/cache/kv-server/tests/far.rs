//! Far memory under the server, with real blades: items that do not fit into memory are still
//! served, in order, and a blade that dies costs its own items and nothing else.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, Server as Blade, Serving};
use farpool_keyvault::client::{Address as LightAddress, Client as LightClient, Connection};
use farpool_keyvault::frame::Status;
use farpool_keyvault::message::{Item, KeyList, Request, SetMode, read_found};
use farpool_keyvault::owner::{hash_key, shard_of};
use farpool_kv_server::{
    FarSettings, FarSource, SealPolicy, Server, ServerError, Settings, Shared,
};
use farpool_pool::Address;

const MEMORY_BYTES: usize = 16 << 20;
const FAR_BYTES: u64 = 96 << 20;
/// Longer than a busy machine lets a blade wait, so that only one that is dead is lost. Far shorter
/// than [`common::PATIENCE`]: one after the other may have to find out.
const DEADLINE: Duration = Duration::from_secs(8);
/// Longest time of a request whose item was on a dead blade: it waits a second for far memory, and
/// not for the blade's deadline.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// Storing one of two keys whose hashes agree in the 32 bits that the index keeps costs the other's
/// item in far memory. The seed is random: one run in five has such a pair among its keys.
const ALIKE_MAX: u64 = 3;

fn blade(address: &Address) -> Serving {
    let config = BladeConfig { memory_bytes: 256 << 20, ..BladeConfig::default() };
    Blade::bind(std::slice::from_ref(address), config).unwrap().serve().unwrap()
}

struct Running {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    text: SocketAddr,
    light: SocketAddr,
}

impl Running {
    fn start(threads: usize, blade: &Address) -> Self {
        Self::start_with(threads, vec![blade.clone()])
    }

    fn start_with(threads: usize, blades: Vec<Address>) -> Self {
        let any = "127.0.0.1:0".parse().unwrap();
        let settings = Settings {
            addresses: vec![any],
            keyvault_addresses: vec![any],
            memory_bytes: MEMORY_BYTES,
            threads,
            far: Some(FarSettings {
                source: FarSource::Blades(blades),
                bytes: FAR_BYTES,
                deadline: DEADLINE,
                seal: SealPolicy::Remote,
                allow_remote_tcp: false,
                credentials: None,
            }),
            ..Settings::default()
        };
        let server = Server::bind(settings, 1_700_000_000).unwrap();
        let &[text, light] = server.addresses() else { panic!("two addresses") };
        let shared = server.shared();
        let thread = Some(std::thread::spawn(move || server.run()));
        Self { shared, thread, text, light }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.ask_to_stop();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap().unwrap();
        }
    }
}

struct Text {
    reader: BufReader<TcpStream>,
}

impl Text {
    fn connect(at: SocketAddr) -> Self {
        let stream = TcpStream::connect(at).unwrap();
        // A hang fails the test instead of blocking the whole run.
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
        Self { reader: BufReader::new(stream) }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.reader.get_mut().write_all(bytes).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, request: &str) -> String {
        self.send(format!("{request}\r\n").as_bytes());
        self.line()
    }

    /// Reads the reply to a `get`: the items, in order.
    fn items(&mut self) -> Vec<(String, Vec<u8>)> {
        let mut items = Vec::new();
        loop {
            let line = self.line();
            if line == "END" {
                return items;
            }
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(words[0], "VALUE", "{line}");
            let mut value = vec![0; words[3].parse::<usize>().unwrap() + 2];
            self.reader.read_exact(&mut value).unwrap();
            value.truncate(value.len() - 2);
            items.push((words[1].to_owned(), value));
        }
    }

    fn get(&mut self, key: &str) -> Option<Vec<u8>> {
        self.send(format!("get {key}\r\n").as_bytes());
        self.items().pop().map(|(_, value)| value)
    }

    fn statistic(&mut self, name: &str) -> u64 {
        self.send(b"stats\r\n");
        common::talk::read_statistic(|| self.line(), name)
    }
}

fn value(key: usize, round: usize) -> Vec<u8> {
    let mut value = format!("{key}.{round}.").into_bytes();
    value.resize(40 + key * 131 % 2000, b'v');
    value
}

fn fill(text: &mut Text, keys: usize, round: usize) {
    for key in 0..keys {
        let value = value(key, round);
        text.send(format!("set key{key} 3 0 {} noreply\r\n", value.len()).as_bytes());
        text.send(&value);
        text.send(b"\r\n");
    }
    assert!(text.ask("version").starts_with("VERSION"));
}

/// Stores items again that the blade of a busy machine did not take in time, until it has taken
/// nearly all.
fn fill_until_taken(text: &mut Text, keys: usize, round: usize) {
    const ATTEMPTS: usize = 10;
    for _ in 0..ATTEMPTS {
        let before = text.statistic("far_refused");
        fill(text, keys, round);
        if text.statistic("far_refused") - before < keys as u64 / 10 {
            return;
        }
    }
    panic!("the blade refused a tenth of the items in each of {ATTEMPTS} rounds");
}

fn with_blades(test: impl Fn(&Address, Serving)) {
    let folder = tempfile::tempdir().unwrap();
    for (number, scheme) in ["tcp", "unix", "shm"].into_iter().enumerate() {
        let path = folder.path().join(format!("blade{number}.sock"));
        let address: Address = match scheme {
            "tcp" => Address::Tcp("127.0.0.1:0".parse().unwrap()),
            "unix" => Address::Unix(path),
            _ => Address::Shm(path),
        };
        let serving = blade(&address);
        let bound = serving.addresses()[0].clone();
        test(&bound, serving);
    }
    assert!(Path::new(folder.path()).exists());
}

#[test]
fn what_memory_has_no_room_for_is_still_there() {
    with_blades(|address, blade| {
        for threads in [1, 3] {
            let server = Running::start(threads, address);
            let mut text = Text::connect(server.text);
            let keys = 40_000;
            fill(&mut text, keys, 0);
            assert!(text.statistic("far_items") > 10_000, "{address}");
            let start = Instant::now();
            let mut missing = 0;
            for first in (0..keys).step_by(50) {
                let names: Vec<String> =
                    (first..first + 50).map(|key| format!("key{key}")).collect();
                text.send(format!("get {}\r\n", names.join(" ")).as_bytes());
                let items = text.items();
                // In the order of the request; missing items were counted when they were lost.
                let mut asked = names.iter();
                for (name, found) in &items {
                    assert!(asked.any(|it| it == name), "{name} is out of order");
                    assert!(
                        *found == value(name[3..].parse().unwrap(), 0),
                        "{name} has another value"
                    );
                }
                missing += 50 - items.len() as u64;
            }
            let refused = text.statistic("far_refused");
            assert!(
                missing <= refused + ALIKE_MAX && missing < keys as u64 / 10,
                "{missing} are missing, {refused} were refused"
            );
            eprintln!("{address} {threads} threads: {keys} items in {:?}", start.elapsed());
            let mut light = LightClient::connect(&LightAddress::Tcp(server.light)).unwrap();
            let names: Vec<String> = (0..keys).step_by(17).map(|key| format!("key{key}")).collect();
            let wanted: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
            let found = light.get_many(&wanted).unwrap();
            for (key, found) in (0..keys).step_by(17).zip(&found) {
                assert!(found.as_ref().is_none_or(|it| it.bytes == value(key, 0)), "key{key}");
            }
            assert!(found.iter().flatten().count() > found.len() * 8 / 10);
        }
        blade.shutdown();
    });
}

#[test]
fn large_items_are_below_too() {
    with_blades(|address, blade| {
        let server = Running::start(2, address);
        let mut text = Text::connect(server.text);
        // 58 MB of items, of which several share a zone, or one nearly fills it.
        let kib = |key: usize| if key.is_multiple_of(3) { 1_000 } else { 200 };
        let large = |key: usize| {
            let mut value = format!("{key}.").into_bytes();
            value.extend(
                (value.len()..kib(key) << 10).map(|at| u8::try_from(at * (key + 7) % 251).unwrap()),
            );
            value
        };
        let keys = 120;
        for key in 0..keys {
            let value = large(key);
            text.send(format!("set key{key} 0 0 {}\r\n", value.len()).as_bytes());
            text.send(&value);
            text.send(b"\r\n");
            assert_eq!(text.line(), "STORED");
        }
        let refused = usize::try_from(text.statistic("far_refused")).unwrap();
        let mut found = [0, 0];
        // Twice: first answered from the record, then promoted.
        for key in (0..keys).chain(0..keys) {
            if let Some(value) = text.get(&format!("key{key}")) {
                assert!(value == large(key), "key{key} has another value");
                found[usize::from(key.is_multiple_of(3))] += 1;
            }
        }
        eprintln!("{address}: {found:?} found, {refused} refused");
        assert!(found[0] + found[1] + 2 * refused >= 2 * keys - 24, "{found:?} {refused}");
        assert!(found[0] > 100 && found[1] > 40, "{found:?}");
        assert!(text.statistic("far_served") > 20);
        assert!(text.statistic("far_items") > 20);
        drop(server);
        blade.shutdown();
    });
}

#[test]
fn every_command_finds_what_is_below() {
    with_blades(|address, blade| {
        let server = Running::start(2, address);
        let mut text = Text::connect(server.text);
        text.send(
            b"set number 7 0 2\r\n41\r\nset word 1 0 2\r\nab\r\nset cas 0 0 1\r\nx\r\nset \
            gone 0 0 1\r\nx\r\n",
        );
        text.send(
            b"set old 0 0 1\r\nx\r\nset touched 0 0 1\r\nx\r\nset meta 5 0 3\r\nabc\r\nset \
            late 0 2 1\r\nx\r\n",
        );
        (0..8).for_each(|_| assert_eq!(text.line(), "STORED"));
        fill(&mut text, 40_000, 0);
        // All sent together: a request that waits for an item does not overtake earlier ones.
        text.send(b"incr number 1\r\nget number\r\nappend word 0 0 2\r\ncd\r\nget word\r\n");
        assert_eq!(text.line(), "42");
        assert_eq!(text.items(), [("number".to_owned(), b"42".to_vec())]);
        assert_eq!(text.line(), "STORED");
        assert_eq!(text.items(), [("word".to_owned(), b"abcd".to_vec())]);
        text.send(b"gets cas\r\n");
        let line = text.line();
        let cas: u64 = line.rsplit(' ').next().unwrap().parse().unwrap();
        assert_eq!((text.line(), text.line()), ("x".to_owned(), "END".to_owned()));
        assert_eq!(text.ask(&format!("cas cas 0 0 1 {}\r\ny", cas + 1)), "EXISTS");
        assert_eq!(text.ask(&format!("cas cas 0 0 1 {cas}\r\ny")), "STORED");
        assert_eq!(text.ask("delete gone"), "DELETED");
        assert_eq!(text.get("gone"), None);
        assert_eq!(text.ask("add old 0 0 1\r\ny"), "NOT_STORED");
        assert_eq!(text.ask("set old 0 0 3\r\nnew"), "STORED");
        assert_eq!(text.get("old").unwrap(), b"new");
        assert_eq!(text.ask("touch touched 100"), "TOUCHED");
        assert_eq!(text.ask("mg meta v f s k"), "VA 3 f5 s3 kmeta");
        assert_eq!(text.line(), "abc");
        // In far memory, and not stored anew since; flushed with the others.
        assert!(text.get("key5").is_some());
        assert_eq!(text.ask("flush_all"), "OK");
        assert_eq!(text.get("key7"), None);
        assert_eq!(text.get("key5"), None);
        assert_eq!(text.get("late"), None);
        blade.shutdown();
    });
}

/// Overwrites more than memory and far memory hold, in rounds: every value found is the newest.
#[test]
fn an_old_value_never_comes_back() {
    with_blades(|address, blade| {
        let server = Running::start(2, address);
        let mut text = Text::connect(server.text);
        let keys = 60_000;
        for round in 0..5 {
            fill_until_taken(&mut text, keys, round);
            let mut there = 0;
            for key in (0..keys).step_by(7) {
                if let Some(found) = text.get(&format!("key{key}")) {
                    assert!(
                        found == value(key, round),
                        "key{key} has an old value in round {round}"
                    );
                    there += 1;
                }
            }
            assert!(there > keys / 7 / 2, "{there} of {} are there", keys / 7);
        }
        blade.shutdown();
    });
}

#[test]
fn a_dead_blade_costs_its_items_and_nothing_else() {
    for scheme in ["tcp", "unix"] {
        let folder = tempfile::tempdir().unwrap();
        let address = match scheme {
            "tcp" => Address::Tcp("127.0.0.1:0".parse().unwrap()),
            _ => Address::Unix(folder.path().join("blade.sock")),
        };
        let serving = blade(&address);
        let bound = serving.addresses()[0].clone();
        let server = Running::start(2, &bound);
        let mut text = Text::connect(server.text);
        let keys = 40_000;
        fill(&mut text, keys, 0);
        // Requests are under way while the blade dies.
        let names: Vec<String> = (0..2000).map(|key| format!("key{key}")).collect();
        text.send(format!("get {}\r\n", names.join(" ")).as_bytes());
        serving.shutdown();
        for (name, found) in text.items() {
            assert!(found == value(name[3..].parse().unwrap(), 0), "{name} has another value");
        }
        let mut slowest = Duration::ZERO;
        for key in 0..3000 {
            let start = Instant::now();
            if let Some(found) = text.get(&format!("key{key}")) {
                assert!(found == value(key, 0), "key{key} has another value");
            }
            slowest = slowest.max(start.elapsed());
        }
        assert!(slowest < WAIT_MAX, "somebody waited {slowest:?} for a dead blade");
        // Memory works as before.
        fill(&mut text, 1000, 1);
        for key in 0..1000 {
            assert!(text.get(&format!("key{key}")).unwrap() == value(key, 1));
        }
    }
}

/// Which of the keys are found; each has its own value.
fn found_of(text: &mut Text, keys: usize) -> Vec<bool> {
    let mut found = vec![false; keys];
    for first in (0..keys).step_by(50) {
        let names: Vec<String> = (first..first + 50).map(|key| format!("key{key}")).collect();
        text.send(format!("get {}\r\n", names.join(" ")).as_bytes());
        for (name, bytes) in text.items() {
            let key: usize = name[3..].parse().unwrap();
            assert!(bytes == value(key, 0), "{name} has another value");
            found[key] = true;
        }
    }
    found
}

/// What far memory has answered.
fn answered_by_far(text: &mut Text) -> u64 {
    text.statistic("far_served") + text.statistic("far_promoted")
}

#[test]
fn a_dead_blade_of_two_costs_its_own_items_only() {
    for threads in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let [lives, dies] =
            ["lives", "dies"].map(|name| blade(&Address::Unix(folder.path().join(name))));
        let addresses = [&lives, &dies].map(|it| it.addresses()[0].clone());
        let server = Running::start_with(threads, addresses.to_vec());
        let mut text = Text::connect(server.text);
        let keys = 60_000;
        fill_until_taken(&mut text, keys, 0);
        assert_eq!(text.statistic("far_granted_bytes"), FAR_BYTES);
        let (items, refused) = (text.statistic("far_items"), text.statistic("far_refused"));
        assert!(items > keys as u64 / 2, "{items} items in far memory");
        dies.shutdown();
        let found = found_of(&mut text, keys);
        // Both blades lent the same.
        common::wait_until("the loss is noted", || {
            (text.statistic("far_granted_bytes") == FAR_BYTES / 2).then_some(())
        });
        assert_eq!(text.statistic("far_wanted_bytes"), FAR_BYTES);
        assert_eq!(text.statistic("far_grants_lost"), 0, "the other blade is still used");
        common::wait_until("what the blade held is given up", || {
            (text.statistic("far_limit_bytes") == FAR_BYTES / 2).then_some(())
        });
        let missing = found.iter().filter(|found| !**found).count() as u64;
        let answered = answered_by_far(&mut text);
        eprintln!("{threads} threads: {items} were below, {missing} missing, {answered} answered");
        let lost = text.statistic("far_reads_failed") + text.statistic("far_items_lost");
        assert!(lost > items / 5, "{lost} of {items} are lost");
        assert!(missing <= lost + refused + ALIKE_MAX, "{missing} are missing, {lost} are lost");
        assert!(answered > items / 5, "the other blade answered {answered} of {items}");
        let left = text.statistic("far_items");
        assert!(left < items * 4 / 5, "{left} of {items} are said to be below");
        // What was lost stays lost; the rest is still there and right.
        let again = found_of(&mut text, keys);
        let came_back = found.iter().zip(&again).filter(|(before, now)| !**before && **now);
        assert_eq!(came_back.count(), 0);
        assert!(answered_by_far(&mut text) > answered);
        fill(&mut text, 1000, 1);
        for key in 0..1000 {
            assert!(text.get(&format!("key{key}")).unwrap() == value(key, 1));
        }
        drop(server);
        lives.shutdown();
    }
}

/// The first `count` keys that a shard owns. They leave memory first.
fn keys_of(shard: usize, shards: usize, count: usize) -> Vec<usize> {
    let is_of = |key: &usize| shard_of(hash_key(format!("key{key}").as_bytes()), shards) == shard;
    (0..).filter(is_of).take(count).collect()
}

fn multi_get(connection: &mut Connection, keys: &[usize]) -> u32 {
    let mut list = KeyList::default();
    keys.iter().for_each(|key| assert!(list.push(format!("key{key}").as_bytes())));
    connection.send(&Request::MultiGet(list.keys())).unwrap()
}

/// All answers, by request number: status and body.
fn answers(connection: &mut Connection) -> std::collections::HashMap<u32, (Status, Vec<u8>)> {
    connection.flush().unwrap();
    let mut all = std::collections::HashMap::new();
    while connection.unanswered() > 0 {
        let take = |answer: farpool_keyvault::client::Answer<'_>| {
            let answered = (answer.status, answer.body.to_vec());
            assert!(all.insert(answer.request, answered).is_none(), "answered twice");
        };
        connection.receive(take).unwrap();
    }
    all
}

/// The result for each key in an answer to a MULTIGET that covers all keys.
fn found_in(answer: &(Status, Vec<u8>), keys: usize) -> Vec<Option<Vec<u8>>> {
    assert_eq!(answer.0, Status::Ok);
    let (looked_at, items) = read_found(&answer.1).unwrap();
    assert_eq!(usize::from(looked_at), keys);
    let mut found = vec![None; keys];
    items.into_iter().for_each(|(at, item)| found[usize::from(at)] = Some(item.value.to_vec()));
    found
}

/// Whether the blade took and returned everything in time.
fn is_whole(text: &mut Text) -> bool {
    let names =
        ["far_refused", "far_reads_failed", "far_reads_gone", "far_zones_lost", "lower_late"];
    names.into_iter().map(|name| text.statistic(name)).sum::<u64>() == 0
}

/// Repeats a run in which the blade of a busy machine did not take or return everything in time:
/// one run must lose nothing.
fn without_loss(mut run: impl FnMut() -> bool) {
    const ATTEMPTS: usize = 10;
    assert!((0..ATTEMPTS).any(|_| run()), "the blade was late in each of {ATTEMPTS} runs");
}

fn read_many_at_once(address: &Address, threads: usize) -> bool {
    let server = Running::start(threads, address);
    let mut text = Text::connect(server.text);
    fill(&mut text, 40_000, 0);
    assert_eq!(text.statistic("far_reads_at_once"), 0);
    let mut at_once_before = 0;
    // Requested through another shard's thread, then more keys directly.
    for (asked, count) in [(1, 150), (0, 400)] {
        let light = LightAddress::Tcp(server.light);
        let asked = u16::try_from(asked % threads).unwrap();
        let mut connection = Connection::connect(&light, asked, 8, false).unwrap();
        let keys = &keys_of(0, threads, 550)[550 - count..];
        let number = multi_get(&mut connection, keys);
        let found = found_in(&answers(&mut connection)[&number], count);
        for (key, found) in keys.iter().zip(&found) {
            assert!(found.as_ref().is_none_or(|it| *it == value(*key, 0)), "key{key}");
        }
        if !is_whole(&mut text) {
            return false;
        }
        assert!(found.iter().all(Option::is_some));
        let at_once = text.statistic("far_reads_at_once");
        assert!(
            at_once > at_once_before && at_once > count as u64 / 3,
            "{at_once} reads at once for {count} items ({at_once_before} before)"
        );
        at_once_before = at_once;
    }
    true
}

/// If keys were read one after the other, no more than one read would ever be under way.
#[test]
fn a_multiget_reads_all_its_keys_at_once() {
    with_blades(|address, blade| {
        for threads in [1, 3] {
            without_loss(|| read_many_at_once(address, threads));
        }
        blade.shutdown();
    });
}

/// A MULTIGET, then changes of some of its keys and reads, then the same MULTIGET, all sent
/// together.
fn change_behind_a_multiget(address: &Address, threads: usize) -> bool {
    let server = Running::start(threads, address);
    let mut text = Text::connect(server.text);
    fill(&mut text, 40_000, 0);
    let light = LightAddress::Tcp(server.light);
    let asked = u16::try_from(threads - 1).unwrap();
    let mut connection = Connection::connect(&light, asked, 64, false).unwrap();
    let mut keys = keys_of(0, threads, 40);
    // The last key is in memory.
    let is_of = |key: &usize| shard_of(hash_key(format!("key{key}").as_bytes()), threads) == 0;
    keys.push((0..40_000).rev().find(is_of).unwrap());
    let name = |at: usize| format!("key{}", keys[at]).into_bytes();
    let set = |connection: &mut Connection, at: usize, value: &[u8]| {
        let (key, mode) = (&name(at)[..], SetMode::Set);
        let set = Request::Set { mode, key, value, client_flags: 0, exptime: 0, cas: 0 };
        connection.send(&set).unwrap()
    };
    let before = multi_get(&mut connection, &keys);
    let stored = [0, 40].map(|at| set(&mut connection, at, b"new"));
    let deleted = connection.send(&Request::Delete { key: &name(1), cas: 0 }).unwrap();
    let [first, last] =
        [0, 40].map(|at| connection.send(&Request::Get { key: &name(at) }).unwrap());
    let after = multi_get(&mut connection, &keys);
    let answers = answers(&mut connection);
    let old = found_in(&answers[&before], keys.len());
    for (key, found) in keys.iter().zip(&old) {
        assert!(found.as_ref().is_none_or(|it| *it == value(*key, 0)), "key{key}");
    }
    if !is_whole(&mut text) {
        return false;
    }
    assert!(old.iter().all(Option::is_some));
    stored.into_iter().chain([deleted]).for_each(|it| assert_eq!(answers[&it].0, Status::Ok));
    for number in [first, last] {
        assert_eq!(Item::read(&answers[&number].1).unwrap().value, b"new");
    }
    let mut expected = old;
    (expected[0], expected[40]) = (Some(b"new".to_vec()), Some(b"new".to_vec()));
    expected[1] = None;
    assert!(found_in(&answers[&after], keys.len()) == expected);
    true
}

#[test]
fn a_multiget_that_waits_keeps_its_place() {
    with_blades(|address, blade| {
        for threads in [1, 2] {
            without_loss(|| change_behind_a_multiget(address, threads));
        }
        blade.shutdown();
    });
}

#[test]
fn multigets_outlive_a_dead_blade() {
    let address = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let serving = blade(&address);
    let server = Running::start(2, &serving.addresses()[0].clone());
    let mut text = Text::connect(server.text);
    fill(&mut text, 40_000, 0);
    let mut connection =
        Connection::connect(&LightAddress::Tcp(server.light), 0, 64, false).unwrap();
    let asked: Vec<(u32, Vec<usize>)> = (0..20)
        .map(|round| {
            let keys = keys_of(round % 2, 2, 100 * (round + 1)).split_off(100 * round);
            (multi_get(&mut connection, &keys), keys)
        })
        .collect();
    connection.flush().unwrap();
    serving.shutdown();
    let answers = answers(&mut connection);
    for (number, keys) in asked {
        for (key, found) in keys.iter().zip(found_in(&answers[&number], keys.len())) {
            assert!(found.is_none_or(|it| it == value(*key, 0)), "key{key}");
        }
    }
}
