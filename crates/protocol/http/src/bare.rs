//! Words for the refusals that the HTTP library answers by itself, without a body.
//!
//! A request that cannot be read as one (its line or head is too long or malformed) never reaches a
//! router. Invariant: such an answer is a problem document, too; every other byte passes unchanged.
//! What a router answers has a body wherever it has one of these statuses, so it is told apart by
//! that.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use farpool_api::{Problem, ProblemKind};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::PROBLEM_TYPE;

/// A stream on which bare refusals are worded.
#[derive(Debug)]
pub(crate) struct Worded<S> {
    stream: S,
    /// What is still to be written in place of a bare refusal.
    left: Vec<u8>,
}

impl<S: AsyncWrite + Unpin> Worded<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, left: Vec::new() }
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
}

/// Returns the worded form of a bare refusal.
fn worded(bytes: &[u8]) -> Option<Vec<u8>> {
    let bytes = Some(bytes).filter(|bytes| bytes.starts_with(b"HTTP/1."))?;
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
        if let Some(worded) = worded(bytes) {
            self.left = worded;
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        all: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.write_left(context))?;
        // A bare refusal has no body, so it comes alone.
        let mut filled = all.iter().filter(|bytes| !bytes.is_empty());
        if let (Some(bytes), None) = (filled.next(), filled.next()) {
            return self.poll_write(context, bytes);
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, all)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
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

    /// What has arrived after writing these parts.
    async fn sent(parts: &[&[u8]], is_vectored: bool) -> Vec<u8> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (near, mut far) = tokio::io::duplex(4096);
        let mut near = Worded::new(near);
        if is_vectored {
            let parts: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
            let length: usize = parts.iter().map(|part| part.len()).sum();
            assert_eq!(near.write_vectored(&parts).await.unwrap(), length);
        } else {
            for part in parts {
                near.write_all(part).await.unwrap();
            }
        }
        near.shutdown().await.unwrap();
        drop(near);
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).await.unwrap();
        bytes
    }

    #[tokio::test]
    async fn all_but_a_bare_refusal_passes_unchanged_in_one_piece_or_several() {
        let answer: [&[u8]; 2] = [b"HTTP/1.1 400 Bad Request\r\ncontent-length: 3\r\n\r\n", b"abc"];
        for is_vectored in [false, true] {
            assert_eq!(sent(&answer, is_vectored).await, answer.concat());
            assert_eq!(sent(&[BARE, b""], is_vectored).await, worded(BARE).unwrap());
        }
        let (near, _far) = tokio::net::UnixStream::pair().unwrap();
        assert!(Worded::new(near).is_write_vectored(), "a socket takes several pieces at once");
    }
}
