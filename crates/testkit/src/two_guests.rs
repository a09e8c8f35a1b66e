//! Two guests in one process, one of which lies.

use crate::assert_soon;
use crate::daemon::Placement;
use crate::{Daemon, Driver, DriverConfig, Layout, PacketPort, Serve, VethPair, frame, wait};

/// Two guests of one daemon, each on a queue of its own of a veth pair.
#[must_use]
pub struct TwoGuests {
    /// The one that does wrong, on port 0.
    pub liar: Driver,
    /// The one that must not notice, on port 1.
    pub honest: Driver,
    /// Their daemon.
    pub daemon: Daemon,
    /// Where the frames of both come out.
    pub wire: PacketPort,
    /// The interfaces.
    pub veth: VethPair,
}

impl TwoGuests {
    /// Both connected, each on a queue of its own of one interface.
    ///
    /// # Panics
    /// If the daemon does not start, or refuses one.
    pub fn new(placement: Placement, config: &DriverConfig) -> Self {
        let veth = VethPair::with(2, 1500);
        let serve = Serve::interface(VethPair::NIC).placement(placement);
        let daemon = Daemon::start_ports(&veth.near, &serve, &["start-queue=0", "start-queue=1"]);
        let wire = PacketPort::open(&veth.far, VethPair::WIRE);
        let guest = |name| Driver::connect(&daemon.path(name), config).expect("it is accepted");
        Self {
            liar: guest("port0.sock"),
            honest: guest("port1.sock"),
            daemon,
            wire,
            veth,
        }
    }

    /// Sends frames until each queue of the NIC will have got one: the kernel chooses by a hash of the flow, whose key
    /// is made at boot.
    ///
    /// # Panics
    /// If the interface does not take them.
    pub fn send_to_every_queue(&self) {
        (0..64).for_each(|flow| self.wire.send(&frame::udp(flow, 100)));
    }

    /// The honest guest's frames arrive on the wire, behind what the other one sent.
    ///
    /// # Panics
    /// If one does not.
    pub fn assert_honest_guest_sends(&mut self) {
        let sent = frame::last();
        self.honest.pairs[0].send(&sent, Layout::Whole);
        let _ = self.wire.receive_before(&sent);
    }

    /// The liar's port is closed, for that reason, which is said once; the daemon and the other go on; the liar may
    /// come back.
    ///
    /// # Panics
    /// If any of that is not so.
    pub fn assert_closed_alone(mut self, reason: &str, config: &DriverConfig) {
        assert!(
            self.liar.await_close(wait::SOON),
            "the port was not closed; the daemon said:\n{}",
            self.daemon.said()
        );
        self.daemon.process().check();
        self.daemon.await_port(0, "closed with its reason", |port| {
            port["last_closed"]["reason"] == reason
        });
        let told = |daemon: &Daemon| daemon.said().lines().filter(|line| line.contains(reason)).count();
        assert_soon!(told(&self.daemon) > 0, "the log does not say why");
        self.assert_honest_guest_sends();
        let mut again = Driver::connect(&self.daemon.path("port0.sock"), config).expect("it may come back");
        assert_eq!(told(&self.daemon), 1, "said once: {}", self.daemon.said());
        let sent = frame::plain(90, 0x22);
        again.pairs[0].send(&sent, Layout::Whole);
        frame::assert_same(&self.wire.receive(wait::SOON).expect("it works again"), &sent);
    }
}
