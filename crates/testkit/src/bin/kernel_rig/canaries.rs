//! Frames that are not the guest's, among its own and after its lease has ended: not one byte of them is in its memory.
//!
//! The guest is asked for by address and VLAN. [`ROUNDS`] times come frames of its own in two flows, and between them
//! canaries: frames to other stations, of other VLANs and of none, for another queue (where the NIC has one), and such
//! as are too long for the MTU. The guest gets each of its own, byte by byte and in order, sends some, and nothing
//! behind its buffers changes.
//!
//! A guest that is asked for without address and VLAN has a queue for itself: what comes there is its own, and the
//! others are those for another queue and those that are too long. Where the NIC writes into guest memory by itself,
//! the latter are in buffers of the guest's, which are not used, and nowhere else.
//!
//! Then, where it has one, its lease ends, with the daemon stopped (SIGSTOP): a holder that keeps its sockets and its
//! memory, and does nothing about it. Once its connection to the steward is shut down, which is what a holder does that
//! closes it; once a policy that is read again does not allow it any more (SIGHUP). Frames that would have been the
//! guest's come, and go to the host's stack. Where the NIC writes frames by itself (zero-copy) they are in the daemon's
//! memory then, and that is looked at, too: the kernel and the NIC go on with what they were given, until its socket is
//! closed.
//!
//! A canary has one byte value only behind its headers, one that nothing else has twice in a row. The whole of the
//! guest's memory is searched for two of them side by side. At first one is sent to the guest itself, and found.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::net::{Shutdown, SocketType, shutdown, sockopt};
use rustix::process::{Pid, Signal};
use testkit::daemon::Placement;
use testkit::holdings::copies_of_sockets;
use testkit::{Layout, PacketPort, Rig, VethPair, Wire, assert_soon, frame, lan, wait};
use virtqueue::GuestAddr;

use crate::kit::{self, ELSEWHERE, RAM, Seen};
use crate::setting::Setting;

/// The guest's.
const VLAN: u16 = 42;
const OTHER_VLAN: u16 = 43;
/// Rounds of so many frames: a thousand in all.
const ROUNDS: u32 = 50;
const OWN: u32 = 8;
const CANARIES: u32 = 12;
/// Frames of the first burst.
const WARM_UP: u32 = 20;
/// Lengths of the guest's own frames.
const LENGTHS: [usize; 5] = [64, 300, 1024, 1025, 1518];
/// Of those that are too long for an MTU of 1500.
const TOO_LONG: [usize; 4] = [1523, 1600, 2048, 2500];
/// What canaries consist of: those that are too long, all others while the lease lasts, those after its first end, and
/// after its second.
const OVERLONG: u8 = 0xe9;
const DURING: u8 = 0xca;
const AFTER: [u8; 2] = [0xc5, 0xd3];
/// Frames that go to the host after the end of a lease.
const LATE: usize = 100;
/// Of these so many at a time.
const BATCH: usize = 20;
/// So many bytes of a canary side by side are of a frame.
const RUN: usize = 64;

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire, setting: Setting) -> Seen {
    let (mut rig, guards) = start(wire, setting);
    let filtered = setting.filtered;
    let seen = Seen::of(&rig.daemon);
    assert_eq!(seen.mode, setting.expected(wire.driver()), "{}", seen.note);
    assert!(canary_to_the_guest_is_found(&mut rig), "nothing can be found");
    let elsewhere = frames_of_second_queue(wire).map(|counter| flow_of_another_queue(&mut rig, counter));
    println!("canaries: flow of another queue: {elsewhere:?}");
    warm_up(&mut rig);
    for round in 0..ROUNDS {
        mixed_frames(&mut rig, round, |number| foreign(number, elsewhere, filtered));
    }
    rig.pair().await_sent();
    let zero_copy = seen.mode == "zero-copy";
    let by_nic = zero_copy && setting.placement == Placement::Direct;
    for byte in [DURING, OVERLONG] {
        let count = canaries_in(&mut rig, byte);
        println!("canaries: {byte:#x}: {count} places in the guest's memory");
        assert!(
            count == 0 || (by_nic && byte == OVERLONG),
            "in the guest's memory"
        );
    }
    kit::assert_untouched(&mut rig, &guards);
    kit::assert_no_strays(&rig.daemon);
    if !setting.leased {
        return seen;
    }
    lease_ends(&mut rig, AFTER[0], zero_copy, shut_connection);
    // The daemon asks for it anew.
    await_own(&mut rig);
    lease_ends(&mut rig, AFTER[1], zero_copy, change_policy);
    rig.daemon
        .await_port(0, "the end", |port| !port["impaired"].is_null());
    for byte in AFTER {
        assert_eq!(canaries_in(&mut rig, byte), 0, "in the guest's memory");
    }
    kit::assert_untouched(&mut rig, &guards);
    seen
}

