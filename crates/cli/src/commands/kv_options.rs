//! Options of memcached that have another meaning here, or none: the one list of them.
//!
//! Command lines written for memcached start the server. What has no meaning is named once in the
//! log; what would be dangerous to ignore is refused, with the reason.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;

use farpool_kv_server::{Settings, least_flash_bytes};

use crate::args::KvArgs;
use crate::config::UsageError;
use crate::values::FlashPart;

/// What becomes of an option of memcached's `-o`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// Idle clients are closed, as in memcached.
    IdleTimeout,
    /// The file of memcached's extstore is flash.
    Flash,
    /// It is about internals that Farpool does not have.
    None,
    /// Ignoring it would be dangerous, for this reason.
    Refused(&'static str),
}

const PROXY: Meaning =
    Meaning::Refused("this server is no proxy; run memcached's proxy or mcrouter before it");
const MARK: Meaning = Meaning::Refused(
    "sockets are not marked, so the firewall's rules for that mark would not hold; write rules for \
     the port instead",
);

/// All options of `-o` of memcached 1.6.18 and 1.6.45 but those about TLS (`ssl_…`).
const OPTIONS: &[(&str, Meaning)] = &[
    ("idle_timeout", Meaning::IdleTimeout),
    ("ext_path", Meaning::Flash),
    ("maxconns_fast", Meaning::None),
    ("no_maxconns_fast", Meaning::None),
    ("hashpower", Meaning::None),
    ("no_hashexpand", Meaning::None),
    ("hash_algorithm", Meaning::None),
    ("tail_repair_time", Meaning::None),
    ("lru_crawler", Meaning::None),
    ("no_lru_crawler", Meaning::None),
    ("lru_crawler_sleep", Meaning::None),
    ("lru_crawler_tocrawl", Meaning::None),
    ("lru_maintainer", Meaning::None),
    ("no_lru_maintainer", Meaning::None),
    ("hot_lru_pct", Meaning::None),
    ("warm_lru_pct", Meaning::None),
    ("hot_max_factor", Meaning::None),
    ("warm_max_factor", Meaning::None),
    ("temporary_ttl", Meaning::None),
    ("slab_reassign", Meaning::None),
    ("no_slab_reassign", Meaning::None),
    ("slab_automove", Meaning::None),
    ("no_slab_automove", Meaning::None),
    ("slab_automove_ratio", Meaning::None),
    ("slab_automove_freeratio", Meaning::None),
    ("slab_automove_window", Meaning::None),
    ("slab_chunk_max", Meaning::None),
    ("slab_sizes", Meaning::None),
    ("no_chunked_items", Meaning::None),
    ("track_sizes", Meaning::None),
    ("watcher_logbuf_size", Meaning::None),
    ("worker_logbuf_size", Meaning::None),
    ("resp_obj_mem_limit", Meaning::None),
    ("read_buf_mem_limit", Meaning::None),
    ("inline_ascii_resp", Meaning::None),
    ("no_inline_ascii_resp", Meaning::None),
    ("modern", Meaning::None),
    ("no_modern", Meaning::None),
    ("drop_privileges", Meaning::None),
    ("no_drop_privileges", Meaning::None),
    ("relaxed_privileges", Meaning::None),
    ("ext_page_size", Meaning::None),
    ("ext_wbuf_size", Meaning::None),
    ("ext_threads", Meaning::None),
    ("ext_io_depth", Meaning::None),
    ("ext_item_size", Meaning::None),
    ("ext_item_age", Meaning::None),
    ("ext_low_ttl", Meaning::None),
    ("ext_drop_unread", Meaning::None),
    ("ext_recache_rate", Meaning::None),
    ("ext_compact_under", Meaning::None),
    ("ext_drop_under", Meaning::None),
    ("ext_max_frag", Meaning::None),
    ("ext_max_sleep", Meaning::None),
    ("sock_cookie_id", MARK),
    ("proxy_config", PROXY),
    ("proxy_arg", PROXY),
    ("proxy_uring", PROXY),
    ("proxy_memprofile", PROXY),
];

/// The kinds of pages that a file of extstore may be for; here it is for all items.
const EXTSTORE_BUCKETS: [&str; 4] = ["default", "compact", "lowttl", "chunked"];

/// What was asked for and has no effect, as it was written.
#[derive(Debug, Default)]
pub(crate) struct Ignored(Vec<String>);

impl Ignored {
    /// The flags of one letter that have no effect.
    pub(crate) fn flags(args: &KvArgs) -> Self {
        let it = &args.without_effect;
        let given = [
            ("-f", it.growth_factor.is_some()),
            ("-n", it.chunk_bytes.is_some()),
            ("-L", it.large_pages),
            ("-C", it.no_cas),
            ("-e", it.memory_file.is_some()),
            ("-N", it.napi_ids.is_some()),
        ];
        Self(given.iter().filter(|(_, is)| *is).map(|(name, _)| (*name).to_owned()).collect())
    }

    /// Names them in the log.
    pub(crate) fn tell(&self) {
        if !self.0.is_empty() {
            let options = self.0.join(" ");
            tracing::info!(options, "these options of memcached have no effect here");
        }
    }
}

