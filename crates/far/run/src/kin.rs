//! The processes of a tree that was attached to.
//!
//! A child whose parent ends gets another parent, so processes are remembered once seen. One that
//! is born and orphaned between two checks is not found: this process is not its subreaper.

use std::collections::HashMap;

use crate::proc::{is_zombie, start_ticks};

/// By process id and start time, as ids are reused.
#[derive(Debug, Default)]
pub struct Kin {
    members: HashMap<u32, u64>,
}

impl Kin {
    pub fn of(root: u32) -> Kin {
        let mut kin = Kin::default();
        kin.learn(&[root]);
        kin
    }

    pub fn learn(&mut self, pids: &[u32]) {
        for pid in pids {
            if let Some(ticks) = start_ticks(*pid) {
                self.members.entry(*pid).or_insert(ticks);
            }
        }
    }

    /// The living members; the others are forgotten.
    pub fn living(&mut self) -> Vec<u32> {
        self.members.retain(|pid, ticks| lives(*pid, *ticks));
        self.members.keys().copied().collect()
    }

    pub fn is_over(&self) -> bool {
        !self.members.iter().any(|(pid, ticks)| lives(*pid, *ticks))
    }
}

fn lives(pid: u32, ticks: u64) -> bool {
    start_ticks(pid) == Some(ticks) && !is_zombie(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_have_ended_are_forgotten() {
        let own = std::process::id();
        let mut kin = Kin::of(own);
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("sleep");
        kin.learn(&[own, child.id()]);
        assert_eq!(kin.living().len(), 2);
        child.kill().expect("a signal");
        child.wait().expect("its end");
        assert_eq!(kin.living(), [own]);
        assert!(!kin.is_over());
        kin.members.insert(own, 0);
        assert!(kin.is_over(), "the number is used again");
    }
}