fn start(wire: &Wire, setting: Setting) -> (Rig, Vec<GuestAddr>) {
    let veth = wire.lay();
    match wire.driver() {
        "igb" | "rig_nic" => veth.near.run("ethtool", &["-L", VethPair::NIC, "combined", "2"]),
        // Else VLANs cannot be told.
        "veth" => veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]),
        _ => {}
    }
    veth.far
        .ip(&["link", "set", VethPair::WIRE, "mtu", kit::LONG_MTU]);
    let serve = match setting.filtered {
        true => setting.serve().with("--vlan", VLAN.to_string()),
        false => setting.serve(),
    };
    let mut rig = kit::start_with(veth, &serve, &setting.guest());
    let guards = kit::post(&mut rig, setting.buffer(wire.driver()));
    await_own(&mut rig);
    (rig, guards)
}

/// A frame of the guest's; no two bytes of it are those of a canary.
fn own(flow: u8, number: u32, len: usize) -> Vec<u8> {
    let mut bytes = frame::tagged(len, VLAN, 0);
    for (at, byte) in bytes.iter_mut().enumerate().skip(frame::HEADER + 4) {
        *byte = (at % 100) as u8;
    }
    bytes[18] = flow;
    bytes[19..23].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// A frame of one byte value behind its headers.
fn canary(mut bytes: Vec<u8>, value: u8) -> Vec<u8> {
    bytes[46..].fill(value);
    bytes
}

/// One of those that are not the guest's.
fn foreign(number: u32, elsewhere: Option<u16>, filtered: bool) -> Vec<u8> {
    let len = LENGTHS[number as usize / 6 % LENGTHS.len()];
    let kind = match filtered {
        true => number % 6,
        false => 3 + 2 * (number % 2),
    };
    let bytes = match (kind, elsewhere) {
        (0, _) => {
            let mut bytes = frame::tagged(len, VLAN, 0);
            bytes[..6].copy_from_slice(&ELSEWHERE);
            bytes
        }
        (1, _) => frame::tagged(len, OTHER_VLAN, 0),
        (2, _) => frame::plain(len, 0),
        (3, Some(flow)) => tagged_udp(flow, len),
        (4, _) => {
            // To all, of another VLAN.
            let mut bytes = frame::tagged(len, OTHER_VLAN, 0);
            bytes[..6].fill(0xff);
            bytes
        }
        _ => {
            let too_long = frame::tagged(TOO_LONG[number as usize / 2 % TOO_LONG.len()], VLAN, 0);
            return canary(too_long, OVERLONG);
        }
    };
    canary(bytes, DURING)
}

/// To the guest's address and of its VLAN, of a flow that the NIC's hash tells from others: igb's is of addresses
/// alone.
fn tagged_udp(flow: u16, len: usize) -> Vec<u8> {
    lan::tagged(&frame::udp_from_afar(flow, len - 4), VLAN)
}

/// Sends frames of the guest's until they arrive.
fn await_own(rig: &mut Rig) {
    let mut number = 1000;
    // An interpreted steward may have to load its program anew.
    let arrives = wait::until(3 * wait::SOON, || {
        number += 1;
        let probe = own(9, number, 64);
        let _ = rig.wire.try_send(&probe);
        let pair = rig.pair();
        let arrivals = std::iter::from_fn(|| pair.receive(wait::QUIET));
        arrivals.into_iter().any(|got| got.frame == probe)
    });
    let said = rig.daemon.said();
    assert!(arrives, "nothing arrives: {:#}\n{said}", rig.daemon.status());
}

/// A first burst. At the beginning of a session QEMU may deliver a frame before others (docs/kernels.md).
fn warm_up(rig: &mut Rig) {
    let frames: Vec<_> = (0..WARM_UP).map(|number| own(9, number, 300)).collect();
    frames.iter().for_each(|frame| rig.wire.send(frame));
    let pair = rig.pair();
    let arrivals = std::iter::from_fn(|| pair.receive(wait::SOON)).take(frames.len());
    let mut got: Vec<_> = arrivals.map(|got| got.frame).collect();
    if got != frames {
        println!("canaries: the first burst does not come in order");
    }
    got.sort_unstable();
    assert!(
        got == frames,
        "of the first {WARM_UP} frames {} arrive",
        got.len()
    );
}

/// Some of the guest's own frames, in order, others between them; and some that it sends.
fn mixed_frames(rig: &mut Rig, round: u32, foreign: impl Fn(u32) -> Vec<u8>) {
    let numbers = round * OWN..(round + 1) * OWN;
    let mut canaries = (round * CANARIES..(round + 1) * CANARIES).map(foreign);
    let sent: Vec<_> = numbers
        .map(|number| {
            own(
                (number % 2) as u8,
                number,
                LENGTHS[number as usize % LENGTHS.len()],
            )
        })
        .collect();
    for (at, frame) in sent.iter().enumerate() {
        let between = if at % 2 == 0 { 2 } else { 1 };
        for canary in canaries.by_ref().take(between) {
            // What is too long some wires refuse themselves.
            let _ = rig.wire.try_send(&canary);
        }
        rig.wire.send(frame);
    }
    let pair = rig.pair();
    let got = std::iter::from_fn(|| pair.receive(wait::SOON)).take(sent.len());
    let got: Vec<_> = got.map(|got| got.frame).collect();
    if got != sent {
        let numbers: Vec<_> = got.iter().map(|frame| (frame[18], frame[22])).collect();
        println!("canaries: round {round}: arrived {numbers:?}");
    }
    for (got, sent) in got.iter().zip(&sent) {
        frame::assert_same(got, sent);
    }
    assert_eq!(got.len(), sent.len(), "round {round}: {:#}", rig.daemon.status());
    rig.assert_from_guest(
        &own(2, round, LENGTHS[round as usize % LENGTHS.len()]),
        Layout::Whole,
    );
}

/// Whether a canary is found where there is one. Then it is wiped out.
fn canary_to_the_guest_is_found(rig: &mut Rig) -> bool {
    rig.assert_to_guest(&canary(own(9, 0, 1000), DURING));
    let ram = std::sync::Arc::clone(rig.pair().ram());
    let places = places_of(&ram.read_vec(GuestAddr(0), RAM as usize), DURING);
    for &place in &places {
        ram.write(GuestAddr(place as u64), &[0; 2]);
    }
    !places.is_empty() && canaries_in(rig, DURING) == 0
}

/// Places in all of the guest's memory where there are two such bytes.
fn canaries_in(rig: &mut Rig, value: u8) -> usize {
    let memory = rig.pair().ram().read_vec(GuestAddr(0), RAM as usize);
    places_of(&memory, value).len()
}

/// Where two such bytes stand side by side.
fn places_of(memory: &[u8], value: u8) -> Vec<usize> {
    let places_in = |(start, block): (usize, &[u8])| {
        // A pair may begin with the last byte of a block and end with the first of the next one.
        let end = (start + block.len() + 1).min(memory.len());
        let pairs = memory[start..end].windows(2).enumerate();
        let places = pairs.filter(|(_, pair)| **pair == [value; 2]);
        places.map(|(at, _)| start + at).collect::<Vec<_>>()
    };
    kit::blocks_with(memory, value).flat_map(places_in).collect()
}

/// Where a driver counts what comes to its second queue, for those that spread flows over two here.
fn frames_of_second_queue(wire: &Wire) -> Option<&'static str> {
    match wire.driver() {
        "igb" => Some("rx_queue_1_packets"),
        "rig_nic" => Some("rx1_frames"),
        _ => None,
    }
}

