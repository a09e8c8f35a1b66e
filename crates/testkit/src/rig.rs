//! The usual arrangement: a veth pair, the daemon on its near end, a packet socket on its far end, a guest.

use std::time::Duration;

use rustix::process::Signal;

use crate::daemon::{Mode, Placement};
use crate::pair::Received;
use crate::{
    Daemon, Driver, DriverConfig, Layout, PacketPort, Pair, Serve, Traffic, VethPair, frame, packet, wait,
};

/// All of it. Fields are dropped in this order: the guest goes first, the namespaces last.
#[must_use]
pub struct Rig {
    /// The guest.
    pub driver: Driver,
    /// The daemon.
    pub daemon: Daemon,
    /// The far end of the wire.
    pub wire: PacketPort,
    /// The interfaces.
    pub veth: VethPair,
}

impl Rig {
    /// One queue pair, MTU 1500.
    pub fn new(placement: Placement, mode: Mode) -> Self {
        let serve = Serve::interface(VethPair::NIC).placement(placement).mode(mode);
        Self::with(VethPair::new(), &serve, &DriverConfig::default())
    }

    /// Its fields.
    pub fn into_parts(self) -> (Driver, Daemon, PacketPort, VethPair) {
        (self.driver, self.daemon, self.wire, self.veth)
    }

    /// With interfaces, options and a guest of the caller's choice.
    ///
    /// # Panics
    /// If the daemon does not start, or refuses the guest.
    pub fn with(veth: VethPair, serve: &Serve, config: &DriverConfig) -> Self {
        let daemon = Daemon::start(&veth.near, serve);
        Self::around(veth, daemon, config)
    }

    /// Around a daemon that listens: a guest connects to it.
    ///
    /// # Panics
    /// If the daemon refuses the guest.
    pub fn around(veth: VethPair, daemon: Daemon, config: &DriverConfig) -> Self {
        let driver = connect(&daemon, config);
        Self::of(veth, daemon, driver)
    }

    /// Of a daemon and its guest.
    pub fn of(veth: VethPair, daemon: Daemon, driver: Driver) -> Self {
        Self {
            driver,
            daemon,
            wire: PacketPort::open(&veth.far, VethPair::WIRE),
            veth,
        }
    }

    /// Of a daemon, and what traffic through it went between, which ends.
    ///
    /// # Panics
    /// As [`Traffic::end`].
    pub fn after(traffic: Traffic, daemon: Daemon, veth: VethPair) -> Self {
        let (driver, wire) = traffic.end();
        Self {
            driver,
            daemon,
            wire,
            veth,
        }
    }

    /// What `exchange` makes of the guest takes its place; the rest stays.
    pub fn exchange(self, exchange: impl FnOnce(Driver, &Daemon) -> Driver) -> Self {
        let Self {
            driver,
            daemon,
            wire,
            veth,
        } = self;
        Self {
            driver: exchange(driver, &daemon),
            daemon,
            wire,
            veth,
        }
    }

    /// The guest goes as one does whose VMM was killed: the connection ends, nothing was stopped before. Another comes.
    ///
    /// # Panics
    /// If the daemon refuses it.
    pub fn next_guest(self) -> Self {
        self.next_guest_with(&DriverConfig::default())
    }

    /// The same with a guest of that form.
    ///
    /// # Panics
    /// If the daemon refuses it.
    pub fn next_guest_with(self, config: &DriverConfig) -> Self {
        self.exchange(|driver, daemon| {
            drop(driver);
            connect(daemon, config)
        })
    }

    /// Its first queue pair.
    pub fn pair(&mut self) -> &mut Pair {
        &mut self.driver.pairs[0]
    }

    /// Posts receive chains in the first pair, and returns when frames arrive in them: a NIC drops what comes before it
    /// has buffers, and when it has seen them the driver cannot tell.
    ///
    /// # Panics
    /// If none ever does.
    #[track_caller]
    pub fn post(&mut self, count: usize, lengths: &[u32]) {
        self.pair().post(count, lengths);
        self.await_to_guest();
    }

    /// Sends frames, numbered, until the one sent last arrives in the guest: then none is under way any more.
    ///
    /// # Panics
    /// If that never happens.
    #[track_caller]
    pub fn await_to_guest(&mut self) {
        let mut seed = 0xee;
        let arrives = wait::until(wait::SOON, || {
            seed = u8::wrapping_add(seed, 1);
            let probe = frame::plain(60, seed);
            let _ = self.wire.try_send(&probe);
            let pair = &mut self.driver.pairs[0];
            let arrivals = std::iter::from_fn(|| pair.receive(Duration::from_millis(200)));
            arrivals.into_iter().any(|got| got.frame == probe)
        });
        assert!(
            arrives,
            "nothing arrives in the guest: {:#}\n{}",
            self.daemon.status(),
            self.daemon.said()
        );
    }

