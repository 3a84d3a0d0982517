//! `farpool stat`: shows what programs and blades do, from the runs' boards and the blades' own
//! counters. Reading them costs a program nothing.

use std::io::{IsTerminal, stdout};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use farpool_board::quantile_ns;
use farpool_fabric::{Address, ClientId, Control, DescriptorSet, Session, Spare};
use farpool_handshake::Dialer;
use farpool_run::{ProcessStatistics, RunStatistics, read_statistics, runs};
use farpool_wire::{BladeTotals, ClientUsage, Purpose, Request, Response};
use serde_json::{Value, json};

use crate::args::StatArgs;
use crate::commands::service::read_pki;
use crate::terminal::{self, table};

/// How long a blade may take to answer before it is shown as unreachable.
const BLADE_DEADLINE: Duration = Duration::from_secs(2);
/// Shift that converts pages to MiB.
const PAGES_PER_MIB_SHIFT: u32 = 8;

/// The figures of one blade, or why there are none.
type BladeAnswer = Result<(BladeTotals, Vec<ClientUsage>), String>;

/// Prints once, or repeatedly with `--watch`.
pub fn main(args: &StatArgs) -> anyhow::Result<u8> {
    let dial = |credentials| Dialer::new(credentials, |news| eprintln!("farpool: {news}"));
    let dialer = read_pki(args.settings.pki.as_deref())?.map(dial).transpose()?;
    loop {
        let runs = live_runs();
        let blades: Vec<(Address, BladeAnswer)> = args
            .settings
            .blade
            .iter()
            .map(|at| (at.0.clone(), ask(&at.0, dialer.as_ref())))
            .collect();
        terminal::print(&match args.json {
            true => format!("{}\n", as_json(&runs, &blades)),
            false => tables(&runs, &blades, args.watch.is_some()),
        })?;
        let Some(seconds) = args.watch else {
            return Ok(u8::from(blades.iter().any(|(_, answer)| answer.is_err())));
        };
        thread::sleep(Duration::from_secs(seconds));
    }
}

/// Returns the runs whose keepers live. A board that cannot be read belongs to a run that just
/// ended.
fn live_runs() -> Vec<RunStatistics> {
    let alive = |run: &RunStatistics| {
        std::path::Path::new("/proc").join(run.keeper_pid.to_string()).exists()
    };
    runs().iter().filter_map(|board| read_statistics(board).ok()).filter(alive).collect()
}

/// Asks a blade for its counters and its clients.
fn ask(address: &Address, dialer: Option<&Arc<Dialer>>) -> BladeAnswer {
    let session = Session {
        address: address.clone(),
        client: ClientId(0),
        grant: None,
        limits: None,
        client_name: "farpool stat".into(),
        purpose: Purpose::Monitor,
        quota_bytes: 0,
        sharing_group: None,
        deadline: BLADE_DEADLINE,
        // The user named the address, and only counters are sent.
        spare: Spare::default(),
        allow_remote_tcp: true,
        secures_tcp: dialer.is_some(),
        asks: dialer.map(|dialer| Arc::clone(dialer) as _),
        time: farpool_fabric::Time::KERNEL,
        descriptors: Arc::new(DescriptorSet::default()),
        met: farpool_fabric::Met::default(),
    };
    let mut control = Control::connect(Arc::new(session), 0).map_err(|error| error.to_string())?;
    let mut all = Vec::new();
    loop {
        let skip_clients = u32::try_from(all.len()).map_err(|error| error.to_string())?;
        let answer = control.call(&Request::Stat { skip_clients }).map_err(|e| e.to_string())?;
        let Response::Stat { totals, clients } = answer.response else {
            return Err("the blade's answer does not match the request".into());
        };
        all.extend_from_slice(clients);
        if clients.is_empty() || all.len() >= totals.clients.get() as usize {
            return Ok((*totals, all));
        }
    }
}

fn as_json(runs: &[RunStatistics], blades: &[(Address, BladeAnswer)]) -> Value {
    json!({
        "programs": runs.iter().map(RunStatistics::to_json).collect::<Vec<_>>(),
        "blades": blades.iter().map(blade_json).collect::<Vec<_>>(),
    })
}

