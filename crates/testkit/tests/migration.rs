//! Live migration between two QEMUs on one host, while TCP runs.
//!
//! ```text
//!   far namespace                                near namespace
//!                  ┌ wire0 ═══════════════ nic0 ── port 0 ── source QEMU
//!   stack ── br0 ──┤                                             │ migrates
//!                  └ wire1 ═══════════════ nic1 ── port 1 ── destination QEMU
//! ```
//!
//! The bridge stands for the switch: it learns from the guest's announcement where the guest is now. Three streams
//! cross the migration: iperf3; a file that the guest sends, whose second half is read only after the guest has moved;
//! and bytes that pile up in the guest's receive buffers, where only the daemon (in direct placement and in tap mode, the kernel) has
//! written them, and which the guest reads only after it has moved. However long the migration takes, it does not
//! outlast them. Before it goes on at its destination both memories are compared byte for byte: a page that the dirty
//! log missed shows there.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rstest::rstest;
use serde_json::json;
use testkit::daemon::{Placement, private_dir};
use testkit::driver::F_RING_PACKED;
use testkit::guest::{Backend, Guest};
use testkit::holdings::xdp_sockets;
use testkit::process::output_of;
use testkit::world::{GUEST, HOST, features, received_bytes};
use testkit::{Daemon, Running, Serve, VethPair, assert_has, require, soak, wait};

const MIB: usize = 1 << 20;
const MAC: &str = "52:54:00:12:34:56";
/// Where the guest's file goes to, and where the bytes for it come from.
const UPLOAD: u16 = 7001;
const DOWNLOAD: u16 = 7002;
/// Bytes each way, and how many at a time.
const UPLOADED: usize = 16 * MIB;
const DOWNLOADED: usize = 5 * MIB;
const CHUNK: usize = 64 << 10;
/// Between two chunks, so that there is traffic all the while that memory is copied.
const PAUSE: Duration = Duration::from_millis(20);
const DOWNLOAD_PAUSE: Duration = Duration::from_millis(60);
/// A file in the guest: it reads what has come.
const GO_ON: &str = "/tmp/go-on";

/// Two ports on a bridge.
struct Bridged {
    daemon: Daemon,
    veth: VethPair,
}

impl Bridged {
    fn new(placement: Placement) -> Self {
        let veth = VethPair::new();
        veth.join_as("nic1", "wire1", 1, 1500);
        let far = &veth.far;
        far.ip(&["link add br0 type bridge forward_delay 0 mcast_snooping 0"]);
        for wire in [VethPair::WIRE, "wire1"] {
            far.ip(&["link", "set", wire, "master", "br0"]);
        }
        far.ip(&["address", "add", &format!("{HOST}/24"), "dev", "br0"]);
        far.ip(&["link", "set", "br0", "up"]);
        let serve = Serve::interface(VethPair::NIC).placement(placement);
        let daemon = Daemon::start_ports(&veth.near, &serve, &["ifname=nic0", "ifname=nic1"]);
        Self { daemon, veth }
    }

    fn guest(&self, port: usize, options: &[&str]) -> Guest {
        let socket = self.daemon.path(&format!("port{port}.sock"));
        let options = [&["--mem", "256", "--mac", MAC, "--migratable"][..], options].concat();
        Guest::boot(Backend::Daemon(&socket), GUEST, &options)
    }

    fn listen(&self, port: u16) -> TcpListener {
        self.veth
            .far
            .enter(|| TcpListener::bind((HOST, port)).expect("a free port"))
    }

    /// The bridge's port behind which it believes the guest to be.
    fn whereabouts(&self) -> String {
        let said = self.veth.far.output_of("bridge", &["fdb", "show", "br", "br0"]);
        said.lines()
            .find(|line| line.starts_with(MAC))
            .unwrap_or_default()
            .to_owned()
    }
}

/// Whether the guest has moved.
type Over = Arc<AtomicBool>;

/// A server's end of a stream: what the hash is of, and the longest time without progress.
struct Moved {
    bytes: Vec<u8>,
    longest_pause: Duration,
}

fn serve(listener: TcpListener, work: impl FnOnce(TcpStream) -> Moved + Send + 'static) -> JoinHandle<Moved> {
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().expect("the guest connects");
        stream.set_read_timeout(Some(3 * wait::SOON)).expect("not zero");
        stream.set_write_timeout(Some(3 * wait::SOON)).expect("not zero");
        work(stream)
    })
}

/// Reads slowly, and no more than a half before the guest has moved.
fn receive(mut stream: TcpStream, over: &Over) -> Moved {
    let (mut bytes, mut chunk) = (Vec::with_capacity(UPLOADED), vec![0; CHUNK]);
    let mut longest_pause = Duration::ZERO;
    loop {
        while bytes.len() >= UPLOADED / 2 && !over.load(Ordering::Relaxed) {
            std::thread::sleep(PAUSE);
        }
        let begun = Instant::now();
        let count = stream.read(&mut chunk).expect("the stream survives");
        longest_pause = longest_pause.max(begun.elapsed());
        if count == 0 {
            return Moved { bytes, longest_pause };
        }
        bytes.extend(&chunk[..count]);
        std::thread::sleep(PAUSE * u32::try_from(count).expect("small") / CHUNK as u32);
    }
}