    /// Sends frames while the daemon is held up, so that it finds them together: up to 64 are a batch.
    ///
    /// # Panics
    /// If the interface does not take one.
    pub fn burst_to_guest(&mut self, frames: &[Vec<u8>]) {
        self.daemon.process().signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.daemon.process().pid());
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = task.map(|task| std::fs::read_to_string(task.path().join("stat")));
            stat.is_ok_and(|stat| stat.is_ok_and(|stat| stat.contains(") T ")))
        };
        let stopped = || std::fs::read_dir(&tasks).is_ok_and(|mut tasks| tasks.all(is_stopped));
        assert!(wait::until(wait::SOON, stopped), "SIGSTOP stops the daemon");
        let before = self.veth.received_by_nic();
        frames.iter().for_each(|frame| self.wire.send(frame));
        let count = u64::try_from(frames.len()).expect("few");
        packet::await_delivered(&self.veth, before + count);
        self.daemon.process().signal(Signal::CONT);
    }

    /// What comes out of the wire before a frame that the guest's first pair sends now: all that was under way there.
    ///
    /// # Panics
    /// If that never comes.
    #[track_caller]
    pub fn flush_from_guest(&mut self) -> Vec<Vec<u8>> {
        let last = frame::last();
        self.pair().send(&last, Layout::Whole);
        self.wire.receive_before(&last)
    }

    /// What arrives in the guest's first pair before a frame that is sent into the wire now: all that was under way
    /// there. Buffers must be posted.
    ///
    /// # Panics
    /// If that never comes.
    #[track_caller]
    pub fn flush_to_guest(&mut self) -> Vec<Received> {
        let last = frame::last();
        self.wire.send(&last);
        self.pair().receive_before(&last)
    }

    /// A frame from the guest must arrive on the wire as it is.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn assert_from_guest(&mut self, sent: &[u8], layout: Layout) {
        self.pair().send(sent, layout);
        let got = self.wire.receive(wait::SOON);
        frame::assert_same(
            &got.unwrap_or_else(|| panic!("{} bytes, {layout:?}: nothing arrived", sent.len())),
            sent,
        );
    }

    /// A frame from the wire must arrive in the guest as it is. Buffers must be posted.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn assert_to_guest(&mut self, sent: &[u8]) {
        self.wire.send(sent);
        let got = self.pair().receive(wait::SOON);
        let got = got.unwrap_or_else(|| panic!("{} bytes: nothing arrived", sent.len()));
        frame::assert_same(&got.frame, sent);
        assert_eq!(
            got.header[..10],
            [0; 10],
            "no offload was negotiated, so the header says nothing"
        );
    }

    /// Renames the interface, which the kernel does while it is up since 6.2; frames go on.
    ///
    /// # Panics
    /// If they do not.
    #[track_caller]
    pub fn rename_nic(&mut self, name: &str) {
        self.assert_passes_both_ways();
        self.veth.near.ip(&["link", "set", VethPair::NIC, "name", name]);
        self.assert_passes_both_ways();
    }

    /// Frames pass both ways: for after something happened. Buffers must be posted.
    ///
    /// # Panics
    /// If one does not.
    #[track_caller]
    pub fn assert_passes_both_ways(&mut self) {
        self.assert_from_guest(&frame::plain(100, 0xa5), Layout::Whole);
        self.assert_to_guest(&frame::plain(100, 0x5a));
    }

    /// As [`assert_passes_both_ways`](Self::assert_passes_both_ways), where it may take a while and frames may be lost
    /// until then.
    ///
    /// # Panics
    /// If frames never pass.
    #[track_caller]
    pub fn await_passes_both_ways(&mut self) {
        let limit = Duration::from_millis(200);
        let out = frame::plain(101, 0xa6);
        let outwards = wait::until(wait::SOON, || {
            self.driver.pairs[0].send(&out, Layout::Whole);
            self.wire.receive(limit).is_some_and(|got| got == out)
        });
        assert!(outwards, "frames of the guest do not arrive again");
        self.await_to_guest();
        let _ = self.flush_from_guest();
    }
}

pub(crate) fn connect(daemon: &Daemon, config: &DriverConfig) -> Driver {
    Driver::connect(&daemon.socket(), config)
        .unwrap_or_else(|refused| panic!("{refused}; the daemon said:\n{}", daemon.said()))
}
