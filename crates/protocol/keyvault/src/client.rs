//! A client of one server: it knows which shard owns a key and talks to that shard's thread
//! directly.
//!
//! [`Connection`] is one connection to one shard: requests are sent in batches, answers arrive in
//! any order, and at most as many requests are unanswered as the server granted. [`Client`] has one
//! to each shard and offers plain calls.

mod connection;

use std::net::SocketAddr;
use std::path::PathBuf;

use rustix::io::Errno;

pub use connection::{ANSWER_RING_BYTES, Answer, Connection, REQUEST_RING_BYTES};

use crate::frame::{FrameError, Status};
use crate::lease;
use crate::message::{Item, KeyList, Request, SetMode, read_found, read_numbers};
use crate::owner::{hash_key, shard_of};

/// Credits that a client asks for by default.
pub const CREDITS: u32 = 256;
/// The address of a server of this protocol.
#[derive(Debug, Clone)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
    /// A unix socket for the greeting, shared memory afterwards.
    Shared(PathBuf),
}

/// Errors between client and server.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection came about.
    #[error("cannot connect to {address:?}: {source}")]
    Connect {
        /// The server's address.
        address: Address,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A call on the connection failed.
    #[error("the connection broke: {0}")]
    Io(#[from] Errno),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The bytes received are no frame.
    #[error("the server sent an invalid frame: {0}")]
    Frame(#[from] FrameError),
    /// The server refused.
    #[error("the server answered {0:?}")]
    Status(Status),
    /// The body of an answer does not match the request.
    #[error("the server's answer is invalid")]
    Answer,
    /// A key or value that no frame can carry.
    #[error("the key is empty or longer than 250 bytes, or the value longer than a frame")]
    TooLong,
}

/// An item that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// The flags that the item was stored with.
    pub client_flags: u32,
    /// The CAS number of the item.
    pub cas: u64,
    /// The value.
    pub bytes: Vec<u8>,
}

impl From<Item<'_>> for Value {
    fn from(item: Item<'_>) -> Self {
        Self { client_flags: item.client_flags, cas: item.cas, bytes: item.value.to_vec() }
    }
}

/// A client with a connection to every shard.
#[derive(Debug)]
pub struct Client {
    connections: Vec<Connection>,
}

impl Client {
    /// Connects to all shards of a server.
    pub fn connect(address: &Address) -> Result<Self, ClientError> {
        let unchecked = matches!(address, Address::Shared(_));
        let first = Connection::connect(address, 0, CREDITS, unchecked)?;
        let shards = first.granted().shard;
        let mut connections = vec![first];
        for shard in 1..shards {
            connections.push(Connection::connect(address, shard, CREDITS, unchecked)?);
        }
        Ok(Self { connections })
    }

    /// As [`Self::connect`], but also asks for leases of values of at least `bytes_min`, for
    /// [`Self::get_lease`].
    pub fn connect_leasing(address: &Address, bytes_min: u32) -> Result<Self, ClientError> {
        let unchecked = matches!(address, Address::Shared(_));
        let connect =
            |shard| Connection::connect_leasing(address, shard, CREDITS, unchecked, bytes_min);
        let mut connections = vec![connect(0)?];
        for shard in 1..connections[0].granted().shard {
            connections.push(connect(shard)?);
        }
        Ok(Self { connections })
    }

    /// True if the server grants leases; otherwise every value is sent as a copy.
    #[must_use]
    pub fn is_leasing(&self) -> bool {
        self.connections.iter().all(|it| it.leases().is_some())
    }

    /// Returns the item of a key, read in place in the server's memory if possible, until it is
    /// dropped. Kept items pin that memory: a server grants a limited number of leases, then
    /// copies.
    pub fn get_lease(&mut self, key: &[u8]) -> Result<Option<lease::Value>, ClientError> {
        let shard = self.owner(key);
        let Some(leases) = self.connections[shard].leases().cloned() else {
            let value = self.get(key)?;
            return Ok(value.map(|it| lease::Value::copied(it.client_flags, it.cas, it.bytes)));
        };
        self.call(shard, &Request::GetLease { key }, |status, body| match status {
            Status::Ok => Ok(Some(leases.read(body).ok_or(ClientError::Answer)?)),
            Status::NotFound => Ok(None),
            other => Err(ClientError::Status(other)),
        })
    }

    /// Tells the server of all ended leases now. Otherwise that happens in batches, before later
    /// requests.
    pub fn release_ended(&mut self) -> Result<(), ClientError> {
        self.connections.iter_mut().try_for_each(Connection::release_ended)
    }

