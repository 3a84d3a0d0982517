//! Packet sockets: raw frames with offload metadata, many per call.
//!
//! A frame from a veth interface may be a super-frame of up to 64 KiB whose checksum is still to be
//! computed. `PACKET_VNET_HDR` puts ten bytes that say so before each frame, in both directions, so
//! that a frame is sent as it was received. `PACKET_AUXDATA` gives the VLAN tag that the kernel has
//! removed.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use farpool_units::exactly;

use crate::emulated::frame::{CONTROL_BYTES, Frame, PACKET_AUXDATA};

/// Frames received or sent per call: enough to make the cost of a call negligible, with 2 MiB of
/// buffers.
pub(crate) const BATCH_FRAMES: usize = 32;

// From linux/if_packet.h; stable numbers of the kernel's interface.
const PACKET_ADD_MEMBERSHIP: i32 = 1;
const PACKET_STATISTICS: i32 = 6;
const PACKET_VNET_HDR: i32 = 15;
const PACKET_IGNORE_OUTGOING: i32 = 23;
const PACKET_MR_PROMISC: u16 = 1;
/// "Return K" of classic BPF: keep the first K bytes of every frame.
const BPF_RETURN: u16 = 0x06;
/// Parts of a received frame: metadata, addresses, the rest.
const PARTS_IN: usize = 3;
/// Parts of a sent frame: there may be a VLAN tag after the addresses.
const PARTS_OUT: usize = 4;

/// `struct packet_mreq`.
#[repr(C)]
struct Membership {
    interface: i32,
    kind: u16,
    address_len: u16,
    address: [u8; 8],
}

/// `struct tpacket_stats`.
#[repr(C)]
#[derive(Default)]
struct Statistics {
    frames: u32,
    lost: u32,
}

const _: () = assert!(size_of::<Membership>() == 16);
const _: () = assert!(size_of::<Statistics>() == 8);
const _: () = assert!(size_of::<libc::sockaddr_ll>() == 20);
const _: () = assert!(size_of::<libc::sock_filter>() == 8);
const _: () = assert!(size_of::<libc::sock_fprog>() == 16);
const _: () = assert!(size_of::<libc::mmsghdr>() == 64);
const _: () = assert!(size_of::<libc::iovec>() == 16);
const _: () = assert!(size_of::<libc::cmsghdr>() == 16);

/// Opens a socket that receives and sends the frames of one interface, closed to frames at first
/// (see [`set_open`]). `buffer_bytes` limits the bytes queued in each direction.
pub(crate) fn packet_socket(interface: u32, buffer_bytes: i32) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: creates a descriptor from numbers. Protocol 0: no frame arrives before it is bound.
    let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    check(raw)?;
    // SAFETY: the descriptor was just created and nothing else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };
    let interface = i32::try_from(interface).map_err(|_| io::ErrorKind::InvalidInput)?;
    set_open(&socket, false)?;
    set_option(&socket, libc::SOL_PACKET, PACKET_VNET_HDR, &1_i32)?;
    set_option(&socket, libc::SOL_PACKET, PACKET_AUXDATA, &1_i32)?;
    set_option(&socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, &1_i32)?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &buffer_bytes)?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &buffer_bytes)?;
    let all = Membership { interface, kind: PACKET_MR_PROMISC, address_len: 0, address: [0; 8] };
    set_option(&socket, libc::SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all)?;
    bind(&socket, interface)?;
    Ok(socket)
}

fn bind(socket: &OwnedFd, interface: i32) -> io::Result<()> {
    let all_protocols = exactly::<u16, _>(libc::ETH_P_ALL).to_be();
    let address = libc::sockaddr_ll {
        sll_family: exactly(libc::AF_PACKET),
        sll_protocol: all_protocols,
        sll_ifindex: interface,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let len = exactly(size_of_val(&address));
    // SAFETY: the kernel reads `len` bytes of `address`, which is that long.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) })
}

/// Sets whether the socket keeps arriving frames. If not, the kernel drops them before they are
/// queued.
pub(crate) fn set_open(socket: &OwnedFd, open: bool) -> io::Result<()> {
    let keep = if open { u32::MAX } else { 0 };
    let mut program = [libc::sock_filter { code: BPF_RETURN, jt: 0, jf: 0, k: keep }];
    let filter = libc::sock_fprog { len: 1, filter: program.as_mut_ptr() };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)
}

