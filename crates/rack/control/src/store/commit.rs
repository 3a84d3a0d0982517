//! Group commit: one thread writes, and puts everything that was queued meanwhile into one commit.
//! Batches are numbered in the order in which the state changed. A request, even a read, is
//! answered only once the number it saw is durable, so no client is told what a crash could undo.

use std::sync::mpsc::{Receiver, Sender, channel};

use tokio::sync::watch;

use super::{Store, StoreOp};

/// Changes in one commit from which on no further batch is added: limits how long the first one
/// waits.
const BATCH_LIMIT: usize = 1_024;

/// How far the store has come.
#[derive(Clone, Debug, Default)]
pub(crate) struct CommitState {
    /// All batches up to this one are durable.
    pub durable: u64,
    /// Why nothing more will be durable, if the store has failed.
    pub failed: Option<String>,
}

/// The queue to the store's thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Committer {
    queue: Sender<(u64, Vec<StoreOp>)>,
    state: watch::Receiver<CommitState>,
}

impl Committer {
    /// Starts the thread, which calls `failed` once if the store fails.
    pub(crate) fn start(
        store: Box<dyn Store>,
        failed: impl FnOnce(&str) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (queue, jobs) = channel();
        let (sender, state) = watch::channel(CommitState::default());
        let work = move || write(store, &jobs, &sender, failed);
        std::thread::Builder::new().name("store".to_owned()).spawn(work)?;
        Ok(Self { queue, state })
    }

    /// Queues a batch. The caller holds the lock on the state, so numbers arrive in order.
    pub(crate) fn send(&self, number: u64, ops: Vec<StoreOp>) {
        // If the thread has ended, it has said why, and waiting for the number fails.
        let _ = self.queue.send((number, ops));
    }

    /// The number up to which all batches are durable.
    pub(crate) fn durable(&self) -> u64 {
        self.state.borrow().durable
    }

    /// Returns a receiver of how far the store has come.
    pub(crate) fn state(&self) -> watch::Receiver<CommitState> {
        self.state.clone()
    }
}

fn write(
    mut store: Box<dyn Store>,
    jobs: &Receiver<(u64, Vec<StoreOp>)>,
    state: &watch::Sender<CommitState>,
    failed: impl FnOnce(&str),
) {
    while let Ok((mut number, mut ops)) = jobs.recv() {
        while ops.len() < BATCH_LIMIT
            && let Ok((next, more)) = jobs.try_recv()
        {
            number = next;
            ops.extend(more);
        }
        match store.commit(&ops) {
            Ok(()) => state.send_modify(|state| state.durable = number),
            Err(error) => {
                let reason = error.to_string();
                state.send_modify(|state| state.failed = Some(reason.clone()));
                failed(&reason);
                return;
            }
        }
    }
}