fn blade_json((address, answer): &(Address, BladeAnswer)) -> Value {
    let address = address.to_string();
    match answer {
        Err(error) => json!({ "address": address, "error": error }),
        Ok((totals, clients)) => json!({
            "address": address,
            "capacity_bytes": totals.capacity_bytes.get(),
            "used_bytes": totals.used_bytes.get(),
            "superpages_held": totals.superpages_held.get(),
            "uptime_ms": totals.uptime_ms.get(),
            "pages_read": totals.pages_read.get(),
            "pages_written": totals.pages_written.get(),
            "requests": totals.requests.get(),
            "requests_refused": totals.requests_refused.get(),
            "bad_frames": totals.bad_frames.get(),
            "leases_expired": totals.leases_expired.get(),
            "superpages_scrubbed": totals.superpages_scrubbed.get(),
            "control_throttled_ns": totals.control_throttled_ns.get(),
            "flash": flash_json(totals),
            "pack": pack_json(totals),
            "connections": totals.connections.get(),
            "segments": totals.segments.get(),
            "clients": clients.iter().map(client_json).collect::<Vec<_>>(),
        }),
    }
}

/// What a blade's flash did; null without flash.
fn flash_json(totals: &BladeTotals) -> Value {
    if totals.flash_bytes.get() == 0 {
        return Value::Null;
    }
    json!({
        "bytes": totals.flash_bytes.get(),
        "memory_used_bytes": totals.flash_memory_used_bytes.get(),
        "pages_fetched": totals.flash_pages_fetched.get(),
        "pages_written": totals.flash_pages_written.get(),
        "pages_failed": totals.flash_pages_failed.get(),
        "writes_failed": totals.flash_writes_failed.get(),
    })
}

/// What a blade has packed; null if it does not pack.
fn pack_json(totals: &BladeTotals) -> Value {
    if totals.pack_memory_bytes.get() == 0 {
        return Value::Null;
    }
    json!({
        "memory_bytes": totals.pack_memory_bytes.get(),
        "memory_used_bytes": totals.pack_memory_used_bytes.get(),
        "frames_bytes": totals.pack_frames_bytes.get(),
        "pages_filled": totals.pack_pages_filled.get(),
        "pages_in_frames": totals.pack_pages_in_frames.get(),
        "frames": totals.pack_frames.get(),
        "zero_pages_found": totals.pack_zero_pages_found.get(),
        "pages_packed": totals.pack_pages_packed.get(),
        "pages_unpacked": totals.pack_pages_unpacked.get(),
        "pages_failed": totals.pack_pages_failed.get(),
    })
}

fn client_json(client: &ClientUsage) -> Value {
    json!({
        "number": client.number.get(),
        "name": client.name(),
        "pid": client.pid.get(),
        "quota_bytes": client.quota_bytes.get(),
        "used_bytes": client.used_bytes.get(),
        "pages_read": client.pages_read.get(),
        "pages_written": client.pages_written.get(),
        "connections": client.connections.get(),
        "segments": client.segments.get(),
        "lease_left_ms": client.lease_left_ms.get(),
    })
}

/// Formats both tables, over the previous ones when watching on a terminal.
fn tables(runs: &[RunStatistics], blades: &[(Address, BladeAnswer)], watching: bool) -> String {
    let clear = match watching && stdout().is_terminal() {
        true => "\x1b[H\x1b[J",
        false => "",
    };
    let between = if blades.is_empty() { "" } else { "\n" };
    format!("{clear}{}{between}{}", programs_table(runs), blades_table(blades))
}

const PROGRAM_HEADER: [&str; 20] = [
    "program",
    "pid",
    "local MiB",
    "limit MiB",
    "needs MiB",
    "fixed MiB",
    "pinned MiB",
    "outside MiB",
    "far MiB",
    "faults",
    "fetches",
    "prefetched",
    "victim hits",
    "evicted",
    "written",
    "unchanged",
    "fetch p50 us",
    "p99",
    "lost",
    "blades",
];

