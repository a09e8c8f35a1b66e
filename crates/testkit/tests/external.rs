//! The ways of those who bring their own XDP program: sockets passed in, a map by path or by descriptor, and the map that the AF_XDP
//! device plugin for Kubernetes gives. No steward: it would have a program of its own.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rstest::rstest;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept, bind, listen, recv, sendmsg, socket_with,
};
use testkit::daemon::{Mode, private_dir};
use testkit::foreign::{self, BpfFs, Foreign, complaint, inherited, list};
use testkit::guest::Guest;
use testkit::world::{GUEST, HOST, give_address};
use testkit::{
    Daemon, Driver, DriverConfig, Layout, Lessor, PacketPort, Rig, Running, Serve, VethPair, frame, require,
    wait,
};

const BUFFER: u32 = 2048;

/// With a program that is there already.
fn inhibited() -> Serve {
    Serve::interface(VethPair::NIC).by_root().flag("--inhibit")
}

/// Guests come and go on a daemon that listens; frames pass for each, and what came between them does not reach the next.
fn assert_serves_guests(veth: VethPair, mut daemon: Daemon, count: u8) {
    daemon.await_sockets(&[daemon.socket(), daemon.path("control")]);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let connect = |daemon: &Daemon| {
        Driver::connect(&daemon.socket(), &DriverConfig::default())
            .unwrap_or_else(|refused| panic!("{refused}: {}", daemon.said()))
    };
    let driver = connect(&daemon);
    let mut rig = Rig {
        driver,
        daemon,
        wire,
        veth,
    };
    for seed in 0..count {
        rig.post(64, &[BUFFER]);
        for at in 0..20 {
            let size = 60 + usize::from(at) * 70;
            rig.assert_from_guest(&frame::plain(size, seed ^ at), Layout::Whole);
            rig.assert_to_guest(&frame::plain(size, seed ^ at));
        }
        // It goes with frames under way, and more come than the socket has room for.
        for at in 0..64 {
            rig.pair().send(&frame::plain(200, at), Layout::Whole);
            rig.wire.send(&frame::plain(200, at));
        }
        drop(rig.driver);
        rig.daemon
            .await_port(0, "the end of the guest", |port| port["connected"] == false);
        for _ in 0..3000 {
            let _ = rig.wire.try_send(&frame::plain(60, 0x77));
        }
        wait::settle();
        while rig.wire.receive(Duration::from_millis(50)).is_some() {}
        rig.driver = connect(&rig.daemon);
    }
    assert!(rig.daemon.counter("to_guest_queue_stopped") > 0);
}

/// A daemon that cannot start says why in one line.
#[track_caller]
fn assert_refused(veth: &VethPair, descriptors: &[&OwnedFd], serve: &Serve, words: &[&str]) {
    let mut daemon = inherited(descriptors, || Daemon::spawn(&veth.near, serve));
    let said = complaint(daemon.process());
    assert_eq!(said.lines().count(), 1, "one line, and not: {said}");
    words
        .iter()
        .for_each(|word| assert!(said.contains(word), "{word:?} is missing in: {said}"));
    assert!(!daemon.socket().exists(), "a socket stayed behind");
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
    daemon.await_sockets(&[daemon.socket(), daemon.path("control")]);
    assert_eq!(daemon.port(0)["attached"], mode.name());
    assert_serves_guests(veth, daemon, 6);
    drop(program);
}

