//! The ways of those who bring their own XDP program: sockets passed in, a map by path or by descriptor. No steward:
//! it would have a program of its own. A map may also come from a plugin: `afxdp_plugin.rs`.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rstest::rstest;
use rustix::process::Signal;
use testkit::daemon::{Mode, private_dir};
use testkit::driver::{F_HOST_ALL, region_info};
use testkit::foreign::{self, Foreign, assert_serves_guests, inherited, list};
use testkit::gso_packet::{GsoPacket, Ip, header};
use testkit::guest::{Guest, qemu_has_af_xdp};
use testkit::world::{GUEST, HOST, give_address};
use testkit::{
    BpfFs, Daemon, Driver, DriverConfig, Layout, Lessor, PacketPort, Rig, Serve, VethPair, frame, require,
    wait,
};

use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

const BUFFER: u32 = 2048;

/// With a program that is there already.
fn inhibited() -> Serve {
    Serve::interface(VethPair::NIC).by_root().flag("--inhibit")
}

/// A daemon that inherits these descriptors cannot start, and says why.
#[track_caller]
fn assert_refused(veth: &VethPair, descriptors: &[&OwnedFd], serve: &Serve, words: &[&str]) {
    inherited(descriptors, || Daemon::spawn(&veth.near, serve)).assert_complains(words);
}

/// A daemon that uses the program of another process, and listens.
struct Scene {
    veth: VethPair,
    daemon: Daemon,
    _program: Foreign,
}

impl Scene {
    /// By the map of the program.
    fn by_map(mode: Mode, options: impl FnOnce(Serve) -> Serve) -> Self {
        let veth = VethPair::new();
        let program = Foreign::attach(&veth.near, VethPair::NIC, mode, 0);
        let serve = options(inhibited().with("--map-fd", list(&[&program.map])));
        let daemon = listening(&veth, &[&program.map], &serve);
        Self {
            veth,
            daemon,
            _program: program,
        }
    }

    /// By a socket that is in the map, and which nobody else keeps.
    fn by_socket() -> Self {
        let veth = VethPair::new();
        let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
        let socket = foreign::socket(&veth.near);
        program.place(0, &socket);
        let serve = inhibited().with("--sock-fds", list(&[&socket]));
        let daemon = listening(&veth, &[&socket], &serve);
        Self {
            veth,
            daemon,
            _program: program,
        }
    }
}

/// A daemon that inherits these descriptors, and listens.
fn listening(veth: &VethPair, descriptors: &[&OwnedFd], serve: &Serve) -> Daemon {
    let mut daemon = inherited(descriptors, || Daemon::spawn(&veth.near, serve));
    daemon.await_ready();
    daemon
}

#[rstest]
fn sockets_passed_in_serve_guest_after_guest_without_a_capability(
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
) {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, mode, 0);
    let socket = foreign::socket(&veth.near);
    program.place(0, &socket);
    let dir = private_dir();
    let command = Lessor::nobody(&veth.near, &dir, &[]);
    let serve = inhibited().with("--sock-fds", list(&[&socket]));
    let mut daemon = inherited(&[&socket], || Daemon::spawn_by(command, dir, &serve));
    drop(socket);
    // Its files are there a little before it listens.
    daemon.await_ready();
    assert_eq!(daemon.port(0)["attached"], mode.name());
    assert_serves_guests(veth, daemon, 6);
    drop(program);
}

/// What kernels before 7.1 take into a map, and what QEMU asks for; and rings smaller and larger than ours.
#[rstest]
fn sockets_passed_in_may_have_an_rx_ring_of_any_size_or_none(
    #[values(None, Some(256), Some(4096))] entries: Option<u32>,
) {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let mut socket = foreign::bare_socket(&veth.near);
    if let Some(entries) = entries {
        socket = foreign::with_ring(socket, entries);
    }
    if let Err(error) = program.try_place(0, &socket) {
        assert_eq!((entries, error.raw_os_error()), (None, Some(libc::ENOBUFS)));
        println!("SKIPPED: this kernel's maps take no socket without an RX ring");
        return;
    }
    let serve = inhibited().with("--sock-fds", list(&[&socket]));
    let daemon = listening(&veth, &[&socket], &serve);
    drop(socket);
    assert_serves_guests(veth, daemon, 2);
}

