//! `vhost-af-xdp capture`: what guests send and get is in the file, as it was; nobody is disturbed by who reads it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use pcap_file::DataLink;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::blocks::interface_statistics::InterfaceStatisticsOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use rstest::rstest;
use rustix::process::Signal;
use testkit::filter_rules::{HOST, tables as rules, udp};
use testkit::lan::{Lan, STRANGER, file, mac};
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Running, Serve, VethPair, daemon, require, wait};

const LONG: Duration = Duration::from_secs(30);
/// Bytes that are captured of a frame.
const SHOWN: usize = 256;

/// A frame of a file.
#[derive(Debug, PartialEq, Eq)]
struct Captured {
    bytes: Vec<u8>,
    len: u32,
    outbound: bool,
    comments: Vec<String>,
}

impl Captured {
    /// One that passed.
    fn of(frame: &[u8], outbound: bool) -> Self {
        Self {
            bytes: frame[..frame.len().min(SHOWN)].to_vec(),
            len: frame.len() as u32,
            outbound,
            comments: Vec::new(),
        }
    }

    /// One that did not.
    fn denied(frame: &[u8], outbound: bool, why: &str) -> Self {
        Self {
            comments: vec![why.to_owned()],
            ..Self::of(frame, outbound)
        }
    }
}

/// The frames of a file, and how many more were lost, as its statistics say.
fn read(path: &PathBuf) -> (Vec<Captured>, Option<u64>) {
    let mut reader = PcapNgReader::new(File::open(path).expect("written")).expect("pcapng");
    let (mut frames, mut lost) = (Vec::new(), None);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    while let Some(block) = reader.next_block() {
        match block.expect("a block") {
            Block::InterfaceDescription(interface) => {
                assert_eq!(
                    (interface.linktype, interface.snaplen),
                    (DataLink::ETHERNET, SHOWN as u32)
                );
                let nanoseconds = InterfaceDescriptionOption::IfTsResol(9);
                assert!(interface.options.contains(&nanoseconds), "{interface:?}");
            }
            Block::EnhancedPacket(packet) => {
                let age = now.as_ref().expect("after 1970").saturating_sub(packet.timestamp);
                assert!(age < Duration::from_secs(3600), "{packet:?}");
                let mut captured = Captured::of(&packet.data, false);
                captured.len = packet.original_len;
                for option in packet.options {
                    match option {
                        EnhancedPacketOption::Flags(flags) => captured.outbound = flags == 2,
                        EnhancedPacketOption::Comment(text) => captured.comments.push(text.into_owned()),
                        _ => {}
                    }
                }
                frames.push(captured);
            }
            Block::InterfaceStatistics(statistics) => {
                lost = statistics.options.iter().find_map(|option| match option {
                    InterfaceStatisticsOption::IsbIfDrop(lost) => Some(*lost),
                    _ => None,
                });
            }
            other => panic!("{other:?}"),
        }
    }
    (frames, lost)
}

fn command(daemon: &Daemon, port: &str, args: &[&str]) -> Command {
    let mut command = Command::new(daemon::binary());
    command
        .args(["capture", port, "--control"])
        .arg(daemon.path("control"))
        .args(args);
    command
}

/// A capture that has begun, and its file.
fn capture(daemon: &Daemon, port: &str, args: &[&str]) -> (Running, PathBuf) {
    let path = daemon.path(&format!("{port}.pcapng"));
    let mut command = command(daemon, port, args);
    command.arg("--write").arg(&path);
    let mut running = Running::start(command);
    running.await_text("capturing the first 256 bytes");
    (running, path)
}

/// Ends it, and reads its file.
fn end((mut running, path): (Running, PathBuf)) -> (Vec<Captured>, Option<u64>) {
    running.signal(Signal::INT);
    let status = running.wait(LONG);
    assert!(status.success(), "{}", running.said());
    read(&path)
}

fn of_ours(frames: Vec<Captured>) -> Vec<Captured> {
    let is_ours = |it: &Captured| it.bytes[6] == 2 && it.bytes[7..10] == [0; 3];
    frames.into_iter().filter(is_ours).collect()
}

