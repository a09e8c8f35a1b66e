//! Frames in and out of an interface, byte for byte, by packet socket (packet(7)).
//!
//! The kernel takes a VLAN tag out of a frame before a packet socket sees it and tells it beside the frame
//! (PACKET_AUXDATA, `net/core/dev.c` __netif_receive_skb_core); it is put back here, so that what a test reads is what
//! was on the wire.
#![allow(unsafe_code)]

use crate::assert_soon;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, netdevice, send, socket_with};

use crate::{NetNs, VethPair, wait};

/// Not in libc (`linux/if_packet.h`).
const PACKET_VNET_HDR: libc::c_int = 15;

/// Most bytes of a frame that is read.
const LONGEST: usize = 65_536;

/// Room for frames that a test has not read yet, bytes as the kernel counts them (net.core.rmem_default is reached by
/// 277 frames of 200 bytes): what is missing was lost on its way, and not here.
const WAITING_BYTES: libc::c_int = 64 << 20;

/// A packet socket on one interface: what is sent goes out of it, what is read came in by it.
#[derive(Debug)]
#[must_use]
pub struct PacketPort {
    fd: OwnedFd,
}

impl AsFd for PacketPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl PacketPort {
    /// Opens it on an interface of a namespace.
    ///
    /// # Panics
    /// If there is no such interface.
    pub fn open(netns: &NetNs, interface: &str) -> Self {
        let fd = netns.enter(|| open_socket(interface, libc::ETH_P_ALL));
        Self {
            fd: fd.unwrap_or_else(|error| panic!("packet socket on {interface}: {error}")),
        }
    }

    /// Opens it on an interface of this process's namespace, for sending only.
    ///
    /// # Panics
    /// If there is no such interface.
    pub fn open_here(interface: &str) -> Self {
        let fd = open_socket(interface, 0);
        Self {
            fd: fd.unwrap_or_else(|error| panic!("packet socket on {interface}: {error}")),
        }
    }

    /// Opens it so that each frame to be sent has the first ten bytes of a virtio-net header before it, by which the
    /// kernel completes the checksum and cuts GSO packets (PACKET_VNET_HDR, `net/packet/af_packet.c` packet_snd). For
    /// sending only.
    ///
    /// # Panics
    /// If there is no such interface.
    pub fn open_with_header(netns: &NetNs, interface: &str) -> Self {
        netns.enter(|| Self::here_with_header(interface))
    }

    /// As [`Self::open_with_header`], at the far end of a pair. GSO packets come to the near end unsegmented, unless an
    /// XDP program is there.
    ///
    /// # Panics
    /// If there is no far end.
    pub fn open_gso_sender(veth: &VethPair) -> Self {
        let wire = VethPair::WIRE;
        let on = ["-K", wire, "tx", "on", "tso", "on", "tx-udp-segmentation", "on"];
        veth.far.run("ethtool", &on);
        Self::open_with_header(&veth.far, wire)
    }

    /// As [`Self::open_with_header`], in this network namespace.
    ///
    /// # Panics
    /// If there is no such interface.
    pub fn here_with_header(interface: &str) -> Self {
        // No protocol: nothing is received, and what is sent passes no tap of ours.
        let fd = open_socket(interface, 0);
        let fd = fd.unwrap_or_else(|error| panic!("packet socket on {interface}: {error}"));
        set(&fd, libc::SOL_PACKET, PACKET_VNET_HDR, 1).expect("every kernel has it");
        Self { fd }
    }

    /// Opens it so that each frame that is read has such a header before it, which says whether its checksum is yet to
    /// be completed, and whether it is to be cut.
    ///
    /// # Panics
    /// If there is no such interface.
    pub fn open_to_read_with_header(netns: &NetNs, interface: &str) -> Self {
        let port = Self::open(netns, interface);
        set(&port.fd, libc::SOL_PACKET, PACKET_VNET_HDR, 1).expect("every kernel has it");
        port
    }

