//! TCP of a real guest with offloads, over a wire that loses, doubles and reorders frames, while the guest's
//! offloads are switched.
//!
//! Streams of pseudo-random bytes, in pieces of all sizes, run both ways at once, over IPv4, IPv6 and a VLAN; sender
//! and receiver hash them (`scripts/lib/netcheck.c`). 24 MiB go each way in each test, in a soak 2 GiB.

use std::time::{Duration, Instant};

use rstest::rstest;
use serde_json::Value;
use testkit::bad_wire::{Faults, Tally, VLAN};
use testkit::daemon::{Mode, Placement};
use testkit::guest::{Backend, Guest, UML, netcheck};
use testkit::world::{GUEST, HOST, await_placement};
use testkit::{BadWire, Daemon, Running, Serve, VethPair, assert_has, require, soak, wait};

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Where the peer's stream ends listen, and its datagram echo.
const UPLOAD: u16 = 7001;
const DOWNLOAD: u16 = 7002;
const ECHO: u16 = 7003;
/// The peer on each path: IPv4, IPv6, IPv4 on a VLAN.
const PEERS: [&str; 3] = [HOST, "fd77::1", "10.79.0.1"];
/// Datagrams a path, and their greatest length: some need fragments.
const DATAGRAMS: u64 = 150;
const DATAGRAM_BYTES: u64 = 4000;
/// `ethtool -K eth0 …` in the guest, one after the other while streams run. What the guest's driver cannot switch is
/// refused, and stays.
const SWITCHES: [&str; 14] = [
    "tso off",
    "gro off",
    "tso on",
    "tx off",
    "gro on",
    "tx on",
    "gso off",
    "sg off",
    "gso on",
    "sg on",
    "rx-gro-hw off",
    "rx-gro-hw on",
    "tx off",
    "tx on",
];
/// Longest frame that may be on the wire: MTU, Ethernet header, VLAN tag.
const LONGEST_FRAME: u64 = 1500 + 14 + 4;
/// Drops because the guest had no buffers in time, in the kernel's count.
const NO_ROOM: [&str; 3] = ["rx_dropped", "rx_ring_full", "rx_fill_ring_empty_descs"];
const FAULTS: Faults = Faults {
    lost: 10,
    doubled: 5,
    late: 5,
};

/// A guest, the daemon with all offloads, and a bad wire to a peer.
struct Bench {
    guest: Guest,
    daemon: Daemon,
    wire: BadWire,
    netcheck: String,
    /// See [`Self::drops`].
    lost_before: Vec<(String, u64)>,
}

impl Bench {
    fn new(serve: Serve, options: &[&str]) -> Self {
        let wire = BadWire::new(1);
        wire.veth.near.ip(&["link", "set", VethPair::NIC, "arp", "on"]);
        address_peer(&wire);
        let daemon = Daemon::start(&wire.veth.near, &serve.with("--offload", "all"));
        let options = [&["--mem", "256"], options].concat();
        let guest = Guest::boot(Backend::Daemon(&daemon.socket()), GUEST, &options);
        let address = format!(
            "echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad && ip -6 addr add fd77::2/64 dev eth0 &&
             ip link add link eth0 name eth0.{VLAN} type vlan id {VLAN} && ip addr add 10.79.0.2/24 dev eth0.{VLAN} &&
             ip link set eth0.{VLAN} up"
        );
        let _ = guest.run(&address);
        // What goes to the guest while its memory is registered is lost in part.
        await_placement(&daemon);
        let mut bench = Self {
            guest,
            daemon,
            wire,
            netcheck: netcheck(),
            lost_before: Vec::new(),
        };
        bench.lost_before = bench.losses();
        bench
    }

    /// Starts netcheck on the peer.
    fn peer(&self, words: &[&str]) -> Running {
        let mut command = self.wire.peer.command(&self.netcheck);
        command.args(words);
        Running::start(command)
    }

    /// Sends datagrams to one of the peer's addresses back.
    fn echo(&self, peer: &str) -> Running {
        let mut echo = self.peer(&["udp", "listen", peer, &ECHO.to_string()]);
        echo.await_text("listening");
        echo
    }

