//! The floor: a bare epoll loop that answers every fixed-length request with a fixed-length reply.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use farpool_kernel::pin_thread;
use farpool_units::exactly;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;

use super::request::ECHO_REQUEST;

const READ_BYTES: usize = 64 << 10;
const EVENTS_MAX: usize = 64;
const TOKEN_LISTENER: u64 = u64::MAX;
const TOKEN_STOP: u64 = u64::MAX - 1;

/// An echo server in its own thread; it ends when dropped.
#[derive(Debug)]
pub struct Echo {
    address: SocketAddr,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<rustix::io::Result<()>>>,
}

struct Loop {
    epoll: OwnedFd,
    listener: TcpListener,
    /// Each socket with the bytes received of an incomplete request.
    sockets: Vec<Option<(OwnedFd, usize)>>,
    replies: Vec<u8>,
    reply_bytes: usize,
}

impl Echo {
    /// Starts it on a free port of this host, on the given processor if there is one.
    pub fn start(reply_bytes: usize, processor: Option<usize>) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let stop = Arc::new(rustix::event::eventfd(0, flags)?);
        let watch = |fd: std::os::fd::BorrowedFd<'_>, token| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
        };
        watch(listener.as_fd(), TOKEN_LISTENER)?;
        watch(stop.as_fd(), TOKEN_STOP)?;
        let most = READ_BYTES / ECHO_REQUEST.len() + 1;
        let replies = vec![b'x'; most * reply_bytes];
        let mut it = Loop { epoll, listener, sockets: Vec::new(), replies, reply_bytes };
        let thread = std::thread::Builder::new().name("echo".into()).spawn(move || {
            if let Some(processor) = processor {
                pin_thread(processor)?;
            }
            it.run()
        })?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Loop {
    fn run(&mut self) -> rustix::io::Result<()> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut buffer = vec![0; READ_BYTES];
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
            for event in &events {
                match event.data.u64() {
                    TOKEN_STOP => return Ok(()),
                    TOKEN_LISTENER => self.accept()?,
                    number => self.serve(exactly(number), &mut buffer),
                }
            }
        }
    }

    fn accept(&mut self) -> rustix::io::Result<()> {
        while let Ok((stream, _)) = self.listener.accept() {
            // With delayed replies this would not be the floor.
            let _ = stream.set_nodelay(true);
            let socket = OwnedFd::from(stream);
            let data = epoll::EventData::new_u64(self.sockets.len() as u64);
            epoll::add(&self.epoll, &socket, data, epoll::EventFlags::IN)?;
            self.sockets.push(Some((socket, 0)));
        }
        Ok(())
    }

    fn serve(&mut self, number: usize, buffer: &mut [u8]) {
        let Some(Some((socket, left))) = self.sockets.get_mut(number) else { return };
        let is_over = match rustix::io::read(&*socket, &mut *buffer) {
            Ok(0) => true,
            Ok(bytes) => {
                let requests = (*left + bytes) / ECHO_REQUEST.len();
                *left = (*left + bytes) % ECHO_REQUEST.len();
                // A blocking send will do: the client always reads.
                let mut reply = &self.replies[..requests * self.reply_bytes];
                let flags = rustix::net::SendFlags::NOSIGNAL;
                loop {
                    if reply.is_empty() {
                        break false;
                    }
                    match rustix::net::send(&*socket, reply, flags) {
                        Ok(sent) => reply = &reply[sent..],
                        Err(Errno::INTR) => {}
                        Err(_) => break true,
                    }
                }
            }
            Err(errno) => !matches!(errno, Errno::AGAIN | Errno::INTR),
        };
        if is_over {
            self.sockets[number] = None;
        }
    }
}
