//! QMP, the protocol by which QEMU is asked about its guest: one JSON object a line. Pure: bytes
//! come in, bytes to be sent and answers go out.
//!
//! What answers at a socket need not be QEMU, and QEMU's process can be taken over by its guest. So
//! nothing that arrives is trusted: lines have a largest length, answers must be those to what was
//! asked, and the words of a state are words.

use serde_json::{Value, json};

/// The longest line that is read: QEMU's answers to what is asked here have some hundred bytes. A
/// longer line ends the conversation.
pub const LINE_BYTES_MAX: usize = 64 << 10;
/// The longest name of a state; QEMU's have up to 14 letters (`finish-migrate`).
const STATE_BYTES_MAX: usize = 32;
/// Ids of the two commands of a conversation.
const CAPABILITIES: u64 = 1;
const COMMAND: u64 = 2;

/// Why a conversation has ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QmpError {
    #[error("what answers at its QMP socket does not speak QMP: {0}")]
    NotQmp(&'static str),
    #[error("QEMU refuses {command}: {reason}")]
    Refused { command: &'static str, reason: String },
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read more.
    Read,
    /// Send this, then read more.
    Send(Vec<u8>),
    /// The conversation is over.
    Answered(Value),
}

/// What the other side is to say next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Greeting,
    Capabilities,
    Answer,
}

/// One command to QEMU, from its greeting to its answer.
#[derive(Debug)]
pub struct Conversation {
    command: &'static str,
    arguments: Value,
    awaited: Awaited,
    /// What has arrived and was not looked at: above all, the begin of a line.
    begun: Vec<u8>,
}

impl Conversation {
    /// A conversation with one command; its arguments are an object, or null for none.
    pub fn new(command: &'static str, arguments: Value) -> Conversation {
        Conversation { command, arguments, awaited: Awaited::Greeting, begun: Vec::new() }
    }

    /// Takes what has arrived.
    ///
    /// # Errors
    /// If it is not what QEMU says, or QEMU refuses the command.
    pub fn take(&mut self, bytes: &[u8]) -> Result<Step, QmpError> {
        self.begun.extend_from_slice(bytes);
        while let Some(end) = self.begun.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.begun.drain(..=end).collect();
            match self.take_line(&line)? {
                Step::Read => {}
                step => return Ok(step),
            }
        }
        check_length(&self.begun)?;
        Ok(Step::Read)
    }

    fn take_line(&mut self, line: &[u8]) -> Result<Step, QmpError> {
        check_length(line)?;
        let message: Value =
            serde_json::from_slice(line).map_err(|_| QmpError::NotQmp("a line is no JSON"))?;
        // Events come at any time.
        if message.get("event").is_some() {
            return Ok(Step::Read);
        }
        match self.awaited {
            Awaited::Greeting => {
                message.get("QMP").ok_or(QmpError::NotQmp("it does not greet"))?;
                self.awaited = Awaited::Capabilities;
                Ok(Step::Send(request("qmp_capabilities", &Value::Null, CAPABILITIES)))
            }
            Awaited::Capabilities => {
                answer(&message, "qmp_capabilities", CAPABILITIES)?;
                self.awaited = Awaited::Answer;
                Ok(Step::Send(request(self.command, &self.arguments, COMMAND)))
            }
            Awaited::Answer => answer(&message, self.command, COMMAND).map(Step::Answered),
        }
    }
}

fn check_length(line: &[u8]) -> Result<(), QmpError> {
    match line.len() {
        0..=LINE_BYTES_MAX => Ok(()),
        _ => Err(QmpError::NotQmp("a line has no end")),
    }
}

fn request(command: &str, arguments: &Value, id: u64) -> Vec<u8> {
    let mut request = json!({"execute": command, "id": id});
    if !arguments.is_null() {
        request["arguments"] = arguments.clone();
    }
    format!("{request}\n").into_bytes()
}

/// The answer to the command with this id.
fn answer(message: &Value, command: &'static str, id: u64) -> Result<Value, QmpError> {
    if message.get("id").and_then(Value::as_u64) != Some(id) {
        return Err(QmpError::NotQmp("it answers what was not asked"));
    }
    if let Some(error) = message.get("error") {
        let reason = error["desc"].as_str().unwrap_or("without a reason").to_owned();
        return Err(QmpError::Refused { command, reason });
    }
    let value = message.get("return").cloned();
    value.ok_or(QmpError::NotQmp("an answer is neither a value nor an error"))
}

