//! Encoding requests, and the reply that each expects.

use farpool_units::exactly;

use super::binary;
use super::value::{push_key, push_value};
use crate::workload::{KeyNumber, Operation, Workload};

/// The protocol spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// memcached's classic text commands.
    Text,
    /// memcached's meta commands.
    Meta,
    /// memcached's binary protocol.
    Binary,
    /// Redis's, for comparisons: GET or MGET, SET, DEL.
    Redis,
    /// KeyVault, the protocol of docs/contributors/kv-protocol.md, over sockets.
    KeyVault { checked: bool },
    /// Any bytes, for a bare echo server that returns some: the floor.
    Echo,
}

/// The reply that a request expects. Its keys are in the connection's list of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    pub operation: Operation,
    pub keys: usize,
}

/// Writes requests of one workload in one protocol.
#[derive(Debug, Clone, Copy)]
pub struct Writer<'a> {
    pub workload: &'a Workload,
    pub protocol: Protocol,
}

impl Writer<'_> {
    /// Appends a request on these keys; only reads take several. Meta and binary reads of several
    /// keys are as many commands but one expected reply.
    pub fn push(&self, out: &mut Vec<u8>, operation: Operation, keys: &[KeyNumber]) {
        match (operation, self.protocol) {
            (_, Protocol::Echo) => out.extend_from_slice(&ECHO_REQUEST),
            (_, Protocol::KeyVault { .. }) => {
                debug_assert!(false, "a connection numbers its frames")
            }
            (Operation::Get, Protocol::Text) => {
                out.extend_from_slice(b"get");
                for &key in keys {
                    out.push(b' ');
                    push_key(out, key, self.workload.key_bytes(key));
                }
                out.extend_from_slice(b"\r\n");
            }
            (Operation::Get, Protocol::Meta) => {
                for &key in keys {
                    self.push_command(out, b"mg ", key);
                    out.extend_from_slice(b" v\r\n");
                }
            }
            (_, Protocol::Binary) => binary::push(out, self.workload, operation, keys),
            (_, Protocol::Redis) => self.push_redis(out, operation, keys),
            (Operation::Set, _) => keys.iter().for_each(|&key| self.push_set(out, key)),
            (Operation::Delete, protocol) => {
                let command: &[u8] = if protocol == Protocol::Text { b"delete " } else { b"md " };
                for &key in keys {
                    self.push_command(out, command, key);
                    out.extend_from_slice(b"\r\n");
                }
            }
        }
    }

    fn push_redis(&self, out: &mut Vec<u8>, operation: Operation, keys: &[KeyNumber]) {
        let lifetime_s = keys.first().map_or(0, |&key| self.workload.lifetime_s(key));
        let (name, words): (&[u8], usize) = match operation {
            Operation::Get if keys.len() == 1 => (b"GET", 2),
            Operation::Get => (b"MGET", 1 + keys.len()),
            Operation::Set => (b"SET", if lifetime_s == 0 { 3 } else { 5 }),
            Operation::Delete => (b"DEL", 1 + keys.len()),
        };
        out.push(b'*');
        push_number(out, words);
        out.extend_from_slice(b"\r\n");
        let word = |out: &mut Vec<u8>, bytes: usize, push: &dyn Fn(&mut Vec<u8>)| {
            out.push(b'$');
            push_number(out, bytes);
            out.extend_from_slice(b"\r\n");
            push(out);
            out.extend_from_slice(b"\r\n");
        };
        word(out, name.len(), &|out| out.extend_from_slice(name));
        for &key in keys {
            let bytes = self.workload.key_bytes(key);
            word(out, bytes, &|out| push_key(out, key, bytes));
            if operation == Operation::Set {
                let bytes = self.workload.value_bytes(key);
                word(out, bytes, &|out| push_value(out, key, bytes));
                if lifetime_s > 0 {
                    word(out, 2, &|out| out.extend_from_slice(b"EX"));
                    let mut digits = Vec::new();
                    push_number(&mut digits, lifetime_s as usize);
                    word(out, digits.len(), &|out| out.extend_from_slice(&digits));
                }
            }
        }
    }

    fn push_command(&self, out: &mut Vec<u8>, command: &[u8], key: KeyNumber) {
        out.extend_from_slice(command);
        push_key(out, key, self.workload.key_bytes(key));
    }

    fn push_set(&self, out: &mut Vec<u8>, key: KeyNumber) {
        let bytes = self.workload.value_bytes(key);
        let lifetime_s = self.workload.lifetime_s(key);
        if self.protocol == Protocol::Text {
            self.push_command(out, b"set ", key);
            out.extend_from_slice(b" 0 ");
            push_number(out, lifetime_s as usize);
            out.push(b' ');
            push_number(out, bytes);
        } else {
            self.push_command(out, b"ms ", key);
            out.push(b' ');
            push_number(out, bytes);
            out.extend_from_slice(b" T");
            push_number(out, lifetime_s as usize);
        }
        out.extend_from_slice(b"\r\n");
        push_value(out, key, bytes);
        out.extend_from_slice(b"\r\n");
    }
}

/// The floor's request: as long as a `get` of a 12-byte key.
pub const ECHO_REQUEST: [u8; 18] = *b"get k00000000000\r\n";

fn push_number(out: &mut Vec<u8>, number: usize) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    let mut left = number;
    loop {
        at -= 1;
        digits[at] = b'0' + exactly::<u8, _>(left % 10);
        left /= 10;
        if left == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}
