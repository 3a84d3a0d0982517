//! One frame on its way through the switch.
//!
//! A frame stays as the kernel delivered it: offload metadata, the two addresses, the rest. The
//! kernel delivers a VLAN tag beside the frame; it is put back where it was, between addresses and
//! rest.

/// `struct virtio_net_hdr`: flags, kind of segmentation, header length, segment size, position of
/// the checksum.
const OFFLOAD_BYTES: usize = 10;
/// Destination and source.
const ADDRESSES_BYTES: usize = 12;
/// The rest of the longest frame: the kernel builds no super-frame above 64 KiB unless configured
/// to (BIG TCP). Longer ones are dropped and counted.
const REST_BYTES: usize = 64 * 1024;
/// Space for the control data that the kernel delivers with a frame: one header of 16 bytes, 20 of
/// data.
pub(crate) const CONTROL_BYTES: usize = 40;
/// A VLAN tag: protocol and number.
const TAG_BYTES: usize = 4;
/// Shortest frame: addresses and protocol.
const MIN_FRAME_BYTES: usize = 14;
/// Flag in the first byte of the metadata: the checksum is still to be computed.
const NEEDS_CHECKSUM: u8 = 1;
/// Status bits: the kernel gives a tag, and its protocol (`TP_STATUS_VLAN_VALID`,
/// `TP_STATUS_VLAN_TPID_VALID`).
const TAG_VALID: u32 = 1 << 4;
const TAG_PROTOCOL_VALID: u32 = 1 << 6;
/// 802.1Q, the default if no protocol is given.
const DOT1Q: u16 = 0x8100;

/// A buffer for one frame.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) offload: [u8; OFFLOAD_BYTES],
    pub(crate) addresses: [u8; ADDRESSES_BYTES],
    pub(crate) rest: Box<[u8]>,
    pub(crate) control: Control,
    tag: [u8; TAG_BYTES],
    tag_len: usize,
    rest_len: usize,
    is_whole: bool,
}

/// Control data, aligned as the kernel's `cmsghdr` requires.
#[repr(C, align(8))]
#[derive(Debug)]
pub(crate) struct Control([u8; CONTROL_BYTES]);

const _: () = assert!(size_of::<Control>() == CONTROL_BYTES);

impl Frame {
    pub(crate) fn new() -> Self {
        Self {
            offload: [0; OFFLOAD_BYTES],
            addresses: [0; ADDRESSES_BYTES],
            rest: vec![0; REST_BYTES].into_boxed_slice(),
            control: Control([0; CONTROL_BYTES]),
            tag: [0; TAG_BYTES],
            tag_len: 0,
            rest_len: 0,
            is_whole: false,
        }
    }

    /// Prepares the buffer for the next frame.
    pub(crate) fn clear(&mut self) {
        (self.tag_len, self.rest_len, self.is_whole) = (0, 0, false);
    }

    /// Notes that `len` bytes were received, metadata included, with `control_len` bytes of control
    /// data, and whether some were `cut`.
    pub(crate) fn arrived(&mut self, len: usize, control_len: usize, cut: bool) {
        let frame_len = len.saturating_sub(OFFLOAD_BYTES);
        self.is_whole = !cut && frame_len >= MIN_FRAME_BYTES;
        self.rest_len = frame_len.saturating_sub(ADDRESSES_BYTES).min(REST_BYTES);
        if let Some(tag) = self.control.tag(control_len) {
            self.tag = tag;
            self.tag_len = TAG_BYTES;
            self.shift_offload();
        }
    }

    /// Whether the whole frame was received, and is not too short.
    pub(crate) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Its length on the wire in bytes, if it were sent in one piece.
    pub(crate) fn bytes(&self) -> u64 {
        (ADDRESSES_BYTES + self.tag_len + self.rest_len) as u64
    }

    /// The bytes to send, in order.
    pub(crate) fn parts(&self) -> [&[u8]; 4] {
        [&self.offload, &self.addresses, &self.tag[..self.tag_len], &self.rest[..self.rest_len]]
    }

    /// Moves the offsets behind the tag on by its length.
    fn shift_offload(&mut self) {
        const HEADER_LEN: usize = 2;
        const CHECKSUM_START: usize = 6;
        const SHIFT_BYTES: u16 = 4;
        const _: () = assert!(SHIFT_BYTES as usize == TAG_BYTES);
        if self.offload[0] & NEEDS_CHECKSUM == 0 {
            return;
        }
        for at in [HEADER_LEN, CHECKSUM_START] {
            let value = u16::from_ne_bytes([self.offload[at], self.offload[at + 1]]);
            let moved = value.saturating_add(SHIFT_BYTES).to_ne_bytes();
            self.offload[at..at + 2].copy_from_slice(&moved);
        }
    }
}

