//! Command streams: every command and flag of a version, mostly valid, often slightly wrong, on few
//! keys.

use farpool_kv_server::Compat;
use proptest::prelude::*;
use proptest::sample::select;

/// One request, data included.
pub(crate) type Command = Vec<u8>;

/// The longest key, and one byte more.
const KEY_BYTES_MAX: usize = 250;

/// Few keys, so that commands collide; some are too long, some are good or bad base64.
fn key() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        12 => select(vec!["a", "b", "foo", "Zm9v"]).prop_map(|key| key.as_bytes().to_vec()),
        1 => Just(vec![b'k'; KEY_BYTES_MAX]),
        1 => Just(vec![b'k'; KEY_BYTES_MAX + 1]),
        1 => select(vec!["Zm9", "Zm9=", "!!!!", "Zm9v=", "====", "k\tx", "\u{e4}", "noreply"])
            .prop_map(|key| key.as_bytes().to_vec()),
    ]
}

/// A number, well-formed or not.
fn number() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => (0u32..12).prop_map(|number| number.to_string()),
        4 => select(vec!["0", "1", "100", "-1", "3000000"]).prop_map(str::to_owned),
        1 => select(vec![
            "-0", "+3", "007", "12x", "y", "-", "+", "1.5", "0x10", "1\t", "\t1", "--1", "99999",
            "2147483645", "2147483646", "2147483647", "2147483648", "-2147483648", "-2147483649",
            "4294967295", "4294967296", "4294967297", "9223372036854775807", "9223372036854775808",
            "-9223372036854775808", "18446744073709551614", "18446744073709551615",
            "18446744073709551616", "99999999999999999999999", "-18446744073709551615", "noreply",
        ])
        .prop_map(str::to_owned),
    ]
}

/// An expiry that cannot pass while a case runs.
fn exptime() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => select(vec!["0", "100", "2592000", "-1", "2592001", "3000000", "10"]).prop_map(str::to_owned),
        1 => number(),
    ]
}

/// Never spaces alone: `incr` of such a value makes memcached read on past its end, into whatever
/// an earlier item left there (`do_add_delta`, `strtoull`); plainly a bug. A number of 2^63 or more
/// makes it look there for a minus sign, so no long value has one.
fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        6 => select(vec![
            "", "0", "5", "10", "99", "100", "abc", "18446744073709551615", "18446744073709551616",
            "18446744073709551610", "-1", " 7", "7 ", "12abc", "a\r\nget a", "1\x00002", "+5",
        ])
        .prop_map(|value| value.as_bytes().to_vec()),
        1 => (0usize..600).prop_map(|bytes| vec![b'x'; bytes]),
        1 => prop::collection::vec(any::<u8>().prop_map(|it| if it == b'-' { b'_' } else { it }), 0..40),
    ]
}

fn noreply() -> impl Strategy<Value = Option<Vec<u8>>> {
    prop_oneof![6 => Just(None), 1 => Just(Some(b"noreply".to_vec())), 1 => Just(Some(b"0".to_vec()))]
}

fn words<const N: usize>(words: [&[u8]; N]) -> Vec<Vec<u8>> {
    words.iter().map(|word| word.to_vec()).collect()
}

/// A command line, and the data that follows it.
#[derive(Debug, Clone)]
struct Draft {
    words: Vec<Vec<u8>>,
    data: Option<Vec<u8>>,
}

impl Draft {
    fn line(words: Vec<Vec<u8>>) -> Self {
        Self { words, data: None }
    }

    fn and(mut self, word: Option<Vec<u8>>) -> Self {
        self.words.extend(word);
        self
    }
}

/// The length given in a command line; None, the most likely, stands for the right one.
fn told_length() -> impl Strategy<Value = Option<String>> {
    prop_oneof![20 => Just(None), 1 => number().prop_map(Some)]
}

/// A CAS number for a command. Where the servers draw different numbers it is one that only a
/// client can have given.
fn cas(compat: Compat) -> impl Strategy<Value = String> {
    number().prop_map(move |number| match number.parse::<u64>() {
        Ok(own @ 1..super::OWN_CAS_MAX) if !compat.is_old() => {
            (super::OWN_CAS_MAX + own).to_string()
        }
        _ => number,
    })
}

