//! Queries of a driver by the ethtool ioctl. They need no privilege (`dev_ethtool`, net/ethtool/ioctl.c).
//!
//! Untested with a NIC that has rules: layouts are compared with the kernel's header, errors with those of a veth.
#![allow(unsafe_code)]

use std::io;

use xsk::Netdevice;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::abi::{self, DriverInfo, RxFh, RxNfc, Value, command};
use super::rule::Known;

/// Most rules that are read of one NIC.
const RULES_MAX: u32 = 16_384;
/// Highest number of an RSS context that is looked for; drivers number them from 1.
const CONTEXTS_MAX: u32 = 64;
/// Longest indirection table that is written.
pub const INDIRECTION_MAX: u32 = 4096;

/// Where the VLAN tags of received frames are when XDP sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tags {
    /// In the frame.
    There,
    /// Where the peer of a veth or netkit put them.
    AsSent,
    /// Stripped by the driver into metadata: a tagged frame looks untagged, one with two tags has only the inner
    /// one.
    TakenOff,
    /// Stripped by the kernel, regardless of the driver's settings.
    Lost,
}

/// The rules of a NIC.
#[derive(Debug, Clone)]
pub struct Table {
    /// Number of locations.
    pub size: u32,
    /// The driver chooses locations.
    pub special: bool,
    /// The rules.
    pub rules: Vec<Known>,
}

/// A NIC's n-tuple rules and RSS contexts, to be read.
pub trait Steering {
    /// The n-tuple rules that there are.
    ///
    /// # Errors
    /// The driver's: EOPNOTSUPP if it has none.
    fn table(&self) -> io::Result<Table>;
    /// The RSS contexts other than the main one.
    ///
    /// # Errors
    /// The driver's: EOPNOTSUPP if it has not even a main one.
    fn contexts(&self) -> io::Result<Vec<u32>>;
    /// The queues that an RSS context spreads over, in order, each once; 0 is the main one's number.
    ///
    /// # Errors
    /// The driver's.
    fn spread(&self, context: u32) -> io::Result<Vec<u32>>;
    /// All entries of an RSS context's table.
    ///
    /// # Errors
    /// The driver's.
    fn indirection(&self, context: u32) -> io::Result<Vec<u32>>;
}

/// An interface's driver.
#[derive(Debug)]
pub struct Ethtool {
    device: Netdevice,
}

impl Ethtool {
    /// Opens the driver of the interface of that name, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The kernel's; an impossible name.
    pub fn open(interface: &str) -> io::Result<Self> {
        let device = Netdevice::by_name(interface)?;
        Ok(Self { device })
    }

    /// Number of receive queues in use, which `ethtool -L` changes.
    ///
    /// # Errors
    /// The driver's; many do not tell.
    pub fn receive_queues(&self) -> io::Result<u32> {
        let channels = self.device.channels()?;
        Ok(channels.rx.saturating_add(channels.combined))
    }

    /// Maximum number of receive queues that `ethtool -L` can set.
    ///
    /// # Errors
    /// The driver's; many do not tell.
    pub fn most_receive_queues(&self) -> io::Result<u32> {
        Ok(self.device.channels()?.most_receiving)
    }

    /// Where VLAN tags are when XDP sees a frame.
    #[must_use]
    pub fn tags(&self) -> Tags {
        let driver = self.driver().unwrap_or_default();
        let flags = self.value(command::GFLAGS);
        match driver.as_str() {
            // Their frames come from another interface, whose tags the kernel has taken off (skb_vlan_untag in
            // __netif_receive_skb_core, net/core/dev.c) before generic XDP runs for them. (A bond can run XDP natively,
            // but not for AF_XDP: its sockets are of the bond, its frames of the interface below, see xsk_rcv_check.)
            "macvlan" | "ipvlan" | "bridge" | "team" | "bonding" => Tags::Lost,
            _ if flags.is_ok_and(|flags| flags & abi::FLAG_RXVLAN != 0) => Tags::TakenOff,
            // As the other end sends them (drivers/net/veth.c): in the skb if it offloads VLAN tags, else in the frame.
            "veth" | "netkit" => Tags::AsSent,
            _ => Tags::There,
        }
    }

