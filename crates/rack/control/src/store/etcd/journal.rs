//! How a batch that is too long for one transaction of etcd still takes effect as a whole.
//!
//! 1. Each piece of the batch, as long as one transaction takes, is written to a journal.
//! 2. The mark is written: the batch counts from here on.
//! 3. Each piece is carried out, and the journal is removed.
//!
//! Every step is a fenced transaction. A leader that takes over carries out a marked journal from
//! its beginning, which changes nothing that has been carried out already, and removes one without
//! a mark. Nothing else is written in between: a leader writes one batch at a time.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{DATA_PREFIX, EtcdStore, StoreError, StoreOp, decode, encode};

/// Most operations of one transaction; etcd takes 128 by default.
const OPS_LIMIT: usize = 100;
const PIECE_PREFIX: &str = "farpool/journal/";
/// The first key after all that begin with the prefix.
const PIECE_END: &str = "farpool/journal0";
const MARK_KEY: &str = "farpool/journal-mark";

/// One operation as the journal has it; the value in base64.
#[derive(Serialize, Deserialize)]
struct Entry {
    key: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    value: Option<String>,
}

/// Returns the operations that count: of several changes of a key, the last one. A transaction may
/// name a key only once. Pure.
fn last_changes(ops: &[StoreOp]) -> Vec<&StoreOp> {
    let mut known = HashSet::with_capacity(ops.len());
    let mut last: Vec<_> = ops.iter().rev().filter(|op| known.insert(key_of(op))).collect();
    last.reverse();
    last
}

/// Returns the requests of each transaction that carries a batch out, in order. Pure.
fn transactions(ops: &[StoreOp]) -> Vec<Vec<Value>> {
    let last = last_changes(ops);
    let pieces: Vec<_> = last.chunks(OPS_LIMIT).collect();
    let changes = pieces.iter().map(|piece| piece.iter().map(|op| request(op)).collect());
    if pieces.len() <= 1 {
        return changes.collect();
    }
    let journal = pieces.iter().enumerate().map(|(place, piece)| {
        let entries: Vec<Entry> = piece.iter().map(|op| entry(op)).collect();
        vec![put(&piece_key(place), json!(entries).to_string())]
    });
    let mark = vec![put(MARK_KEY, pieces.len().to_string())];
    journal.chain([mark]).chain(changes).chain([removal()]).collect()
}

/// Removes the mark with the pieces, in one transaction.
fn removal() -> Vec<Value> {
    let pieces = json!({ "key": encode(PIECE_PREFIX), "range_end": encode(PIECE_END) });
    let mark = json!({ "key": encode(MARK_KEY) });
    [pieces, mark].map(|keys| json!({ "request_delete_range": keys })).into()
}

impl EtcdStore {
    /// Carries out a batch as a whole.
    pub(super) fn carry_out(&mut self, ops: &[StoreOp]) -> Result<(), StoreError> {
        transactions(ops).into_iter().try_for_each(|requests| self.fenced(requests))
    }

    /// Carries out what an earlier leader has left in a marked journal.
    pub(super) fn finish_journal(&mut self) -> Result<(), StoreError> {
        let mark = self.etcd.call("/v3/kv/range", &json!({ "key": encode(MARK_KEY) }))?;
        if let Some(mark) = mark["kvs"].get(0) {
            let mark = String::from_utf8_lossy(&decode(&mark["value"])?).into_owned();
            let count = mark.parse().map_err(|_| unreadable(MARK_KEY, &mark))?;
            tracing::info!(pieces = count, "a batch of the earlier leader is finished");
            for piece in 0..count {
                let ops = self.read_piece(piece)?;
                self.fenced(ops.iter().map(request).collect())?;
            }
        }
        self.fenced(removal())
    }

    fn read_piece(&self, place: usize) -> Result<Vec<StoreOp>, StoreError> {
        let key = piece_key(place);
        let answer = self.etcd.call("/v3/kv/range", &json!({ "key": encode(&key) }))?;
        let bytes = decode(&answer["kvs"][0]["value"])?;
        let entries: Vec<Entry> =
            serde_json::from_slice(&bytes).map_err(|error| unreadable(&key, &error.to_string()))?;
        entries.into_iter().map(operation).collect()
    }

    /// Carries out requests in one transaction, if this leader still leads.
    fn fenced(&mut self, requests: Vec<Value>) -> Result<(), StoreError> {
        let body = json!({ "compare": [self.fence()], "success": requests });
        if self.etcd.call("/v3/kv/txn", &body)?["succeeded"] == json!(true) {
            Ok(())
        } else {
            Err(StoreError::Fenced)
        }
    }
}

fn piece_key(place: usize) -> String {
    format!("{PIECE_PREFIX}{place:08}")
}

fn unreadable(key: &str, reason: &str) -> StoreError {
    StoreError::Io(format!("etcd's key {key} is not a journal of farpool: {reason}"))
}

fn key_of(op: &StoreOp) -> &str {
    match op {
        StoreOp::Put(key, _) | StoreOp::Delete(key) => key,
    }
}

fn put(key: &str, value: impl AsRef<[u8]>) -> Value {
    json!({ "request_put": { "key": encode(key), "value": encode(value) } })
}

fn request(op: &StoreOp) -> Value {
    let key = format!("{DATA_PREFIX}{}", key_of(op));
    match op {
        StoreOp::Put(_, value) => put(&key, value),
        StoreOp::Delete(_) => json!({ "request_delete_range": { "key": encode(key) } }),
    }
}

fn entry(op: &StoreOp) -> Entry {
    let value = match op {
        StoreOp::Put(_, value) => Some(encode(value)),
        StoreOp::Delete(_) => None,
    };
    Entry { key: key_of(op).to_owned(), value }
}

fn operation(entry: Entry) -> Result<StoreOp, StoreError> {
    match entry.value {
        Some(value) => Ok(StoreOp::Put(entry.key, decode(&json!(value))?)),
        None => Ok(StoreOp::Delete(entry.key)),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Carries out the first `count` transactions of a batch, as a leader that is killed then.
    /// Returns whether these are all.
    pub(in crate::store::etcd) fn leave(
        store: &mut EtcdStore,
        ops: &[StoreOp],
        count: usize,
    ) -> bool {
        let all = transactions(ops);
        let is_all = count == all.len();
        all.into_iter().take(count).for_each(|some| store.fenced(some).expect("it leads"));
        is_all
    }

    #[test]
    fn the_last_change_of_a_key_counts() {
        let put = |key: &str, value: &str| StoreOp::Put(key.into(), value.into());
        let ops = [put("a", "1"), put("b", "1"), StoreOp::Delete("a".into()), put("b", "2")];
        assert_eq!(last_changes(&ops), [&ops[2], &ops[3]]);
        assert!(last_changes(&[]).is_empty());
    }

    #[test]
    fn an_entry_becomes_the_operation_that_it_was_made_of() {
        let ops = [
            StoreOp::Put("a".into(), vec![0, 255]),
            StoreOp::Put("b".into(), vec![]),
            StoreOp::Delete("c".into()),
        ];
        for op in ops {
            let text = json!(entry(&op)).to_string();
            let read = operation(serde_json::from_str(&text).expect("an entry"));
            assert_eq!(read.expect("base64"), op);
        }
    }
}
