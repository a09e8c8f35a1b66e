//! The AF_XDP device plugin for Kubernetes, played by the test: what it gives is used, and each of its refusals is
//! said.

use std::os::fd::{AsFd, OwnedFd};

use rstest::rstest;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept, bind, listen, recv, sendmsg, socket_with,
};
use testkit::daemon::{Mode, private_dir};
use testkit::foreign::{self, Foreign, assert_serves_guests};
use testkit::{Daemon, Driver, DriverConfig, PacketPort, Serve, VethPair, frame, require, wait};

const BUFFER: u32 = 2048;

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

/// A plugin in a thread of this process, at a path that a daemon is told; it plays its steps to one connection, and
/// waits for its end.
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
        // The kernel chooses a queue, and so the guest, by a hash of the flow; what comes before the daemon has given
        // it buffers is lost.
        for guest in &mut guests {
            let arrives = wait::until(wait::SOON, || {
                (0..64).for_each(|flow| wire.send(&frame::udp(flow, 200)));
                guest.pairs[0].receive(wait::QUIET).is_some()
            });
            assert!(arrives, "{:#}", daemon.status());
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
    with_plugin(&veth, &steps, |daemon| daemon.assert_complains(words));
}

#[test]
fn wrong_descriptors_of_the_kubernetes_plugin_are_refused() {
    require!(Root);
    let veth = VethPair::new();
    let numbers = foreign::map_of_numbers();
    let program = Foreign::attach(&veth.near, VethPair::NIC, Mode::Native, 0);
    let cases: [(&[&OwnedFd], &[&str]); 3] = [
        (&[&numbers], &["afxdp-plugin", "not an XSKMAP"]),
        (&[&program.map, &program.map], &["2 descriptors instead of 1"]),
        (&[&foreign::socket(&veth.near)], &["not a BPF map but socket"]),
    ];
    for (descriptors, words) in cases {
        let mut steps = accepted();
        steps.push(step(MAP_REQUEST, "/fd_ack", descriptors));
        // A single descriptor is judged when the conversation is over.
        if descriptors.len() == 1 {
            steps.push(step("/fin", "/fin_ack", &[]));
        }
        steps.truncate(3);
        with_plugin(&veth, &steps, |daemon| daemon.assert_complains(words));
    }
}

#[test]
fn silence_of_the_kubernetes_plugin_ends_after_seconds_and_its_absence_at_once() {
    require!(Root);
    let veth = VethPair::new();
    with_plugin(&veth, &[], |daemon| {
        daemon.assert_complains(&["has not answered", "/connect"]);
    });
    let serve = Serve::interface(VethPair::NIC)
        .by_root()
        .with("--afxdp-plugin", "/nowhere/afxdp.sock");
    let daemon = Daemon::spawn(&veth.near, &serve);
    daemon.assert_complains(&["no AF_XDP device plugin at /nowhere/afxdp.sock"]);
}
