//! The kernel's vhost-net and a tap device, with the rings of a [`Pair`]: the device that most guests have, to be
//! compared with.
//!
//! Theory of operation. The same requests as over vhost-user, as ioctls (linux/vhost.h); guest memory is what this
//! process has mapped. The tap device takes and makes virtio-net headers of 12 bytes, as QEMU sets it up, with
//! checksums and TSO, and a send buffer without end.

#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use virtqueue::driver::GuestRam;

use crate::Pair;
use crate::driver::HEADER;

// linux/vhost.h; libc has none of them.
const VHOST_GET_FEATURES: libc::Ioctl = 0x8008_af00;
const VHOST_SET_FEATURES: libc::Ioctl = 0x4008_af00;
const VHOST_SET_OWNER: libc::Ioctl = 0xaf01;
const VHOST_SET_MEM_TABLE: libc::Ioctl = 0x4008_af03;
const VHOST_SET_VRING_NUM: libc::Ioctl = 0x4008_af10;
const VHOST_SET_VRING_ADDR: libc::Ioctl = 0x4028_af11;
const VHOST_SET_VRING_BASE: libc::Ioctl = 0x4008_af12;
const VHOST_SET_VRING_KICK: libc::Ioctl = 0x4008_af20;
const VHOST_SET_VRING_CALL: libc::Ioctl = 0x4008_af21;
const VHOST_NET_SET_BACKEND: libc::Ioctl = 0x4008_af30;

/// struct vhost_memory with one region.
#[repr(C)]
struct Memory {
    regions: u32,
    padding: u32,
    guest_addr: u64,
    bytes: u64,
    user_addr: u64,
    flags: u64,
}

/// struct vhost_vring_state and struct vhost_vring_file.
#[repr(C)]
struct Vring {
    index: u32,
    value: i32,
}

/// struct vhost_vring_addr.
#[repr(C)]
struct Addresses {
    index: u32,
    flags: u32,
    desc: u64,
    used: u64,
    avail: u64,
    log: u64,
}

/// A queue pair that vhost-net serves.
#[must_use]
pub struct VhostNet {
    vhost: File,
    tap: File,
}

/// An ioctl with an argument in memory.
fn ioctl<T>(file: &File, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    // SAFETY: each request of this file takes a pointer to the type that its caller passes, which outlives the call.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, std::ptr::from_mut(argument)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An ioctl with a number.
fn ioctl_value(file: &File, request: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the requests that are called so take a number, and touch no memory of this process.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, value) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A descriptor of the tap device `name`, which is made if it is not there; or, with a path, of a macvtap.
fn open_tap(name: &str) -> io::Result<File> {
    let path = if name.starts_with('/') {
        name
    } else {
        "/dev/net/tun"
    };
    let mut options = OpenOptions::new();
    let tap = options
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    // SAFETY: a structure of numbers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if path != name {
        for (to, from) in request
            .ifr_name
            .iter_mut()
            .zip(name.bytes().take(libc::IFNAMSIZ - 1))
        {
            *to = from.cast_signed();
        }
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).expect("15 bits");
    ioctl(&tap, libc::TUNSETIFF, &mut request)?;
    ioctl(
        &tap,
        libc::TUNSETVNETHDRSZ,
        &mut i32::try_from(HEADER).expect("12"),
    )?;
    let mut endless = i32::MAX;
    ioctl(&tap, libc::TUNSETSNDBUF, &mut endless)?;
    let offload = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    ioctl_value(&tap, libc::TUNSETOFFLOAD, offload.into())?;
    Ok(tap)
}

impl VhostNet {
    /// Opens the device, and returns which of the wanted features it has.
    ///
    /// # Errors
    /// No vhost-net, or no such tap device.
    pub fn open(tap: &str, wanted: u64) -> io::Result<(Self, u64)> {
        let vhost = OpenOptions::new().read(true).write(true).open("/dev/vhost-net")?;
        ioctl_value(&vhost, VHOST_SET_OWNER, 0)?;
        let mut features = 0_u64;
        ioctl(&vhost, VHOST_GET_FEATURES, &mut features)?;
        // Those of virtio-net itself are the tap device's.
        let net = (1 << 24) - 1;
        let mut of_vhost = features & wanted;
        ioctl(&vhost, VHOST_SET_FEATURES, &mut of_vhost)?;
        let tap = open_tap(tap)?;
        Ok((Self { vhost, tap }, of_vhost | (wanted & net)))
    }

    /// Starts both rings.
    ///
    /// # Errors
    /// What the kernel rejects.
    ///
    /// # Panics
    /// If the memory has not exactly one region.
    pub fn start(&self, ram: &GuestRam, pair: &Pair) -> io::Result<()> {
        let [region] = &ram.regions()?[..] else {
            panic!("memory of one region");
        };
        let mut memory = Memory {
            regions: 1,
            padding: 0,
            guest_addr: region.guest_addr.get(),
            bytes: region.len,
            user_addr: region.user_addr,
            flags: 0,
        };
        ioctl(&self.vhost, VHOST_SET_MEM_TABLE, &mut memory)?;
        for index in 0..2_u32 {
            let ring = pair.ring(index as usize);
            let at = ring.driver.ring_user_addresses();
            let set = |request, value| ioctl(&self.vhost, request, &mut Vring { index, value });
            set(VHOST_SET_VRING_NUM, ring.driver.size().get().into())?;
            set(VHOST_SET_VRING_BASE, 0)?;
            let mut addresses = Addresses {
                index,
                flags: 0,
                desc: at.desc,
                used: at.used,
                avail: at.avail,
                log: 0,
            };
            ioctl(&self.vhost, VHOST_SET_VRING_ADDR, &mut addresses)?;
            set(VHOST_SET_VRING_KICK, ring.kick.as_raw_fd())?;
            set(VHOST_SET_VRING_CALL, ring.call.as_raw_fd())?;
        }
        for index in 0..2 {
            let value = self.tap.as_raw_fd();
            ioctl(&self.vhost, VHOST_NET_SET_BACKEND, &mut Vring { index, value })?;
        }
        Ok(())
    }
}