/// Writes slowly.
fn send(mut stream: TcpStream) -> Moved {
    let bytes: Vec<u8> = (0..DOWNLOADED as u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let mut longest_pause = Duration::ZERO;
    for chunk in bytes.chunks(CHUNK) {
        let begun = Instant::now();
        stream.write_all(chunk).expect("the stream survives");
        longest_pause = longest_pause.max(begun.elapsed());
        std::thread::sleep(DOWNLOAD_PAUSE);
    }
    Moved { bytes, longest_pause }
}

fn hash(bytes: &[u8]) -> String {
    let dir = private_dir();
    let file = dir.path().join("bytes");
    std::fs::write(&file, bytes).expect("a directory of our own");
    hash_in(&output_of("sha256sum", &[file.to_str().expect("ASCII")]))
}

/// The hash in what `sha256sum` prints.
fn hash_in(said: &str) -> String {
    said.split_whitespace().next().unwrap_or_default().to_owned()
}

/// Numbers of the pages that are not the same in two guests.
fn differing_pages(one: &Guest, other: &Guest) -> Vec<usize> {
    const PAGE: usize = 4096;
    let mut files = [one.memory(), other.memory()];
    let mut buffers = [vec![0; MIB], vec![0; MIB]];
    let mut differing = Vec::new();
    for first in (0..).step_by(MIB / PAGE) {
        let mut counts = files.iter_mut().zip(&mut buffers).map(|(file, buffer)| {
            let mut buffer = &mut buffer[..];
            let mut read = 0;
            // Memory need not be a multiple of the buffer.
            while let Ok(count @ 1..) = file.read(buffer) {
                buffer = &mut buffer[count..];
                read += count;
            }
            read
        });
        let (count, same) = (counts.next().unwrap_or(0), counts.next().unwrap_or(0));
        assert_eq!(count, same, "the memories are of different length");
        if count == 0 {
            return differing;
        }
        let pages = buffers[0][..count]
            .chunks(PAGE)
            .zip(buffers[1][..count].chunks(PAGE));
        differing.extend(
            (first..)
                .zip(pages)
                .filter(|(_, (a, b))| a != b)
                .map(|(at, _)| at),
        );
    }
    unreachable!("files end")
}

/// Starts the guest's ends of the three streams; returns the hash of what it will send.
fn start_streams(guest: &Guest) -> String {
    let make = format!(
        "dd if=/dev/urandom of=/tmp/file bs=1M count={} 2>/dev/null; sha256sum /tmp/file",
        UPLOADED / MIB
    );
    let hash = hash_in(&guest.run(&make));
    guest.start("upload", &format!("nc {HOST} {UPLOAD} </tmp/file"));
    guest.start(
        "download",
        &format!("nc {HOST} {DOWNLOAD} | (until [ -e {GO_ON} ]; do sleep 0.2; done; sha256sum)"),
    );
    guest.start("iperf", &format!("iperf3 -c {HOST} -b 20M -t 8 -J"));
    hash
}

#[rstest]
fn streams_survive_migration_and_their_bytes_are_intact(
    #[values(Placement::Copy, Placement::Direct, Placement::Tap)] placement: Placement,
    #[values(false, true)] packed: bool,
) {
    require!(Root, Qemu);
    if soak::leaves_out(packed == (placement == Placement::Copy)) {
        return;
    }
    let mut bridged = Bridged::new(placement);
    let pid = bridged.daemon.process().pid();
    let opened = xdp_sockets(pid);
    let ring: &[&str] = if packed { &["--packed"] } else { &[] };
    let source = bridged.guest(0, ring);
    assert_eq!(features(&bridged.daemon.port(0)) & F_RING_PACKED != 0, packed);
    let destination = bridged.guest(1, &[&["--incoming"], ring].concat());

    let mut command = bridged.veth.far.command("iperf3");
    command.args(["-s", "-1", "--forceflush"]);
    let mut server = Running::start(command);
    server.await_text("listening");
    let over = Over::default();
    let upload = {
        let over = Arc::clone(&over);
        serve(bridged.listen(UPLOAD), move |stream| receive(stream, &over))
    };
    let download = serve(bridged.listen(DOWNLOAD), send);
    let uploaded = start_streams(&source);
    assert!(
        bridged.whereabouts().contains(VethPair::WIRE),
        "{}",
        bridged.whereabouts()
    );

    let copies = placement != Placement::Direct;
    assert!(
        !copies || xdp_sockets(pid) == opened,
        "a guest's boot opened a queue"
    );

    let socket = bridged.daemon.path("migration");
    let end = source.qmp().migrate_to(&mut destination.qmp(), &socket);
    let arrived = Instant::now();
    assert_eq!(
        differing_pages(&source, &destination),
        [0; 0],
        "pages that the dirty log missed"
    );
    let compared = arrived.elapsed();
    destination.qmp().execute("cont", &json!({}));
    drop(source);
    assert!(!copies || xdp_sockets(pid) == opened, "migration opened a queue");
    assert!(
        wait::until(2 * wait::SOON, || destination.answers()),
        "the guest is dead"
    );
    assert!(!upload.is_finished() && !destination.finished("download"));
    over.store(true, Ordering::Relaxed);
    let _ = destination.run(&format!("touch {GO_ON}"));

    let downloaded = destination.finish("download", 4 * wait::SOON);
    let report = destination.finish("iperf", 2 * wait::SOON);
    let _ = destination.finish("upload", 4 * wait::SOON);
    let (upload, download) = (upload.join().expect("received"), download.join().expect("sent"));
    println!(
        "{placement:?}, packed {packed}: migration {} ms, of which {} ms stopped, {compared:.0?} more to compare memories; longest pause of the upload {:.0?}, of the download's writes {:.0?}",
        end["total-time"], end["downtime"], upload.longest_pause, download.longest_pause
    );
    assert_eq!(hash(&upload.bytes), uploaded, "the upload");
    assert_eq!(hash_in(&downloaded), hash(&download.bytes), "the download");
    assert!(received_bytes(&report, "sum_received") > 100_000, "{report}");
    assert_has(&bridged.whereabouts(), &["wire1"]);
}
