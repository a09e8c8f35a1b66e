//! The conversation with the VMM: who connects to whom, what is refused, what survives an end; and the command line.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rstest::rstest;
use testkit::daemon::{DIR, Mode, Placement, private_dir, run_to_end};
use testkit::driver::{self, F_MRG_RXBUF, F_RING_PACKED, F_VERSION_1, region_info};
use testkit::process::assert_complaint;
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Rig, Serve, VethPair, frame, require, wait};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

const BUFFER: u32 = 2048;
const MIB: u64 = 1 << 20;

fn daemon_on_null() -> (NetNs, Daemon) {
    daemon_on(&Serve::null())
}

fn daemon_on(serve: &Serve) -> (NetNs, Daemon) {
    let netns = NetNs::new("null");
    let daemon = Daemon::start(&netns, serve);
    (netns, daemon)
}

/// As far as the features, which are acknowledged.
fn greeted(daemon: &Daemon) -> Driver {
    let config = DriverConfig::default();
    let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), MIB)]).expect("memory"));
    let mut driver = Driver::greet(driver::connect(&daemon.socket()), &config, ram).expect("greeted");
    let features = driver.features() & (F_VERSION_1 | F_MRG_RXBUF | driver::F_PROTOCOL_FEATURES);
    driver
        .frontend()
        .set_features(features)
        .expect("offered features are accepted");
    driver
}

/// The memory table must be refused, with the words in the log, and the daemon must go on.
fn assert_memory_refused(daemon: &mut Daemon, regions: &[VhostUserMemoryRegionInfo], words: &[&str]) {
    let driver = {
        let mut driver = greeted(daemon);
        assert!(
            driver.frontend().set_mem_table(regions).is_err(),
            "the table was accepted"
        );
        driver
    };
    drop(driver);
    let said = || words.iter().all(|word| daemon.said().contains(word));
    assert!(wait::until(wait::SOON, said), "{words:?} is not all in");
    daemon.process().check();
    Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("a good guest is accepted afterwards");
}

/// A private mapping of a file, as a VMM has it that does not share its guest's memory.
#[allow(unsafe_code)]
fn private_mapping(file: &std::os::fd::OwnedFd, len: usize) -> u64 {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    // SAFETY: the kernel chooses the place, and nothing in this process uses it.
    let place = unsafe {
        mmap(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
            file,
            0,
        )
    };
    place.expect("a file can be mapped") as u64
}

#[test]
fn memory_that_the_vmm_does_not_share_is_refused_with_the_remedy() {
    require!(Root);
    // By root, whose helper looks for it: only root and the VMM's own user may see how it maps its memory (ptrace(2),
    // PTRACE_MODE_READ).
    let (netns, mut daemon) = daemon_on(&Serve::null().by_root());
    assert_private_memory_refused(&mut daemon);
    drop(daemon);
    // Of a port that comes later, too, whose socket the helper makes.
    let directories = format!("[daemon]\nsocket-directories = [\"{DIR}\"]\n");
    let mut daemon = Daemon::start_file(&netns, &Serve::file().by_root(), &[], &directories);
    daemon.reload_with(&format!(
        "{directories}[port.vm]\nsocket-path = \"{DIR}/vm.sock\"\nnull = true\n"
    ));
    assert_private_memory_refused(&mut daemon);
}

#[track_caller]
fn assert_private_memory_refused(daemon: &mut Daemon) {
    let ram = GuestRam::new(&[(GuestAddr(0), MIB)]).expect("memory");
    let regions = ram.regions().expect("regions");
    let mut info = region_info(&regions[0]);
    info.userspace_addr = private_mapping(&regions[0].file, MIB as usize);
    assert_memory_refused(daemon, &[info], &["not shared", "share=on"]);
}