fn programs_table(runs: &[RunStatistics]) -> String {
    if runs.is_empty() {
        return "no program runs on far memory\n".into();
    }
    let rows = runs.iter().flat_map(|run| {
        let head = program_row(&run.program, run.keeper_pid, &run.total, Some(run));
        let below = run
            .processes
            .iter()
            .map(|process| program_row(&format!("  {}", process.name), process.pid, process, None));
        std::iter::once(head).chain(below.collect::<Vec<_>>())
    });
    table(&PROGRAM_HEADER, &rows.collect::<Vec<_>>()) + &unmovable_lines(runs)
}

/// Formats a run or, without one, a process of the run above.
fn program_row(
    name: &str,
    pid: u32,
    numbers: &ProcessStatistics,
    run: Option<&RunStatistics>,
) -> Vec<String> {
    let count = |name| numbers.counter(name).to_string();
    let mib = |name| (numbers.counter(name) >> PAGES_PER_MIB_SHIFT).to_string();
    let latency =
        |fraction| quantile_ns(&numbers.fetch_latency, fraction).map_or("-".into(), microseconds);
    // Processes without a pager have no row.
    let local_pages =
        numbers.counter("resident_pages") + run.map_or(0, |run| run.unpublished_pages);
    vec![
        name.to_owned(),
        pid.to_string(),
        (local_pages >> PAGES_PER_MIB_SHIFT).to_string(),
        run.map_or_else(String::new, limit_text),
        run.map_or_else(String::new, needs_text),
        numbers
            .fixed_pages()
            .map_or("-".into(), |pages| (pages >> PAGES_PER_MIB_SHIFT).to_string()),
        mib("pinned_pages"),
        run.map_or_else(String::new, |run| (run.outside_pages >> PAGES_PER_MIB_SHIFT).to_string()),
        mib("far_pages"),
        count("faults"),
        count("demand_fetches"),
        count("prefetches"),
        count("victim_hits"),
        count("evictions"),
        count("pages_written"),
        count("clean_drops"),
        latency(0.5),
        latency(0.99),
        count("lost"),
        run.map_or_else(String::new, |run| blades_text(&run.blades)),
    ]
}

/// Formats the current limit, and the share that it results from.
fn limit_text(run: &RunStatistics) -> String {
    let now = (run.limit_now_bytes() >> 20).to_string();
    match run.local_percent {
        0 => now,
        percent => format!("{now} ({percent}%)"),
    }
}

/// Formats the local memory that the working set needs, while the program has less.
fn needs_text(run: &RunStatistics) -> String {
    run.working_set.map_or("-".into(), |set| {
        let mib = set.pages.div_ceil(1 << PAGES_PER_MIB_SHIFT);
        if set.is_guess { format!("{mib}?") } else { mib.to_string() }
    })
}

/// Describes memory that cannot be moved, for runs where it alone exceeds the limit.
fn unmovable_lines(runs: &[RunStatistics]) -> String {
    let passes = |run: &&RunStatistics| {
        let limit_bytes = run.limit_now_bytes();
        run.unmovable.staying_bytes(limit_bytes) > limit_bytes
    };
    let line = |run: &RunStatistics| {
        let (pid, limit_bytes) = (run.keeper_pid, run.limit_now_bytes());
        let bytes = run.unmovable.staying_bytes(limit_bytes);
        format!(
            "{} ({pid}): {bytes} bytes cannot be moved, more than the limit of {limit_bytes}: {}\n",
            run.program,
            run.unmovable.text()
        )
    };
    runs.iter().filter(passes).map(line).collect()
}

/// Shows a keeper's own blade as `private`, as its address is of no use.
fn blades_text(blades: &[String]) -> String {
    let is_private = |address: &str| address.contains("/run-") && address.ends_with("/blade.sock");
    let shown = |address: &String| if is_private(address) { "private" } else { address }.to_owned();
    blades.iter().map(shown).collect::<Vec<_>>().join(",")
}

fn microseconds(ns: u64) -> String {
    format!("{}.{}", ns / 1000, ns % 1000 / 100)
}