    /// Streams of `mib` MiB both ways at once to one of the peer's addresses; `during` is called again and again until
    /// they have ended.
    fn streams(&self, peer: &str, mib: u64, mut during: impl FnMut()) {
        let (mib, up_seed, down_seed) = (mib.to_string(), (2 * mib).to_string(), (2 * mib + 1).to_string());
        let (up, down) = (UPLOAD.to_string(), DOWNLOAD.to_string());
        let mut upload = self.peer(&["stream", "listen", "receive", peer, &up, &mib, &up_seed]);
        let mut download = self.peer(&["stream", "listen", "send", peer, &down, &mib, &down_seed]);
        let begun = Instant::now();
        self.guest.start(
            "up",
            &format!("netcheck stream connect send {peer} {up} {mib} {up_seed}"),
        );
        self.guest.start(
            "down",
            &format!("netcheck stream connect receive {peer} {down} {mib} {down_seed}"),
        );
        while upload.ended().is_none() || download.ended().is_none() {
            assert!(
                begun.elapsed() < limit(),
                "the streams stand still:\n{upload}\n{download}\n{:#}",
                self.daemon.status()
            );
            during();
        }
        for (name, peer) in [("up", &mut upload), ("down", &mut download)] {
            let status = peer.wait(wait::SOON);
            let (here, there) = (peer.said(), self.guest.finish(name, wait::SOON));
            assert!(status.success(), "{name}: {peer}");
            assert_eq!(
                here.trim(),
                there.trim(),
                "{name}: bytes and hash, of the peer and of the guest"
            );
        }
        println!("{peer}: {mib} MiB each way in {:.1?}", begun.elapsed());
    }

    /// Datagrams to the peer and back; those that return are as they were sent.
    fn datagrams(&self, peer: &str) {
        let _echo = self.echo(peer);
        let command = format!("netcheck udp connect {peer} {ECHO} {DATAGRAMS} {DATAGRAM_BYTES}");
        let said = self.guest.run(&command);
        let counts: Vec<u64> = said
            .split_whitespace()
            .map_while(|word| word.parse().ok())
            .collect();
        let [sent, returned, wrong, _twice] = counts[..] else {
            panic!("{said}");
        };
        assert_eq!((sent, wrong), (DATAGRAMS, 0), "{said}");
        assert!(returned > DATAGRAMS / 2, "{said}");
    }

    /// The port's counters of losses that have grown since the guest was up, but for those of frames that came faster
    /// than the guest made room for them: that happens, and TCP sends it again. (What came before the guest, such as an
    /// announcement of the host's, is lost by right.)
    fn drops(&self) -> Vec<(String, u64)> {
        let mut drops = self.losses();
        drops.retain(|loss| !self.lost_before.contains(loss));
        drops
    }

    fn losses(&self) -> Vec<(String, u64)> {
        let port = self.daemon.port(0);
        let lanes = port["lanes"].as_array().expect("it has lanes").clone();
        let counters = lanes
            .iter()
            .filter_map(|lane| lane["counters"].as_array())
            .flatten();
        let lost = counters.filter(|counter| counter["drop"] == true && counter["value"] != 0);
        let lost = lost.filter(|counter| !NO_ROOM.contains(&text(&counter["name"]).as_str()));
        lost.map(|counter| (text(&counter["name"]), counter["value"].as_u64().unwrap_or(0)))
            .collect()
    }