fn classic_store(compat: Compat) -> impl Strategy<Value = Draft> {
    let mode = select(vec!["set", "set", "add", "replace", "append", "prepend", "cas"]);
    let numbers = (number(), exptime(), told_length(), cas(compat));
    (mode, key(), numbers, value(), noreply()).prop_map(
        |(mode, key, (flags, exptime, length, cas), value, noreply)| {
            let length = length.unwrap_or_else(|| value.len().to_string());
            let (flags, exptime, length) =
                (flags.as_bytes(), exptime.as_bytes(), length.as_bytes());
            let mut words = words([mode.as_bytes(), &key, flags, exptime, length]);
            if mode == "cas" {
                words.push(cas.into_bytes());
            }
            Draft { words, data: Some(value) }.and(noreply)
        },
    )
}

fn classic_get() -> impl Strategy<Value = Draft> {
    let verb = select(vec!["get", "get", "gets", "gat", "gats", "bget"]);
    let form = (verb, exptime(), prop::collection::vec(key(), 1..30));
    form.prop_map(|(verb, exptime, mut keys)| {
        // memcached counts and touches the keys in front of one that is too long as read; ours does
        // not.
        if keys[0].len() <= KEY_BYTES_MAX {
            keys.retain(|key| key.len() <= KEY_BYTES_MAX);
        }
        let mut words = words([verb.as_bytes()]);
        if verb.starts_with("gat") {
            words.push(exptime.into_bytes());
        }
        words.extend(keys);
        Draft::line(words)
    })
}

fn classic_other() -> impl Strategy<Value = Draft> {
    let verb = select(vec!["delete", "incr", "decr", "touch", "incr", "decr"]);
    (verb, key(), number(), exptime(), noreply()).prop_map(
        |(verb, key, number, exptime, noreply)| {
            let mut words = words([verb.as_bytes(), &key]);
            match verb {
                "delete" => {}
                "touch" => words.push(exptime.into_bytes()),
                _ => words.push(number.into_bytes()),
            }
            Draft::line(words).and(noreply)
        },
    )
}

/// A flag of a meta command. Those that only newer versions know are left out for 1.6.18, as ours
/// understands them: modes in small letters, `E`, `C` of `mg`, `x` of `md`.
fn meta_flag(letters: &'static str, compat: Compat) -> impl Strategy<Value = Vec<u8>> {
    let letter = select(letters.as_bytes().to_vec());
    let modes = vec!["S", "E", "A", "P", "R", "I", "D", "+", "-", "X", "", "SS"];
    let opaque = prop_oneof![
        6 => select(vec!["", "1", "abc", "x\tx"]).prop_map(str::to_owned),
        1 => (28usize..36).prop_map(|bytes| "o".repeat(bytes)),
    ];
    let junk = prop_oneof![12 => Just(""), 1 => Just("x")];
    (letter, (number(), cas(compat), exptime(), select(modes), opaque), junk).prop_map(
        |(letter, (number, cas, exptime, mode, opaque), junk)| {
            let token = match letter {
                b'T' | b'N' | b'R' => exptime.as_str(),
                b'M' => mode,
                b'O' => opaque.as_str(),
                b'F' | b'J' | b'D' => number.as_str(),
                b'C' | b'E' => cas.as_str(),
                _ => junk,
            };
            [&[letter], token.as_bytes()].concat()
        },
    )
}

fn meta_flags(letters: &'static str, compat: Compat) -> impl Strategy<Value = Vec<Vec<u8>>> {
    prop_oneof![
        30 => prop::collection::vec(meta_flag(letters, compat), 0..6),
        1 => prop::collection::vec(meta_flag(letters, compat), 6..26),
    ]
}

fn meta_line(
    verb: &'static str,
    letters: &'static str,
    compat: Compat,
) -> impl Strategy<Value = Draft> {
    (key(), meta_flags(letters, compat)).prop_map(move |(key, mut flags)| {
        // For an item that `N` or `x` creates, memcached forgets that its key was in base64, and
        // later returns raw bytes, line ends included: plainly a bug.
        if flags.iter().any(|flag| flag[0] == b'b') {
            flags.retain(|flag| !matches!(flag[0], b'N' | b'x'));
        }
        // memcached forgets the expiry if the number gets longer: plainly a bug.
        let decrements = |flag: &Vec<u8>| matches!(&flag[..], b"MD" | b"M-");
        if verb == "ma" && !flags.iter().any(decrements) {
            flags.retain(|flag| flag[0] != b'T');
        }
        let mut words = words([verb.as_bytes(), &key]);
        words.extend(flags);
        Draft::line(words)
    })
}