/// It resets its device while it boots, leaves checksums to us, and sends and takes super-frames.
#[test]
fn linux_guests_boot_and_talk_over_sockets_passed_in() {
    require!(Root, Qemu);
    let veth = VethPair::new();
    give_address(&veth);
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let socket = foreign::socket(&veth.near);
    program.place(0, &socket);
    let serve = inhibited().with("--sock-fds", list(&[&socket]));
    let mut daemon = inherited(&[&socket], || Daemon::spawn(&veth.near, &serve));
    daemon.await_sockets(&[daemon.socket(), daemon.path("control")]);
    let mut command = veth.far.command("iperf3");
    command.args(["-s", "-p", "5201", "--forceflush"]);
    let mut server = Running::start(command);
    server.await_text("listening");
    for _ in 0..2 {
        let guest = Guest::boot(("--socket", &daemon.socket()), GUEST, &["--mem", "256"]);
        let _ = guest.run(&format!("ping -c 3 -i 0.2 -W 2 {HOST}"));
        for direction in ["", "-R"] {
            let _ = guest.run(&format!("iperf3 -c {HOST} -p 5201 -n 20M {direction}"));
        }
        guest.kill();
    }
    assert!(
        daemon.port(0)["sessions"].as_u64() >= Some(2),
        "{:#}",
        daemon.port(0)
    );
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
    let said = complaint(spawn(&[]).process());
    assert!(said.contains("CAP_NET_RAW"), "{said}");
    let daemon = spawn(&["+net_raw"]);
    assert_serves_guests(veth, daemon, 2);
}

#[test]
fn no_chunk_is_lost_however_many_guests_go_with_frames_under_way() {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let serve = inhibited().with("--map-fd", list(&[&program.map]));
    let mut daemon = inherited(&[&program.map], || Daemon::spawn(&veth.near, &serve));
    daemon.await_sockets(&[daemon.socket(), daemon.path("control")]);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    // Of some 3000 chunks, were those of each guest lost.
    for guest in 1..=40 {
        let mut driver = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
        driver.pairs[0].post(8, &[BUFFER]);
        for at in 0..100 {
            driver.pairs[0].send(&frame::plain(60, at), Layout::Whole);
            wire.send(&frame::plain(60, at));
        }
        // Most of them wait for buffers.
        daemon.await_counter("to_guest_frames", 8 * guest);
        drop(driver);
    }
    assert_serves_guests(veth, daemon, 1);
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
    let config = DriverConfig {
        pairs: 2,
        ..DriverConfig::default()
    };
    let mut daemon = inherited(&both, || Daemon::spawn(&veth.near, &serve));
    daemon.await_sockets(&[daemon.socket(), daemon.path("control")]);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let driver = Driver::connect(&daemon.socket(), &config).expect("accepted");
    let mut rig = Rig {
        driver,
        daemon,
        wire,
        veth,
    };
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
    let bpffs = BpfFs::mount();
    let serve = inhibited().with("--map-start-index", "3");
    let daemon = if by_path {
        let serve = serve.with("--map-path", bpffs.pin(&program.map, "xsks"));
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
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let serve = inhibited().with("--map-fd", list(&[&program.map]));
    let mut daemon = inherited(&[&program.map], || Daemon::spawn(&veth.near, &serve));
    daemon.await_sockets(&[daemon.socket(), daemon.path("control")]);
    let driver = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let mut rig = Rig {
        driver,
        daemon,
        wire,
        veth,
    };
    rig.post(64, &[BUFFER]);
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "down"]);
    wait::settle();
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
    rig.daemon.await_port(0, "impaired", |port| {
        port["impaired"]
            .as_str()
            .is_some_and(|why| why.contains("start the daemon anew"))
    });
    set_mtu(&rig, 1500);
    rig.daemon
        .await_port(0, "recovered", |port| port["impaired"].is_null());
    rig.await_passes_both_ways();
}

#[test]
fn interface_that_was_made_again_gets_new_sockets_in_the_map() {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let bpffs = BpfFs::mount();
    let pinned = bpffs.pin(&program.map, "xsks");
    let serve = inhibited().with("--map-path", pinned);
    let mut daemon = Daemon::spawn(&veth.near, &serve);
    daemon.await_sockets(&[daemon.socket(), daemon.path("control")]);
    let driver = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    veth.near.ip(&["link", "delete", VethPair::NIC]);
    daemon.await_port(0, "gone", |port| !port["impaired"].is_null());
    veth.join(1, 1500);
    daemon.await_port(0, "back", |port| port["impaired"].is_null());
    // Their program went with the old one.
    let _link = program.attach_again(&veth.near, VethPair::NIC, Mode::Native);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let mut rig = Rig {
        driver,
        daemon,
        wire,
        veth,
    };
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
}

