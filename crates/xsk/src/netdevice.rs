//! Queries to an interface by ioctl (netdevice(7)) that rustix does not support.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};

/// `ETHTOOL_GCHANNELS`, `include/uapi/linux/ethtool.h`.
const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// Queues in use, as `ethtool -l` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Channels {
    /// Queues that only receive.
    pub rx: u32,
    /// Queues that only send.
    pub tx: u32,
    /// Queues that do both.
    pub combined: u32,
    /// Maximum number of receive queues (`ethtool -L`): the larger of the maxima of rx and combined.
    pub most_receiving: u32,
}

impl Channels {
    /// How many queues AF_XDP can bind to.
    #[must_use]
    pub fn queues(self) -> u32 {
        self.combined.saturating_add(self.rx.max(self.tx))
    }
}

/// An interface, in the network namespace of the thread that opens it.
#[derive(Debug)]
pub struct Netdevice {
    socket: OwnedFd,
    name: String,
}

impl Netdevice {
    /// The interface with this name; does not check that it exists.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` for a name that no interface can have.
    pub fn by_name(name: &str) -> io::Result<Self> {
        // One byte less than the field of the request, which has to be terminated.
        if name.is_empty() || name.len() >= libc::IF_NAMESIZE || name.contains('\0') {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self {
            socket: socket()?,
            name: name.to_owned(),
        })
    }

    /// The interface with this index.
    ///
    /// # Errors
    /// The kernel's; ENODEV if there is none.
    pub fn by_index(ifindex: u32) -> io::Result<Self> {
        let socket = socket()?;
        let name = netdevice::index_to_name(&socket, ifindex)?;
        Ok(Self { socket, name })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its MTU, bytes.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn mtu(&self) -> io::Result<u32> {
        let mut request = self.request();
        // SAFETY: SIOCGIFMTU reads the name and writes ifru_mtu, both in the request, which outlives the call.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so ifru_mtu is the member that was written.
        let mtu = unsafe { request.ifr_ifru.ifru_mtu };
        u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// The queues that are in use.
    ///
    /// # Errors
    /// The driver's; many do not report them.
    pub fn channels(&self) -> io::Result<Channels> {
        // struct ethtool_channels: the command, the maxima of four kinds, the numbers in use.
        let mut words = [ETHTOOL_GCHANNELS, 0, 0, 0, 0, 0, 0, 0, 0];
        // SAFETY: the command writes one struct ethtool_channels, of nine words.
        unsafe { self.ethtool((&raw mut words).cast()) }?;
        let [_, most_rx, _, _, most_combined, rx, tx, _, combined] = words;
        Ok(Channels {
            rx,
            tx,
            combined,
            most_receiving: most_rx.max(most_combined),
        })
    }

    /// A command of the ethtool ioctl (`dev_ethtool`, net/ethtool/ioctl.c), which may read and write what `command`
    /// points to.
    ///
    /// # Errors
    /// The driver's; EOPNOTSUPP if it does not know the command.
    ///
    /// # Safety
    /// `command` points to the command's structure, with room for all bytes that the kernel may write according to
    /// the counts in it. No other thread uses it during the call, and it may have any bytes afterwards.
    pub unsafe fn ethtool(&self, command: *mut c_void) -> io::Result<()> {
        let mut request = self.request();
        request.ifr_ifru.ifru_data = command.cast();
        // SAFETY: the request outlives the call; the caller guarantees the data that it points to.
        match unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    fn request(&self) -> libc::ifreq {
        // SAFETY: ifreq is plain data, for which all zeroes are valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // The name is shorter than the field: it stays terminated.
        for (to, from) in request.ifr_name.iter_mut().zip(self.name.bytes()) {
            *to = from.cast_signed();
        }
        request
    }
}

/// A socket for the ioctls; any kind will do.
fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?)
}