#[test]
fn features_and_protocol_features_of_the_contract_are_offered() {
    require!(Root);
    let netns = NetNs::new("null");
    let daemon = Daemon::start(&netns, &Serve::null().with("--queues", "3"));
    let config = DriverConfig::default();
    let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), MIB)]).expect("memory"));
    let mut driver = Driver::greet(driver::connect(&daemon.socket()), &config, ram).expect("greeted");
    let wanted = [
        driver::F_VERSION_1,
        driver::F_MRG_RXBUF,
        driver::F_EVENT_IDX,
        driver::F_INDIRECT,
        driver::F_IN_ORDER,
        driver::F_MAC,
        driver::F_MTU,
        driver::F_STATUS,
        driver::F_MQ,
        driver::F_PROTOCOL_FEATURES,
    ];
    for feature in wanted {
        assert_ne!(
            driver.features() & feature,
            0,
            "feature {feature:#x} is not offered"
        );
    }
    assert_eq!(
        driver.protocol(),
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    );
    // Counted in pairs (vhost-user, "Multiple queue support").
    assert_eq!(driver.frontend().get_queue_num().expect("MQ"), 3);
    assert!(driver.frontend().get_max_mem_slots().expect("slots") >= 32);
    assert!(
        driver.frontend().set_features(1 << 63).is_err(),
        "a feature that was not offered"
    );
    daemon.await_port(0, "why", |port| {
        let why = port["last_closed"]["detail"].as_str().unwrap_or_default();
        why.contains("0x8000000000000000") && why.contains("start the daemon with the options")
    });
}

#[rstest]
fn stopped_pair_keeps_its_place_and_starts_again(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct, Placement::Tap)] placement: Placement,
    #[values(0, F_RING_PACKED)] ring: u64,
) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC).placement(placement);
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::with(ring));
    rig.post(64, &[BUFFER]);
    for round in 0..20 {
        rig.assert_from_guest(&frame::plain(100, round), Layout::Whole);
        rig.pair().await_sent();
        let [_, sent] = rig.driver.stop_pair(0).expect("stopped");
        let expected = u32::from(round) + 1;
        let expected = if ring == 0 {
            expected
        } else {
            // The slot, in the lap with wrap counter 1, that is taken next and that is used next.
            (0x8000 | expected) * 0x1_0001
        };
        assert_eq!(sent, expected, "as many as were sent");
        rig.driver.start_pair(0).expect("started");
    }
    rig.await_passes_both_ways();
}

#[rstest]
fn client_meets_the_next_guest_at_the_same_place(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let veth = VethPair::new();
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .flag("--client");
    // It starts before there is anybody to connect to.
    let daemon = Daemon::spawn(&veth.near, &serve);
    std::thread::sleep(wait::QUIET);
    let listener = daemon.listen();
    let config = DriverConfig::default();
    let driver = Driver::accept(&listener, &config).expect("accepted");
    let mut rig = Rig::of(veth, daemon, driver);
    rig.post(64, &[BUFFER]);
    rig.assert_passes_both_ways();

    // The guest goes; a new one is met at the same place.
    rig = rig.exchange(|driver, _| {
        drop(driver);
        Driver::accept(&listener, &config).expect("a new guest")
    });
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
}

#[test]
fn inherited_listener_serves_one_guest_after_the_other() {
    require!(Root);
    let netns = NetNs::new("null");
    let dir = private_dir();
    let path = dir.path().join("mine.sock");
    let listener = UnixListener::bind(&path).expect("a free path");
    let mut daemon = Daemon::spawn_on_fd(&netns, &listener.into(), &Serve::null());
    for _ in 0..3 {
        let mut driver = Driver::connect(&path, &DriverConfig::default()).expect("accepted");
        driver.pairs[0].send(&frame::plain(100, 1), Layout::Whole);
        driver.pairs[0].await_sent();
    }
    daemon.process().check();
    assert!(path.exists(), "the file is not ours to remove");
}