/// There is no other one for the next guest.
#[rstest]
fn socket_passed_in_stays_when_a_vmm_takes_the_memory_of_its_rings_away(#[values(true, false)] all: bool) {
    require!(Root);
    let scene = Scene::by_socket();
    let config = DriverConfig::with_memory(vec![(GuestAddr(0), 16 << 20)]);
    let mut driver = Driver::connect(&scene.daemon.socket(), &config).expect("accepted");
    if all {
        let region = region_info(&driver.ram().regions().expect("regions")[0]);
        let removed = driver.frontend().remove_mem_region(&region);
        removed.expect("a VMM may do that");
    } else {
        let other = GuestRam::new(&[(GuestAddr(1 << 40), 4 << 20)]).expect("memory");
        let region = region_info(&other.regions().expect("regions")[0]);
        let said = driver.frontend().set_mem_table(&[region]);
        said.expect_err("the rings are in none of it");
    }
    drop(driver);
    assert_serves_guests(scene.veth, scene.daemon, 2);
}

/// A guest of QEMU's own AF_XDP and one of the daemon, one after the other, with the options of both word by word the
/// same.
fn assert_either_serves(
    veth: VethPair,
    options: impl Fn(&VethPair) -> (Vec<OwnedFd>, Vec<(&'static str, String)>),
) {
    if qemu_has_af_xdp() {
        give_address(&veth);
        let (sockets, options) = options(&veth);
        let words = options.iter().map(|(name, value)| format!(",{name}={value}"));
        let netdev = format!(
            "af-xdp,ifname={},inhibit=on{}",
            VethPair::NIC,
            words.collect::<String>()
        );
        let boot = || Guest::boot_in(&veth.near, &netdev, GUEST, &["--mem", "256"]);
        let guest = inherited(&sockets.iter().collect::<Vec<_>>(), boot);
        let said = guest.run(&format!("ping -c 3 -i 0.2 -W 60 {HOST}"));
        assert!(said.contains(" 0% packet loss"), "{said}");
    }
    let (sockets, options) = options(&veth);
    let serve = options.iter().fold(inhibited(), |serve, (name, value)| {
        serve.with(&format!("--{name}"), value)
    });
    let daemon = listening(&veth, &sockets.iter().collect::<Vec<_>>(), &serve);
    drop(sockets);
    assert_serves_guests(veth, daemon, 1);
}

#[test]
fn sockets_that_are_laid_out_for_qemu_serve_the_daemon() {
    require!(Root, Qemu);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    assert_either_serves(veth, |veth| {
        let socket = foreign::socket(&veth.near);
        program.place(0, &socket);
        let options = vec![("mode", "native".to_owned()), ("sock-fds", list(&[&socket]))];
        (vec![socket], options)
    });
}

#[test]
fn map_that_is_pinned_for_qemu_serves_the_daemon_from_the_same_index_on() {
    require!(Root, Qemu);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 3);
    let bpffs = BpfFs::new();
    let pinned = foreign::pin(&bpffs, &program.map, "xsks");
    assert_either_serves(veth, |_| {
        let index = ("map-start-index", "3".to_owned());
        (vec![], vec![("map-path", pinned.clone()), index])
    });
}

#[test]
fn map_needs_no_capability_but_the_one_to_open_a_socket() {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let serve = inhibited().with("--map-fd", list(&[&program.map]));
    let spawn = |further: &[&str]| {
        let dir = private_dir();
        let command = Lessor::nobody(&veth.near, &dir, further);
        inherited(&[&program.map], || Daemon::spawn_by(command, dir, &serve))
    };
    spawn(&[]).assert_complains(&["CAP_NET_RAW"]);
    let daemon = spawn(&["+net_raw"]);
    assert_serves_guests(veth, daemon, 2);
}

#[test]
fn no_chunk_is_lost_however_many_guests_go_with_frames_under_way() {
    require!(Root);
    let scene = Scene::by_map(Mode::Native, |serve| serve);
    let wire = PacketPort::open(&scene.veth.far, VethPair::WIRE);
    // Of some 3000 chunks, were those of each guest lost.
    for guest in 1..=40 {
        let mut driver = Driver::connect(&scene.daemon.socket(), &DriverConfig::default()).expect("accepted");
        driver.pairs[0].post(8, &[BUFFER]);
        for at in 0..100 {
            driver.pairs[0].send(&frame::plain(60, at), Layout::Whole);
            wire.send(&frame::plain(60, at));
        }
        // Most of them wait for buffers.
        scene.daemon.await_counter("to_guest_frames", 8 * guest);
        drop(driver);
    }
    assert_serves_guests(scene.veth, scene.daemon, 1);
}

/// Several descriptors of each GSO packet refer to one chunk, and the socket outlives the guest.
#[rstest]
fn no_chunk_is_lost_however_many_guests_go_with_gso_packets_under_way(
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
) {
    require!(Root);
    let scene = Scene::by_map(mode, |serve| {
        let serve = serve.offload("csum,tso4,uso");
        serve.with("--segments", "by-reference")
    });
    let config = DriverConfig::with(F_HOST_ALL);
    let gso_packet = GsoPacket::udp(Ip::V4(0), 40_000);
    let bytes = gso_packet.bytes();
    // Of some 3000 chunks: each guest's GSO packets take 130, or, in thousands of segments, hundreds.
    for guest in 0..60 {
        let mut driver = Driver::connect(&scene.daemon.socket(), &config).expect("accepted");
        let header = header(gso_packet.request([20, 1400, 700][guest % 3]));
        let before = scene.daemon.counter("from_guest_referred_segments");
        driver.pairs[0].send_asking(&[(header, &bytes[..]); 6], Layout::Pieces(5000));
        scene
            .daemon
            .await_counter("from_guest_referred_segments", before + 1);
        drop(driver);
    }
    assert_serves_guests(scene.veth, scene.daemon, 1);
}

#[test]
fn sockets_passed_in_are_one_a_queue_in_order() {
    require!(Root);
    let veth = VethPair::with(3, 1500);
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let sockets = [foreign::socket(&veth.near), foreign::socket(&veth.near)];
    program.place(1, &sockets[0]);
    program.place(2, &sockets[1]);
    let both = [&sockets[0], &sockets[1]];
    let serve = inhibited()
        .with("--sock-fds", list(&both))
        .with("--queues", "2")
        .with("--start-queue", "1");
    let config = DriverConfig::with_pairs(2);
    let daemon = listening(&veth, &both, &serve);
    let mut rig = Rig::around(veth, daemon, &config);
    for pair in &mut rig.driver.pairs {
        pair.post(32, &[BUFFER]);
        let sent = frame::plain(100, 1);
        pair.send(&sent, Layout::Whole);
        frame::assert_same(&rig.wire.receive(wait::SOON).expect("it arrives"), &sent);
    }
    // The kernel chooses a queue by a hash of the flow.
    (0..64).for_each(|flow| rig.wire.send(&frame::udp(flow, 200)));
    for (at, pair) in rig.driver.pairs.iter_mut().enumerate() {
        let got = pair.receive(wait::SOON);
        assert!(got.is_some(), "nothing in pair {at}: {:#}", rig.daemon.port(0));
    }
}

#[rstest]
#[case::by_path(true)]
#[case::by_descriptor(false)]
fn map_of_another_gets_the_sockets_from_its_first_index_on(#[case] by_path: bool) {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 3);
    let bpffs = BpfFs::new();
    let serve = inhibited().with("--map-start-index", "3");
    let daemon = if by_path {
        let serve = serve.with("--map-path", foreign::pin(&bpffs, &program.map, "xsks"));
        Daemon::spawn(&veth.near, &serve)
    } else {
        let serve = serve.with("--map-fd", list(&[&program.map]));
        inherited(&[&program.map], || Daemon::spawn(&veth.near, &serve))
    };
    assert_serves_guests(veth, daemon, 3);
}

#[test]
fn interface_that_goes_down_or_changes_its_mtu_is_followed_as_far_as_a_chunk_reaches() {
    require!(Root);
    let scene = Scene::by_map(Mode::Native, |serve| serve);
    let mut rig = Rig::around(scene.veth, scene.daemon, &DriverConfig::default());
    rig.post(64, &[BUFFER]);
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "down"]);
    wait::a_moment();
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
    rig.await_passes_both_ways();
    let set_mtu = |rig: &Rig, mtu: u32| {
        let mtu = mtu.to_string();
        rig.veth.near.ip(&["link", "set", VethPair::NIC, "mtu", &mtu]);
    };
    for mtu in [1000, 1700] {
        set_mtu(&rig, mtu);
        rig.daemon.await_port(0, "the MTU", |port| port["mtu"] == mtu);
        rig.await_passes_both_ways();
    }
    set_mtu(&rig, 3000);
    rig.daemon.await_impaired(0, "restart the daemon");
    set_mtu(&rig, 1500);
    rig.daemon.await_recovered(0);
    rig.await_passes_both_ways();
}