fn meta_set(compat: Compat) -> impl Strategy<Value = Draft> {
    (key(), value(), told_length(), meta_flags("bcCFIkOqsTMNvPLZ", compat)).prop_map(
        move |(key, value, length, mut flags)| {
            // Ours does what newer versions do: it returns the size, and creates a missing item on
            // append.
            flags.retain(|flag| !(compat.is_old() && matches!(flag[0], b's' | b'N')));
            let length = length.unwrap_or_else(|| value.len().to_string());
            let mut words = words([b"ms", &key, length.as_bytes()]);
            words.extend(flags);
            Draft { words, data: Some(value) }
        },
    )
}

fn meta(compat: Compat) -> impl Strategy<Value = Draft> {
    let (get, delete, change) = match compat {
        Compat::V1_6_18 => ("bcfhklOqRstTuvNPLMIFJD", "bCIkOqTPLvs", "bCcDJkMNOqTtvPL"),
        // No `E` for `ma`, which forgets it if the number gets longer: plainly a bug.
        Compat::V1_6_45 => ("bcCEfhklOqRstTuvNPLMIFJD", "bCEFIkOqTPLvsx", "bCcDJkMNOqTtvPL"),
    };
    prop_oneof![
        6 => meta_line("mg", get, compat),
        6 => meta_set(compat),
        3 => meta_line("md", delete, compat),
        4 => meta_line("ma", change, compat),
        2 => meta_line("me", "bbk", compat),
        1 => Just(Draft::line(words([b"mn"]))),
    ]
}

/// Valid requests, so that the others find items.
fn plain() -> impl Strategy<Value = Draft> {
    let key = select(vec!["a", "b", "foo"]);
    let flags = proptest::sample::subsequence(
        vec!["v", "k", "s", "t", "f", "h", "l", "c", "u", "R50", "N60"],
        0..5,
    );
    prop_oneof![
        4 => (key.clone(), exptime(), value()).prop_map(|(key, exptime, value)| {
            let length = value.len().to_string();
            let line = [b"set", key.as_bytes(), b"7", exptime.as_bytes(), length.as_bytes()];
            Draft { words: words(line), data: Some(value) }
        }),
        3 => (key, flags.prop_shuffle()).prop_map(|(key, flags)| {
            let flags = flags.iter().map(|flag| flag.as_bytes().to_vec());
            let words = words([b"mg", key.as_bytes()]).into_iter().chain(flags);
            Draft::line(words.collect())
        }),
    ]
}

#[expect(clippy::too_many_lines, reason = "one line or two for each command")]
fn admin() -> impl Strategy<Value = Draft> {
    let fixed = vec![
        "version",
        "verbosity 1",
        "verbosity 0 noreply",
        "verbosity",
        "verbosity y",
        "verbosity 1 2 3",
        "flush_all",
        "flush_all 0",
        "flush_all -1",
        "flush_all 100",
        "flush_all noreply",
        "flush_all 0 noreply",
        "flush_all y",
        "flush_all 9 2 3",
        "shutdown",
        "shutdown graceful",
        "cache_memlimit",
        "cache_memlimit 1",
        "cache_memlimit y",
        "cache_memlimit 64 noreply",
        "cache_memlimit 2000000000",
        "misbehave",
        "nonsense",
        "m",
        "mx a",
        "mgg a",
        "ge a",
        "gett a",
        "GET a",
        "set",
        "get",
        "gets",
        "gat",
        "gat 0",
        "gats",
        "incr",
        "decr a",
        "touch",
        "touch a",
        "delete",
        "delete a 0",
        "delete a 0 noreply",
        "delete a 1",
        "delete a 0 0",
        "cas",
        "mg",
        "ms",
        "ms a",
        "md",
        "ma",
        "me",
        "mn a b",
        "add a",
        "verbosity 99999999999",
        "lru",
        "lru tune",
        "lru tune 10 20 1.0 2.0",
        "slabs",
        "slabs automove 0",
        "slabs automove 3",
        "slabs automove y",
        "slabs reassign",
        "lru_crawler",
        "lru_crawler tocrawl y",
        "lru_crawler sleep 2000000",
        "lru_crawler sleep y",
        "lru_crawler tocrawl 10",
        "stats reset y y",
        "quit now",
        "lru tune 50 50 1 2",
        "lru tune 10 20 0 1",
        "lru tune 10 20 y 1",
        "extstore",
        "extstore free_memchunks 1 y",
        "extstore item_size y",
        "lru_crawler y",
        "slabs automove ratio",
        "slabs automove ratio y",
        "slabs automove ratio 0.8",
        "extstore max_frag y",
        "extstore max_frag 0.5",
        "slabs automove window 3",
        "slabs automove window 2",
        "slabs automove freeratio 0.1",
        "slabs a 1",
        "extstore i 5",
        "extstore m 5",
        "lru_crawler t 10",
        "nonsense noreply",
        "noreply",
        "a b HTTP/1.1",
        "shutdown noreply",
        "set a 0 0 1 2 3",
    ];
    select(fixed).prop_map(|line| {
        Draft::line(line.split(' ').map(|word| word.as_bytes().to_vec()).collect())
    })
}