#[test]
fn interface_that_was_made_again_is_gone_for_sockets_that_were_passed_in_and_that_is_said() {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let socket = foreign::socket(&veth.near);
    program.place(0, &socket);
    let serve = inhibited().with("--sock-fds", list(&[&socket]));
    let mut daemon = inherited(&[&socket], || Daemon::spawn(&veth.near, &serve));
    daemon.await_sockets(&[daemon.socket(), daemon.path("control")]);
    let _driver = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    veth.near.ip(&["link", "delete", VethPair::NIC]);
    veth.join(1, 1500);
    daemon.await_port(0, "said", |port| {
        port["impaired"]
            .as_str()
            .is_some_and(|why| why.contains("start the daemon with new ones"))
    });
    daemon.process().check();
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
    refused(&[&unix.into()], &["--sock-fds", "no AF_XDP socket"]);
    refused(&[&program.map], &["--sock-fds", "no AF_XDP socket"]);
    let (first, second) = (foreign::socket(&veth.near), foreign::socket(&veth.near));
    refused(&[&first, &second], &["2 descriptor(s)", "1 queue pair(s)"]);
    refused(&[&foreign::socket(&veth.far)], &["another network namespace"]);
    let missing = inhibited().with("--sock-fds", "777");
    assert_refused(&veth, &[], &missing, &["--sock-fds 777", "inherited"]);
    let words = inhibited().with("--sock-fds", "3:x");
    assert_refused(&veth, &[], &words, &["3:x", "colons"]);
    let number = list(&[&first]);
    let twice = inhibited()
        .with("--queues", "2")
        .with("--sock-fds", format!("{number}:{number}"));
    assert_refused(&veth, &[&first], &twice, &["twice"]);

    let serve = inhibited().with("--sock-fds", number);
    let mut daemon = inherited(&[&first], || Daemon::spawn(&veth.near, &serve));
    daemon.await_sockets(&[daemon.socket()]);
    refused(&[&first], &["has memory or a queue already"]);
}

#[test]
fn wrong_maps_are_refused_by_what_is_wrong() {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let bpffs = BpfFs::mount();
    let pinned = bpffs.pin(&program.map, "xsks");
    let by_path = |path: &str| inhibited().with("--map-path", path);
    let refused = |serve: &Serve, words: &[&str]| assert_refused(&veth, &[], serve, words);
    let numbers = foreign::map_of_numbers();
    let pinned_numbers = bpffs.pin(&numbers, "numbers");
    refused(
        &by_path(&pinned_numbers),
        &["--map-path", "type 2", "not an XSKMAP"],
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
    by_number(&numbers, &["--map-fd", "not an XSKMAP"]);
    by_number(&socket, &["--map-fd", "no BPF map but socket"]);
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
    let null = Serve::null().flag("--inhibit").with("--map-path", "/x");
    refused(null, &["--ifname"]);

    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Skb, 0);
    let serve = inhibited()
        .with("--map-fd", list(&[&program.map]))
        .mode(Mode::Native);
    assert_refused(
        &veth,
        &[&program.map],
        &serve,
        &["attached in skb mode", "--mode"],
    );
}

/// One step of a plugin: what it waits for, and what it then says.
struct Step<'a> {
    request: String,
    answer: Vec<u8>,
    descriptors: Vec<&'a OwnedFd>,
}

fn step<'a>(request: &str, answer: &str, descriptors: &[&'a OwnedFd]) -> Step<'a> {
    Step {
        request: request.to_owned(),
        answer: answer.as_bytes().to_vec(),
        descriptors: descriptors.to_vec(),
    }
}