/// A flow that the NIC's hash brings to its second queue, of which the daemon has nothing.
fn flow_of_another_queue(rig: &mut Rig, counter: &str) -> u16 {
    let received = |rig: &Rig| -> u64 {
        let said = rig.veth.near.output_of("ethtool", &["-S", VethPair::NIC]);
        let mut lines = said
            .lines()
            .filter_map(|line| line.trim().strip_prefix(counter)?.strip_prefix(": "));
        lines
            .next()
            .and_then(|count| count.parse().ok())
            .expect("it counts them")
    };
    let found = (5000..5032).find(|&flow| {
        let before = received(rig);
        rig.wire.send(&tagged_udp(flow, 100));
        // Those of the first queue arrive in the guest.
        let went_by = || received(rig) > before;
        wait::until(wait::QUIET, went_by)
    });
    // What came to the guest is nobody's concern.
    await_own(rig);
    found.unwrap_or_else(|| {
        let said = |program, args: &[&str]| rig.veth.near.output_of(program, args);
        panic!(
            "the NIC spreads flows over its queues: {}{}{}",
            said("ip", &["-s", "link", "show", VethPair::NIC]),
            said("ethtool", &["-x", VethPair::NIC]),
            said("ethtool", &["-S", VethPair::NIC]),
        )
    })
}

