//! Words for the refusals that the HTTP library answers by itself, without a body.
//!
//! A request that cannot be read as one (its line or head is too long or malformed) never reaches a
//! router. Invariant: such an answer is a problem document, too; every other byte passes unchanged.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use farpool_api::{Problem, ProblemKind};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::PROBLEM_TYPE;

/// A stream on which bare refusals are worded.
#[derive(Debug)]
pub(crate) struct Worded<S> {
    stream: S,
    /// Requests whose answers have not begun: while there is one, answers are the router's.
    owed: Arc<AtomicUsize>,
    /// What is still to be written in place of a bare refusal.
    left: Vec<u8>,
}

impl<S: AsyncWrite + Unpin> Worded<S> {
    pub(crate) fn new(stream: S, owed: Arc<AtomicUsize>) -> Self {
        Self { stream, owed, left: Vec::new() }
    }

    fn write_left(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.left.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.left))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.left.drain(..written);
        }
        Poll::Ready(Ok(()))
    }

    /// Whether bytes begin the answer to a request; notes that it has begun.
    fn is_owed(&self, bytes: &[u8]) -> bool {
        let begins = bytes.starts_with(b"HTTP/1.");
        let less = |owed: usize| owed.checked_sub(1);
        !begins || self.owed.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok()
    }
}

/// Returns the worded form of a bare refusal.
fn worded(bytes: &[u8]) -> Option<Vec<u8>> {
    let head = std::str::from_utf8(bytes).ok()?.strip_suffix("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?;
    let is_bare = head.lines().any(|line| line.eq_ignore_ascii_case("content-length: 0"));
    let (kind, detail) = match status {
        "400" => (ProblemKind::BadRequest, "this is no HTTP request"),
        "414" => (ProblemKind::UriTooLong, "the path and query are above 64 KiB"),
        "431" => (ProblemKind::HeadTooLarge, "the header fields are too many or too large"),
        _ => return None,
    };
    let body = serde_json::to_string(&Problem::new(kind, detail)).ok().filter(|_| is_bare)?;
    let fields = head.lines().filter(|line| !line.eq_ignore_ascii_case("content-length: 0"));
    let fields: Vec<&str> = fields.collect();
    let head = fields.join("\r\n");
    let length = body.len();
    let kind = format!("content-type: {PROBLEM_TYPE}\r\ncontent-length: {length}");
    Some(format!("{head}\r\n{kind}\r\n\r\n{body}").into_bytes())
}

impl<S: AsyncRead + Unpin> AsyncRead for Worded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Worded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.write_left(context))?;
        if bytes.starts_with(b"HTTP/1.")
            && self.owed.load(Ordering::Acquire) == 0
            && let Some(worded) = worded(bytes)
        {
            self.left = worded;
            return Poll::Ready(Ok(bytes.len()));
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        // Only counted; what was begun goes on.
        let _ = self.is_owed(bytes);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_left(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_left(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BARE: &[u8] = b"HTTP/1.1 414 URI Too Long\r\ncontent-length: 0\r\ndate: x\r\n\r\n";

    #[test]
    fn only_a_bare_refusal_is_worded() {
        let text = String::from_utf8(worded(BARE).unwrap()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 414 URI Too Long\r\ndate: x\r\n"), "{head}");
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
        let problem: Problem = serde_json::from_str(body).unwrap();
        assert_eq!(problem.status, 414);
        for other in [
            &b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"[..],
            b"HTTP/1.1 414 URI Too Long\r\ncontent-length: 3\r\n\r\nabc",
            b"HTTP/1.1 414 URI Too Long\r\ncontent-length: 0\r\n",
            b"",
            b"\xff\r\n\r\n",
        ] {
            assert_eq!(worded(other), None);
        }
    }

    #[tokio::test]
    async fn an_answer_that_a_request_is_owed_passes_unchanged() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        for (owed, is_worded) in [(1, false), (0, true)] {
            let (near, mut far) = tokio::io::duplex(4096);
            let mut near = Worded::new(near, Arc::new(AtomicUsize::new(owed)));
            near.write_all(BARE).await.unwrap();
            near.shutdown().await.unwrap();
            drop(near);
            let mut text = Vec::new();
            far.read_to_end(&mut text).await.unwrap();
            assert_eq!(text != BARE, is_worded);
        }
    }
}