/// A plugin in a thread of this process, at a path that a daemon is told; it plays its steps to one connection, and waits for its end.
fn with_plugin(veth: &VethPair, steps: &[Step<'_>], check: impl FnOnce(Daemon)) {
    with_plugin_for(steps, |serve| check(Daemon::spawn(&veth.near, serve)));
}

/// As [`with_plugin`], with a daemon of the caller's.
fn with_plugin_for(steps: &[Step<'_>], run: impl FnOnce(&Serve)) {
    let dir = private_dir();
    let path = dir.path().join("plugin.sock");
    let flags = SocketFlags::CLOEXEC;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
    bind(&listener, &SocketAddrUnix::new(&path).expect("short")).expect("a free path");
    listen(&listener, 1).expect("it is bound");
    let serve = Serve::interface(VethPair::NIC)
        .by_root()
        .with("--afxdp-plugin", path.to_str().expect("ASCII"));
    std::thread::scope(|scope| {
        scope.spawn(|| play(&listener, steps));
        run(&serve);
    });
}

fn play(listener: &OwnedFd, steps: &[Step<'_>]) {
    let connection = accept(listener).expect("the daemon connects");
    for step in steps {
        let mut bytes = [0; 128];
        let (len, _) = recv(&connection, &mut bytes, RecvFlags::empty()).expect("a request");
        assert_eq!(String::from_utf8_lossy(&bytes[..len]), step.request);
        assert!(len <= 64, "the plugin reads 64 bytes");
        let fds: Vec<_> = step.descriptors.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let parts = [std::io::IoSlice::new(&step.answer)];
        sendmsg(&connection, &parts, &mut control, SendFlags::NOSIGNAL).expect("it listens");
    }
    // The end of the conversation, or what is asked and gets no answer.
    let _ = recv(&connection, &mut [0; 128][..], RecvFlags::empty());
    let _ = recv(&connection, &mut [0; 128][..], RecvFlags::empty());
}

fn connect_request() -> String {
    format!(
        "/connect,{}",
        rustix::system::uname().nodename().to_str().expect("UTF-8")
    )
}

/// The first steps, in which the plugin accepts us.
fn accepted<'a>() -> Vec<Step<'a>> {
    vec![
        step(&connect_request(), "/host_ok", &[]),
        step("/version", "0.1", &[]),
    ]
}

const MAP_REQUEST: &str = "/xsk_map_fd,nic0";

#[rstest]
fn map_of_the_kubernetes_plugin_is_asked_for_and_used(#[values("/fin_ack", "/nak", "")] last_answer: &str) {
    require!(Root);
    let veth = VethPair::new();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let mut steps = accepted();
    steps.push(step(MAP_REQUEST, "/fd_ack", &[&program.map]));
    // What was given is ours, whatever comes then.
    steps.push(step("/fin", last_answer, &[]));
    let mut kept = None;
    with_plugin(&veth, &steps, |mut daemon| {
        daemon.await_sockets(&[daemon.socket()]);
        kept = Some(daemon);
    });
    assert_serves_guests(veth, kept.expect("it runs"), 2);
}

#[test]
fn ports_share_one_conversation_with_the_kubernetes_plugin() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let mut steps = accepted();
    steps.push(step(MAP_REQUEST, "/fd_ack", &[&program.map]));
    steps.push(step(MAP_REQUEST, "/fd_ack", &[&program.map]));
    steps.push(step("/fin", "/fin_ack", &[]));
    with_plugin_for(&steps, |serve| {
        let daemon = Daemon::start_ports(&veth.near, serve, &["start-queue=0", "start-queue=1"]);
        let wire = PacketPort::open(&veth.far, VethPair::WIRE);
        let guest = |name| Driver::connect(&daemon.path(name), &DriverConfig::default()).expect("accepted");
        let mut guests = [guest("port0.sock"), guest("port1.sock")];
        for guest in &mut guests {
            guest.pairs[0].post(64, &[BUFFER]);
        }
        // The kernel chooses a queue, and so the guest, by a hash of the flow.
        (0..64).for_each(|flow| wire.send(&frame::udp(flow, 200)));
        for guest in &mut guests {
            assert!(
                guest.pairs[0].receive(wait::SOON).is_some(),
                "{:#}",
                daemon.status()
            );
        }
    });
}

/// What the plugin answers instead of the last step that it accepts.
#[rstest]
#[case::unknown_host(0, b"/host_nak", &["does not know a pod", "/host_nak"])]
#[case::error(0, b"/error", &["refuses", "/connect", "/error"])]
#[case::connect_not_understood(0, b"/nak", &["refuses", "/connect", "/nak"])]
#[case::garbage_for_connect(0, b"\xff\xfe{}", &["/connect", "none of the protocol"])]
#[case::version_not_understood(1, b"/nak", &["refuses", "/version"])]
#[case::garbage_for_version(1, b"/fd_ack", &["/version", "none of the protocol"])]
#[case::unknown_device(2, b"/fd_nak", &["no device \"nic0\"", "/fd_nak"])]
#[case::device_not_understood(2, b"/nak", &["refuses", MAP_REQUEST])]
#[case::no_descriptor(2, b"/fd_ack", &["0 descriptors instead of 1"])]
#[case::garbage_for_device(2, b"fd_ack", &[MAP_REQUEST, "none of the protocol"])]
#[case::too_long(2, &[b'x'; 65], &[MAP_REQUEST, "longer than 64 bytes"])]
fn refusal_of_the_kubernetes_plugin_is_said(
    #[case] at: usize,
    #[case] answer: &[u8],
    #[case] words: &[&str],
) {
    require!(Root);
    let veth = VethPair::new();
    let mut steps = accepted();
    steps.push(step(MAP_REQUEST, "", &[]));
    steps.truncate(at + 1);
    steps[at].answer = answer.to_vec();
    with_plugin(&veth, &steps, |daemon| assert_complains(daemon, words));
}

#[track_caller]
fn assert_complains(mut daemon: Daemon, words: &[&str]) {
    let said = complaint(daemon.process());
    assert_eq!(said.lines().count(), 1, "one line, and not: {said}");
    words
        .iter()
        .for_each(|word| assert!(said.contains(word), "{word:?} is missing in: {said}"));
}

#[test]
fn wrong_descriptors_of_the_kubernetes_plugin_are_refused() {
    require!(Root);
    let veth = VethPair::new();
    let numbers = foreign::map_of_numbers();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let cases: [(&[&OwnedFd], &[&str]); 3] = [
        (&[&numbers], &["--afxdp-plugin", "not an XSKMAP"]),
        (&[&program.map, &program.map], &["2 descriptors instead of 1"]),
        (&[&foreign::socket(&veth.near)], &["no BPF map but socket"]),
    ];
    for (descriptors, words) in cases {
        let mut steps = accepted();
        steps.push(step(MAP_REQUEST, "/fd_ack", descriptors));
        // A single descriptor is judged when the conversation is over.
        if descriptors.len() == 1 {
            steps.push(step("/fin", "/fin_ack", &[]));
        }
        steps.truncate(3);
        with_plugin(&veth, &steps, |daemon| assert_complains(daemon, words));
    }
}

#[test]
fn silence_of_the_kubernetes_plugin_ends_after_seconds_and_its_absence_at_once() {
    require!(Root);
    let veth = VethPair::new();
    with_plugin(&veth, &[], |daemon| {
        assert_complains(daemon, &["has not answered", "/connect"]);
    });
    let serve = Serve::interface(VethPair::NIC)
        .by_root()
        .with("--afxdp-plugin", "/nowhere/afxdp.sock");
    assert_complains(
        Daemon::spawn(&veth.near, &serve),
        &["no AF_XDP device plugin at /nowhere/afxdp.sock"],
    );
}
