//! What Prometheus' memcached_exporter reads: each of its series has a value.

mod common;

use std::collections::HashMap;

use common::talk::ask;
use common::{Ours, wait_until};
use farpool_kv_server::Settings;

/// The names that the exporter reads in `stats`.
const GENERAL: &str = "version uptime time get_hits get_misses delete_hits delete_misses incr_hits \
    incr_misses decr_hits decr_misses cas_hits cas_misses touch_hits touch_misses cas_badval \
    cmd_flush cmd_set rusage_user rusage_system bytes limit_maxbytes curr_items total_items \
    bytes_read bytes_written curr_connections total_connections rejected_connections conn_yields \
    listen_disabled_num evictions reclaimed store_too_large store_no_memory lru_crawler_starts \
    direct_reclaims crawler_items_checked crawler_reclaimed moves_to_cold moves_to_warm \
    moves_within_lru accepting_conns time_in_listen_disabled_us lrutail_reflocked \
    hash_power_level expired_unfetched";
/// Those of `stats items`, for each class.
const ITEMS: &str = "number age hits_to_hot hits_to_warm hits_to_cold hits_to_temp \
    crawler_reclaimed evicted evicted_nonzero evicted_time evicted_unfetched expired_unfetched \
    outofmemory reclaimed tailrepairs mem_requested moves_to_cold moves_to_warm moves_within_lru \
    number_hot number_warm number_cold number_temp age_hot age_warm";
/// Those of `stats slabs`, for each class.
const SLABS: &str = "get_hits delete_hits incr_hits decr_hits cas_hits touch_hits cas_badval \
    cmd_set chunk_size chunks_per_page total_pages total_chunks used_chunks free_chunks free_chunks_end \
    mem_requested";
/// Those of `stats settings`.
const SETTINGS: &str = "maxconns lru_crawler lru_crawler_sleep lru_crawler_tocrawl \
    lru_maintainer_thread lru_segmented hot_lru_pct warm_lru_pct hot_max_factor warm_max_factor";

type Stream = std::os::unix::net::UnixStream;

/// The figures of a section, by their names.
fn section(stream: &mut Stream, name: &str) -> HashMap<String, String> {
    let text = ask(stream, format!("stats {name}\r\n").as_bytes(), b"END\r\n");
    let text = String::from_utf8(text).expect("stats are text");
    let figures = text.lines().filter_map(|line| line.strip_prefix("STAT ")?.split_once(' '));
    figures.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn figure(figures: &HashMap<String, String>, name: &str) -> u64 {
    let value = figures.get(name).and_then(|value| value.parse().ok());
    value.unwrap_or_else(|| panic!("no number {name} in {figures:?}"))
}

#[test]
fn every_series_of_the_exporter_has_a_value() {
    let ours = Ours::local(Settings { threads: 2, ..Settings::default() });
    let mut stream = ours.connect();
    for number in 0..200 {
        let value = "v".repeat(number);
        let set = format!("set key{number} 0 0 {number}\r\n{value}\r\n");
        ask(&mut stream, set.as_bytes(), b"STORED\r\n");
    }
    for (section_name, prefix, names) in [
        ("", "", GENERAL),
        ("items", "items:1:", ITEMS),
        ("slabs", "1:", SLABS),
        ("settings", "", SETTINGS),
    ] {
        let figures = section(&mut stream, section_name);
        for name in names.split_whitespace() {
            let value = figures.get(&format!("{prefix}{name}"));
            let is_value = value.is_some_and(|it| match it.as_str() {
                "yes" | "no" => true,
                it => name == "version" || it.parse::<f64>().is_ok(),
            });
            assert!(is_value, "stats {section_name}: {name} is {value:?}");
        }
    }
    // The crawler's settings are read only if there is one.
    assert_eq!(section(&mut stream, "settings")["lru_crawler"], "yes");
    assert!(section(&mut stream, "slabs").contains_key("total_malloced"));
    let slabs = section(&mut stream, "slabs");
    let [used, free, all] =
        ["used_chunks", "free_chunks", "total_chunks"].map(|it| figure(&slabs, &format!("1:{it}")));
    assert!(used == 200 && used + free == all, "{slabs:?}");
}

/// Ages, evictions and what expired unread are measured.
#[test]
fn ages_and_expiries_are_real() {
    let ours = Ours::local(Settings { memory_bytes: 4 << 20, threads: 1, ..Settings::default() });
    let mut stream = ours.connect();
    let value = "v".repeat(1000);
    ask(&mut stream, b"set old 0 0 1\r\nx\r\n", b"STORED\r\n");
    let age = wait_until("it grows older", || {
        Some(figure(&section(&mut stream, "items"), "items:1:age")).filter(|&age| age > 0)
    });
    assert!(age < 60, "{age}");
    for number in 0..10_000 {
        let set = format!("set key{number} 0 1000 1000\r\n{value}\r\n");
        ask(&mut stream, set.as_bytes(), b"STORED\r\n");
    }
    let items = section(&mut stream, "items");
    let evicted = figure(&items, "items:1:evicted");
    let with_expiry = figure(&items, "items:1:evicted_nonzero");
    assert!(evicted > 0 && evicted.abs_diff(with_expiry) <= 1, "{items:?}");
    assert_eq!(figure(&section(&mut stream, ""), "direct_reclaims"), evicted);
    // Nobody reads these; they make room once they have expired.
    for number in 0..10_000 {
        let set = format!("set short{number} 0 1 1000\r\n{value}\r\n");
        ask(&mut stream, set.as_bytes(), b"STORED\r\n");
    }
    wait_until("they have expired", || {
        let general = section(&mut stream, "");
        let unread = figure(&general, "expired_unfetched");
        let is_consistent = unread <= figure(&general, "reclaimed")
            && figure(&general, "crawler_reclaimed") <= figure(&general, "crawler_items_checked");
        assert!(is_consistent, "{general:?}");
        (unread > 0 && figure(&general, "lru_crawler_starts") > 0).then_some(())
    });
}
