//! Messages to the keeper of far memory, from the thread that talks to the pool and from the
//! server.

use super::plan::Answer;

/// A message to the keeper.
#[derive(Debug)]
pub enum News {
    Answer(Answer),
    /// The pool has been told that the server ends.
    Left,
    End,
}
