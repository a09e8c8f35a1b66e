//! A tap in the near namespace: a driver that has native XDP and reports no hints.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;

use super::Pair;

/// `TUNSETIFF` (include/uapi/linux/if_tun.h)
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;

pub(crate) struct Tap {
    file: File,
    pub(crate) ifindex: u32,
}

impl Tap {
    pub(crate) fn new(pair: &Pair) -> Self {
        let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
        let file = file.expect("every kernel that tests run on has it");
        // SAFETY: all zeros are a request without a name.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, &from) in request.ifr_name.iter_mut().zip(b"tap0") {
            *to = from.cast_signed();
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
        // SAFETY: the kernel reads and writes one live request.
        let made = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) };
        assert_eq!(made, 0, "TUNSETIFF: {}", std::io::Error::last_os_error());
        let near = &pair.veth.near;
        near.ip(&["link", "set", "tap0", "up"]);
        Self {
            file,
            ifindex: near.index_of("tap0"),
        }
    }

    /// As if the tap had received it.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        let sent = self.file.write(frame).expect("it is up");
        assert_eq!(sent, frame.len());
    }
}
