//! `farpool kv top`: shows a memcached server's own figures, sample by sample.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write, stdout};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use farpool_load::client::asked::Server;
use serde_json::json;

use crate::args::KvTopArgs;
use crate::terminal;
use crate::values::Size;

/// How long to wait for a server's reply.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest reply that is read: `stats` and its sections are far shorter, so anything longer is not
/// memcached.
const REPLY_BYTES_MAX: u64 = 16 << 20;

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

struct Connection(BufReader<Box<dyn Stream>>);

impl Connection {
    fn open(server: &Server) -> std::io::Result<Self> {
        let stream: Box<dyn Stream> = match server {
            Server::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                Box::new(stream)
            }
            Server::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                Box::new(stream)
            }
        };
        Ok(Self(BufReader::new(stream)))
    }

    /// Returns the lines of a reply up to its `END`.
    fn ask(&mut self, request: &str) -> anyhow::Result<Vec<String>> {
        self.ask_if_allowed(request)?.map_err(|line| anyhow!("the server answered {line:?}"))
    }

    /// As [`Self::ask`], or the line with which the server refuses the request.
    fn ask_if_allowed(&mut self, request: &str) -> anyhow::Result<Result<Vec<String>, String>> {
        self.0.get_mut().write_all(request.as_bytes())?;
        let mut lines = Vec::new();
        let mut limited = (&mut self.0).take(REPLY_BYTES_MAX);
        loop {
            let mut line = Vec::new();
            if limited.read_until(b'\n', &mut line)? == 0 {
                bail!("the server ended the connection");
            }
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            match line.as_str() {
                "END" => return Ok(Ok(lines)),
                error if error.contains("ERROR") => return Ok(Err(line)),
                _ => lines.push(line),
            }
        }
    }
}

/// Commands on one prefix so far: gets, hits, sets, deletes.
type PrefixCounts = [u64; 4];

/// One sample of a server.
#[derive(Debug, Clone)]
struct Look {
    at: Instant,
    figures: BTreeMap<String, f64>,
    prefixes: BTreeMap<String, PrefixCounts>,
}

impl Look {
    fn take(connection: &mut Connection) -> anyhow::Result<Self> {
        let figures = connection.ask("stats\r\n")?;
        let figures = figures.iter().filter_map(|line| {
            let (name, value) = line.strip_prefix("STAT ")?.split_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        let figures = figures.collect();
        // A server with -X does not show them.
        let prefixes = connection.ask_if_allowed("stats detail dump\r\n")?.unwrap_or_default();
        let prefixes = prefixes.iter().filter_map(|line| prefix(line)).collect();
        Ok(Self { at: Instant::now(), figures, prefixes })
    }

    fn figure(&self, name: &str) -> f64 {
        self.figures.get(name).copied().unwrap_or(0.0)
    }
}

/// Parses `PREFIX name get 1 hit 2 set 3 del 4`. A name may contain anything, so the counts are
/// read from the end.
fn prefix(line: &str) -> Option<(String, PrefixCounts)> {
    let mut words = line.strip_prefix("PREFIX ")?.rsplitn(9, ' ');
    let mut counts = [0; 4];
    for (at, name) in ["del", "set", "hit", "get"].into_iter().enumerate() {
        counts[3 - at] = words.next()?.parse().ok()?;
        words.next().filter(|word| *word == name)?;
    }
    Some((words.next()?.to_owned(), counts))
}

/// Rates per second between two samples.
struct Rates<'a> {
    before: &'a Look,
    now: &'a Look,
}

impl Rates<'_> {
    fn seconds(&self) -> f64 {
        self.now.at.duration_since(self.before.at).as_secs_f64().max(1e-3)
    }

    fn of(&self, name: &str) -> f64 {
        (self.now.figure(name) - self.before.figure(name)).max(0.0) / self.seconds()
    }

    /// Share of reads that hit, if there were reads.
    fn hit_ratio(&self) -> Option<f64> {
        let (hits, misses) = (self.of("get_hits"), self.of("get_misses"));
        (hits + misses > 0.0).then(|| hits / (hits + misses))
    }

    /// Processors that the server kept busy.
    fn processors(&self) -> f64 {
        self.of("rusage_user") + self.of("rusage_system")
    }

