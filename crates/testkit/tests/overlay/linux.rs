//! Linux guests of several hosts, where FRR's EVPN makes the entries.
//!
//! A guest has a TCP connection to a Linux stack at a port of the kernel's bridge of host 2. The stack sends back what it
//! receives: slowly, and no more than a half before the test has done to the guest what it must survive.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use rstest::rstest;
use serde_json::json;
use testkit::guest::{Backend, Guest};
use testkit::lan::mac;
use testkit::overlay::{Host, Overlay, Underlay};
use testkit::world::{GUEST, HOST, assert_stream, iperf_server};
use testkit::{Daemon, NetNs, Serve, dnsmasq, require, wait};

const MAC: &str = "02:00:00:00:00:00";
/// The address is [`GUEST`].
const KEYS: &str = "ips = [\"10.77.0.2\"]";
const PORT: u16 = 7001;
/// Bytes each way, and how many at a time.
const BYTES: usize = 16 << 20;
const CHUNK: usize = 16 << 10;
/// Between two chunks.
const PAUSE: Duration = Duration::from_millis(20);

/// A guest's connection to a stack.
struct Connection {
    guest_sends: String,
    is_over: Arc<AtomicBool>,
    stack: JoinHandle<usize>,
}

impl Connection {
    /// The guest connects, and sends a file.
    fn open(guest: &Guest, stack: &NetNs) -> Self {
        let listener = stack.enter(|| TcpListener::bind((HOST, PORT)).expect("a free port"));
        let is_over = Arc::default();
        let stack = {
            let is_over = Arc::clone(&is_over);
            spawn(move || send_back(listener.accept().expect("the guest connects").0, &is_over))
        };
        let size = BYTES >> 20;
        let make =
            format!("dd if=/dev/urandom of=/tmp/file bs=1M count={size} 2>/dev/null; sha256sum </tmp/file");
        let guest_sends = guest.run(&make);
        guest.start("nc", &format!("nc {HOST} {PORT} </tmp/file | sha256sum"));
        Self {
            guest_sends,
            is_over,
            stack,
        }
    }

    /// All arrives and comes back.
    #[track_caller]
    fn finish(self, guest: &Guest) {
        assert!(!self.stack.is_finished() && !guest.finished("nc"));
        self.is_over.store(true, Ordering::Relaxed);
        let guest_received = guest.finish("nc", 4 * wait::SOON);
        assert_eq!(self.stack.join().expect("the connection survives"), BYTES);
        assert_eq!(guest_received, self.guest_sends);
    }
}

/// See the module's head; how much was received.
fn send_back(mut stream: TcpStream, is_over: &AtomicBool) -> usize {
    stream.set_read_timeout(Some(4 * wait::SOON)).expect("not zero");
    let mut back = stream.try_clone().expect("descriptors are left");
    // By itself, as the guest may read only what it has sent before.
    let (sender, chunks) = mpsc::channel::<Vec<u8>>();
    let writer = spawn(move || {
        chunks
            .iter()
            .try_for_each(|chunk| back.write_all(&chunk))
            .and_then(|()| back.shutdown(Shutdown::Write))
    });
    let (mut chunk, mut received) = (vec![0; CHUNK], 0);
    loop {
        while received >= BYTES / 2 && !is_over.load(Ordering::Relaxed) {
            sleep(PAUSE);
        }
        let count = stream.read(&mut chunk).expect("the connection survives");
        if count == 0 {
            break;
        }
        received += count;
        sender
            .send(chunk[..count].to_vec())
            .expect("the connection survives");
        if !is_over.load(Ordering::Relaxed) {
            sleep(PAUSE * u32::try_from(count).expect("small") / CHUNK as u32);
        }
    }
    drop(sender);
    writer.join().expect("no panic").expect("the connection survives");
    received
}

/// The file of a daemon with the guest. With an underlay it sends no GSO packets: those leave by the kernel.
fn file(host: &Host) -> String {
    let few = if host.underlay.by_xdp {
        "offload = \"-tso4,-tso6\""
    } else {
        ""
    };
    host.file(&[(0, &format!("{KEYS}\n{few}"))])
}

/// Frames of guests to other hosts, and from there, pass by the underlay if there is one.
#[track_caller]
fn assert_by_underlay(daemon: &Daemon, underlay: Underlay) {
    for name in ["from_guest_encapsulated", "redirected"] {
        let frames = daemon.counter(name);
        assert_eq!(frames > 100, underlay.by_xdp, "{name}: {frames}");
    }
}

