//! The messages on a switch's control socket: one line of JSON each way.
//!
//! The switch greets with one line; then each request line is answered by one line, in order.
//! Unknown words, fields and numbers out of range are refused, and change nothing:
//!
//! ```text
//! < {"is":"switch","version":1,"name":"s0","instance":"5f0c...","ports":5}
//! > {"do":"connect","ports":[0,2]}
//! < {"is":"done"}
//! > {"do":"connect","ports":[2,3]}
//! < {"is":"refused","why":{"kind":"port_in_use","port":2,"circuit":[0,2]},"message":"..."}
//! ```

use std::io::{self, BufRead, Read};

use serde::{Deserialize, Serialize};

use crate::{Circuit, CircuitCounters, DirectionCounters, SwitchError};

/// Version of this protocol. A greeting with another version is refused.
pub(crate) const VERSION: u32 = 1;
/// Longest request, in bytes: every valid one is below a hundred. A longer one is refused and the
/// connection closed, since its end is not searched for.
pub const MAX_LINE_BYTES: usize = 4096;
/// Longest answer that a driver accepts, in bytes: counters of a full switch are below 32 KiB.
pub(crate) const MAX_ANSWER_BYTES: usize = 256 * 1024;

/// A request to a switch.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    Circuits {},
    Counters {},
    Connect { ports: [u32; 2] },
    Disconnect { ports: [u32; 2] },
}

/// An answer of a switch.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Answer {
    /// The greeting. `instance` differs each time a switch is started.
    Switch {
        version: u32,
        name: String,
        instance: String,
        ports: u32,
    },
    Done {},
    Circuits {
        circuits: Vec<[u32; 2]>,
    },
    Counters {
        circuits: Vec<Counted>,
    },
    Refused {
        why: Why,
        message: String,
    },
}

/// One circuit's counters.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Counted {
    ports: [u32; 2],
    from_low: DirectionCounters,
    from_high: DirectionCounters,
}

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Why {
    NoPort { port: u32 },
    PortInUse { port: u32, circuit: [u32; 2] },
    PortFailed { port: u32, reason: String },
    Malformed {},
    TooLong {},
    Busy {},
}

/// The result of reading a line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// One line, without its end.
    Whole(Vec<u8>),
    /// More bytes than a line may have.
    TooLong,
    /// The end of the input. An incomplete line is ignored: it may have been cut.
    End,
}

/// Reads one line of at most `max_bytes`.
pub(crate) fn read_line(reader: &mut impl BufRead, max_bytes: usize) -> io::Result<Line> {
    let mut line = Vec::new();
    reader.take(max_bytes as u64 + 1).read_until(b'\n', &mut line)?;
    Ok(match line.pop() {
        Some(b'\n') => Line::Whole(line),
        Some(_) if line.len() >= max_bytes => Line::TooLong,
        _ => Line::End,
    })
}

/// Serializes a value as a line.
pub(crate) fn line_of(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

pub(crate) fn ports_of(circuit: Circuit) -> [u32; 2] {
    let (low, high) = circuit.ports();
    [low, high]
}

impl Answer {
    /// Returns the answer to a request that failed with `error`.
    pub(crate) fn refusal(error: &SwitchError) -> Self {
        let message = error.to_string();
        let why = match error {
            SwitchError::NoPort { port, .. } => Why::NoPort { port: *port },
            SwitchError::PortInUse { port, low, high, .. } => {
                Why::PortInUse { port: *port, circuit: [*low, *high] }
            }
            SwitchError::PortFailed { port, reason, .. } => {
                Why::PortFailed { port: *port, reason: reason.clone() }
            }
            // A switch never reports this about itself.
            SwitchError::Restarted { .. } | SwitchError::Unreachable { .. } => Why::Malformed {},
        };
        Self::Refused { why, message }
    }
}

impl Why {
    /// Converts the refusal into an error of the switch with this name.
    pub(crate) fn into_error(self, switch: String, message: String) -> SwitchError {
        match self {
            Self::NoPort { port } => SwitchError::NoPort { switch, port },
            Self::PortInUse { port, circuit: [low, high] } => {
                SwitchError::PortInUse { switch, port, low, high }
            }
            Self::PortFailed { port, reason } => SwitchError::PortFailed { switch, port, reason },
            Self::Malformed {} | Self::TooLong {} | Self::Busy {} => {
                SwitchError::Unreachable { switch, reason: message }
            }
        }
    }
}

impl From<&CircuitCounters> for Counted {
    fn from(counters: &CircuitCounters) -> Self {
        let CircuitCounters { circuit, from_low, from_high } = *counters;
        Self { ports: ports_of(circuit), from_low, from_high }
    }
}

impl Counted {
    /// Returns the counters. Returns None if both ports are the same.
    pub(crate) fn counters(&self) -> Option<CircuitCounters> {
        let circuit = Circuit::new(self.ports[0], self.ports[1])?;
        Some(CircuitCounters { circuit, from_low: self.from_low, from_high: self.from_high })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_line_has_an_end_and_a_greatest_length() {
        let read = |text: &str| read_line(&mut text.as_bytes(), 4).expect("no I/O");
        assert_eq!(read("abcd\nx"), Line::Whole(b"abcd".to_vec()));
        assert_eq!(read("abcde\n"), Line::TooLong);
        assert_eq!(read("abc"), Line::End);
        assert_eq!(read(""), Line::End);
        assert_eq!(read("\n"), Line::Whole(Vec::new()));
    }

    #[test]
    fn only_what_is_meant_is_understood() {
        let parse = |text: &str| serde_json::from_str::<Request>(text).ok();
        assert_eq!(
            parse(r#"{"do":"connect","ports":[0,2]}"#),
            Some(Request::Connect { ports: [0, 2] })
        );
        assert_eq!(parse(r#"{"do":"circuits"}"#), Some(Request::Circuits {}));
        for wrong in [
            r#"{"do":"circuits","x":1}"#,
            r#"{"do":"connect","ports":[0]}"#,
            r#"{"do":"connect","ports":[0,-1]}"#,
            r#"{"do":"connect","ports":[0,4294967296]}"#,
            r#"{"do":"connect","ports":[0,1,2]}"#,
            r#"{"do":"explode"}"#,
            r#"{"do":"circuits"}{"do":"circuits"}"#,
            "[]",
            "",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_do_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = serde_json::from_slice::<Request>(&bytes);
            let _ = serde_json::from_slice::<Answer>(&bytes);
            let line = read_line(&mut bytes.as_slice(), 50).expect("no I/O");
            if let Line::Whole(line) = line {
                prop_assert!(line.len() <= 50);
            }
        }
    }
}
