//! A network under test: a daemon by its file, guests that testkit plays, and the other end of the uplink.

use std::fmt::Write as _;
use std::time::Duration;

use crate::daemon::DIR;
use crate::{Daemon, Driver, DriverConfig, Layout, NetNs, PacketPort, Serve, VethPair, frame, wait};

/// A station of the LAN, behind the uplink.
pub const STRANGER: [u8; 6] = [0x02, 0, 0, 0, 1, 0];
/// Address of the uplink, and so of the host, after [`with_host`].
pub const HOST: [u8; 6] = [0x02, 0, 0, 0, 2, 0];
/// The same as text.
pub const HOST_TEXT: &str = "02:00:00:00:02:00";
/// All stations.
pub const BROADCAST: [u8; 6] = [0xff; 6];

/// An EtherType for local experiments, so that no stack looks inside.
const LOCAL: [u8; 2] = [0x88, 0xb5];

/// The address of a guest, by number.
pub fn mac(guest: usize) -> [u8; 6] {
    [0x02, 0, 0, 0, 0, guest as u8]
}

/// An EtherType for local experiments, so that no stack looks inside; bytes by length and number.
pub fn frame(to: [u8; 6], from: [u8; 6], len: usize, number: u8) -> Vec<u8> {
    let mut frame = [&to[..], &from[..], &LOCAL].concat();
    frame.extend((14..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(number)));
    frame
}

/// The same, a frame that differs from all others.
pub fn once(to: [u8; 6], from: [u8; 6], len: usize) -> Vec<u8> {
    let mut frame = frame(to, from, len, 0);
    frame[14..18].copy_from_slice(&frame::last()[14..18]);
    frame
}

/// A frame of 60 bytes that says to whom it is sent, in which VLAN, and a number.
pub fn telling(to: [u8; 6], from: [u8; 6], vlan: u16, number: u32) -> Vec<u8> {
    let said = [&vlan.to_be_bytes()[..], &number.to_be_bytes(), &to].concat();
    let mut frame = [&to[..], &from, &LOCAL, &said].concat();
    frame.resize(60, 0x5a);
    frame
}

/// Whether a frame is one that tests send, and none of a stack's; it may have a tag.
pub fn is_ours(frame: &[u8]) -> bool {
    frame[12..].starts_with(&LOCAL) || frame[16..].starts_with(&LOCAL)
}

/// The same frame with a tag (802.1Q).
pub fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    let tag = [0x8100u16.to_be_bytes(), vlan.to_be_bytes()].concat();
    [&frame[..12], &tag, &frame[12..]].concat()
}

/// Gives the near end of a pair the host's address, and has it leave tags in frames, where XDP sees them.
pub fn with_host(veth: VethPair) -> VethPair {
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    veth.near
        .ip(&["link", "set", VethPair::NIC, "address", HOST_TEXT]);
    veth.await_near();
    veth
}

/// A table for a port of the network, with further keys.
pub fn port(guest: usize, keys: &str) -> String {
    let [.., last] = mac(guest);
    format!(
        "[port.vm{guest}]\nnetwork = \"lan\"\nsocket-path = \"{DIR}/vm{guest}.sock\"\nmac = \"02:00:00:00:00:{last:02x}\"\n{keys}\n"
    )
}

/// Ports with these keys, on an uplink or on none.
///
/// # Panics
/// Never.
pub fn file(uplink: Option<&str>, ports: &[&str]) -> String {
    let mut text = "[network.lan]\n".to_owned();
    if let Some(uplink) = uplink {
        writeln!(text, "uplink = \"{uplink}\"").expect("room");
    }
    for (guest, keys) in ports.iter().enumerate() {
        text += &port(guest, keys);
    }
    text
}

/// Receives from an interface, but only frames that tests send.
pub struct Ear(pub PacketPort);

impl Ear {
    /// On an interface.
    pub fn on(netns: &NetNs, interface: &str) -> Self {
        Self(PacketPort::open(netns, interface))
    }

    /// The next one.
    pub fn next(&self, limit: Duration) -> Option<Vec<u8>> {
        std::iter::from_fn(|| self.0.receive(limit)).find(|frame| is_ours(frame))
    }

    /// Asserts that this is the next one.
    ///
    /// # Panics
    /// If it is not.
    #[track_caller]
    pub fn hears(&self, frame: &[u8]) {
        assert_eq!(self.next(wait::SOON).as_deref(), Some(frame));
    }
}

/// A daemon, its guests, and the other end of its uplink.
#[must_use]
pub struct Lan {
    /// By number.
    pub guests: Vec<Driver>,
    /// What is tested.
    pub daemon: Daemon,
    /// The other end of the uplink.
    pub wire: PacketPort,
    /// The uplink's two ends.
    pub veth: VethPair,
}