#[test]
fn program_that_is_not_there_yet_is_not_shown() {
    require!(Root);
    let veth = VethPair::new();
    let elsewhere = Foreign::attach(&veth.far, VethPair::WIRE, Mode::Native, 0);
    let serve = inhibited().with("--map-fd", list(&[&elsewhere.map]));
    let mut daemon = listening(&veth, &[&elsewhere.map], &serve);
    assert!(daemon.port(0)["attached"].is_null(), "{:#}", daemon.port(0));
    let link = elsewhere.attach_again(&veth.near, VethPair::NIC, Mode::Skb);
    daemon.await_port(0, "their program", |port| port["attached"] == "skb");
    drop(link);
    daemon.await_port(0, "no program", |port| port["attached"].is_null());
    daemon.process().check();
}

/// Their program may be there before the daemon sees that the interface is.
#[rstest]
fn interface_that_was_made_again_gets_new_sockets_in_the_map(#[values(false, true)] unseen: bool) {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let bpffs = BpfFs::new();
    let pinned = foreign::pin(&bpffs, &program.map, "xsks");
    let serve = inhibited().with("--map-path", pinned);
    let mut daemon = listening(&veth, &[], &serve);
    let driver = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    veth.near.ip(&["link", "delete", VethPair::NIC]);
    daemon.await_impaired(0, "");
    if unseen {
        daemon.process().signal(Signal::STOP);
    }
    veth.join(1, 1500);
    if !unseen {
        daemon.await_recovered(0);
    }
    // Their program went with the old one.
    let _link = program.attach_again(&veth.near, VethPair::NIC, Mode::Native);
    daemon.process().signal(Signal::CONT);
    daemon.await_recovered(0);
    let mut rig = Rig::of(veth, daemon, driver);
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
}