impl Control {
    /// Returns the VLAN tag, if the kernel gave one, from a `struct tpacket_auxdata` behind one
    /// `struct cmsghdr`.
    fn tag(&self, len: usize) -> Option<[u8; TAG_BYTES]> {
        const LEVEL: usize = 8;
        const KIND: usize = 12;
        const DATA: usize = 16;
        const NUMBER: usize = DATA + 16;
        const PROTOCOL: usize = DATA + 18;
        const END: usize = DATA + 20;
        let word = |at: usize| Some(u32::from_ne_bytes(self.0.get(at..at + 4)?.try_into().ok()?));
        let half = |at: usize| Some(u16::from_ne_bytes(self.0.get(at..at + 2)?.try_into().ok()?));
        let is_ours = word(LEVEL)? == libc::SOL_PACKET.cast_unsigned()
            && word(KIND)? == PACKET_AUXDATA.cast_unsigned();
        let status = word(DATA)?;
        if len < END || !is_ours || status & TAG_VALID == 0 {
            return None;
        }
        let told = status & TAG_PROTOCOL_VALID != 0;
        let protocol = if told { half(PROTOCOL)? } else { DOT1Q }.to_be_bytes();
        let number = half(NUMBER)?.to_be_bytes();
        Some([protocol[0], protocol[1], number[0], number[1]])
    }
}

pub(crate) const PACKET_AUXDATA: i32 = 8;

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::{Duration, Instant};

    use farpool_hosts::{Host, Hosts, Wiring};

    use super::*;
    use crate::{Circuit, EmulatedSwitch, SwitchDriver, sys};

    const BROADCAST: [u8; 6] = [0xff; 6];
    const SENDER: [u8; 6] = [2, 0, 0, 0, 0, 9];

    fn socket(host: &Host) -> OwnedFd {
        let interface = host.enter(|| {
            let any = rustix::net::socket(
                rustix::net::AddressFamily::INET,
                rustix::net::SocketType::DGRAM,
                None,
            )?;
            let interface = rustix::net::netdevice::name_to_index(&any, "eth0")?;
            sys::packet_socket(interface, 1 << 20)
        });
        let socket = interface.expect("enter").expect("a packet socket");
        sys::set_open(&socket, true).expect("open");
        socket
    }

    fn frame(rest: &[u8]) -> Frame {
        let mut frame = Frame::new();
        frame.addresses[..6].copy_from_slice(&BROADCAST);
        frame.addresses[6..].copy_from_slice(&SENDER);
        frame.rest[..rest.len()].copy_from_slice(rest);
        frame.rest_len = rest.len();
        frame
    }

    /// Returns the next frame of the test's sender. Skips the kernel's own frames.
    fn next(socket: &OwnedFd, counted: impl Fn() -> String) -> Frame {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let mut frames = [Frame::new()];
            match sys::receive(socket.as_fd(), &mut frames) {
                Ok(1) if frames[0].addresses[6..] == SENDER => {
                    return frames.into_iter().next().expect("one");
                }
                _ => assert!(Instant::now() < deadline, "no frame came: {}", counted()),
            }
        }
    }

    #[test]
    fn a_frame_comes_out_as_it_went_in_with_its_tag() {
        let hosts = match Hosts::builder(2, Wiring::Switch).make() {
            Ok(hosts) => hosts,
            Err(reason) => return println!("SKIPPED: {reason}"),
        };
        let side = hosts.switch().expect("wired for a switch");
        let opened = side.enter(|| EmulatedSwitch::open("s0", side.ports()));
        let mut switch = opened.expect("enter").expect("open");
        switch.connect(Circuit::new(0, 1).expect("two ports")).expect("connect");
        let (near, far) = (socket(&hosts[0]), socket(&hosts[1]));
        // An experimental protocol and some bytes, with no tag, an 802.1Q tag and an 802.1ad tag.
        for tag in [&[][..], &[0x81, 0x00, 0x20, 0x05], &[0x88, 0xa8, 0x01, 0x23]] {
            let payload = [&[0x88, 0xb5][..], &[7; 500]].concat();
            let sent = frame(&[tag, &payload].concat());
            assert_eq!(sys::send(near.as_fd(), &[&sent]).expect("send"), 1);
            let got = next(&far, || {
                let of = |host: usize| side.counters(host);
                format!("{:?}; ports {:?}, {:?}", switch.counters(), of(0), of(1))
            });
            assert!(got.is_whole());
            assert_eq!(got.bytes(), sent.bytes());
            // The kernel has removed the tag once more at the receiving socket, and `Frame` has put
            // it back.
            assert_eq!(got.parts()[2], tag);
            assert_eq!(got.parts()[3], payload);
        }
        let counted = switch.counters()[0].from_low;
        assert_eq!((counted.frames, counted.dropped), (3, 0));
    }
}