/// The lease ends while the daemon can do nothing about it, and frames come that would have been the guest's.
fn lease_ends(rig: &mut Rig, value: u8, zero_copy: bool, end: fn(&mut Rig)) {
    let host = PacketPort::open(&rig.veth.near, VethPair::NIC);
    let pid = rig.daemon.process().pid();
    rig.daemon.process().signal(Signal::STOP);
    assert_soon!(is_stopped(pid), "SIGSTOP stops the daemon");
    end(rig);
    let late = canary(own(0, 0, 1500), value);
    let mut passed = 0;
    let all_pass = wait::until(3 * wait::SOON, || {
        // Some are lost where a NIC loses its link as the program comes off.
        (0..BATCH).for_each(|_| drop(rig.wire.try_send(&late)));
        let arrivals = std::iter::from_fn(|| host.receive(wait::QUIET));
        passed += arrivals.filter(|got| *got == late).count();
        passed >= LATE
    });
    assert!(all_pass, "{passed} of {LATE} frames go to the host");
    assert_eq!(canaries_in(rig, value), 0, "in the guest's memory");
    let is_there = is_in_memory_of(pid, value);
    // Without the program, which stays for some seconds, igb takes its memory away from a socket (`igb_xsk_pool`).
    let link = rig.veth.near.output_of("ip", &["link", "show", VethPair::NIC]);
    let attached = link.contains("xdp");
    println!("after the end of a lease: in the holder's memory: {is_there}, program attached: {attached}");
    assert!(
        is_there == zero_copy || (zero_copy && !attached),
        "whether frames that come after the end of a lease are in the memory of its holder: {is_there}"
    );
    rig.daemon.process().signal(Signal::CONT);
}

fn is_stopped(pid: u32) -> bool {
    let mut tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .expect("it runs")
        .flatten();
    tasks.all(|task| fs::read_to_string(task.path().join("stat")).is_ok_and(|stat| stat.contains(") T ")))
}

/// What the steward said of leases that ended.
fn ends_said(rig: &Rig) -> usize {
    let lessor = rig.daemon.lessor.as_ref().expect("leased");
    lessor.steward.said().matches("lease ended").count()
}

fn await_end(rig: &Rig, before: usize) {
    assert_soon!(ends_said(rig) > before, "the lease does not end");
}

/// As if the daemon closed its connection to the steward.
fn shut_connection(rig: &mut Rig) {
    let before = ends_said(rig);
    let steward = rig.daemon.lessor.as_ref().expect("leased").steward.pid();
    let connection = connection(rig.daemon.process().pid(), steward);
    shutdown(&connection, Shutdown::Both).expect("it is connected");
    await_end(rig, before);
}

/// A process's connection to another.
fn connection(pid: u32, other: u32) -> OwnedFd {
    let mut copies = copies_of_sockets(pid).into_values();
    let is_it = |socket: &OwnedFd| {
        sockopt::socket_type(socket) == Ok(SocketType::SEQPACKET)
            && sockopt::socket_peercred(socket).is_ok_and(|peer| peer.pid == pid_of(other))
    };
    copies.find(is_it).expect("it is connected to the steward")
}

fn pid_of(pid: u32) -> Pid {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .expect("a process number")
}

/// The policy allows nothing any more.
fn change_policy(rig: &mut Rig) {
    let before = ends_said(rig);
    let lessor = rig.daemon.lessor.as_mut().expect("leased");
    lessor.change_policy("[[allow]]\nuser = 1\ninterface = \"nic0\"\nqueues = \"all\"\n");
    lessor.steward.signal(Signal::HUP);
    await_end(rig, before);
}

/// Whether a frame of such bytes is in what a process has written, or had written; the guest's memory is not counted.
fn is_in_memory_of(pid: u32, value: u8) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    let memory = File::open(format!("/proc/{pid}/mem")).expect("we are root");
    let writable = maps.lines().filter(|line| {
        let rights = line.split(' ').nth(1).unwrap_or_default();
        rights.starts_with("rw") && !line.contains("memfd:guest")
    });
    let mut bytes = vec![0; 1 << 20];
    for line in writable {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let (start, end) = range.expect("a range");
        let number = |text| u64::from_str_radix(text, 16).expect("hexadecimal");
        for at in (number(start)..number(end)).step_by(bytes.len()) {
            let len = bytes.len().min((number(end) - at) as usize);
            // Rings of sockets cannot be read.
            let Ok(read) = memory.read_at(&mut bytes[..len], at) else {
                continue;
            };
            let blocks = kit::blocks_with(&bytes[..read], value);
            let mut runs = blocks.flat_map(|(_, block)| block.chunks_exact(RUN));
            if runs.any(|run| run == [value; RUN]) {
                return true;
            }
        }
    }
    false
}