fn set_option<T>(socket: &OwnedFd, level: i32, name: i32, value: &T) -> io::Result<()> {
    let len = u32::try_from(size_of::<T>()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: the kernel reads `len` bytes of `value`, which is that long, and what a filter points
    // to, which the caller keeps until this returns.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value, len) })
}

/// Returns how many frames were lost to a full queue since the last call.
pub(crate) fn take_lost(socket: &OwnedFd) -> io::Result<u32> {
    let mut statistics = Statistics::default();
    let mut len = exactly(size_of::<Statistics>());
    let (fd, level) = (socket.as_raw_fd(), libc::SOL_PACKET);
    let place = (&raw mut statistics).cast();
    // SAFETY: the kernel writes at most `len` bytes to `statistics`, which is that long, and `len`
    // itself.
    check(unsafe { libc::getsockopt(fd, level, PACKET_STATISTICS, place, &raw mut len) })?;
    Ok(statistics.lost)
}

/// Receives frames that have arrived, as many as there are and fit, without waiting. Returns how
/// many. Each frame records how many bytes arrived and whether some did not fit.
pub(crate) fn receive(socket: BorrowedFd<'_>, frames: &mut [Frame]) -> io::Result<usize> {
    let count = frames.len().min(BATCH_FRAMES);
    let mut parts = [[part(&mut []); PARTS_IN]; BATCH_FRAMES];
    let mut messages = [empty_message(); BATCH_FRAMES];
    for ((frame, parts), message) in frames.iter_mut().zip(&mut parts).zip(&mut messages) {
        frame.clear();
        *parts = [part(&mut frame.offload), part(&mut frame.addresses), part(&mut frame.rest)];
        message.msg_hdr.msg_iov = parts.as_mut_ptr();
        message.msg_hdr.msg_iovlen = PARTS_IN;
        message.msg_hdr.msg_control = (&raw mut frame.control).cast();
        message.msg_hdr.msg_controllen = CONTROL_BYTES;
    }
    let vector = messages.as_mut_ptr();
    let count = u32::try_from(count).map_err(|_| io::ErrorKind::InvalidInput)?;
    let (fd, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT);
    // SAFETY: `count` messages are filled in; each points to parts of a frame of its own that is
    // exclusively borrowed, with their true lengths. No timeout is given.
    let taken = unsafe { libc::recvmmsg(fd, vector, count, flags, std::ptr::null_mut()) };
    check(taken)?;
    let taken = exactly(taken);
    for (frame, message) in frames.iter_mut().zip(&messages).take(taken) {
        let len = exactly(message.msg_len);
        let cut = message.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
        frame.arrived(len, message.msg_hdr.msg_controllen, cut);
    }
    Ok(taken)
}

/// Sends frames, in order, without waiting for space. Returns how many the kernel accepted.
pub(crate) fn send(socket: BorrowedFd<'_>, frames: &[&Frame]) -> io::Result<usize> {
    let count = frames.len().min(BATCH_FRAMES);
    let mut parts = [[part(&mut []); PARTS_OUT]; BATCH_FRAMES];
    let mut messages = [empty_message(); BATCH_FRAMES];
    for ((frame, parts), message) in frames.iter().zip(&mut parts).zip(&mut messages) {
        *parts = frame.parts().map(const_part);
        message.msg_hdr.msg_iov = parts.as_mut_ptr();
        message.msg_hdr.msg_iovlen = PARTS_OUT;
    }
    let count = u32::try_from(count).map_err(|_| io::ErrorKind::InvalidInput)?;
    let (fd, vector) = (socket.as_raw_fd(), messages.as_mut_ptr());
    // SAFETY: `count` messages are filled in; each points to parts of a frame that is borrowed,
    // with their true lengths. The kernel only reads them.
    let given = unsafe { libc::sendmmsg(fd, vector, count, libc::MSG_DONTWAIT) };
    check(given)?;
    Ok(exactly(given))
}

fn part(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

/// For sending only: the kernel does not write to it.
fn const_part(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

fn empty_message() -> libc::mmsghdr {
    // SAFETY: all zero is an empty message: null pointers with lengths of zero.
    unsafe { std::mem::zeroed() }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
