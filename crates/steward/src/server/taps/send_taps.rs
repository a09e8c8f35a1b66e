//! Tap devices by which lessees send GSO packets unsegmented (`steer::attach_redirect`).
//!
//! A lessee asks for one for a queue ([`Request::SendTap`](steward_protocol::Request::SendTap)). Only the lessee has
//! its descriptor, and its program ends with the device: nothing is kept here, nor pinned. When the lease ends the
//! device is set down, so that it sends no more frames, and removed, in case the lessee has made it persistent.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use steer::{attach_redirect, with_sources};

use crate::server::connections::connection::{Held, Reply};
use crate::server::connections::limits::DeviceChange;
use crate::server::interface::Interface;
use crate::server::taps::tap::{Purpose, Tap, all_taps};
use crate::server::{Answered, Server, no_lease};
use host::links::Link;
use host::nic::Ethtool;
use steward_protocol::{Answer, Reason, SendTapEnd};

impl Server {
    /// Makes a tap for a queue of the lessee's lease.
    pub(crate) fn send_tap(&mut self, number: u64, queue: u32, only_with_tso: bool) -> Answered {
        let held = self.held_lease(number)?;
        let queue = held.check(queue)?;
        let interface = self.interfaces.get(&held.interface).ok_or_else(no_lease)?;
        interface.program()?;
        let (uid, link) = (self.connections[&number].peer.uid, &interface.link);
        let has_tso = || Ethtool::open(&link.name).and_then(|ethtool| ethtool.has_tso());
        if only_with_tso && !has_tso().unwrap_or(false) {
            return Ok(Answer::Done.into());
        }
        self.device_changes
            .take(DeviceChange::SendTap, (interface.name(), uid), Instant::now())?;
        let tap = Tap::new(Purpose::Send, interface.name(), link.index, queue);
        let (answer, files) = make(&tap, link)
            .map_err(|why| Reason::Kernel.because(format!("no tap for {}: {why}", link.name)))?;
        Ok(Reply::with(Answer::SendTap(answer), files))
    }

    /// Whether a device is of a queue that somebody has.
    pub(crate) fn is_of_a_lease(&self, tap: &Tap) -> bool {
        self.all_leases().any(|lease| {
            let interface = self.interfaces.get(&lease.held.interface);
            interface.is_some_and(|interface| is_of(tap, interface, lease.held))
        })
    }

    /// Ends the devices of a lease that ends, even if a process has their descriptors.
    pub(crate) fn end_send_taps(&mut self, held: &Held) {
        let Some(interface) = self.interfaces.get(&held.interface) else {
            return;
        };
        for tap in all_taps().into_iter().filter(|tap| is_of(tap, interface, held)) {
            self.removals.begin(&tap);
        }
    }
}

/// Whether a device is of a lease's queue. The interface may have another index by now, or another name.
fn is_of(tap: &Tap, interface: &Interface, held: &Held) -> bool {
    let expected = Tap::new(Purpose::Send, interface.name(), interface.link.index, tap.first);
    tap.purpose == Purpose::Send
        && (tap.uplink == expected.uplink || tap.name == expected.name)
        && held.wanted.range().contains(&tap.first)
}

/// Makes a device.
/// Errors: in words.
fn make(tap: &Tap, link: &Link) -> Result<(SendTapEnd, Vec<OwnedFd>), String> {
    let name = &tap.name;
    let failed = |what: &str, error: io::Error| format!("cannot {what} {name}: {error}");
    let made = tap.make(1, Tap::mtu_for(link.mtu));
    let made = made.map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy => format!("{name} is there: close its descriptor first"),
        _ => failed("make the tap device (by /dev/net/tun)", error),
    })?;
    let device = Link::by_name(name).map_err(with_sources)?;
    let sends = attach_redirect(device.index, link.index, tap.first);
    sends.map_err(with_sources)?;
    // Not before: only the program may take its frames.
    tap.set_up(true).map_err(|error| failed("set up", error))?;
    let answer = SendTapEnd {
        interface: name.clone(),
        cuts_udp: made.cuts_udp,
    };
    Ok((answer, made.descriptors))
}
