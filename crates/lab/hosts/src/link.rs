//! Links between namespaces, set up by `ip`, and what an interface has counted.

use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::{HostsError, Namespace};

/// What an interface has carried since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LinkCounters {
    /// Frames that arrived here. A frame that the kernel would cut up later counts as one.
    pub received_frames: u64,
    /// Bytes of these frames.
    pub received_bytes: u64,
    /// Frames that left from here.
    pub sent_frames: u64,
    /// Bytes of these frames.
    pub sent_bytes: u64,
}

/// Runs `ip` commands inside a namespace, up to the first that fails.
pub(crate) fn ip(namespace: &Namespace, action: &str, lines: &[String]) -> Result<(), HostsError> {
    let mut child = namespace
        .command("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| HostsError::Lacking(format!("`ip` (iproute2) cannot be run: {error}")))?;
    let mut text = lines.join("\n");
    text.push('\n');
    // If it ended early its status says so, and its words say why.
    let written = child.stdin.take().map(|mut stdin| stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().map_err(HostsError::os("wait for `ip`"))?;
    if output.status.success() && matches!(written, Some(Ok(()))) {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(HostsError::Ip { action: action.to_owned(), said })
}

/// How long the kernel may take to activate the queues of links that are set up.
const ACTIVE_WAIT: Duration = Duration::from_secs(10);
/// Pause between two checks of the queues.
const STEP: Duration = Duration::from_millis(5);

/// Waits until every link of a namespace that is up can send. The kernel activates a link's queue
/// some time after it was set up, together with its operational state (linkwatch), and silently
/// drops all frames before.
pub(crate) fn await_active(namespace: &Namespace) -> Result<(), HostsError> {
    let deadline = Instant::now() + ACTIVE_WAIT;
    loop {
        let output = namespace.command("ip").args(["-oneline", "link", "show"]).output();
        let output = output.map_err(HostsError::os("list the links of a host"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let Some(waiting) = text.lines().find(|line| is_inactive(line)) else { return Ok(()) };
        if Instant::now() >= deadline {
            let said = format!("it cannot send after {ACTIVE_WAIT:?}: {waiting}");
            return Err(HostsError::Ip { action: "set a link up".to_owned(), said });
        }
        std::thread::sleep(STEP);
    }
}

/// Whether a line of `ip -oneline link show` describes a link that is up and not operational yet. A
/// loopback interface has the state UNKNOWN.
fn is_inactive(line: &str) -> bool {
    let flags = line.split_once('<').and_then(|(_, rest)| rest.split_once('>'));
    let is_up = flags.is_some_and(|(flags, _)| flags.split(',').any(|flag| flag == "UP"));
    is_up && ![" state UP ", " state UNKNOWN "].iter().any(|state| line.contains(state))
}

/// The counters of an interface inside a namespace.
pub(crate) fn counters(namespace: &Namespace, name: &str) -> Result<LinkCounters, HostsError> {
    let text = namespace
        .enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?
        .map_err(HostsError::os("read the counters of interfaces"))?;
    let line =
        text.lines().find_map(|line| line.trim_start().strip_prefix(name)?.strip_prefix(':'));
    line.and_then(parse).ok_or_else(|| HostsError::Lacking(format!("there is no interface {name}")))
}

/// The columns of /proc/net/dev: eight of what came in, then eight of what went out.
fn parse(columns: &str) -> Option<LinkCounters> {
    let values = columns.split_whitespace().map(|word| word.parse().ok());
    let values = values.collect::<Option<Vec<u64>>>()?;
    Some(LinkCounters {
        received_bytes: *values.first()?,
        received_frames: *values.get(1)?,
        sent_bytes: *values.get(8)?,
        sent_frames: *values.get(9)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_is_up_is_inactive_until_it_is_operational() {
        let line = |flags, state| {
            is_inactive(&format!("2: p0@if3: <{flags}> mtu 1500 qdisc noqueue state {state} mode"))
        };
        assert!(line("BROADCAST,MULTICAST,UP,LOWER_UP", "LOWERLAYERDOWN"));
        assert!(line("NO-CARRIER,BROADCAST,MULTICAST,UP", "DOWN"));
        assert!(!line("BROADCAST,MULTICAST,UP,LOWER_UP", "UP"));
        assert!(!line("LOOPBACK,UP,LOWER_UP", "UNKNOWN"));
        assert!(!line("BROADCAST,MULTICAST", "DOWN"));
    }

    #[test]
    fn columns_are_taken_from_where_the_kernel_puts_them() {
        let line = " 70 1 0 0 0 0 0 0  140 2 0 0 0 0 0 0";
        let told = parse(line).expect("a line of the kernel's");
        assert_eq!((told.received_bytes, told.received_frames), (70, 1));
        assert_eq!((told.sent_bytes, told.sent_frames), (140, 2));
        assert_eq!(parse("70 1 0"), None);
        assert_eq!(parse("x"), None);
    }
}
