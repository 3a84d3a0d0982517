//! The order of a hand-off, in which Cloud Hypervisor gives a snapshot away: Start, the memory of
//! each slot, the configuration, the state, and the end.

use super::cloud_hypervisor::{Command, MAPPINGS_MAX, Memory, MigrationError};

/// What is to be done about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Answer that it is done, and read on.
    Answer,
    /// The snapshot is complete. All memory must be read before the answer: the VM ends then, and
    /// nobody else has it.
    Keep,
    /// The sender gives up: answer that this is done; there is no snapshot.
    Abandoned,
}

/// What was handed over so far.
#[derive(Debug, Default)]
pub struct HandOff {
    is_started: bool,
    slots: Vec<u32>,
    config: Option<(Vec<u8>, Memory)>,
    state: Option<Vec<u8>>,
    runs: bool,
}

/// All that a hand-off brings but the memory itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// The configuration as it came.
    pub config: Vec<u8>,
    /// The state of processors and devices as it came.
    pub state: Vec<u8>,
    pub memory: Memory,
    /// The guest ran when it was handed over.
    pub runs: bool,
}

impl HandOff {
    /// Takes a request with its payload. A slot's descriptor is the caller's to keep, in the order
    /// of the requests.
    ///
    /// # Errors
    /// It does not belong there, or what it says breaks a rule.
    pub fn take(&mut self, command: Command, payload: Vec<u8>) -> Result<Step, MigrationError> {
        match command {
            Command::Memory => return Err(MigrationError::NotLocal),
            Command::Abandon if self.is_started => return Ok(Step::Abandoned),
            Command::Start if !self.is_started => self.is_started = true,
            Command::MemoryFd if self.is_started && self.config.is_none() => {
                self.take_slot(&payload)?;
            }
            Command::Config if self.is_started && self.config.is_none() => {
                let memory = Memory::of_config(&payload)?;
                memory.check_slots(&self.slots)?;
                self.config = Some((payload, memory));
            }
            Command::State if self.config.is_some() && self.state.is_none() => {
                self.state = Some(payload);
            }
            Command::Complete | Command::CompletePaused if self.state.is_some() => {
                self.runs = command == Command::Complete;
                return Ok(Step::Keep);
            }
            _ => return Err(MigrationError::Order { command, expected: self.expected() }),
        }
        Ok(Step::Answer)
    }

    fn take_slot(&mut self, payload: &[u8]) -> Result<(), MigrationError> {
        let command = Command::MemoryFd;
        let given = payload.len() as u64;
        let bytes = <[u8; 4]>::try_from(payload).map_err(|_| MigrationError::Length {
            command,
            given,
            expected: 4,
        })?;
        let slot = u32::from_le_bytes(bytes);
        if self.slots.contains(&slot) {
            return Err(MigrationError::Twice { slot });
        }
        if self.slots.len() == MAPPINGS_MAX {
            return Err(MigrationError::Count { given: MAPPINGS_MAX + 1 });
        }
        self.slots.push(slot);
        Ok(())
    }

    fn expected(&self) -> &'static str {
        match (self.is_started, &self.config, &self.state) {
            (false, ..) => "Start",
            (true, None, _) => "MemoryFd or Config",
            (true, Some(_), None) => "State",
            (true, Some(_), Some(_)) => "Complete or CompletePaused",
        }
    }

    /// The slots whose memory was handed over, in order.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// What was handed over; nothing before [`Step::Keep`].
    pub fn parts(self) -> Option<Parts> {
        let ((config, memory), state) = (self.config?, self.state?);
        Some(Parts { config, state, memory, runs: self.runs })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CONFIG: &[u8] = b"{\"memory_manager_data\":{\"guest_ram_mappings\":[\
        {\"slot\":0,\"gpa\":0,\"size\":4096,\"file_offset\":0}]}}";

    fn payload(command: Command) -> Vec<u8> {
        match command {
            Command::MemoryFd => vec![0; 4],
            Command::Config => CONFIG.to_vec(),
            Command::State => b"state".to_vec(),
            _ => Vec::new(),
        }
    }

    fn run(commands: &[Command]) -> Result<(HandOff, Step), MigrationError> {
        let mut hand_off = HandOff::default();
        let mut last = Step::Answer;
        for command in commands {
            assert_eq!(last, Step::Answer, "nothing comes after the end");
            last = hand_off.take(*command, payload(*command))?;
        }
        Ok((hand_off, last))
    }

    #[test]
    fn a_whole_hand_off_is_kept() {
        use Command::{Complete, CompletePaused, Config, MemoryFd, Start, State};
        for (end, runs) in [(Complete, true), (CompletePaused, false)] {
            let (hand_off, step) = run(&[Start, MemoryFd, Config, State, end]).expect("in order");
            assert_eq!((step, hand_off.slots()), (Step::Keep, &[0][..]));
            let parts = hand_off.parts().expect("complete");
            assert_eq!((parts.runs, parts.memory.pages()), (runs, 1));
            assert_eq!((&parts.config[..], &parts.state[..]), (CONFIG, &b"state"[..]));
        }
    }

    #[test]
    fn what_comes_out_of_order_is_refused() {
        use Command::{Complete, Config, Memory, MemoryFd, PageFault, Start, State};
        let wrong = |commands: &[Command]| run(commands).map(|_| ()).expect_err("out of order");
        for commands in [
            &[MemoryFd][..],
            &[Start, Start],
            &[Start, State],
            &[Start, MemoryFd, Config, MemoryFd],
            &[Start, MemoryFd, Config, Config],
            &[Start, MemoryFd, Config, Complete],
            &[Start, MemoryFd, Config, State, State],
            &[Start, PageFault],
        ] {
            assert!(matches!(wrong(commands), MigrationError::Order { .. }), "{commands:?}");
        }
        assert_eq!(wrong(&[Start, Memory]), MigrationError::NotLocal);
        assert_eq!(wrong(&[Start, Config]), MigrationError::NoMemory { slot: 0 });
        assert_eq!(wrong(&[Start, MemoryFd, MemoryFd]), MigrationError::Twice { slot: 0 });
        let (given_up, step) = run(&[Start, MemoryFd, Command::Abandon]).expect("at any time");
        assert_eq!((step, given_up.parts()), (Step::Abandoned, None));
    }

    proptest! {
        /// In no order is a snapshot kept that lacks a part.
        #[test]
        fn only_whole_snapshots_are_kept(commands in proptest::collection::vec(
            prop_oneof![
                Just(Command::Start), Just(Command::Config), Just(Command::State),
                Just(Command::Complete), Just(Command::MemoryFd), Just(Command::Abandon),
            ],
            0..9,
        )) {
            let mut hand_off = HandOff::default();
            for (at, command) in commands.iter().enumerate() {
                match hand_off.take(*command, payload(*command)) {
                    Ok(Step::Answer) => {}
                    Ok(Step::Keep) => {
                        prop_assert_eq!(at, 4);
                        prop_assert!(hand_off.parts().is_some());
                        break;
                    }
                    Ok(Step::Abandoned) | Err(_) => break,
                }
            }
        }
    }
}