    /// Sends one frame.
    ///
    /// # Panics
    /// If the interface does not take it.
    pub fn send(&self, frame: &[u8]) {
        self.try_send(frame)
            .unwrap_or_else(|error| panic!("sending {} bytes: {error}", frame.len()));
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// What send(2) says: EMSGSIZE, ENETDOWN and so on.
    pub fn try_send(&self, frame: &[u8]) -> io::Result<()> {
        // A packet socket sends a frame whole or not at all.
        send(&self.fd, frame, SendFlags::empty())?;
        Ok(())
    }

    /// The next frame that came in, or `None` if none does in time.
    ///
    /// # Panics
    /// If the interface is gone.
    pub fn receive(&self, limit: Duration) -> Option<Vec<u8>> {
        self.receive_with_status(limit).map(|(frame, _)| frame)
    }

    /// What comes in before `last`, a frame like no other that was sent behind everything else on the same way: so that
    /// nothing has to be waited for in silence, which on a slow machine proves nothing.
    ///
    /// # Panics
    /// If it never comes.
    #[track_caller]
    pub fn receive_before(&self, last: &[u8]) -> Vec<Vec<u8>> {
        let mut before = Vec::new();
        loop {
            match self.receive(wait::SOON) {
                Some(frame) if frame == last => return before,
                Some(frame) => before.push(frame),
                None => panic!("the last frame does not come; {} came before", before.len()),
            }
        }
    }

    /// As [`receive`](Self::receive), with what the kernel says of the frame beside it (`TP_STATUS_…`,
    /// `linux/if_packet.h`): for instance that its checksum is yet to be completed.
    ///
    /// # Panics
    /// As [`receive`](Self::receive).
    pub fn receive_with_status(&self, limit: Duration) -> Option<(Vec<u8>, u32)> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).expect("short");
            let mut fds = [PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN)];
            if poll(&mut fds, Some(&left)).expect("a good descriptor") == 0 {
                return None;
            }
            match self.read() {
                Ok(frame) => return Some(frame),
                Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => {} // said once; what comes later is read
                Err(error) => panic!("reading a frame: {error}"),
            }
        }
    }

    fn read(&self) -> io::Result<(Vec<u8>, u32)> {
        let mut frame = vec![0u8; LONGEST];
        let (got, aux) = self.read_aux(&mut frame, 0)?;
        frame.truncate(got);
        let Some(aux) = aux else {
            return Ok((frame, 0));
        };
        if let Some(tag) = vlan_tag(&aux) {
            frame.splice(12..12, tag);
        }
        Ok((frame, aux.tp_status))
    }

    /// Waits a while for a frame and reads it; returns its length and the VLAN tag that is not in it. Of a port
    /// [with headers](Self::open_to_read_with_header) the header comes first.
    ///
    /// # Errors
    /// `WouldBlock` if none came; else what recvmsg(2) says.
    pub fn read_into(&self, frame: &mut [u8], limit: Duration) -> io::Result<(usize, Option<[u8; 4]>)> {
        let mut read = self.read_aux(frame, libc::MSG_DONTWAIT);
        if matches!(&read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            && wait::readable(&self.fd, limit)
        {
            read = self.read_aux(frame, libc::MSG_DONTWAIT);
        }
        let (got, aux) = read?;
        Ok((got, aux.as_ref().and_then(vlan_tag)))
    }

    fn read_aux(
        &self,
        frame: &mut [u8],
        flags: libc::c_int,
    ) -> io::Result<(usize, Option<libc::tpacket_auxdata>)> {
        let mut control = [0u64; 16];
        let mut iov = libc::iovec {
            iov_base: frame.as_mut_ptr().cast(),
            iov_len: frame.len(),
        };
        // SAFETY: msghdr is plain data, for which zeros are a value.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of::<[u64; 16]>();
        // SAFETY: the message points at `frame` and `control`, with their lengths, and both outlive the call.
        let got = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, flags) };
        let Ok(got) = usize::try_from(got) else {
            return Err(io::Error::last_os_error());
        };
        Ok((got, auxiliary(&message)))
    }
}

/// Waits until the near end of a pair has received so many frames and its sockets have them, however late softirqs run.
///
/// # Panics
/// If they never come.
#[track_caller]
pub fn await_delivered(veth: &VethPair, frames: u64) {
    assert_soon!(veth.received_by_nic() >= frames, "the NIC takes what is sent");
    // Where the driver has no program, a veth counts a frame before a CPU's backlog has it.
    assert_soon!(backlogs_are_empty(), "frames stay in a backlog");
    // A softirq counts frames, or takes them from the backlog, before it gives the last ones to a socket (veth_poll,
    // drivers/net/veth.c). Closing a packet socket takes until all softirqs that run now have ended: it waits for RCU
    // (packet_release, net/packet/af_packet.c).
    drop(PacketPort::open(&veth.far, VethPair::WIRE));
}

/// Whether no CPU has frames that wait for its softirq.
fn backlogs_are_empty() -> bool {
    let text = std::fs::read_to_string("/proc/net/softnet_stat").expect("it is there");
    // The twelfth number of a CPU's line (softnet_seq_show, net/core/net-procfs.c).
    let waiting = |cpu: &str| {
        cpu.split_whitespace()
            .nth(11)
            .is_some_and(|count| count != "00000000")
    };
    !text.lines().any(waiting)
}

/// What the kernel says of a frame beside it.
fn auxiliary(message: &libc::msghdr) -> Option<libc::tpacket_auxdata> {
    // SAFETY: recvmsg filled the control buffer and set its length; the CMSG functions stay within that.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null()
            && ((*header).cmsg_level, (*header).cmsg_type) != (libc::SOL_PACKET, libc::PACKET_AUXDATA)
        {
            header = libc::CMSG_NXTHDR(message, header);
        }
        if header.is_null() {
            return None;
        }
        Some(
            libc::CMSG_DATA(header)
                .cast::<libc::tpacket_auxdata>()
                .read_unaligned(),
        )
    }
}

/// The four bytes of a tag that the kernel took out of the frame.
fn vlan_tag(aux: &libc::tpacket_auxdata) -> Option<[u8; 4]> {
    if aux.tp_status & libc::TP_STATUS_VLAN_VALID == 0 {
        return None;
    }
    let tpid = if aux.tp_status & libc::TP_STATUS_VLAN_TPID_VALID == 0 {
        0x8100
    } else {
        aux.tp_vlan_tpid
    };
    let ([a, b], [c, d]) = (tpid.to_be_bytes(), aux.tp_vlan_tci.to_be_bytes());
    Some([a, b, c, d])
}

fn open_socket(interface: &str, protocol: libc::c_int) -> io::Result<OwnedFd> {
    let protocol = (protocol as u16).to_be();
    let fd = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    set(&fd, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
    set(&fd, libc::SOL_PACKET, libc::PACKET_AUXDATA, 1)?;
    set(&fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, WAITING_BYTES)?;
    let index = netdevice::name_to_index(&fd, interface)?;
    // SAFETY: sockaddr_ll is plain data, for which zeros are a value.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol;
    address.sll_ifindex = index.cast_signed();
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address outlives the call and `len` is its length.
    if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

fn set(fd: &OwnedFd, level: i32, option: i32, value: libc::c_int) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value outlives the call and `len` is its length.
    let result = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, (&raw const value).cast(), len) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