#[test]
fn interface_that_was_made_again_is_gone_for_sockets_that_were_passed_in_and_that_is_said() {
    require!(Root);
    let mut scene = Scene::by_socket();
    let _driver = Driver::connect(&scene.daemon.socket(), &DriverConfig::default()).expect("accepted");
    scene.veth.near.ip(&["link", "delete", VethPair::NIC]);
    scene.veth.join(1, 1500);
    scene.daemon.await_impaired(0, "start the daemon with new ones");
    scene.daemon.process().check();
}

#[test]
fn wrong_sockets_are_refused_by_what_is_wrong() {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let refused = |descriptors: &[&OwnedFd], words: &[&str]| {
        let serve = inhibited().with("--sock-fds", list(descriptors));
        assert_refused(&veth, descriptors, &serve, words);
    };
    let (unix, _other) = UnixStream::pair().expect("sockets");
    refused(&[&unix.into()], &["sock-fds", "no AF_XDP socket"]);
    refused(&[&program.map], &["sock-fds", "no AF_XDP socket"]);
    let (first, second) = (foreign::socket(&veth.near), foreign::socket(&veth.near));
    refused(&[&first, &second], &["2 descriptor(s)", "1 queue pair(s)"]);
    refused(&[&foreign::socket(&veth.far)], &["another network namespace"]);
    let missing = inhibited().with("--sock-fds", "777");
    assert_refused(&veth, &[], &missing, &["sock-fds 777", "inherited"]);
    let words = inhibited().with("--sock-fds", "3:x");
    assert_refused(&veth, &[], &words, &["3:x", "colons"]);
    let number = list(&[&first]);
    let twice = inhibited()
        .with("--queues", "2")
        .with("--sock-fds", format!("{number}:{number}"));
    assert_refused(&veth, &[&first], &twice, &["twice"]);

    let small = foreign::with_ring(foreign::bare_socket(&veth.near), 16);
    refused(&[&small], &["sock-fds", "fewer than 256 entries"]);

    let serve = inhibited().with("--sock-fds", number);
    let _daemon = listening(&veth, &[&first], &serve);
    refused(&[&first], &["has memory or a queue already"]);
}

