//! A small client of the redis protocol: requests on one connection, as many in flight as the
//! caller queues. It has only what the measurements need, and does not recover from errors.

use crate::BenchError;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// One connection to a redis server.
#[derive(Debug)]
pub struct Client {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    out: Vec<u8>,
    line: String,
}

impl Client {
    /// Connects to a server's unix socket. Later calls error with `WouldBlock` if the server does
    /// not answer for `patience`.
    ///
    /// # Errors
    /// No server listens there.
    pub fn connect(path: &Path, patience: Duration) -> io::Result<Self> {
        let writer = UnixStream::connect(path)?;
        writer.set_read_timeout(Some(patience))?;
        writer.set_write_timeout(Some(patience))?;
        Self::over(writer)
    }

    fn over(writer: UnixStream) -> io::Result<Self> {
        let reader = BufReader::with_capacity(64 << 10, writer.try_clone()?);
        Ok(Self { reader, writer, out: Vec::new(), line: String::new() })
    }

    /// Appends a request to those that are not sent yet.
    pub fn queue(&mut self, words: &[&[u8]]) {
        // Writing to a vector cannot fail.
        let _ = write!(self.out, "*{}\r\n", words.len());
        for word in words {
            let _ = write!(self.out, "${}\r\n", word.len());
            self.out.extend_from_slice(word);
            self.out.extend_from_slice(b"\r\n");
        }
    }

    /// Sends what was queued.
    ///
    /// # Errors
    /// The connection is broken, or the server does not read.
    pub fn send(&mut self) -> io::Result<()> {
        self.writer.write_all(&self.out)?;
        self.out.clear();
        Ok(())
    }

    /// Reads one answer. Puts the value of a GET into `value`, which is empty for other answers.
    ///
    /// # Errors
    /// `NotFound` if there is no such key. Other errors mean that redis refused the request or that
    /// the connection is broken.
    pub fn answer(&mut self, value: &mut Vec<u8>) -> io::Result<()> {
        value.clear();
        self.line.clear();
        self.reader.read_line(&mut self.line)?;
        let line = self.line.trim_end();
        match line.as_bytes().first() {
            None => Err(io::Error::new(ErrorKind::UnexpectedEof, "redis closed the connection")),
            Some(b'+' | b':') => Ok(()),
            Some(b'$') if line == "$-1" => Err(io::Error::new(ErrorKind::NotFound, "no such key")),
            Some(b'$') => {
                let len = line[1..].parse::<usize>();
                let len = len.map_err(|_| io::Error::other(format!("no value: {line}")))?;
                value.resize(len + 2, 0);
                self.reader.read_exact(value)?;
                value.truncate(len);
                Ok(())
            }
            _ => Err(io::Error::other(format!("redis answers {line:?}"))),
        }
    }

    /// Sends one request and reads its answer.
    ///
    /// # Errors
    /// As [`Self::send`] and [`Self::answer`].
    pub fn call(&mut self, words: &[&[u8]], value: &mut Vec<u8>) -> io::Result<()> {
        self.queue(words);
        self.send()?;
        self.answer(value)
    }
}

/// For `map_err` on requests and answers.
pub(crate) fn talk(error: io::Error) -> BenchError {
    BenchError::os("talk to redis-server")(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_are_the_protocols() {
        let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
        let mut client = Client::over(near).expect("a client");
        client.queue(&[b"GET", b"k1"]);
        client.queue(&[b"GET", b"k2"]);
        client.send().expect("the peer is there");
        let mut asked = [0u8; 42];
        far.read_exact(&mut asked).expect("both requests");
        assert_eq!(&asked, b"*2\r\n$3\r\nGET\r\n$2\r\nk1\r\n*2\r\n$3\r\nGET\r\n$2\r\nk2\r\n");
        far.write_all(b"$5\r\nab\r\nc\r\n+OK\r\n$-1\r\n-ERR no\r\n").expect("the client is there");
        let mut value = Vec::new();
        client.answer(&mut value).expect("a value");
        assert_eq!(value, b"ab\r\nc");
        client.answer(&mut value).expect("a status");
        assert!(value.is_empty());
        let mut refused = || client.answer(&mut value).expect_err("no value").kind();
        assert_eq!(refused(), ErrorKind::NotFound);
        assert_eq!(refused(), ErrorKind::Other);
        drop(far);
        assert_eq!(refused(), ErrorKind::UnexpectedEof);
    }
}