    /// How many shards the server has.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.connections.len()
    }

    fn owner(&self, key: &[u8]) -> usize {
        shard_of(hash_key(key), self.connections.len())
    }

    fn call<T>(
        &mut self,
        shard: usize,
        request: &Request<'_>,
        read: impl FnOnce(Status, &[u8]) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let connection = &mut self.connections[shard];
        let number = connection.send(request)?;
        connection.flush()?;
        let mut read = Some(read);
        let mut result = None;
        while result.is_none() {
            // After an error, answers to earlier requests may still arrive.
            connection.receive(|answer| {
                if answer.request == number
                    && let Some(read) = read.take()
                {
                    result = Some(read(answer.status, answer.body));
                }
            })?;
        }
        result.unwrap_or(Err(ClientError::Answer))
    }

    /// Returns the item of a key, if there is one.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Value>, ClientError> {
        self.call(self.owner(key), &Request::Get { key }, |status, body| match status {
            Status::Ok => Ok(Some(Item::read(body).ok_or(ClientError::Answer)?.into())),
            Status::NotFound => Ok(None),
            other => Err(ClientError::Status(other)),
        })
    }

    /// Returns the items of many keys, in their order; all shards are asked at the same time.
    pub fn get_many(&mut self, keys: &[&[u8]]) -> Result<Vec<Option<Value>>, ClientError> {
        let mut values = vec![None; keys.len()];
        let mut left: Vec<usize> = (0..keys.len()).collect();
        while !left.is_empty() {
            let mut lists = vec![(KeyList::default(), Vec::new()); self.connections.len()];
            let mut again = Vec::new();
            for &at in &left {
                let (list, places) = &mut lists[self.owner(keys[at])];
                if list.push(keys[at]) {
                    places.push(at);
                } else if places.is_empty() {
                    return Err(ClientError::TooLong);
                } else {
                    again.push(at);
                }
            }
            let mut numbers = vec![None; lists.len()];
            for ((connection, (list, places)), number) in
                self.connections.iter_mut().zip(&lists).zip(&mut numbers)
            {
                if !places.is_empty() {
                    *number = Some(connection.send(&Request::MultiGet(list.keys()))?);
                    connection.flush()?;
                }
            }
            for ((connection, (_, places)), number) in
                self.connections.iter_mut().zip(&lists).zip(numbers)
            {
                let Some(number) = number else { continue };
                let mut result = None;
                while result.is_none() {
                    connection.receive(|answer| {
                        if answer.request == number {
                            result = Some(take_found(&answer, places, &mut values));
                        }
                    })?;
                }
                let looked_at = result.unwrap_or(Err(ClientError::Answer))?;
                again.extend_from_slice(&places[looked_at..]);
            }
            left = again;
        }
        Ok(values)
    }

    /// Stores a value. Returns the new CAS number, or None if the mode or the CAS number did not
    /// allow it.
    pub fn set(
        &mut self,
        key: &[u8],
        value: &[u8],
        how: Storing,
    ) -> Result<Option<u64>, ClientError> {
        let Storing { mode, client_flags, exptime, cas } = how;
        let request = Request::Set { mode, key, value, client_flags, exptime, cas };
        self.call(self.owner(key), &request, |status, body| match status {
            Status::Ok => Ok(Some(read_numbers(body).ok_or(ClientError::Answer)?.0)),
            Status::NotStored | Status::Exists | Status::NotFound => Ok(None),
            other => Err(ClientError::Status(other)),
        })
    }

    /// Deletes an item. True if there was one.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, ClientError> {
        self.call(self.owner(key), &Request::Delete { key, cas: 0 }, yes_or_no)
    }

    /// Sets an item's expiry. True if there is one.
    pub fn touch(&mut self, key: &[u8], exptime: i32) -> Result<bool, ClientError> {
        self.call(self.owner(key), &Request::Touch { key, exptime }, yes_or_no)
    }

    /// Adds to a number, or subtracts down to 0. Returns the new number, or None if there is
    /// neither an item nor an `initial`.
    pub fn change(
        &mut self,
        key: &[u8],
        delta: i64,
        initial: Option<u64>,
    ) -> Result<Option<u64>, ClientError> {
        let request = Request::Change {
            key,
            delta: delta.unsigned_abs(),
            subtracts: delta < 0,
            initial,
            exptime: 0,
        };
        self.call(self.owner(key), &request, |status, body| match status {
            Status::Ok => Ok(Some(read_numbers(body).ok_or(ClientError::Answer)?.0)),
            Status::NotFound => Ok(None),
            other => Err(ClientError::Status(other)),
        })
    }

    /// Deletes all items of all shards.
    pub fn flush_all(&mut self) -> Result<(), ClientError> {
        self.call(0, &Request::Flush { delay_s: 0 }, |status, _| match status {
            Status::Ok => Ok(()),
            other => Err(ClientError::Status(other)),
        })
    }
}

/// How SET stores.
#[derive(Debug, Clone, Copy)]
pub struct Storing {
    /// What is done where there is an item, or none.
    pub mode: SetMode,
    /// Flags that are kept with the item.
    pub client_flags: u32,
    /// As memcached's: 0 for never, up to 30 days relative to now, else Unix time.
    pub exptime: i32,
    /// The CAS number that the item must have; 0 = any.
    pub cas: u64,
}

impl Default for Storing {
    fn default() -> Self {
        Self { mode: SetMode::Set, client_flags: 0, exptime: 0, cas: 0 }
    }
}

fn take_found(
    answer: &Answer<'_>,
    places: &[usize],
    values: &mut [Option<Value>],
) -> Result<usize, ClientError> {
    if answer.status != Status::Ok {
        return Err(ClientError::Status(answer.status));
    }
    let (looked_at, found) = read_found(answer.body).ok_or(ClientError::Answer)?;
    for (index, item) in found {
        let place = places.get(usize::from(index)).ok_or(ClientError::Answer)?;
        values[*place] = Some(item.into());
    }
    // At least one, or the retries would never end.
    let looked_at = usize::from(looked_at);
    if looked_at == 0 || looked_at > places.len() {
        Err(ClientError::Answer)
    } else {
        Ok(looked_at)
    }
}

fn yes_or_no(status: Status, _: &[u8]) -> Result<bool, ClientError> {
    match status {
        Status::Ok => Ok(true),
        Status::NotFound => Ok(false),
        other => Err(ClientError::Status(other)),
    }
}
