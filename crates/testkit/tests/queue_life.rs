//! A NIC queue has a life of its own: its socket stays bound while guests come, go, and change their memory, and the
//! host has the queue's frames meanwhile. Each test asks the kernel which sockets there are.

use std::collections::BTreeSet;

use rstest::rstest;
use rustix::process::Signal;
use testkit::daemon::Placement;
use testkit::driver::region_info;
use testkit::holdings::xdp_sockets;
use testkit::{Daemon, Driver, DriverConfig, Layout, PacketPort, Rig, Serve, VethPair, frame, require, wait};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

const BUFFER: u32 = 2048;

fn sockets(daemon: &mut Daemon) -> BTreeSet<String> {
    xdp_sockets(daemon.process().pid())
}

/// The one socket that there is.
#[track_caller]
fn socket(daemon: &mut Daemon) -> String {
    let found = sockets(daemon);
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().next().expect("one")
}

fn serve(leased: bool, placement: Placement) -> Serve {
    let serve = Serve::interface(VethPair::NIC).placement(placement);
    serve.leased_if(leased)
}

/// A frame from the wire reaches the host's stack, and no guest.
#[track_caller]
fn assert_host_gets_frames(veth: &VethPair, wire: &PacketPort, seed: u8) {
    let host = PacketPort::open(&veth.near, VethPair::NIC);
    let sent = frame::plain(100, seed);
    wire.send(&sent);
    frame::assert_same(&host.receive(wait::SOON).expect("the host has it"), &sent);
}

/// What is there without a guest.
struct Host {
    daemon: Daemon,
    wire: PacketPort,
    veth: VethPair,
}

impl Host {
    /// The guest goes, and its VMM with it.
    fn without_guest(rig: Rig) -> Self {
        let (driver, daemon, wire, veth) = rig.into_parts();
        drop(driver);
        daemon.await_port(0, "no VMM", |port| port["connected"] == false);
        Self { daemon, wire, veth }
    }

    /// The next one.
    fn with_guest(self) -> Rig {
        Rig::around(self.veth, self.daemon, &DriverConfig::default())
    }

    /// The queue is not the daemon's any more.
    #[track_caller]
    fn assert_has_queue(&mut self) {
        assert_eq!(sockets(&mut self.daemon), BTreeSet::new());
        assert_host_gets_frames(&self.veth, &self.wire, 1);
    }
}

#[rstest]
fn socket_stays_bound_while_guests_come_and_go(#[values(false, true)] leased: bool) {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &serve(leased, Placement::Copy));
    let first = socket(&mut daemon);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    assert_host_gets_frames(&veth, &wire, 1);
    let mut rig = Rig::around(veth, daemon, &DriverConfig::default());
    for seed in 2..6 {
        rig.post(64, &[BUFFER]);
        rig.assert_passes_both_ways();
        assert_eq!(socket(&mut rig.daemon), first, "a guest uses it");
        let mut host = Host::without_guest(rig);
        assert_eq!(socket(&mut host.daemon), first, "no guest uses it");
        assert_host_gets_frames(&host.veth, &host.wire, seed);
        rig = host.with_guest();
    }
    rig.post(64, &[BUFFER]);
    rig.assert_passes_both_ways();
    assert_eq!(
        rig.daemon.counter("to_guest_queue_stopped"),
        0,
        "the host had them"
    );
}

#[rstest]
fn socket_stays_bound_when_the_memory_table_changes(#[values(false, true)] leased: bool) {
    require!(Root);
    let mut rig = Rig::with(
        VethPair::new(),
        &serve(leased, Placement::Copy),
        &DriverConfig::default(),
    );
    rig.post(64, &[BUFFER]);
    let first = socket(&mut rig.daemon);
    let more = GuestRam::new(&[(GuestAddr(16 << 30), 8 << 20)]).expect("memory");
    let regions = more.regions().expect("regions");
    let info = region_info(&regions[0]);
    for _ in 0..3 {
        rig.driver.frontend().add_mem_region(&info).expect("added");
        rig.assert_passes_both_ways();
        rig.driver.frontend().remove_mem_region(&info).expect("removed");
        rig.assert_passes_both_ways();
    }
    assert_eq!(socket(&mut rig.daemon), first);
}