/// Takes an option of `-o` that is not about TLS.
pub(crate) fn take(
    settings: &mut Settings,
    ignored: &mut Ignored,
    option: &str,
) -> Result<(), UsageError> {
    let (name, value) = option.split_once('=').unwrap_or((option, ""));
    match OPTIONS.iter().find(|(known, _)| *known == name) {
        Some((_, Meaning::Flash)) => take_flash(settings, ignored, option),
        Some((_, Meaning::IdleTimeout)) => {
            let wrong = || UsageError(format!("{option:?}: idle_timeout is a number of seconds"));
            settings.idle_timeout_s = value.parse().map_err(|_| wrong())?;
            Ok(())
        }
        Some((_, Meaning::None)) => {
            ignored.0.push(format!("-o {name}"));
            Ok(())
        }
        Some((_, Meaning::Refused(why))) => Err(UsageError(format!("-o {name}: {why}"))),
        None => Err(UsageError(format!("-o {name} is not an option that Farpool knows"))),
    }
}

/// Takes `ext_path=PATH:SIZE`, or `PATH:SIZE:BUCKET`. A size too small for the threads is raised:
/// memcached takes it.
fn take_flash(
    settings: &mut Settings,
    ignored: &mut Ignored,
    option: &str,
) -> Result<(), UsageError> {
    if settings.flash.is_some() {
        let once = "flash is one file or device: give ext_path or --flash, and once";
        return Err(UsageError(once.into()));
    }
    let value = option.split_once('=').map_or("", |(_, value)| value);
    let bucket = value.rsplit_once(':').filter(|(_, last)| EXTSTORE_BUCKETS.contains(last));
    if let Some((_, bucket)) = bucket {
        ignored.0.push(format!("-o ext_path=...:{bucket}"));
    }
    let wrong = |error| UsageError(format!("{option:?}: {error}"));
    let mut part: FlashPart = bucket.map_or(value, |(part, _)| part).parse().map_err(wrong)?;
    let least = least_flash_bytes(settings.threads);
    if part.size.0 < least {
        let wanted = part.size;
        part.size.0 = least;
        ignored.0.push(format!("-o ext_path=...:{wanted} (raised to {}, the least)", part.size));
    }
    settings.flash = Some(super::kv::flash(&part));
    Ok(())
}

/// Refuses flags whose meaning in memcached nothing here has.
pub(crate) fn refuse_dangerous(args: &KvArgs) -> Result<(), UsageError> {
    let refused = |how: String| Err(UsageError(how));
    if args.udp_port.is_some_and(|port| port != 0) {
        let how = "UDP is not served: answers to forged addresses flooded others; use -U 0";
        return refused(how.into());
    }
    for address in &args.listen {
        let per_address = ["proto[", "mtls:", "btls:", "tag[", "tag_"];
        if let Some(prefix) = per_address.iter().find(|it| address.contains(**it)) {
            return refused(format!(
                "-l {address}: {prefix} is not understood, and without it others could talk to \
                 this address than are meant to; -B and -Z are for all addresses, notls: for one"
            ));
        }
    }
    Ok(())
}

/// The variable that names the file for the ports.
const PORT_FILE: &str = "MEMCACHED_PORT_FILENAME";

/// Writes the ports to the file that `MEMCACHED_PORT_FILENAME` names, if it names one, as memcached
/// does: under another name first, so that whoever sees the file sees all of it.
pub(crate) fn write_ports(addresses: &[SocketAddr]) {
    let Some(path) = std::env::var_os(PORT_FILE).map(PathBuf::from) else { return };
    let mut unfinished = path.clone().into_os_string();
    unfinished.push(".lck");
    let write = || {
        let mut file = std::fs::File::options().append(true).create(true).open(&unfinished)?;
        for address in addresses {
            let family = if address.is_ipv4() { "INET" } else { "INET6" };
            writeln!(file, "TCP {family}: {}", address.port())?;
        }
        std::fs::rename(&unfinished, &path)
    };
    if let Err(error) = write() {
        let path = path.display();
        tracing::warn!(%path, %error, "the file of {PORT_FILE} cannot be written");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_taken_noted_or_refused_with_a_reason() {
        for &(name, meaning) in OPTIONS {
            let (mut settings, mut ignored) = (Settings::default(), Ignored::default());
            let option = match name {
                "ext_path" => "ext_path=/x:1m:compact".to_owned(),
                _ => format!("{name}=5"),
            };
            let taken = take(&mut settings, &mut ignored, &option);
            match meaning {
                Meaning::IdleTimeout => assert!(taken.is_ok() && settings.idle_timeout_s == 5),
                Meaning::Flash => assert!(taken.is_ok() && settings.flash.is_some()),
                Meaning::None => assert_eq!(ignored.0, [format!("-o {name}")]),
                Meaning::Refused(why) => {
                    assert!(taken.is_err_and(|error| error.to_string().contains(why)), "{name}");
                }
            }
        }
    }

    #[test]
    fn a_file_of_extstore_has_at_least_what_the_threads_need() {
        let mut settings = Settings { threads: 4, ..Settings::default() };
        let mut ignored = Ignored::default();
        let taken = take(&mut settings, &mut ignored, "ext_path=/x:64m:compact");
        assert!(taken.is_ok() && ignored.0.len() == 2, "{ignored:?}");
        assert_eq!(settings.flash.map(|it| it.bytes), Some(least_flash_bytes(4)));
    }
}