    /// Prefixes with their commands per second, the busiest first.
    fn prefixes(&self, most: usize) -> Vec<(&str, [f64; 4])> {
        let none = PrefixCounts::default();
        let mut rates: Vec<(&str, [f64; 4])> = self
            .now
            .prefixes
            .iter()
            .map(|(name, now)| {
                let before = self.before.prefixes.get(name).unwrap_or(&none);
                #[expect(clippy::cast_precision_loss, reason = "counts of a moment")]
                let rate = |at: usize| now[at].saturating_sub(before[at]) as f64 / self.seconds();
                (name.as_str(), [rate(0), rate(1), rate(2), rate(3)])
            })
            .collect();
        let all = |rates: &[f64; 4]| rates[0] + rates[2] + rates[3];
        rates.sort_by(|a, b| all(&b.1).total_cmp(&all(&a.1)));
        rates.truncate(most);
        rates
    }
}

/// Samples until the count is reached or the server ends.
pub fn main(args: &KvTopArgs) -> anyhow::Result<u8> {
    let server = &args.server;
    let mut connection = Connection::open(server)
        .with_context(|| format!("cannot connect to {server}; is the server running?"))?;
    let failed = || format!("asking {server}");
    let mut before = Look::take(&mut connection).with_context(failed)?;
    let mut looks = 0;
    while args.count.is_none_or(|count| looks < count) {
        std::thread::sleep(args.interval.0);
        let now = Look::take(&mut connection).with_context(failed)?;
        let rates = Rates { before: &before, now: &now };
        if args.json {
            terminal::print(&format!("{}\n", figures(&rates, args.prefixes)))?;
        } else {
            terminal::print(&screen(server, &rates, args.prefixes))?;
        }
        before = now;
        looks += 1;
    }
    Ok(0)
}

fn figures(rates: &Rates<'_>, prefixes: usize) -> serde_json::Value {
    let now = rates.now;
    let prefixes: Vec<_> = rates
        .prefixes(prefixes)
        .into_iter()
        .map(|(name, [gets, hits, sets, deletes])| {
            json!({ "prefix": name, "gets_per_s": gets, "hits_per_s": hits, "sets_per_s": sets, "deletes_per_s": deletes })
        })
        .collect();
    json!({
        "gets_per_s": rates.of("cmd_get"),
        "sets_per_s": rates.of("cmd_set"),
        "touches_per_s": rates.of("cmd_touch"),
        "hit_ratio": rates.hit_ratio(),
        "evictions_per_s": rates.of("evictions"),
        "bytes_read_per_s": rates.of("bytes_read"),
        "bytes_written_per_s": rates.of("bytes_written"),
        "processors": rates.processors(),
        "connections": now.figure("curr_connections"),
        "items": now.figure("curr_items"),
        "item_bytes": now.figure("bytes"),
        "limit_bytes": now.figure("limit_maxbytes"),
        "far_items": now.figure("far_items"),
        "far_reads_per_s": rates.of("far_reads"),
        "far_wanted_bytes": now.figure("far_wanted_bytes"),
        "far_granted_bytes": now.figure("far_granted_bytes"),
        "far_leaving_bytes": now.figure("far_leaving_bytes"),
        "far_reclaims": now.figure("far_reclaims"),
        "far_reclaimed_moved": now.figure("far_reclaimed_moved"),
        "far_reclaimed_spilled": now.figure("far_reclaimed_spilled"),
        "far_reclaimed_dropped": now.figure("far_reclaimed_dropped"),
        "far_grants_lost": now.figure("far_grants_lost"),
        "far_items_lost": now.figure("far_items_lost"),
        "flash_items": now.figure("flash_items"),
        "flash_reads_per_s": rates.of("flash_reads"),
        "prefixes": prefixes,
    })
}

fn size(bytes: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "figures of bytes below 2^53, none negative"
    )]
    Size(bytes as u64).to_string()
}

/// Describes the far memory granted, and what happened to items whose memory was reclaimed. None
/// without far memory.
fn far_memory(now: &Look) -> Option<String> {
    now.figures.get("far_wanted_bytes")?;
    let bytes = |name: &str| size(now.figure(name));
    Some(format!(
        "far memory: {} of {}  wanted back {}  reclaims {}: items moved {}  spilled {}  dropped \
         {}  lost {} with {} grants\n",
        bytes("far_granted_bytes"),
        bytes("far_wanted_bytes"),
        bytes("far_leaving_bytes"),
        now.figure("far_reclaims"),
        now.figure("far_reclaimed_moved"),
        now.figure("far_reclaimed_spilled"),
        now.figure("far_reclaimed_dropped"),
        now.figure("far_items_lost"),
        now.figure("far_grants_lost"),
    ))
}