/// Boots a guest under QEMU, with further options.
fn boot(daemon: &Daemon, options: &[&str]) -> Guest {
    let options = [&["--mem", "256", "--mac", MAC], options].concat();
    Guest::boot(Backend::Daemon(&daemon.path("vm0.sock")), GUEST, &options)
}

#[test]
fn connection_of_a_guest_survives_migration_to_another_host() {
    require!(Root, Qemu, Frr);
    let overlay = Overlay::with_frr(Underlay::BY_XDP, 3);
    let stack = overlay.hosts[2].add_stack("stack", &format!("{HOST}/24"));
    let daemons = [0, 1].map(|number| {
        let host = &overlay.hosts[number];
        host.start_daemon(&Serve::file().leased(), &file(host))
    });
    let source = boot(&daemons[0], &["--migratable"]);
    let destination = boot(&daemons[1], &["--migratable", "--incoming"]);
    let await_at = |host: usize| {
        overlay.await_announced_only_by(mac(0), host);
        let others = overlay
            .hosts
            .iter()
            .enumerate()
            .filter(|&(other, _)| other != host);
        for (_, other) in others {
            other.await_remote(mac(0), Some(&overlay.hosts[host]));
            other.await_neighbour("10.77.0.2", mac(0), true);
        }
    };
    await_at(0);
    let connection = Connection::open(&source, &stack);
    let socket = daemons[0].path("migration");
    let _ = source.qmp().migrate_to(&mut destination.qmp(), &socket);
    destination.qmp().execute("cont", &json!({}));
    await_at(1);
    drop(source);
    connection.finish(&destination);
    await_at(1);
    daemons
        .iter()
        .for_each(|daemon| assert_by_underlay(daemon, Underlay::BY_XDP));
}

#[rstest]
#[case(Underlay::BY_XDP, Serve::file().leased())]
#[case(Underlay::PLAIN, Serve::file().by_root())]
fn connection_of_a_guest_survives_restarts_of_the_daemon(#[case] underlay: Underlay, #[case] serve: Serve) {
    require!(Root, Qemu, Frr);
    let overlay = Overlay::with_frr(underlay, 2);
    let [host, observer] = [0, 1].map(|number| &overlay.hosts[number]);
    let stack = observer.add_stack("stack", &format!("{HOST}/24"));
    let mut daemon = host.start_daemon(&serve, &file(host));
    let guest = boot(&daemon, &["--reconnect", "20"]);
    let connection = Connection::open(&guest, &stack);
    for kills in [true, false] {
        match kills {
            true => daemon.kill(),
            false => _ = daemon.terminate(),
        }
        observer.await_remote(mac(0), None);
        daemon.restart_file(&host.netns, &serve);
        observer.await_remote(mac(0), Some(host));
        observer.await_neighbour("10.77.0.2", mac(0), true);
    }
    connection.finish(&guest);
    assert_by_underlay(&daemon, underlay);
}

/// User-mode Linux on hosts 0 and 1.
#[rstest]
fn guests_get_addresses_from_a_server_on_another_host_and_reach_each_other() {
    require!(Root, Uml, Frr, Dnsmasq);
    const GIVEN: [&str; 2] = ["10.77.0.50", "10.77.0.51"];
    let overlay = Overlay::with_frr(Underlay::BY_XDP, 3);
    let stack = overlay.hosts[2].add_stack("stack", &format!("{HOST}/24"));
    let hosts = [0, 1].map(|guest| format!("--dhcp-host=02:00:00:00:00:0{guest},{}", GIVEN[guest]));
    let server = dnsmasq::start(&stack, "eth0", &[&hosts[0], &hosts[1]]);
    let daemons = [0, 1].map(|host| {
        let keys = format!("ips = [\"{}\"]", GIVEN[host]);
        let text = overlay.hosts[host].file(&[(host, &keys)]);
        overlay.hosts[host].start_daemon(&Serve::file(), &text)
    });
    let boot = |host: usize| Guest::boot_uml(&daemons[host].path(&format!("vm{host}.sock")), "");
    let guests = [boot(0), boot(1)];
    for (guest, given) in guests.iter().zip(GIVEN) {
        guest.ask_for_address();
        let has = guest.run("ip addr show dev eth0");
        assert!(has.contains(given), "{has}\n{}", server.said());
    }
    guests[1].serve_iperf("");
    let _server = iperf_server(&stack);
    for direction in ["", "-R"] {
        assert_stream(&guests[0], GIVEN[1], direction);
        assert_stream(&guests[0], HOST, direction);
    }
    daemons
        .iter()
        .for_each(|daemon| assert_by_underlay(daemon, Underlay::BY_XDP));
}