#[test]
fn wrong_maps_are_refused_by_what_is_wrong() {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let bpffs = BpfFs::new();
    let pinned = foreign::pin(&bpffs, &program.map, "xsks");
    let by_path = |path: &str| inhibited().with("--map-path", path);
    let refused = |serve: &Serve, words: &[&str]| assert_refused(&veth, &[], serve, words);
    let numbers = foreign::map_of_numbers();
    let pinned_numbers = foreign::pin(&bpffs, &numbers, "numbers");
    refused(
        &by_path(&pinned_numbers),
        &["map-path", "type 2", "not an XSKMAP"],
    );
    refused(&by_path("/nowhere/map"), &["/nowhere/map", "bpffs"]);
    refused(&by_path("/etc/hostname"), &["/etc/hostname", "bpffs"]);
    let far_off = by_path(&pinned).with("--map-start-index", "8");
    refused(&far_off, &["places 8 to 8", "with 8"]);
    let beyond = by_path(&pinned).with("--map-start-index", "4294967295");
    refused(&beyond, &["places 4294967295"]);
    let socket = foreign::socket(&veth.near);
    program.place(0, &socket);
    refused(&by_path(&pinned), &["place 0", "another socket"]);

    let by_number = |map: &OwnedFd, words: &[&str]| {
        let serve = inhibited().with("--map-fd", list(&[map]));
        assert_refused(&veth, &[map], &serve, words);
    };
    by_number(&numbers, &["map-fd", "not an XSKMAP"]);
    by_number(&socket, &["map-fd", "not a BPF map but socket"]);
}

#[rstest]
fn rules_match_the_mark_that_anothers_program_leaves_where_it_is_said_how(
    #[values(false, true)] is_said: bool,
) {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach_marking(&veth.near, VethPair::NIC, 7);
    let mut serve = inhibited()
        .with("--map-fd", list(&[&program.map]))
        .with("--rule", "direction=to-guest action=allow mark=7");
    if is_said {
        serve = serve.with("--map-layout", Foreign::STRUCTURE);
    }
    let daemon = listening(&veth, &[&program.map], &serve);
    let mut driver = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    driver.pairs[0].post(8, &[BUFFER]);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    for flow in 0..4 {
        wire.send(&frame::udp(flow, 64));
    }
    let counter = if is_said {
        "to_guest_frames"
    } else {
        "to_guest_filter"
    };
    daemon.await_that(|| daemon.counter(counter) >= 4);
    assert_eq!(daemon.counter("to_guest_hints_unknown"), 0);
    let other = ["to_guest_filter", "to_guest_frames"][usize::from(!is_said)];
    assert_eq!(daemon.counter(other), 0);
    let hints = &daemon.port(0)["lanes"][0]["hints"];
    if is_said {
        assert_eq!(hints["on"], serde_json::json!(["hash", "mark"]), "{hints}");
        assert_eq!(hints["seen"], hints["on"], "{hints}");
    } else {
        assert!(hints.is_null(), "{hints}");
    }
}

#[test]
fn structure_that_no_program_of_the_map_has_is_refused_by_its_name() {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach_marking(&veth.near, VethPair::NIC, 7);
    let serve = inhibited()
        .with("--map-fd", list(&[&program.map]))
        .with("--map-layout", "other_hints");
    assert_refused(
        &veth,
        &[&program.map],
        &serve,
        &["map-layout", "map-fd", "`struct other_hints`"],
    );
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    require!(Root);
    let veth = VethPair::new();
    let bare = || Serve::interface(VethPair::NIC).by_root();
    let refused = |serve: Serve, words: &[&str]| assert_refused(&veth, &[], &serve, words);
    refused(bare().flag("--inhibit"), &["inhibit requires", "sock-fds"]);
    refused(bare().with("--map-path", "/x"), &["require inhibit"]);
    refused(bare().with("--sock-fds", "5"), &["require inhibit"]);
    let index = inhibited().with("--sock-fds", "5").with("--map-start-index", "1");
    refused(index, &["map-start-index requires"]);
    let two = inhibited().with("--sock-fds", "5").with("--map-path", "/x");
    refused(two, &["exclude each other"]);
    let direct = inhibited().with("--map-path", "/x").with("--memory", "direct");
    refused(direct, &["memory=copy", "virtio-net header"]);
    let steward = inhibited().with("--map-path", "/x").with("--steward", "/y");
    refused(steward, &["--steward", "exclude"]);
    let null = Serve::null().by_root().flag("--inhibit").with("--map-path", "/x");
    refused(null, &["--ifname"]);

    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Skb, 0);
    let serve = inhibited()
        .with("--map-fd", list(&[&program.map]))
        .mode(Mode::Native);
    assert_refused(
        &veth,
        &[&program.map],
        &serve,
        &["attached in skb mode", "contradicts mode"],
    );
}