    /// Checksums that either stack found wrong.
    fn assert_no_stack_saw_a_bad_checksum(&self) {
        let there = self.guest.run("cat /proc/net/snmp /proc/net/snmp6");
        let here = self
            .wire
            .peer
            .output_of("cat", &["/proc/net/snmp", "/proc/net/snmp6"]);
        for (who, said) in [("guest", there), ("peer", here)] {
            assert_eq!(bad_checksums(&said), 0, "{who}:\n{said}");
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Gives the peer's ends their addresses.
fn address_peer(wire: &BadWire) {
    let peer = &wire.peer;
    for setting in ["disable_ipv6=0", "accept_dad=0"] {
        peer.run(
            "sysctl",
            &["-qw", &format!("net.ipv6.conf.{}.{setting}", BadWire::WIRE)],
        );
    }
    for (address, end) in [
        (format!("{}/24", PEERS[0]), BadWire::WIRE),
        (format!("{}/64", PEERS[1]), BadWire::WIRE),
        (format!("{}/24", PEERS[2]), BadWire::TAGGED),
    ] {
        peer.ip(&["address", "add", &address, "dev", end, "nodad"]);
    }
}

/// Sum of `InCsumErrors` and the like in the text of `/proc/net/snmp` and `snmp6`.
fn bad_checksums(said: &str) -> u64 {
    let mut sum = 0;
    let mut heads: Vec<&str> = Vec::new();
    for line in said.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        // In snmp a line of names stands before one of values; in snmp6 each line has both.
        if words.len() == 2 && words[0].contains("InCsumErrors") {
            sum += words[1].parse::<u64>().unwrap_or(0);
        } else if heads.first() == words.first() {
            let at = heads.iter().position(|&name| name == "InCsumErrors");
            sum += at.and_then(|at| words.get(at)?.parse().ok()).unwrap_or(0);
        }
        heads = words;
    }
    sum
}

/// MiB each way in each test.
fn transfer_mib() -> u64 {
    soak::count(24, 2048) as u64
}

/// Long enough for as much as that over a wire with losses, in a guest that is interpreted.
fn limit() -> Duration {
    Duration::from_secs(60 + transfer_mib())
}

fn read(value: &AtomicU64) -> u64 {
    value.load(Relaxed)
}

/// The faults happened, each about as often as it was asked for, and nothing longer than a frame was on the wire.
fn assert_wire_was_bad(tally: &Tally, name: &str) {
    let frames = read(&tally.frames);
    println!("{name}: {tally:?}");
    for (what, count, thousandths) in [
        ("lost", &tally.lost, FAULTS.lost),
        ("doubled", &tally.doubled, FAULTS.doubled),
        ("late", &tally.late, FAULTS.late),
    ] {
        assert!(
            read(count) * 1000 > frames * thousandths / 4,
            "{name}: {what} {} of {frames}",
            read(count)
        );
    }
    assert!(read(&tally.longest_bytes) <= LONGEST_FRAME, "{name}: {tally:?}");
    assert_eq!(read(&tally.refused), 0, "{name}: {tally:?}");
}

#[rstest]
#[case::copy(Placement::Copy, Mode::Native, &[])]
// virtio_uml takes packed rings.
#[case::copy_packed_skb(Placement::Copy, Mode::Skb, &UML)]
#[case::direct_packed(Placement::Direct, Mode::Native, &UML)]
fn streams_are_intact_over_a_bad_wire_while_offloads_are_switched(
    #[case] placement: Placement,
    #[case] mode: Mode,
    #[case] options: &[&str],
) {
    require!(Root, Qemu, Uml);
    if soak::leaves_out((placement, mode) != (Placement::Copy, Mode::Native)) {
        return;
    }
    let bench = Bench::new(
        Serve::interface(VethPair::NIC).placement(placement).mode(mode),
        options,
    );
    let share = transfer_mib().div_ceil(2 * PEERS.len() as u64);

    // A good wire: GSO packets are used.
    for peer in PEERS {
        bench.streams(peer, share, || std::thread::sleep(wait::QUIET));
    }
    let port = bench.daemon.port(0);
    assert!(bench.daemon.counter("from_guest_super_frames") > 100, "{port:#}");
    if placement == Placement::Copy {
        assert!(bench.daemon.counter("to_guest_super_frames") > 100, "{port:#}");
    }
    let unfinished = read(&bench.wire.to_nic().unfinished);
    assert!(
        unfinished > 1000,
        "the peer leaves its checksums to the hardware: {unfinished}"
    );

    // A bad one.
    bench.wire.set(FAULTS);
    let mut switches = SWITCHES.iter().cycle();
    for peer in PEERS {
        bench.streams(peer, share, || {
            let switch = switches.next().expect("it goes round");
            let _ = bench.guest.try_run(&format!("ethtool -K eth0 {switch}"));
            std::thread::sleep(wait::QUIET);
        });
        bench.datagrams(peer);
    }
    bench.wire.set(Faults::default());

    assert_wire_was_bad(bench.wire.from_nic(), "from the NIC");
    assert_wire_was_bad(bench.wire.to_nic(), "to the NIC");
    bench.assert_no_stack_saw_a_bad_checksum();
    assert_eq!(bench.drops(), [], "{:#}", bench.daemon.port(0));
}

/// The check itself: streams that are not the same are told apart.
#[test]
fn netcheck_sees_a_wrong_byte() {
    require!(Qemu);
    let program = netcheck();
    let start = |words: &[&str]| {
        let mut command = std::process::Command::new(&program);
        command.args(words);
        Running::start(command)
    };
    let mut receiver = start(&["stream", "listen", "receive", "127.0.0.1", "7950", "1", "5"]);
    let mut sender = start(&["stream", "connect", "send", "127.0.0.1", "7950", "1", "6"]);
    assert!(sender.wait(wait::SOON).success());
    assert!(!receiver.wait(wait::SOON).success());
    assert_has(&receiver.said(), &["the first wrong word is at byte 0"]);
    let hash = |said: String| {
        said.lines()
            .find(|line| line.starts_with("1048576 "))
            .map(str::to_owned)
    };
    let (sent, received) = (hash(sender.said()), hash(receiver.said()));
    assert_eq!(
        (sent.is_some(), sent),
        (true, received),
        "both hash what was on the way"
    );
}

#[test]
fn bad_checksums_are_found_in_what_the_kernel_prints() {
    let said = "Tcp: InSegs InCsumErrors\nTcp: 7 2\nUdp: InCsumErrors X\nUdp: 3 9\nUdp6InCsumErrors   4\nIp6InReceives 8\n";
    assert_eq!(bad_checksums(said), 9);
}
