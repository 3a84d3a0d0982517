//! A thread's mail: its asks to other shards and its answers to other threads. They are gathered
//! over a round of the thread's loop and sent as one message to each.

mod asks;
pub(crate) mod mailbox;
pub(crate) mod merge;

use crate::me::Me;
use mailbox::{Address, Answer, Ask, Batch, Message};

/// Spare batches that are kept for their memory: one for each thread would be a lot with many
/// threads.
const SPARE_BATCHES: usize = 4;

/// What a thread sends at the end of the round, and spare memory for it.
#[derive(Debug)]
pub(crate) struct Mail {
    /// Asks, by shard.
    asks: Vec<Batch<Ask>>,
    /// Answers, by thread.
    answers: Vec<Batch<Answer>>,
    /// Batches that were answered or delivered, kept for their memory.
    spare_asks: Vec<Batch<Ask>>,
    spare_answers: Vec<Batch<Answer>>,
    /// Memory for messages taken from the mailbox.
    messages: Vec<Message>,
}

impl Mail {
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            asks: (0..shards).map(|_| Batch::default()).collect(),
            answers: (0..shards).map(|_| Batch::default()).collect(),
            spare_asks: Vec::new(),
            spare_answers: Vec::new(),
            messages: Vec::new(),
        }
    }

    /// Asks a shard; `write` appends the ask's bytes.
    #[inline]
    pub(crate) fn ask(
        &mut self,
        owner: usize,
        address: Address,
        ask: Ask,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        self.asks[owner].push(address, ask, write);
    }

    /// Where bytes of the next ask to a shard may be appended before the ask itself.
    #[inline]
    pub(crate) fn bytes_for(&mut self, owner: usize) -> &mut Vec<u8> {
        &mut self.asks[owner].bytes
    }

    /// Asks every shard but the thread's own.
    pub(crate) fn ask_others(&mut self, me: &Me, address: Address, ask: Ask) {
        let own = me.number;
        for (_, asks) in self.asks.iter_mut().enumerate().filter(|&(shard, _)| shard != own) {
            asks.push(address, ask, |_| {});
        }
    }

    /// Takes out this round's answers to a thread, to add to them. Put back with
    /// [`Self::return_answers`].
    pub(crate) fn take_answers(&mut self, to: usize) -> Batch<Answer> {
        std::mem::take(&mut self.answers[to])
    }

    pub(crate) fn return_answers(&mut self, to: usize, answers: Batch<Answer>) {
        self.answers[to] = answers;
    }

    /// Takes the messages that have arrived. Put back, empty, with [`Self::return_messages`].
    pub(crate) fn take_messages(&mut self, me: &Me) -> Vec<Message> {
        let mut messages = std::mem::take(&mut self.messages);
        me.mailbox().take_into(&mut messages);
        messages
    }

    pub(crate) fn return_messages(&mut self, messages: Vec<Message>) {
        self.messages = messages;
        self.spare_asks.truncate(SPARE_BATCHES);
        self.spare_answers.truncate(SPARE_BATCHES);
    }

    /// Keeps an answered batch for its memory.
    pub(crate) fn keep_asks(&mut self, mut batch: Batch<Ask>) {
        batch.clear();
        self.spare_asks.push(batch);
    }

    /// Keeps a delivered batch for its memory.
    pub(crate) fn keep_answers(&mut self, mut batch: Batch<Answer>) {
        batch.clear();
        self.spare_answers.push(batch);
    }

    /// Sends what was gathered.
    pub(crate) fn send(&mut self, me: &Me) {
        for to in 0..self.asks.len() {
            if !self.asks[to].is_empty() {
                let spare = self.spare_asks.pop().unwrap_or_default();
                let batch = std::mem::replace(&mut self.asks[to], spare);
                me.shared.mailboxes[to].put(Message::Asks { from: me.number, batch });
            }
            if !self.answers[to].is_empty() {
                let spare = self.spare_answers.pop().unwrap_or_default();
                let batch = std::mem::replace(&mut self.answers[to], spare);
                me.shared.mailboxes[to].put(Message::Answers(batch));
            }
        }
    }
}
