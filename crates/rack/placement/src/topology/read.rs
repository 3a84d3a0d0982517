//! TOML to graph. Every mistake is reported with its line and the reason.

use std::fmt;
use std::ops::Range;

use farpool_units::{format_bytes, parse_bytes};
use serde::Deserialize;
use toml::Spanned;

use crate::builder::{BuildError, GraphBuilder};
use crate::graph::{ComputeBrick, Graph, MemoryBrick, PowerState, SwitchKind};
use crate::ids::{DomainId, PortId, TrayId};

/// Most bytes of a topology: some 100,000 bricks with their links fit.
pub(super) const TEXT_LIMIT_BYTES: usize = 256 << 20;

/// A topology that was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Topology {
    /// What it describes.
    pub graph: Graph,
    /// Allowed, but probably not meant.
    pub warnings: Vec<Warning>,
}

/// Something allowed but probably not meant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Warning {
    /// Line in the text, from 1.
    pub line: usize,
    /// The oddity.
    pub reason: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

/// A mistake in a topology.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct TopologyError {
    /// Line in the text, from 1.
    pub line: usize,
    /// The fault.
    pub reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    rack: Vec<RackEntry>,
    #[serde(default)]
    tray: Vec<TrayEntry>,
    #[serde(default)]
    switch: Vec<SwitchEntry>,
    #[serde(default)]
    compute: Vec<ComputeEntry>,
    #[serde(default)]
    memory: Vec<MemoryEntry>,
    #[serde(default)]
    link: Vec<LinkEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RackEntry {
    name: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TrayEntry {
    name: Spanned<String>,
    rack: Spanned<String>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Circuit,
    Packet,
}

#[derive(Deserialize, Clone, Copy, Default)]
#[serde(rename_all = "lowercase")]
enum Power {
    #[default]
    On,
    Off,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SwitchEntry {
    name: Spanned<String>,
    kind: Kind,
    ports: Spanned<u32>,
    #[serde(default)]
    latency_ns: u32,
    #[serde(default)]
    power_watts: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ComputeEntry {
    name: Spanned<String>,
    tray: Spanned<String>,
    domain: Option<Spanned<String>>,
    ports: Spanned<u32>,
    #[serde(default)]
    power_watts: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryEntry {
    name: Spanned<String>,
    tray: Spanned<String>,
    domain: Option<Spanned<String>>,
    ports: Spanned<u32>,
    capacity: Spanned<String>,
    read_bandwidth: Spanned<String>,
    write_bandwidth: Spanned<String>,
    #[serde(default)]
    power: Power,
    #[serde(default)]
    power_watts: u32,
    load_permille: Option<Spanned<u16>>,
    #[serde(default)]
    latency_ns: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkEntry {
    from: Spanned<String>,
    to: Spanned<String>,
    bandwidth: Spanned<String>,
    #[serde(default)]
    latency_ns: u32,
}

/// Reads a topology.
///
/// # Errors
/// The first mistake, with its line.
pub fn read(text: &str) -> Result<Topology, TopologyError> {
    if text.len() > TEXT_LIMIT_BYTES {
        let limit = format_bytes(TEXT_LIMIT_BYTES as u64);
        return Err(TopologyError { line: 1, reason: format!("it is longer than {limit}") });
    }
    let file: File = toml::from_str(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start);
        TopologyError { line: line_at(text, start), reason: error.message().replace('\n', "; ") }
    })?;
    let reader = Reader { text, builder: GraphBuilder::new() };
    reader.read(&file)
}

/// The line of a byte of the text, from 1.
fn line_at(text: &str, at: usize) -> usize {
    1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count()
}

struct Reader<'a> {
    text: &'a str,
    builder: GraphBuilder,
}

impl Reader<'_> {
    fn wrong(&self, span: Range<usize>, reason: impl fmt::Display) -> TopologyError {
        TopologyError { line: line_at(self.text, span.start), reason: reason.to_string() }
    }

    fn at<T>(&self, span: Range<usize>, result: Result<T, BuildError>) -> Result<T, TopologyError> {
        result.map_err(|error| self.wrong(span, error))
    }

    fn read(mut self, file: &File) -> Result<Topology, TopologyError> {
        for entry in &file.rack {
            let made = self.builder.rack(entry.name.get_ref());
            self.at(entry.name.span(), made)?;
        }
        for entry in &file.tray {
            let made = self.builder.tray(entry.name.get_ref(), entry.rack.get_ref());
            let span = match made {
                Err(BuildError::UnknownName { .. }) => entry.rack.span(),
                _ => entry.name.span(),
            };
            self.at(span, made)?;
        }
        for entry in &file.switch {
            self.switch(entry)?;
        }
        for entry in &file.compute {
            self.compute(entry)?;
        }
        for entry in &file.memory {
            self.memory(entry)?;
        }
        for entry in &file.link {
            self.link(entry)?;
        }
        let graph = self.builder.finish();
        let lost = graph.unreachable_memories();
        let warning = |id: &crate::MemoryId| {
            let entry = &file.memory[id.index()];
            let line = line_at(self.text, entry.name.span().start);
            let reason = format!(
                "no compute brick can reach the memory brick \"{}\"; link it to a switch that one \
                 can reach",
                entry.name.get_ref()
            );
            Warning { line, reason }
        };
        Ok(Topology { warnings: lost.iter().map(warning).collect(), graph })
    }

    fn switch(&mut self, entry: &SwitchEntry) -> Result<(), TopologyError> {
        let kind = match entry.kind {
            Kind::Circuit => SwitchKind::Circuit,
            Kind::Packet => SwitchKind::Packet,
        };
        let (name, ports) = (entry.name.get_ref(), *entry.ports.get_ref());
        let made = self.builder.switch(name, kind, ports, entry.latency_ns, entry.power_watts);
        self.at(brick_span(&made, &entry.name, &entry.ports), made).map(drop)
    }

    fn place(
        &mut self,
        tray: &Spanned<String>,
        domain: Option<&Spanned<String>>,
    ) -> Result<(TrayId, DomainId), TopologyError> {
        let found = self.builder.find_tray(tray.get_ref());
        let found = self.at(tray.span(), found)?;
        let domain = domain.unwrap_or(tray);
        let made = self.builder.domain(domain.get_ref());
        Ok((found, self.at(domain.span(), made)?))
    }

    fn compute(&mut self, entry: &ComputeEntry) -> Result<(), TopologyError> {
        let (tray, domain) = self.place(&entry.tray, entry.domain.as_ref())?;
        let name = entry.name.get_ref().clone();
        let power_watts = entry.power_watts;
        let brick = ComputeBrick { name, tray, domain, power_watts, ports: Vec::new() };
        let made = self.builder.compute(brick, *entry.ports.get_ref());
        self.at(brick_span(&made, &entry.name, &entry.ports), made).map(drop)
    }

    fn memory(&mut self, entry: &MemoryEntry) -> Result<(), TopologyError> {
        let (tray, domain) = self.place(&entry.tray, entry.domain.as_ref())?;
        let load_permille = entry.load_permille.as_ref().map_or(0, |load| *load.get_ref());
        if let Some(load) = entry.load_permille.as_ref().filter(|load| *load.get_ref() > 1000) {
            return Err(self.wrong(load.span(), "load_permille is at most 1000"));
        }
        let brick = MemoryBrick {
            name: entry.name.get_ref().clone(),
            tray,
            domain,
            capacity_bytes: self.amount(&entry.capacity, false)?,
            read_limit_bytes_per_s: self.amount(&entry.read_bandwidth, true)?,
            write_limit_bytes_per_s: self.amount(&entry.write_bandwidth, true)?,
            power: match entry.power {
                Power::On => PowerState::On,
                Power::Off => PowerState::Off,
            },
            power_watts: entry.power_watts,
            load_permille,
            latency_ns: entry.latency_ns,
            ports: Vec::new(),
        };
        let made = self.builder.memory(brick, *entry.ports.get_ref());
        let span = match &made {
            Err(BuildError::Zero { what: "read bandwidth", .. }) => entry.read_bandwidth.span(),
            Err(BuildError::Zero { what: "write bandwidth", .. }) => entry.write_bandwidth.span(),
            Err(BuildError::Zero { .. } | BuildError::OddCapacity { .. }) => entry.capacity.span(),
            _ => brick_span(&made, &entry.name, &entry.ports),
        };
        self.at(span, made).map(drop)
    }

    fn link(&mut self, entry: &LinkEntry) -> Result<(), TopologyError> {
        let ends = [self.port(&entry.from)?, self.port(&entry.to)?];
        let bandwidth = self.amount(&entry.bandwidth, true)?;
        let made = self.builder.link(ends[0], ends[1], bandwidth, entry.latency_ns);
        let span = match &made {
            Err(BuildError::Zero { .. }) => entry.bandwidth.span(),
            // The reason shows which end it is; the line is that of the end at fault.
            Err(BuildError::PortLinkedTwice { port }) if port == entry.to.get_ref() => {
                entry.to.span()
            }
            _ => entry.from.span(),
        };
        self.at(span, made).map(drop)
    }

    fn port(&self, text: &Spanned<String>) -> Result<PortId, TopologyError> {
        self.at(text.span(), self.builder.find_port(text.get_ref()))
    }

    /// A size, or a bandwidth, which may end in `/s`.
    fn amount(&self, text: &Spanned<String>, per_second: bool) -> Result<u64, TopologyError> {
        let written = text.get_ref();
        let plain = written.strip_suffix("/s").filter(|_| per_second).unwrap_or(written);
        let (what, example) = if per_second { ("bandwidth", "12GiB/s") } else { ("size", "64GiB") };
        let wrong = || {
            let reason = format!("\"{written}\" is no {what}; write it as {example}");
            self.wrong(text.span(), reason)
        };
        parse_bytes(plain).ok_or_else(wrong)
    }
}

/// Where a brick's or switch's mistake is: at its ports or at its name.
fn brick_span<T>(
    made: &Result<T, BuildError>,
    name: &Spanned<String>,
    ports: &Spanned<u32>,
) -> Range<usize> {
    match made {
        Err(BuildError::NoPorts { .. } | BuildError::TooMany { what: "ports", .. }) => ports.span(),
        _ => name.span(),
    }
}
