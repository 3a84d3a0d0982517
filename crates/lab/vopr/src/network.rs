//! One flow: the bytes between a client's socket and a blade's, delayed, cut into pieces, spoiled
//! or swallowed on the way.
//!
//! Both are halves of socket pairs, so the product's code makes its usual system calls; this end of
//! each pair never blocks.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farpool_acms::Rng;
use farpool_wire::{ErrorCode, Header, Kind, Opcode, Response};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::clock;
use crate::liar::Liar;

/// Bytes taken from a socket at once.
pub(crate) const BITE_BYTES: usize = 64 << 10;

/// What the network does to bytes.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// The longest delay of a piece.
    pub delay_max_ns: u64,
    /// Pieces are cut where they like, if set.
    pub is_choppy: bool,
    /// One in so many pieces has a bit flipped; 0: none.
    pub flip_one_in: u64,
    /// Least time between two flipped bits.
    pub flip_rest_ns: u64,
}

/// One direction of a flow.
#[derive(Debug, Default)]
struct Pipe {
    /// Pieces on their way, with the time of their arrival; in order.
    pieces: VecDeque<(u64, Vec<u8>)>,
    /// Bytes of the first piece that were delivered.
    delivered: usize,
    last_ns: u64,
    /// The sender has closed; told to the receiver after the last piece.
    is_ended: bool,
    /// Whatever is sent is swallowed, and nothing is said.
    is_dead: bool,
}

/// A connection.
#[derive(Debug)]
pub struct Flow {
    /// The number of the host that it leads to.
    pub host: usize,
    client: Option<OwnedFd>,
    blade: Option<OwnedFd>,
    up: Pipe,
    down: Pipe,
    /// What the blade has sent of an answer that is not complete yet.
    answer: Vec<u8>,
}

/// Returns two connected stream sockets that never block.
///
/// # Errors
/// The kernel's: no descriptor is left.
pub fn pair(kind: SocketType) -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)
}

impl Flow {
    /// A flow to `host` between these ends.
    #[must_use]
    pub fn new(host: usize, client: OwnedFd, blade: OwnedFd) -> Flow {
        let (up, down) = (Pipe::default(), Pipe::default());
        Flow { host, client: Some(client), blade: Some(blade), up, down, answer: Vec::new() }
    }

    /// True if both sides have closed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.client.is_none() && self.blade.is_none()
    }

    /// Closes both sides at once, with whatever is on its way.
    pub fn cut(&mut self) {
        (self.client, self.blade) = (None, None);
    }

    /// From now on nothing passes in these directions, and nobody is told.
    pub fn die(&mut self, up: bool, down: bool) {
        self.up.is_dead |= up;
        self.down.is_dead |= down;
    }

    /// When the next piece arrives.
    #[must_use]
    pub fn next_ns(&self) -> Option<u64> {
        let first = |pipe: &Pipe| pipe.pieces.front().map(|(at_ns, _)| *at_ns);
        first(&self.up).into_iter().chain(first(&self.down)).min()
    }

    /// The client's end and the blade's, where they are open.
    pub(crate) fn ends(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [&self.client, &self.blade].map(|end| end.as_ref().map(AsFd::as_fd))
    }

    /// Takes what was sent on the ends that are ready (the client's, the blade's), and delivers
    /// what is due. True if anything moved.
    pub(crate) fn pass(
        &mut self,
        ready: [bool; 2],
        now_ns: u64,
        sky: &mut Sky<'_>,
        twist: Twist<'_>,
        scratch: &mut [u8],
    ) -> bool {
        let mut moved = false;
        if ready[0] {
            let taken = take(&mut self.client, scratch);
            self.up.queue(taken, now_ns, sky);
            moved |= taken != Taken::Nothing;
        }
        if ready[1] {
            let taken = take(&mut self.blade, scratch);
            let answers = match taken {
                Taken::Bytes(bytes) => {
                    self.answer.extend_from_slice(bytes);
                    whole_answers(&mut self.answer, twist, sky.random)
                }
                _ => std::mem::take(&mut self.answer),
            };
            self.down.queue(Taken::Bytes(&answers), now_ns, sky);
            if taken == Taken::End {
                self.down.queue(taken, now_ns, sky);
            }
            moved |= taken != Taken::Nothing;
        }
        moved |= self.up.deliver(&mut self.blade, now_ns);
        moved |= self.down.deliver(&mut self.client, now_ns);
        moved
    }
}

/// Weather, chance, and when a bit was flipped last.
#[derive(Debug)]
pub struct Sky<'a> {
    /// What the network does now.
    pub weather: Weather,
    /// Chooses.
    pub random: &'a mut Rng,
    /// The time from which on a bit may be flipped again.
    pub flips_from_ns: &'a mut u64,
}

