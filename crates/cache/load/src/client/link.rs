//! One connection to a server: requests out, replies in, in order.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::Errno;

use super::asked::{Asked, LoadError, Server};
use super::keyvault::KeyVault;
use super::reply::{Reader, Said};
use super::request::{Expected, Protocol, Writer};
use crate::workload::{KeyNumber, Operation, Workload};

/// The most that one read takes.
const READ_BYTES: usize = 256 << 10;
/// How long connecting may take.
const CONNECT_WAIT: Duration = Duration::from_secs(5);

/// A connection and its requests under way.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    out: Vec<u8>,
    sent: usize,
    input: Vec<u8>,
    /// Its KeyVault state, if it speaks KeyVault; the next three fields then stay empty.
    keyvault: Option<KeyVault>,
    asked: VecDeque<Asked>,
    /// Keys of the requests under way, from index `first_key`.
    keys: Vec<KeyNumber>,
    first_key: usize,
    pub(super) bytes_sent: u64,
    pub(super) bytes_received: u64,
    /// When the batch under way was written.
    pub(super) batch_begin_ns: u64,
    /// Missed keys that are to be stored.
    pub(super) to_store: Vec<KeyNumber>,
    /// Whether epoll waits for room to send the rest of the output.
    pub(super) waits_for_room: bool,
}

impl Link {
    /// Connects, as the connection with this number.
    pub(super) fn connect(
        server: &Server,
        protocol: Protocol,
        number: usize,
    ) -> Result<Self, LoadError> {
        let failed = |source| LoadError::Connect { server: server.clone(), source };
        let (socket, keyvault) = match server {
            Server::Tcp(address) => {
                let connect = || {
                    let stream =
                        TcpStream::connect_timeout(address, CONNECT_WAIT).map_err(failed)?;
                    stream.set_nodelay(true).map_err(failed)?;
                    stream.set_read_timeout(Some(CONNECT_WAIT)).map_err(failed)?;
                    Ok(stream)
                };
                Self::greet(connect, protocol, number)?
            }
            Server::Unix(path) => {
                let connect = || {
                    let stream = UnixStream::connect(path).map_err(failed)?;
                    stream.set_read_timeout(Some(CONNECT_WAIT)).map_err(failed)?;
                    Ok(stream)
                };
                Self::greet(connect, protocol, number)?
            }
        };
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self {
            socket,
            out: Vec::new(),
            sent: 0,
            input: Vec::with_capacity(READ_BYTES),
            keyvault,
            asked: VecDeque::new(),
            keys: Vec::new(),
            first_key: 0,
            bytes_sent: 0,
            bytes_received: 0,
            batch_begin_ns: 0,
            to_store: Vec::new(),
            waits_for_room: false,
        })
    }

    fn greet<S: Read + Write + Into<OwnedFd>>(
        connect: impl Fn() -> Result<S, LoadError>,
        protocol: Protocol,
        number: usize,
    ) -> Result<(OwnedFd, Option<KeyVault>), LoadError> {
        let Protocol::KeyVault { checked } = protocol else { return Ok((connect()?.into(), None)) };
        let (socket, keyvault) = KeyVault::connect(connect, number, checked)?;
        Ok((socket.into(), Some(keyvault)))
    }

    /// Whether a client that knows the shards would request this key here.
    pub(super) fn owns(&mut self, workload: &Workload, key: KeyNumber) -> bool {
        self.keyvault.as_mut().is_none_or(|keyvault| keyvault.owns(workload, key))
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Adds a request to the output.
    pub(super) fn ask(
        &mut self,
        writer: &Writer<'_>,
        operation: Operation,
        keys: &[KeyNumber],
        begin_ns: u64,
    ) {
        let asked = Asked { expected: Expected { operation, keys: keys.len() }, begin_ns };
        if let Some(keyvault) = &mut self.keyvault {
            return keyvault.ask(writer.workload, asked, keys, &mut self.out);
        }
        writer.push(&mut self.out, operation, keys);
        self.keys.extend_from_slice(keys);
        self.asked.push_back(asked);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.under_way() == 0
    }

    pub(super) fn under_way(&self) -> usize {
        self.keyvault.as_ref().map_or(self.asked.len(), KeyVault::under_way)
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Sends as much of the output as the socket takes.
    pub(super) fn flush(&mut self) -> Result<(), LoadError> {
        while self.sent < self.out.len() {
            let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &self.out[self.sent..], flags) {
                Ok(bytes) => {
                    self.sent += bytes;
                    self.bytes_sent += bytes as u64;
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(())
    }

    /// Reads once and hands every complete reply to `take`, with its keys.
    pub(super) fn receive(
        &mut self,
        reader: &Reader<'_>,
        mut take: impl FnMut(Asked, Said, &[KeyNumber]),
    ) -> Result<(), LoadError> {
        self.input.reserve(READ_BYTES);
        match rustix::io::read(&self.socket, rustix::buffer::spare_capacity(&mut self.input)) {
            Ok(0) => return Err(LoadError::Closed),
            Ok(bytes) => self.bytes_received += bytes as u64,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
        if let Some(keyvault) = &mut self.keyvault {
            let done = keyvault.receive(reader.workload, &self.input, &mut self.out, take)?;
            self.input.drain(..done);
            return Ok(());
        }
        let mut at = 0;
        while let Some(&asked) = self.asked.front() {
            let keys = &self.keys[self.first_key..self.first_key + asked.expected.keys];
            let Some((bytes, said)) = reader.read(&self.input[at..], asked.expected, keys)? else {
                break;
            };
            take(asked, said, keys);
            at += bytes;
            self.first_key += asked.expected.keys;
            self.asked.pop_front();
        }
        if self.asked.is_empty() {
            self.keys.clear();
            self.first_key = 0;
        } else if self.first_key > self.keys.len() / 2 {
            self.keys.drain(..self.first_key);
            self.first_key = 0;
        }
        self.input.drain(..at);
        Ok(())
    }
}