impl Lan {
    /// Ports with these keys, and a guest at each.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(ports: &[&str], config: &DriverConfig) -> Self {
        let text = format!("[daemon]\nworkers = 1\n{}", file(Some(VethPair::NIC), ports));
        Self::on(VethPair::new(), &Serve::file(), &text, ports.len(), config)
    }

    /// The same on an uplink that there is, by a file with so many ports.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn on(veth: VethPair, serve: &Serve, text: &str, ports: usize, config: &DriverConfig) -> Self {
        // So that XDP sees tags.
        veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
        let daemon = Daemon::start_file(&veth.near, serve, &[VethPair::NIC], text);
        Self {
            guests: guests(&daemon, ports, config),
            daemon,
            wire: PacketPort::open(&veth.far, VethPair::WIRE),
            veth,
        }
    }

    /// A guest sends a frame.
    pub fn send(&mut self, guest: usize, frame: &[u8]) {
        self.guests[guest].pairs[0].send(frame, Layout::Whole);
    }

    /// What a guest gets next.
    ///
    /// # Panics
    /// If nothing comes.
    #[track_caller]
    pub fn received(&mut self, guest: usize) -> Vec<u8> {
        let got = self.guests[guest].pairs[0].receive(wait::SOON);
        got.unwrap_or_else(|| panic!("nothing comes to guest {guest}: {}", self.daemon.said()))
            .frame
    }

    /// What the wire gets next of our frames.
    ///
    /// # Panics
    /// If nothing comes.
    #[track_caller]
    pub fn received_by_wire(&self) -> Vec<u8> {
        // Announcements and frames with two tags are ours, too.
        let is_ours = |frame: &Vec<u8>| is_ours(frame) || frame[12..].starts_with(&[0x81, 0]);
        std::iter::from_fn(|| self.wire.receive(wait::SOON))
            .find(is_ours)
            .expect("a frame on the wire")
    }

    /// Nothing is under way to anybody: each gets one more frame of its own next.
    ///
    /// # Panics
    /// If something is.
    #[track_caller]
    pub fn assert_quiet(&mut self) {
        for guest in 0..self.guests.len() {
            let last = frame(mac(guest), STRANGER, 60, 0xee);
            self.wire.send(&last);
            assert_eq!(self.received(guest), last, "guest {guest}");
        }
    }
}

/// Asserts that a guest reaches the LAN and is reached from there; the uplink may lose frames until then. Afterwards no
/// frame is under way to the guest.
///
/// # Panics
/// If one of both does not come about.
#[track_caller]
pub fn assert_reaches(guest: &mut Driver, number: usize, wire: &PacketPort) {
    let pair = &mut guest.pairs[0];
    let out = once(STRANGER, mac(number), 100);
    let comes_out = wait::until(wait::SOON, || {
        pair.reap_sent();
        pair.send(&out, Layout::Whole);
        std::iter::from_fn(|| wire.receive(wait::QUIET)).any(|got| got == out)
    });
    assert!(comes_out, "frames of guest {number} do not arrive");
    let back = once(mac(number), STRANGER, 100);
    let comes_in = wait::until(wait::SOON, || {
        wire.send(&back);
        pair.receive(wait::QUIET).is_some_and(|got| got.frame == back)
    });
    assert!(comes_in, "nothing arrives at guest {number}");
    let last = once(mac(number), STRANGER, 100);
    wire.send(&last);
    let _ = pair.receive_before(&last);
}

/// Connects the guest of that number, which gets receive buffers, and waits until its lane runs.
///
/// # Panics
/// If it is not.
pub fn guest(daemon: &Daemon, number: usize) -> Driver {
    let path = daemon.path(&format!("vm{number}.sock"));
    let mut driver = Driver::connect(&path, &DriverConfig::default()).expect("accepted");
    driver.pairs[0].post(64, &[2048]);
    daemon.await_that(|| {
        let port = daemon.port_named(&format!("vm{number}"));
        port.is_some_and(|port| port["lanes"][0]["running"] == true)
    });
    driver
}

/// Sends frames from one guest to another, of these numbers, while `during` runs, and receives each; and to this wire and
/// back, if there is one. Returns how many.
///
/// # Panics
/// If one is lost.
pub fn none_is_lost(
    guests: &mut [Driver; 2],
    [from, to]: [usize; 2],
    wire: Option<&PacketPort>,
    during: impl FnOnce() + Send,
) -> u32 {
    wait::rounds_during(during, |number| {
        let [sent, out] = [mac(to), STRANGER].map(|to| telling(to, mac(from), 0, number));
        let [sender, receiver] = &mut *guests;
        sender.pairs[0].reap_sent();
        sender.pairs[0].send(&sent, Layout::Whole);
        let got = receiver.pairs[0].receive(wait::SOON).expect("it arrives");
        frame::assert_same(&got.frame, &sent);
        if let Some(wire) = wire {
            sender.pairs[0].send(&out, Layout::Whole);
            let mut got = std::iter::from_fn(|| wire.receive(wait::SOON));
            assert!(got.any(|got| got == out), "frame {number} is lost");
            let back = telling(mac(from), STRANGER, 0, number);
            wire.send(&back);
            let got = sender.pairs[0].receive(wait::SOON).expect("it arrives");
            frame::assert_same(&got.frame, &back);
        }
    })
}

/// Guests with receive buffers.
///
/// # Panics
/// If the daemon refuses one.
pub fn guests(daemon: &Daemon, count: usize, config: &DriverConfig) -> Vec<Driver> {
    let guest = |at: usize| daemon.connect(at, &daemon.path(&format!("vm{at}.sock")), config, 32);
    (0..count).map(guest).collect()
}