/// As a guest's reset and boot are for its device: everything stopped, forgotten, and set up with fresh rings.
#[rstest]
fn socket_stays_bound_when_the_guest_boots_again(#[values(false, true)] leased: bool) {
    require!(Root);
    let mut config = DriverConfig::default();
    config.protocol |= VhostUserProtocolFeatures::RESET_DEVICE;
    let mut rig = Rig::with(VethPair::new(), &serve(leased, Placement::Copy), &config);
    let first = socket(&mut rig.daemon);
    for _ in 0..3 {
        rig.post(64, &[BUFFER]);
        rig.assert_passes_both_ways();
        rig.driver.frontend().reset_device().expect("reset");
        assert_eq!(socket(&mut rig.daemon), first, "between two boots");
        rig.driver.start_over(&config).expect("started");
    }
    rig.post(64, &[BUFFER]);
    rig.assert_passes_both_ways();
    assert_eq!(socket(&mut rig.daemon), first);
}

/// A queue is opened anew only for frames that its chunks cannot hold: 2048 bytes have room for 1792, 4096 for 3840.
#[rstest]
fn socket_stays_bound_while_frames_of_another_mtu_fit_its_chunks(#[values(false, true)] leased: bool) {
    require!(Root);
    let veth = VethPair::new();
    veth.far.ip(&["link", "set", VethPair::WIRE, "mtu", "3400"]);
    let mut rig = Rig::with(veth, &serve(leased, Placement::Copy), &DriverConfig::default());
    rig.post(64, &[4096]);
    let mut before = socket(&mut rig.daemon);
    for (mtu, stays) in [
        (1400, true),
        (1774, true),
        (1775, false),
        (3400, true),
        (1500, true),
    ] {
        rig.veth
            .near
            .ip(&["link", "set", VethPair::NIC, "mtu", &mtu.to_string()]);
        rig.daemon
            .await_port(0, "the MTU", |port| port["mtu"].as_u64() == Some(mtu));
        rig.await_passes_both_ways();
        // What frames fit does not depend on a guest.
        let longest = usize::try_from(mtu).expect("small") + frame::HEADER;
        rig.assert_from_guest(&frame::plain(longest, 1), Layout::Whole);
        rig.assert_to_guest(&frame::plain(longest, 2));
        let now = socket(&mut rig.daemon);
        assert_eq!(now == before, stays, "MTU {mtu}");
        before = now;
    }
}

#[test]
fn queue_that_is_coupled_with_a_guest_s_memory_goes_with_it() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &serve(true, Placement::Direct));
    assert_eq!(sockets(&mut daemon), BTreeSet::new());
    let mut rig = Rig::around(veth, daemon, &DriverConfig::default());
    rig.post(64, &[BUFFER]);
    rig.assert_passes_both_ways();
    let _only_one = socket(&mut rig.daemon);
    Host::without_guest(rig).assert_has_queue();
}

/// Nobody can tell the program that the guest is gone. The queue is opened anew when the steward is back.
#[test]
fn queue_of_a_guest_that_goes_while_the_steward_is_away_is_the_host_s() {
    require!(Root);
    let mut rig = Rig::with(
        VethPair::new(),
        &serve(true, Placement::Copy),
        &DriverConfig::default(),
    );
    rig.post(64, &[BUFFER]);
    rig.daemon.end_steward(Signal::KILL);
    rig.assert_passes_both_ways();
    let mut host = Host::without_guest(rig);
    host.assert_has_queue();
    host.daemon.restart_lessor(&host.veth.near);
    let mut rig = host.with_guest();
    rig.post(64, &[BUFFER]);
    rig.assert_passes_both_ways();
}

/// What the steward was asked for too late: by then nobody is there who would take the frames.
#[test]
fn queue_that_a_steward_opens_when_nobody_waits_for_it_any_more_is_the_host_s() {
    require!(Root);
    let veth = VethPair::new();
    let serve = serve(true, Placement::Copy).with("--steward-timeout", "1");
    let mut daemon = Daemon::start(&veth.near, &serve);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    assert_host_gets_frames(&veth, &wire, 1);
    daemon.signal_steward(Signal::STOP);
    let driver = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("it is told to wait");
    daemon.await_port(0, "no queue", |port| !port["impaired"].is_null());
    drop(driver);
    daemon.await_port(0, "no VMM", |port| port["connected"] == false);
    daemon.signal_steward(Signal::CONT);
    // It does, one after the other, what it was asked for.
    daemon.await_port(0, "the steward's answer", |port| port["impaired"].is_null());
    assert_host_gets_frames(&veth, &wire, 2);
}