const BLADE_HEADER: [&str; 10] = [
    "blade",
    "used MiB",
    "of MiB",
    "clients",
    "segments",
    "read MiB",
    "written MiB",
    "requests",
    "refused",
    "bad frames",
];

fn blades_table(blades: &[(Address, BladeAnswer)]) -> String {
    let mut rows = Vec::new();
    let (mut unreachable, mut below) = (String::new(), String::new());
    for (address, answer) in blades {
        match answer {
            Ok((totals, clients)) => {
                rows.push(blade_row(address, totals));
                rows.extend(clients.iter().map(client_row));
                below += &flash_line(address, totals);
                below += &pack_line(address, totals);
            }
            Err(error) => unreachable += &format!("{error}\n"),
        }
    }
    let shown = if rows.is_empty() { String::new() } else { table(&BLADE_HEADER, &rows) };
    shown + &below + &unreachable
}

/// Says what a blade's flash did; empty without flash.
fn flash_line(address: &Address, totals: &BladeTotals) -> String {
    if totals.flash_bytes.get() == 0 {
        return String::new();
    }
    let mib = |pages: u64| pages >> PAGES_PER_MIB_SHIFT;
    format!(
        "{address}: {} MiB in memory, flash: {} MiB read, {} MiB written, {} pages lost, {} writes \
         failed\n",
        totals.flash_memory_used_bytes.get() >> 20,
        mib(totals.flash_pages_fetched.get()),
        mib(totals.flash_pages_written.get()),
        totals.flash_pages_failed.get(),
        totals.flash_writes_failed.get()
    )
}

/// Says what a blade has packed; empty if it does not pack.
fn pack_line(address: &Address, totals: &BladeTotals) -> String {
    if totals.pack_memory_bytes.get() == 0 {
        return String::new();
    }
    let mib = |pages: u64| pages >> PAGES_PER_MIB_SHIFT;
    // They are counted one after the other, while the blade packs.
    let (pages, frames) = (totals.pack_pages_in_frames.get(), totals.pack_frames.get());
    format!(
        "{address}: {} of {} MiB of memory, packed: {} MiB in {} MiB, {} MiB of them equal to \
         others, {} MiB of one word, {} pages lost\n",
        totals.pack_memory_used_bytes.get() >> 20,
        totals.pack_memory_bytes.get() >> 20,
        mib(pages),
        totals.pack_frames_bytes.get() >> 20,
        mib(pages.saturating_sub(frames)),
        mib(totals.pack_pages_filled.get()),
        totals.pack_pages_failed.get()
    )
}

fn blade_row(address: &Address, totals: &BladeTotals) -> Vec<String> {
    let pages = |pages: u64| (pages >> PAGES_PER_MIB_SHIFT).to_string();
    vec![
        address.to_string(),
        (totals.used_bytes.get() >> 20).to_string(),
        (totals.capacity_bytes.get() >> 20).to_string(),
        totals.clients.to_string(),
        totals.segments.to_string(),
        pages(totals.pages_read.get()),
        pages(totals.pages_written.get()),
        totals.requests.to_string(),
        totals.requests_refused.to_string(),
        totals.bad_frames.to_string(),
    ]
}

fn client_row(client: &ClientUsage) -> Vec<String> {
    let pages = |pages: u64| (pages >> PAGES_PER_MIB_SHIFT).to_string();
    vec![
        format!("  {} (pid {})", client.name(), client.pid),
        (client.used_bytes.get() >> 20).to_string(),
        (client.quota_bytes.get() >> 20).to_string(),
        String::new(),
        client.segments.to_string(),
        pages(client.pages_read.get()),
        pages(client.pages_written.get()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_blade_is_called_so_and_others_by_their_address() {
        let blades = ["shm:///run/farpool/run-7-ab/blade.sock", "tcp://127.0.0.1:7070"];
        let blades = blades.map(str::to_owned);
        assert_eq!(blades_text(&blades), "private,tcp://127.0.0.1:7070");
        assert_eq!(blades_text(&[]), "");
    }
}