    /// Name of the driver.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn driver(&self) -> io::Result<String> {
        let mut info = DriverInfo::new_zeroed();
        info.cmd = command::GDRVINFO;
        self.ask(info.as_mut_bytes())?;
        let name = info.driver.split(|&byte| byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(name).into_owned())
    }

    /// Whether received packets are merged before the stack sees them (GRO).
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn joins(&self) -> io::Result<bool> {
        Ok(self.value(command::GGRO)? != 0)
    }

    /// Whether it segments TCP packets that it sends (TSO).
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn has_tso(&self) -> io::Result<bool> {
        Ok(self.value(command::GTSO)? != 0)
    }

    /// The result of a command that returns one number.
    fn value(&self, cmd: u32) -> io::Result<u32> {
        let mut value = Value { cmd, data: 0 };
        self.ask(value.as_mut_bytes())?;
        Ok(value.data)
    }

    /// Number of entries of an RSS context's table; 0 is the main one's number.
    ///
    /// # Errors
    /// The driver's: EOPNOTSUPP if it has none.
    pub fn indirection_size(&self, context: u32) -> io::Result<u32> {
        let mut head = RxFh::new(command::GRSSH, context);
        self.ask(head.as_mut_bytes())?;
        Ok(head.indir_size)
    }

    /// A command and its structure, which the kernel may write to, too.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The bytes are those of the command's structure (asserted against the kernel's header), with room for the counts
    /// in it: how much the kernel writes follows from both.
    pub unsafe fn command(&self, bytes: &mut [u8]) -> io::Result<()> {
        // SAFETY: the caller's.
        unsafe { self.device.ethtool(bytes.as_mut_ptr().cast()) }
    }

    fn ask(&self, bytes: &mut [u8]) -> io::Result<()> {
        // SAFETY: each caller passes the structure of its command, with room for the counts that it writes there. Any
        // bytes are valid for these structures.
        unsafe { self.command(bytes) }
    }
}

impl Steering for Ethtool {
    fn table(&self) -> io::Result<Table> {
        let mut count = RxNfc::new(command::GRXCLSRLCNT);
        self.ask(count.as_mut_bytes())?;
        let special = count.data & u64::from(abi::LOCATION_SPECIAL) != 0;
        // Not every driver reports the size here.
        let size = u32::try_from(count.data & !u64::from(abi::LOCATION_SPECIAL)).unwrap_or(0);
        // Rules may have been added meanwhile.
        let room = count.rule_cnt.saturating_add(16).min(RULES_MAX);
        let mut all = RxNfc::new(command::GRXCLSRLALL);
        all.rule_cnt = room;
        let mut bytes = all.as_bytes()[..abi::LOCATIONS_AT].to_vec();
        bytes.resize(abi::LOCATIONS_AT + 4 * room as usize + 4, 0);
        self.ask(&mut bytes)?;
        let (head, _) = RxNfc::read_from_prefix(&bytes).map_err(|_| io::ErrorKind::InvalidData)?;
        let size = u32::try_from(head.data)
            .ok()
            .filter(|&size| size != 0)
            .unwrap_or(size);
        let locations = bytes[abi::LOCATIONS_AT..].as_chunks::<4>().0.iter();
        let locations = locations.map(|bytes| u32::from_ne_bytes(*bytes));
        let mut rules = Vec::new();
        for location in locations.take(head.rule_cnt.min(room) as usize) {
            let mut one = RxNfc::new(command::GRXCLSRULE);
            one.fs.location = location;
            match self.ask(one.as_mut_bytes()) {
                Ok(()) => rules.push(Known::of(&one.fs, location, one.rule_cnt)),
                // It was removed meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Table { size, special, rules })
    }

    fn contexts(&self) -> io::Result<Vec<u32>> {
        // That there is a main table, hence that the driver knows of any.
        self.indirection_size(0)?;
        Ok((1..=CONTEXTS_MAX)
            .filter(|&context| self.indirection_size(context).is_ok())
            .collect())
    }

    fn spread(&self, context: u32) -> io::Result<Vec<u32>> {
        let mut queues = self.indirection(context)?;
        queues.sort_unstable();
        queues.dedup();
        Ok(queues)
    }

    fn indirection(&self, context: u32) -> io::Result<Vec<u32>> {
        let size = self.indirection_size(context)?;
        if size == 0 || size > INDIRECTION_MAX {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut bytes = RxFh::with_table(command::GRSSH, context, size);
        bytes.resize(size_of::<RxFh>() + 4 * size as usize, 0);
        self.ask(&mut bytes)?;
        let table = bytes[size_of::<RxFh>()..].as_chunks::<4>().0.iter();
        Ok(table.map(|bytes| u32::from_ne_bytes(*bytes)).collect())
    }
}