#[test]
fn inherited_connection_is_served_and_the_daemon_ends_with_it() {
    require!(Root);
    let netns = NetNs::new("null");
    let (ours, its) = UnixStream::pair().expect("sockets");
    let mut daemon = Daemon::spawn_on_fd(&netns, &its.into(), &Serve::null());
    let mut driver = Driver::start(ours, &DriverConfig::default()).expect("accepted");
    driver.pairs[0].send(&frame::plain(100, 1), Layout::Whole);
    driver.pairs[0].await_sent();
    drop(driver);
    let status = daemon.process().wait(wait::SOON);
    assert!(status.success(), "{status}");
}

#[test]
fn capabilities_are_printed_as_qemu_wants_them() {
    require!(Root);
    let netns = NetNs::new("null");
    let (status, said) = run_to_end(&netns, &["--print-capabilities"]);
    assert!(status.success());
    let json: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(json, serde_json::json!({"type": "net"}));
}

#[test]
fn socket_of_a_daemon_that_was_killed_is_taken_over_and_that_of_a_living_one_is_not() {
    require!(Root);
    let (netns, mut daemon) = daemon_on_null();
    let path = daemon.socket();
    let path = path.to_str().expect("ASCII");
    let (status, said) = run_to_end(
        &netns,
        &["serve", "--null", "--control", "none", "--socket-path", path],
    );
    assert!(!status.success() && said.contains(path), "{said}");
    daemon.process().check();
    daemon.kill();
    let gone = wait::until(wait::SOON, || !daemon.socket().exists());
    assert!(gone, "its helper removes it");
    // One that nobody removed, since the machine went down.
    drop(daemon.listen());
    assert!(daemon.socket().exists());
    daemon.restart(&netns, &Serve::null());
    Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
}

#[rstest]
#[case::nothing_at_all(&["serve"], &["--socket-path"])]
#[case::no_interface(&["serve", "--socket-path", SOCKET], &["--ifname", "--null"])]
#[case::unknown_mode(&["serve", "--socket-path", SOCKET, "--ifname", "lo", "--mode", "fast"], &["fast", "native", "skb"])]
#[case::unknown_placement(&["serve", "--socket-path", SOCKET, "--null", "--memory", "magic"], &["magic", "copy", "direct"])]
#[case::no_queues(&["serve", "--socket-path", SOCKET, "--null", "--queues", "0"], &["--queues", "0", "1"])]
#[case::too_many_queues(&["serve", "--socket-path", SOCKET, "--null", "--queues", "5000"], &["--queues", "5000", "128"])]
#[case::queues_are_no_number(&["serve", "--socket-path", SOCKET, "--null", "--queues", "many"], &["--queues", "many"])]
#[case::interface_and_null(&["serve", "--socket-path", SOCKET, "--null", "--ifname", "lo"], &["--null", "--ifname"])]
#[case::path_and_fd(&["serve", "--socket-path", SOCKET, "--null", "--fd", "3"], &["--fd", "--socket-path"])]
#[case::fd_that_is_not_there(&["serve", "--fd", "77", "--null"], &["fd 77"])]
// The first numbers that the daemon itself gets.
#[case::fd_3(&["serve", "--fd", "3", "--null"], &["fd 3", "no such descriptor"])]
#[case::fd_4(&["serve", "--fd", "4", "--null"], &["fd 4", "no such descriptor"])]
#[case::fd_5(&["serve", "--fd", "5", "--null"], &["fd 5", "no such descriptor"])]
#[case::sock_fds_3(&["serve", "--socket-path", SOCKET, "--ifname", "lo", "--inhibit", "--sock-fds", "3"], &["sock-fds 3", "no such descriptor"])]
#[case::cpu_list(&["serve", "--socket-path", SOCKET, "--null", "--cpus", "3-1"], &["--cpus", "3-1"])]
#[case::cpu_that_is_not_there(&["serve", "--socket-path", SOCKET, "--null", "--cpus", "1000"], &["1000"])]
#[case::multicast_mac(&["serve", "--socket-path", SOCKET, "--null", "--mac", "01:00:00:00:00:00"], &["--mac", "01:00:00:00:00:00"])]
#[case::unknown_port_key(&["serve", "--null", "--port", "socket-path=SOCKET,color=red"], &["color", "docs/keys.md"])]
#[case::directory_that_is_not_there(&["serve", "--null", "--socket-path", "/nowhere/x.sock"], &["/nowhere/x.sock"])]
#[case::long_path(&["serve", "--null", "--socket-path", LONG_PATH], &["107"])]
#[case::unknown_option(&["serve", "--null", "--socket-path", SOCKET, "--color"], &["--color"])]
#[case::unknown_command(&["sing"], &["sing"])]
fn bad_options_get_one_line_with_value_and_remedy(#[case] args: &[&str], #[case] words: &[&str]) {
    require!(Root);
    let netns = NetNs::new("cli");
    let dir = private_dir();
    let socket = dir.path().join("vm.sock");
    let mut args: Vec<_> = args
        .iter()
        .map(|arg| arg.replace(SOCKET, socket.to_str().expect("ASCII")))
        .collect();
    if args[0] == "serve" {
        args.extend(["--control", "none"].map(str::to_owned));
    }
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let (status, said) = run_to_end(&netns, &args);
    assert_complaint(status, &said, words);
    assert!(!socket.exists(), "a socket stayed behind");
}