impl Sky<'_> {
    fn spoil(&mut self, piece: &mut [u8], now_ns: u64) {
        let one_in = self.weather.flip_one_in;
        if one_in == 0 || self.random.below(one_in) != 0 || now_ns < *self.flips_from_ns {
            return;
        }
        *self.flips_from_ns = now_ns + self.weather.flip_rest_ns;
        let at = self.random.index(piece.len());
        clock::note(|| format!("a bit of byte {at} of {} is flipped", piece.len()));
        piece[at] ^= 1 << self.random.below(8);
    }
}

impl Pipe {
    fn queue(&mut self, taken: Taken<'_>, now_ns: u64, sky: &mut Sky<'_>) {
        let mut left = match taken {
            Taken::Nothing => return,
            Taken::End => {
                self.is_ended = true;
                return;
            }
            Taken::Bytes(_) if self.is_dead => return,
            Taken::Bytes(bytes) => bytes,
        };
        while !left.is_empty() {
            let length = match sky.weather.is_choppy {
                true => 1 + sky.random.index(left.len()),
                false => left.len(),
            };
            let (piece, rest) = left.split_at(length);
            let mut piece = piece.to_vec();
            sky.spoil(&mut piece, now_ns);
            let delay_ns = sky.random.below(sky.weather.delay_max_ns + 1);
            self.last_ns = self.last_ns.max(now_ns + delay_ns);
            self.pieces.push_back((self.last_ns, piece));
            left = rest;
        }
    }

    /// Delivers what is due, and the end after it.
    fn deliver(&mut self, to: &mut Option<OwnedFd>, now_ns: u64) -> bool {
        let mut moved = false;
        while let Some((at_ns, piece)) = self.pieces.front()
            && *at_ns <= now_ns
            && let Some(socket) = to
        {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&*socket, &piece[self.delivered..], flags) {
                Ok(sent) => {
                    self.delivered += sent;
                    if self.delivered == piece.len() {
                        self.pieces.pop_front();
                        self.delivered = 0;
                    }
                    moved = true;
                }
                Err(Errno::AGAIN) => return moved,
                Err(_) => *to = None,
            }
        }
        if to.is_none() {
            self.pieces.clear();
        } else if self.is_ended && self.pieces.is_empty() && !self.is_dead {
            *to = None;
            moved = true;
        }
        moved
    }
}

/// What a sender has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken<'a> {
    Nothing,
    Bytes(&'a [u8]),
    /// It has closed.
    End,
}

fn take<'a>(from: &mut Option<OwnedFd>, scratch: &'a mut [u8]) -> Taken<'a> {
    let Some(socket) = from else { return Taken::Nothing };
    match rustix::net::recv(&*socket, &mut *scratch, RecvFlags::DONTWAIT) {
        Ok((_, got @ 1..)) => Taken::Bytes(&scratch[..got]),
        Err(Errno::AGAIN) => Taken::Nothing,
        Ok(_) | Err(_) => {
            *from = None;
            Taken::End
        }
    }
}

/// What a blade that is not as it should be says instead of its answers.
#[derive(Debug, Default)]
pub struct Twist<'a> {
    /// It is full: the writes that it refuses are counted here.
    pub refused: Option<&'a mut u64>,
    /// It may lie.
    pub liar: Option<&'a mut Liar>,
}

/// Takes the answers that are complete. A full blade's refusals stand in the place of its answers
/// to writes: what it would do with the pages is not asked, since nobody may read a page before it
/// was written again.
fn whole_answers(bytes: &mut Vec<u8>, mut twist: Twist<'_>, random: &mut Rng) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(header) = bytes.first_chunk() {
        let header = Header::decode(header).expect("a blade's header");
        let length = header.head_bytes() + header.pages_bytes();
        if bytes.len() < length {
            break;
        }
        let rest = bytes.split_off(length);
        let mut answer = std::mem::replace(bytes, rest);
        if let Some(liar) = &mut twist.liar {
            answer = liar.say(header, answer, random);
        }
        let is_write = header.opcode == Opcode::Write && header.kind == Kind::Response;
        match twist.refused.as_mut().filter(|_| is_write) {
            None => whole.extend(answer),
            Some(requests) => {
                **requests += 1;
                let full = Response::Error { code: ErrorCode::BladeFull, detail: 0 };
                let Header { opcode, request_id, credits, .. } = header;
                full.encode(opcode, request_id, credits, 0, &mut whole).expect("it fits");
            }
        }
    }
    whole
}

/// A number of nanoseconds between two, both included.
#[must_use]
pub fn between(random: &mut Rng, least_ns: u64, most_ns: u64) -> u64 {
    least_ns + random.below(most_ns - least_ns + 1)
}