/// The state in an answer to `query-status`, such as `running` or `paused`.
///
/// # Errors
/// If there is none.
pub fn state(answer: &Value) -> Result<String, QmpError> {
    let is_word = |state: &&str| {
        (1..=STATE_BYTES_MAX).contains(&state.len())
            && state.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')
    };
    let state = answer.get("status").and_then(Value::as_str).filter(is_word);
    state.map(str::to_owned).ok_or(QmpError::NotQmp("a state is no word"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GREETING: &[u8] = b"{\"QMP\": {\"version\": {\"qemu\": {\"major\": 7}}}}\r\n";

    fn asked() -> Conversation {
        let mut talk = Conversation::new("query-status", Value::Null);
        assert!(matches!(talk.take(GREETING), Ok(Step::Send(_))));
        assert!(matches!(talk.take(b"{\"return\": {}, \"id\": 1}\r\n"), Ok(Step::Send(_))));
        talk
    }

    #[test]
    fn a_command_is_answered_after_the_greeting() {
        let mut talk = Conversation::new("query-status", Value::Null);
        let capabilities = b"{\"execute\":\"qmp_capabilities\",\"id\":1}\n".to_vec();
        assert_eq!(talk.take(GREETING), Ok(Step::Send(capabilities)));
        let command = b"{\"execute\":\"query-status\",\"id\":2}\n".to_vec();
        assert_eq!(talk.take(b"{\"return\": {}, \"id\": 1}\r\n"), Ok(Step::Send(command)));
        let event = b"{\"event\": \"RESUME\", \"data\": {}}\r\n{\"return\": ";
        assert_eq!(talk.take(event), Ok(Step::Read));
        let Ok(Step::Answered(value)) = talk.take(b"{\"status\": \"running\"}, \"id\": 2}\r\n")
        else {
            panic!("no answer");
        };
        assert_eq!(state(&value), Ok("running".to_owned()));
    }

    #[test]
    fn an_event_may_follow_in_the_same_piece() {
        let mut talk = Conversation::new("query-status", Value::Null);
        let piece = [GREETING, b"{\"event\": "].concat();
        assert!(matches!(talk.take(&piece), Ok(Step::Send(_))));
        let piece = b"\"STOP\"}\n{\"return\": {}, \"id\": 1}\n";
        assert!(matches!(talk.take(piece), Ok(Step::Send(_))));
    }

    #[test]
    fn what_is_not_qmp_is_told() {
        let said = |bytes: &[u8]| Conversation::new("query-status", Value::Null).take(bytes);
        assert_eq!(said(b"SSH-2.0\r\n"), Err(QmpError::NotQmp("a line is no JSON")));
        assert_eq!(said(b"{\"return\": {}}\n"), Err(QmpError::NotQmp("it does not greet")));
        let endless = vec![b' '; LINE_BYTES_MAX + 1];
        assert_eq!(said(&endless), Err(QmpError::NotQmp("a line has no end")));
        let other = asked().take(b"{\"return\": {\"status\": \"running\"}, \"id\": 7}\n");
        assert_eq!(other, Err(QmpError::NotQmp("it answers what was not asked")));
        let neither = asked().take(b"{\"id\": 2}\n");
        assert!(matches!(neither, Err(QmpError::NotQmp(_))), "{neither:?}");
        let refused = asked().take(b"{\"error\": {\"desc\": \"not now\"}, \"id\": 2}\n");
        let reason = "not now".to_owned();
        assert_eq!(refused, Err(QmpError::Refused { command: "query-status", reason }));
    }

    #[test]
    fn a_state_is_a_word() {
        for status in ["", "RUNNING", "a b", "\u{1b}[2J", &"a".repeat(STATE_BYTES_MAX + 1)] {
            assert!(state(&json!({"status": status})).is_err(), "{status:?}");
        }
        assert!(state(&json!({"status": 7})).is_err());
        assert_eq!(state(&json!({"status": "io-error"})), Ok("io-error".to_owned()));
    }

    proptest! {
        /// Any bytes, in any pieces, neither panic nor grow what is kept beyond a line.
        #[test]
        fn any_bytes_are_taken(pieces in proptest::collection::vec(
            prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..99),
                Just(GREETING.to_vec()),
                Just(b"{\"return\": {}, \"id\": 1}\n".to_vec()),
                Just(b"{\"return\": {\"status\": \"paused\"}, \"id\": 2}\n".to_vec()),
            ],
            0..9,
        )) {
            let mut talk = Conversation::new("query-status", Value::Null);
            for piece in pieces {
                let taken = talk.take(&piece);
                prop_assert!(taken.is_err() || talk.begun.len() <= LINE_BYTES_MAX + 999);
                if let Ok(Step::Answered(value)) = &taken {
                    prop_assert_eq!(state(value), Ok("paused".to_owned()));
                }
                if matches!(taken, Err(_) | Ok(Step::Answered(_))) {
                    break;
                }
            }
        }
    }
}