/// Stands for a path of the test's own.
const SOCKET: &str = "SOCKET";
const LONG_PATH: &str = "/tmp/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.sock";

#[test]
fn client_mode_does_not_spin_while_there_is_no_vmm() {
    require!(Root);
    let netns = NetNs::new("null");
    let mut daemon = Daemon::spawn(&netns, &Serve::null().flag("--client"));
    daemon.await_ready();
    // It may still be busy with its start.
    let rests = wait::until(wait::SOON, || cpu_share(&daemon, Duration::from_secs(1)) < SPINS);
    daemon.process().check();
    assert!(rests, "it spins");
}

#[rstest]
fn idle_guest_costs_no_cpu(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct, Placement::Tap)] placement: Placement,
) {
    require!(Root);
    let mut rig = Rig::new(placement, Mode::Native);
    rig.post(64, &[BUFFER]);
    rig.assert_passes_both_ways();
    // The worker sleeps until something happens, and what it sleeps is told as of now.
    let worker = |rig: &Rig| {
        let mut worker = rig.daemon.status()["workers"][0].clone();
        worker["asleep_ns"].take();
        worker
    };
    let rests = wait::until(wait::SOON, || {
        let before = worker(&rig);
        let share = cpu_share(&rig.daemon, Duration::from_secs(1));
        share < SPINS && worker(&rig) == before
    });
    assert!(
        rests,
        "the worker of an idle guest does something: {}",
        worker(&rig)
    );
}

/// A thread that spins takes about a whole CPU, or its share of one on a busy machine; one that wakes each 20 ms, a
/// hundredth.
const SPINS: f64 = 0.1;

/// CPU time of the daemon in this time, by the time that really passed.
fn cpu_share(daemon: &Daemon, time: Duration) -> f64 {
    let cpu_us = || daemon.status()["cpu_us"].as_u64().expect("a number");
    let (before, begun) = (cpu_us(), Instant::now());
    std::thread::sleep(time);
    let share = (cpu_us() - before) as f64 / begun.elapsed().as_micros() as f64;
    println!("{share:.4} of a CPU while idle");
    share
}

#[test]
fn daemon_that_nobody_uses_ends_after_its_idle_timeout() {
    let mut daemon = daemon_on(&Serve::null().with("--idle-timeout", "1"));
    let status = daemon.1.process().wait(wait::SOON);
    let said = daemon.1.said();
    assert!(
        status.success() && said.contains("no VMM has been connected for 1 s"),
        "{status}: {said}"
    );
}