#[rstest]
fn both_directions_are_captured_with_what_rules_said(#[values(1, 2)] workers: usize) {
    require!(Root);
    let list = [
        "direction=from-guest action=deny protocol=udp destination-ports=53",
        "direction=from-guest action=allow protocol=udp",
        "direction=to-guest action=allow protocol=udp destination-ports=80",
    ];
    let text = format!(
        "[daemon]\nworkers = {workers}\n{}{}",
        file(Some(VethPair::NIC), &["", ""]),
        rules(0, &list)
    );
    let config = DriverConfig::default();
    let mut lan = Lan::on(VethPair::new(), &Serve::file(), &text, 2, &config);
    let capture = capture(&lan.daemon, "vm0", &[]);
    let mode = fs::metadata(&capture.1).expect("written").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "what guests say is its owner's");
    let sent = |to, port| udp(to, mac(0), HOST, port);
    let got = |from, port| udp(mac(0), from, HOST, port);
    lan.send(0, &sent(STRANGER, 53));
    lan.send(0, &sent(mac(1), 7));
    assert_eq!(lan.received(1), sent(mac(1), 7));
    // What it may not say is captured, too: another's address.
    let forged = udp(mac(1), mac(7), HOST, 7);
    lan.send(0, &forged);
    let is_refused = || lan.daemon.counter_of("vm0", "from_guest_source_address") == 1;
    assert!(wait::until(wait::SOON, is_refused));
    for port in [81, 80] {
        lan.send(1, &got(mac(1), port));
    }
    assert_eq!(lan.received(0), got(mac(1), 80));
    for port in [81, 80] {
        lan.wire.send(&got(STRANGER, port));
    }
    assert_eq!(lan.received(0), got(STRANGER, 80));
    // What others say to each other is not.
    lan.send(1, &udp(STRANGER, mac(1), HOST, 9));
    let on_the_wire =
        std::iter::from_fn(|| lan.wire.receive(wait::SOON)).any(|it| it == udp(STRANGER, mac(1), HOST, 9));
    assert!(on_the_wire);
    let (frames, lost) = end(capture);
    let nothing_allows = "denied: no filter rule matches";
    let refused = "refused: not what the port may send or get; `status` counts why";
    let wanted = [
        Captured::denied(&sent(STRANGER, 53), true, "denied by filter rule 1"),
        Captured::of(&sent(mac(1), 7), true),
        Captured::denied(&forged, true, refused),
        Captured::denied(&got(mac(1), 81), false, nothing_allows),
        Captured::of(&got(mac(1), 80), false),
        Captured::denied(&got(STRANGER, 81), false, nothing_allows),
        Captured::of(&got(STRANGER, 80), false),
    ];
    assert_eq!((of_ours(frames), lost), (wanted.into(), Some(0)));
    // Nothing is counted otherwise than without it.
    let counter = |name| lan.daemon.counter_of("vm0", name);
    let counts = [
        "from_guest_filter",
        "from_guest_source_address",
        "to_guest_filter",
    ]
    .map(counter);
    assert_eq!(counts, [1, 1, 2]);
}

#[test]
fn client_that_reads_nothing_disturbs_nobody_and_is_told_what_it_lost() {
    const FRAMES: u32 = 20_000;
    let netns = NetNs::new("capture");
    let daemon = Daemon::start(&netns, &Serve::null().with("--frame-size", "0"));
    let mut guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    let port = daemon.status()["ports"][0]["name"]
        .as_str()
        .expect("a name")
        .to_owned();
    let mut client = UnixStream::connect(daemon.path("control")).expect("it listens");
    let asked = serde_json::json!({"capture": {"port": port, "from_guest": true, "to_guest": true}});
    client.write_all(format!("{asked}\n").as_bytes()).expect("read");
    let mut begun = [0; 64];
    let read = client.read(&mut begun).expect("answered");
    assert!(begun[..read].starts_with(b"{\"ok\""), "{:?}", &begun[..read]);
    for _ in 0..FRAMES {
        guest.pairs[0].send(&testkit::frame::plain(300, 1), Layout::Whole);
        guest.pairs[0].await_sent();
    }
    assert_eq!(daemon.counter("from_guest_frames"), u64::from(FRAMES));
    client.shutdown(Shutdown::Write).expect("ours");
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes).expect("it ends");
    let (frames, end) = bytes.split_at(bytes.len() - 16);
    assert_eq!((frames.len() % (32 + SHOWN), &end[..2]), (0, &[2, 0][..]));
    let lost = u64::from_le_bytes(end[8..].try_into().expect("eight"));
    let frames = (frames.len() / (32 + SHOWN)) as u64;
    assert!(
        lost > 0 && frames + lost == u64::from(FRAMES),
        "{frames} and {lost}"
    );
    // Its place is free for the next one, and the guest goes on.
    let next = capture(&daemon, &port, &[]);
    guest.pairs[0].send(&testkit::frame::plain(60, 1), Layout::Whole);
    guest.pairs[0].await_sent();
    let (frames, lost) = self::end(next);
    assert_eq!((frames.len(), lost), (1, Some(0)));
    // One that is killed is gone, too.
    let (mut killed, _) = capture(&daemon, &port, &[]);
    killed.signal(Signal::KILL);
    killed.wait(LONG);
    let again = wait::until_some(wait::SOON, || {
        let output = command(&daemon, &port, &["--write", "-", "--duration", "1"])
            .output()
            .expect("it runs");
        output.status.success().then_some(output)
    });
    let said = String::from_utf8_lossy(&again.expect("its place is free").stderr).into_owned();
    assert!(said.contains("0 frames captured, none lost"), "{said}");
}

#[test]
fn file_that_was_there_is_for_its_owner_only_and_is_none_of_others() {
    require!(Root);
    let netns = NetNs::new("capture");
    let daemon = Daemon::start(&netns, &Serve::null());
    let port = daemon.status()["ports"][0]["name"]
        .as_str()
        .expect("a name")
        .to_owned();
    let path = daemon.path(&format!("{port}.pcapng"));
    let there = |owner| {
        fs::write(&path, "of before").expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("ours");
        std::os::unix::fs::chown(&path, owner, None).expect("we are root");
    };
    there(None);
    end(capture(&daemon, &port, &[]));
    assert_eq!(
        fs::metadata(&path).expect("it is there").permissions().mode() & 0o777,
        0o600
    );

    there(Some(4321));
    let mut command = command(&daemon, &port, &["--duration", "1"]);
    let output = command.arg("--write").arg(&path).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("belongs to user 4321"),
        "{said}"
    );
    assert_eq!(fs::read(&path).expect("we are root"), b"of before");
}
