//! What happened in the rack, second by second; pure.
//!
//! Invariant: samples and events are in the order of their times, which count from the start of the
//! rack.

use std::fmt;
use std::time::Duration;

use farpool_units::at_most;
use serde_json::{Value, json};

/// The role of a host towards the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Lends, or has something to lend.
    Server,
    /// Borrows.
    Client,
    /// Does both.
    Both,
    /// Neither.
    Neutral,
    /// Its link is down.
    CutOff,
}

/// One host at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostSample {
    pub role: Role,
    /// Bytes of its own programs in its memory.
    pub own_bytes: u64,
    /// The most that it lends. Zero if it is no node, or if it is not reported.
    pub offered_bytes: u64,
    /// Bytes of its memory that hold other hosts' data. None if not reported.
    pub lent_bytes: Option<u64>,
    /// Bytes of its programs' data that are on other hosts.
    pub borrowed_bytes: u64,
    pub in_bytes_per_s: u64,
    pub out_bytes_per_s: u64,
    /// Bytes that its programs have read and found right since they started.
    pub checked_bytes: u64,
}

/// All hosts at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sample {
    pub at: Duration,
    pub hosts: Vec<HostSample>,
}

/// Who an event comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// The scenario did it.
    Done,
    /// It was seen in the rack.
    Seen,
    /// A program said it.
    Said,
}

/// Something that happened at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    pub at: Duration,
    pub source: Source,
    pub text: String,
}

/// The whole scenario of one rack.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Timeline {
    pub samples: Vec<Sample>,
    pub events: Vec<Event>,
}

impl Role {
    /// Returns the role that follows from what a host does, where no organiser gives it a class.
    pub fn of(offered_bytes: u64, lent_bytes: u64, borrowed_bytes: u64) -> Role {
        match (lent_bytes > 0, borrowed_bytes > 0) {
            (true, true) => Role::Both,
            (false, true) => Role::Client,
            (true, false) => Role::Server,
            (false, false) if offered_bytes > 0 => Role::Server,
            (false, false) => Role::Neutral,
        }
    }

    /// Its letter in a figure.
    pub fn letter(self) -> char {
        match self {
            Role::Server => 'S',
            Role::Client => 'C',
            Role::Both => 'B',
            Role::Neutral => '.',
            Role::CutOff => 'x',
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Role::Server => "server",
            Role::Client => "client",
            Role::Both => "both",
            Role::Neutral => "neutral",
            Role::CutOff => "cut off",
        })
    }
}

impl HostSample {
    /// In and out together.
    pub fn traffic_bytes_per_s(&self) -> u64 {
        self.in_bytes_per_s + self.out_bytes_per_s
    }

    fn to_json(self, name: &str) -> Value {
        json!({
            "host": name,
            "role": self.role.to_string(),
            "own_bytes": self.own_bytes,
            "offered_bytes": self.offered_bytes,
            "lent_bytes": self.lent_bytes,
            "borrowed_bytes": self.borrowed_bytes,
            "in_bytes_per_s": self.in_bytes_per_s,
            "out_bytes_per_s": self.out_bytes_per_s,
            "checked_bytes": self.checked_bytes,
        })
    }
}

impl Sample {
    /// A line of JSON.
    pub fn to_json(&self, rack: &str, names: &[String]) -> Value {
        let hosts = self.hosts.iter().zip(names).map(|(host, name)| host.to_json(name));
        let hosts: Vec<Value> = hosts.collect();
        json!({ "kind": "sample", "rack": rack, "at_ms": ms(self.at), "hosts": hosts })
    }
}

impl Event {
    /// A line of JSON.
    pub fn to_json(&self, rack: &str) -> Value {
        let source = match self.source {
            Source::Done => "done",
            Source::Seen => "seen",
            Source::Said => "said",
        };
        let (at_ms, text) = (ms(self.at), &self.text);
        json!({ "kind": "event", "rack": rack, "at_ms": at_ms, "source": source, "text": text })
    }
}

impl Timeline {
    /// Adds a sample. Returns an event for each host whose role has changed since the one before.
    pub fn push(&mut self, sample: Sample, names: &[String]) -> Vec<Event> {
        let mut changes = Vec::new();
        if let Some(last) = self.samples.last() {
            let pairs = last.hosts.iter().zip(&sample.hosts).zip(names);
            for ((old, new), name) in pairs.filter(|((old, new), _)| old.role != new.role) {
                let text = format!("{name}: {} -> {}", old.role, new.role);
                changes.push(Event { at: sample.at, source: Source::Seen, text });
            }
        }
        self.samples.push(sample);
        self.events.extend(changes.iter().cloned());
        changes
    }

    /// A host in the last sample.
    pub fn last(&self, host: usize) -> Option<&HostSample> {
        self.samples.last().and_then(|sample| sample.hosts.get(host))
    }

    /// The samples of a span of time.
    pub fn between(&self, from: Duration, to: Duration) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| (from..=to).contains(&sample.at))
    }

    /// Bytes a host's link carried in a span of time, in both directions.
    pub fn carried_bytes(&self, host: usize, from: Duration, to: Duration) -> u64 {
        let hosts = self.between(from, to).filter_map(|sample| sample.hosts.get(host));
        hosts.map(HostSample::traffic_bytes_per_s).sum()
    }
}

fn ms(at: Duration) -> u64 {
    at_most(at.as_millis())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn host(role: Role, traffic: u64) -> HostSample {
        HostSample {
            role,
            own_bytes: 0,
            offered_bytes: 0,
            lent_bytes: Some(0),
            borrowed_bytes: 0,
            in_bytes_per_s: traffic,
            out_bytes_per_s: 0,
            checked_bytes: 0,
        }
    }

    pub fn sample(second: u64, hosts: &[HostSample]) -> Sample {
        Sample { at: Duration::from_secs(second), hosts: hosts.to_vec() }
    }

    #[test]
    fn a_role_follows_from_what_a_host_does() {
        assert_eq!(Role::of(9, 0, 0), Role::Server);
        assert_eq!(Role::of(0, 9, 0), Role::Server);
        assert_eq!(Role::of(9, 0, 9), Role::Client);
        assert_eq!(Role::of(0, 9, 9), Role::Both);
        assert_eq!(Role::of(0, 0, 0), Role::Neutral);
    }

    #[test]
    fn a_change_of_role_is_told_once() {
        let names = ["A".to_owned(), "B".to_owned()];
        let mut timeline = Timeline::default();
        let of = |second, role| sample(second, &[host(role, 5), host(Role::Neutral, 7)]);
        assert_eq!(timeline.push(of(0, Role::Server), &names), []);
        let told = timeline.push(of(1, Role::Client), &names);
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].text, "A: server -> client");
        assert_eq!(timeline.push(of(2, Role::Client), &names), []);
        assert_eq!(timeline.events, told);
        let second = Duration::from_secs(1);
        assert_eq!(timeline.carried_bytes(1, second, 2 * second), 14);
        assert_eq!(timeline.last(0).map(|host| host.role), Some(Role::Client));
    }

    #[test]
    fn json_has_everything_with_its_unit() {
        let line = sample(3, &[host(Role::Both, 5)]).to_json("controller", &["A".to_owned()]);
        assert_eq!(line["at_ms"], 3000);
        assert_eq!(line["hosts"][0]["role"], "both");
        assert_eq!(line["hosts"][0]["in_bytes_per_s"], 5);
        let event = Event { at: Duration::ZERO, source: Source::Said, text: "x".into() };
        assert_eq!(event.to_json("controller")["source"], "said");
    }
}