/// An error in a request.
#[derive(Debug, Clone)]
enum Fault {
    None,
    Drop(usize),
    Double(usize),
    Insert(usize, Vec<u8>),
    Spaces(usize),
    LeadingSpace,
    Zero(usize),
    LineEnd(&'static str),
    DataEnd(&'static str),
    UpperCase,
}

fn fault() -> impl Strategy<Value = Fault> {
    let at = 0usize..8;
    prop_oneof![
        60 => Just(Fault::None),
        3 => at.clone().prop_map(Fault::Drop),
        2 => at.clone().prop_map(Fault::Double),
        3 => (at.clone(), number()).prop_map(|(at, word)| Fault::Insert(at, word.into_bytes())),
        2 => at.clone().prop_map(Fault::Spaces),
        1 => Just(Fault::LeadingSpace),
        1 => at.prop_map(Fault::Zero),
        3 => select(vec!["\n", "\r\r\n", " \r\n", "\t\r\n", "\0\r\n", "\r", ""]).prop_map(Fault::LineEnd),
        3 => select(vec!["", "\n", "\r", "\r\r\n", "x\r\n", "xx"]).prop_map(Fault::DataEnd),
        1 => Just(Fault::UpperCase),
    ]
}

fn written(draft: Draft, fault: &Fault) -> Command {
    let Draft { mut words, data } = draft;
    let count = words.len();
    let (mut line_end, mut data_end) = ("\r\n", "\r\n");
    let mut separators = vec![" "; count + 1];
    match fault {
        Fault::None => {}
        Fault::Drop(at) => drop(words.remove(at % count)),
        Fault::Double(at) => words.insert(at % count, words[at % count].clone()),
        Fault::Insert(at, word) => words.insert(at % count, word.clone()),
        Fault::Spaces(at) => separators[at % count] = "   ",
        Fault::LeadingSpace => words[0].insert(0, b' '),
        Fault::Zero(at) => words[at % count].push(0),
        Fault::LineEnd(end) => line_end = end,
        Fault::DataEnd(end) => data_end = end,
        Fault::UpperCase => words[0].make_ascii_uppercase(),
    }
    let mut bytes = Vec::new();
    for (number, word) in words.iter().enumerate() {
        if number > 0 {
            bytes.extend_from_slice(separators[number - 1].as_bytes());
        }
        bytes.extend_from_slice(word);
    }
    bytes.extend_from_slice(line_end.as_bytes());
    if let Some(data) = data {
        bytes.extend_from_slice(&data);
        bytes.extend_from_slice(data_end.as_bytes());
    }
    bytes
}

fn command(compat: Compat) -> impl Strategy<Value = Command> {
    let draft = prop_oneof![
        9 => plain(),
        8 => classic_store(compat),
        5 => classic_get(),
        6 => classic_other(),
        12 => meta(compat),
        2 => admin(),
    ];
    (draft, fault())
        .prop_map(|(draft, fault)| written(draft, &fault))
        .prop_filter("one that memcached answers by its rules", |command| {
            !flushes_in_a_second(command) && !tunes_lru_threads(command)
        })
}

/// The first two words of a command.
fn first_words(command: &[u8]) -> [&[u8]; 2] {
    let words = command.split(|byte| byte.is_ascii_whitespace() || *byte == 0);
    let mut words = words.filter(|word| !word.is_empty());
    [(); 2].map(|()| words.next().unwrap_or_default())
}

/// Whether the command is `lru mode` or `lru temp_ttl`, also shortened: without background threads
/// (see `QUIET`) memcached refuses them. Those threads run in `tuning_is_checked_...`.
fn tunes_lru_threads(command: &[u8]) -> bool {
    let [verb, what] = first_words(command);
    verb == b"lru" && (what.starts_with(b"m") || what.starts_with(b"t") && what != b"tune")
}

/// Whether the command is `flush_all 1`: it takes effect at once, and until the second ends
/// memcached also drops items stored after it. For `flush_all` without a delay that bug was fixed
/// by comparing CAS numbers (`item_is_flushed`); here it remains. Ours drops the items that were
/// there before.
fn flushes_in_a_second(command: &[u8]) -> bool {
    first_words(command) == [&b"flush_all"[..], b"1"]
}

/// Whether a `flush_all` with a delay follows another `flush_all`: what that flushed and nobody has
/// asked for since is there again in 1.6.18. Plainly a bug.
fn flushes_anew(commands: &[Command]) -> bool {
    let stream = commands.concat();
    let lines = stream.split(|&byte| byte == b'\n').map(first_words);
    let mut delays = lines.filter(|words| words[0] == b"flush_all").map(|words| words[1]);
    let is_now = |delay: &[u8]| matches!(delay, b"" | b"0" | b"noreply" | [b'-', ..]);
    delays.next().is_some() && !delays.all(is_now)
}

/// Whether a `get` has a key that is too long after one that is not (see [`classic_get`]), or
/// before `noreply` in a place that the newer memcached takes for the last, when it sends an empty
/// line. Requests whose line ends are wrong run into one another, so that this is seen in the whole
/// stream only.
fn has_key_too_long_at_odds(commands: &[Command]) -> bool {
    commands.concat().split(|&byte| byte == b'\n').any(|line| {
        let mut words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
        let verb = words.next().unwrap_or_default();
        let is_get = [&b"get"[..], b"gets", b"gat", b"gats", b"bget"].contains(&verb);
        let first = words.nth(usize::from(verb.starts_with(b"gat")));
        let is_first_short = first.is_some_and(|key| key.len() <= KEY_BYTES_MAX);
        let is_quiet = line.windows(8).any(|window| window == b" noreply");
        is_get && (is_first_short && words.any(|key| key.len() > KEY_BYTES_MAX) || is_quiet)
    })
}

/// Requests of one client. Together they stay below memcached's read buffer of 16 KiB; beyond it
/// the result would depend on how reads split lines.
pub(crate) fn stream(compat: Compat) -> impl Strategy<Value = Vec<Command>> {
    let commands = prop::collection::vec(command(compat), 1..60).prop_map(|mut commands| {
        let mut bytes = 0;
        commands.retain(|command| {
            bytes += command.len();
            bytes < STREAM_BYTES_MAX
        });
        commands
    });
    let rules = "one that memcached answers by its rules";
    commands.prop_filter(rules, move |commands| {
        !(has_key_too_long_at_odds(commands) || compat.is_old() && flushes_anew(commands))
    })
}

const STREAM_BYTES_MAX: usize = 16_000;

/// Stores and appends of values up to and beyond 8 KiB, then reads.
pub(crate) fn large_stream() -> impl Strategy<Value = Vec<Command>> {
    let size = prop_oneof![3 => 1usize..4000, 1 => 7900usize..8300];
    let mode = select(vec!["set", "add", "replace", "append", "prepend"]);
    let step =
        (mode, select(vec!["a", "b"]), 0u32..2, size).prop_map(|(mode, key, flags, bytes)| {
            let value = "v".repeat(bytes);
            format!("{mode} {key} {flags} 0 {bytes}\r\n{value}\r\nmg {key} s f c\r\n").into_bytes()
        });
    prop::collection::vec(step, 1..12)
}
