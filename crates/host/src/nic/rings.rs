//! Receive rings of a NIC: the length of their buffers, and whether the NIC splits headers from data
//! (`tcp-data-split`), so that it writes payload to the place where its reader wants it.
//!
//! By the netlink family of ethtool (Documentation/networking/ethtool-netlink.rst), as the ioctl does not have it.
//! netlink-bindings 0.3.5 counts that family's requests and replies together, so that its "rings" are the kernel's
//! "pause": so this file sets the numbers of the commands.

use std::io;

use netlink_bindings::ethtool;
use netlink_socket2::NetlinkSocket;

/// `ETHTOOL_TCP_DATA_SPLIT_ENABLED`, include/uapi/linux/ethtool.h.
pub const ENABLED: u8 = 2;

/// `ETHTOOL_MSG_RINGS_GET`, include/uapi/linux/ethtool_netlink_generated.h.
const RINGS_GET: u8 = 15;

/// A NIC's receive rings, as its driver reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rings {
    /// How header and data are split.
    pub split: Split,
    /// Default length of a receive buffer, bytes; `None`: the driver does not report it.
    pub buffer_bytes: Option<u32>,
}

/// How a NIC splits headers from data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Split {
    /// Its driver has no such setting.
    Never,
    /// Off; the configured threshold, bytes.
    Off(u32),
    /// Only for frames longer than this number of bytes.
    Above(u32),
    /// For all frames.
    On,
}

impl Rings {
    /// For a driver that reports nothing.
    const UNTOLD: Self = Self {
        split: Split::Never,
        buffer_bytes: None,
    };
}

/// The rings of an interface.
///
/// # Errors
/// An error of the kernel.
pub fn of(ifindex: u32) -> io::Result<Rings> {
    let mut socket = NetlinkSocket::new();
    let mut request = ethtool::Request::new().op_rings_get_do();
    request.header_mut().cmd = RINGS_GET;
    request
        .encode()
        .nested_header()
        .push_dev_index(ifindex)
        .end_nested();
    let mut replies = socket.request(&request)?;
    let rings = match replies.recv_one().map_err(io::Error::from) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(Rings::UNTOLD),
        answered => answered?,
    };
    let threshold = rings.get_hds_thresh().unwrap_or(0);
    Ok(Rings {
        split: match (rings.get_tcp_data_split(), threshold) {
            (Err(_), _) => Split::Never,
            (Ok(ENABLED), 0) => Split::On,
            (Ok(ENABLED), bytes) => Split::Above(bytes),
            (Ok(_), bytes) => Split::Off(bytes),
        },
        buffer_bytes: rings.get_rx_buf_len().ok().filter(|&bytes| bytes > 0),
    })
}