/// Replaces the last sample on a terminal, follows it elsewhere.
fn screen(server: &Server, rates: &Rates<'_>, prefixes: usize) -> String {
    let now = rates.now;
    let percent =
        |ratio: Option<f64>| ratio.map_or("-".into(), |it| format!("{:.1} %", it * 100.0));
    let clear = if stdout().is_terminal() { "\x1b[H\x1b[J" } else { "" };
    let mut text = format!(
        "{clear}{server}  up {} s  {} clients  {:.2} processors\n",
        now.figure("uptime"),
        now.figure("curr_connections"),
        rates.processors(),
    );
    text += &format!(
        "gets/s {:.0}  hits {}  sets/s {:.0}  touches/s {:.0}  evictions/s {:.0}  in/s {}  out/s \
         {}\n",
        rates.of("cmd_get"),
        percent(rates.hit_ratio()),
        rates.of("cmd_set"),
        rates.of("cmd_touch"),
        rates.of("evictions"),
        size(rates.of("bytes_read")),
        size(rates.of("bytes_written")),
    );
    text += &format!(
        "items {}  with headers {} of {}\n",
        now.figure("curr_items"),
        size(now.figure("bytes")),
        size(now.figure("limit_maxbytes")),
    );
    for tier in ["far", "flash"] {
        let name = |what: &str| format!("{tier}_{what}");
        if now.figures.contains_key(&name("items")) {
            text += &format!(
                "{tier}: items {}  reads/s {:.0}  written/s {}  evictions/s {:.0}  refused/s \
                 {:.0}\n",
                now.figure(&name("items")),
                rates.of(&name("reads")),
                size(rates.of(&name("bytes_written"))),
                rates.of(&name("evictions")),
                rates.of(&name("refused")),
            );
        }
    }
    text += &far_memory(now).unwrap_or_default();
    let rows: Vec<Vec<String>> = rates
        .prefixes(prefixes)
        .into_iter()
        .map(|(name, [gets, hits, sets, deletes])| {
            let ratio = percent((gets > 0.0).then(|| hits / gets));
            let rate = |it: f64| format!("{it:.0}");
            vec![name.to_owned(), rate(gets), ratio, rate(sets), rate(deletes)]
        })
        .collect();
    if !rows.is_empty() {
        text += "\n";
        text += &terminal::table(&["prefix", "gets/s", "hits", "sets/s", "deletes/s"], &rows);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_may_hold_spaces() {
        let line = "PREFIX (all other) get 1 hit 2 set 3 del 4";
        assert_eq!(prefix(line), Some(("(all other)".into(), [1, 2, 3, 4])));
        assert_eq!(prefix("PREFIX a get x hit 2 set 3 del 4"), None);
        assert_eq!(prefix("PREFIX a get 1"), None);
    }

    #[test]
    fn what_comes_from_a_pool_is_told_where_there_is_a_pool() {
        let look = |figures: &[(&str, f64)]| Look {
            at: Instant::now(),
            figures: figures.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
            prefixes: BTreeMap::new(),
        };
        let far = look(&[
            ("far_wanted_bytes", 1024.0 * 1024.0 * 1024.0),
            ("far_granted_bytes", 768.0 * 1024.0 * 1024.0),
            ("far_leaving_bytes", 256.0 * 1024.0 * 1024.0),
            ("far_reclaims", 2.0),
            ("far_reclaimed_moved", 30.0),
            ("far_reclaimed_spilled", 40.0),
            ("far_reclaimed_dropped", 50.0),
            ("far_grants_lost", 1.0),
            ("far_items_lost", 60.0),
        ]);
        let told = "far memory: 768MiB of 1GiB  wanted back 256MiB  reclaims 2: items moved 30  \
            spilled 40  dropped 50  lost 60 with 1 grants\n";
        assert_eq!(far_memory(&far).as_deref(), Some(told));
        assert_eq!(far_memory(&look(&[("curr_items", 1.0)])), None);
        let rates = Rates { before: &far, now: &far };
        let json = figures(&rates, 0);
        for (name, value) in &far.figures {
            assert_eq!(json[name].as_f64(), Some(*value), "{name}");
        }
        let server = Server::Unix("/kv.sock".into());
        assert!(screen(&server, &rates, 0).contains(told));
    }
}
