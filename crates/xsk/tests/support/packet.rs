//! An AF_PACKET socket on one interface: raw frames in and out, as a peer that is not AF_XDP.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// The EtherType of all test frames (local experimental 1).
pub(crate) const ETHERTYPE: u16 = 0x88b5;

pub(crate) struct Packet(OwnedFd);

impl Packet {
    /// Opens one; it receives frames of [`ETHERTYPE`] only, and gives up after `timeout`.
    pub(crate) fn on(ifindex: u32, timeout: Duration) -> Self {
        let protocol = ETHERTYPE.to_be();
        // SAFETY: plain system call; the result is checked before it becomes an owned descriptor.
        let socket = unsafe {
            libc::socket(
                libc::AF_PACKET,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC,
                i32::from(protocol),
            )
        };
        assert!(socket >= 0, "AF_PACKET: {}", io::Error::last_os_error());
        // SAFETY: just opened, owned by nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // SAFETY: all-zero is a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = ifindex as i32;
        let len = size_of_val(&address) as libc::socklen_t;
        // SAFETY: address lives past the call and len is its size.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
        assert_eq!(bound, 0, "bind: {}", io::Error::last_os_error());
        rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, Some(timeout))
            .unwrap();
        Self(socket)
    }

    pub(crate) fn send(&self, frame: &[u8]) {
        let sent =
            rustix::net::send(&self.0, frame, rustix::net::SendFlags::empty()).expect("send on AF_PACKET");
        assert_eq!(sent, frame.len());
    }

    /// The next frame; `None` if none comes in time.
    pub(crate) fn receive(&self) -> Option<Vec<u8>> {
        let mut buffer = vec![0; 1 << 16];
        let (len, _) = rustix::net::recv(&self.0, &mut buffer[..], rustix::net::RecvFlags::empty()).ok()?;
        buffer.truncate(len);
        Some(buffer)
    }
}
