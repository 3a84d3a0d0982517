//! What the thread that keeps far memory hears, from the one that talks to the pool and the server.

use super::plan::Answer;

/// What the keeper hears.
#[derive(Debug)]
pub enum News {
    Answer(Answer),
    /// The pool was told that the server ends.
    Left,
    End,
}
