//! Frames to stations on other hosts: encapsulated, or by the uplink.

mod gso;

use std::net::IpAddr;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use packet::checksum::{self, ChecksumAt};
use packet::segment::{Gso, GsoKind, Plan, Tunnel};
use packet::tunnel::{Endpoints, Outer};
use packet::word;

use virtqueue::Chains;

use super::filter::filter;
use super::workers::Workers;
use super::*;
use crate::backend::to_nic::{NicSink, Transmit};
use crate::fdb::UnderlayOf;
use crate::fdb::remotes::{Remotes, Vtep, VtepNumber, Vteps};
use crate::guest::from_guest::{Budget, Put};
use crate::guest::guest_frame::GuestFrame;
use crate::lane::Work;
use crate::policy::guard::{Addresses, SourceGuard};
use crate::tests::no_allocation_tests::allocations;
use crate::tests::test_xdp::XdpWire;
use device::pair::Sending;

/// Of the underlay's frames, with a tag.
const LIMIT: u32 = 1518 + 50;
const NEAR: Mac = [2, 0, 0, 9, 0, 1];
const FAR: Mac = [2, 0, 0, 9, 0, 2];
/// Behind a VTEP whose next hop is not known.
const UNRESOLVED: Mac = [2, 0, 0, 9, 0, 3];

/// A network with both ways to other hosts.
struct Overlay {
    world: World,
    uplink: XdpWire,
    underlay: XdpWire,
    remotes: Arc<Remotes>,
    vteps: [Arc<Vtep>; 2],
}

/// The VTEP of this number; over IPv6 it is in VLAN 5, and the tunnel is Geneve.
fn vtep(number: u8, v6: bool) -> Arc<Vtep> {
    let [local, remote]: [IpAddr; 2] = match v6 {
        false => [[10, 9, 0, 1].into(), [10, 9, 0, number].into()],
        true => [
            [0xfd00, 0, 0, 0, 0, 0, 0, 1].into(),
            [0xfd00, 0, 0, 0, 0, 0, 0, number.into()].into(),
        ],
    };
    let ends = Endpoints {
        to: [2, 0, 0, 8, 0, number],
        from: [2, 0, 0, 8, 0, 1],
        vlan: if v6 { 5 } else { 0 },
        local,
        remote,
        ttl: 64,
        is_geneve: v6,
        port: 4789,
        vni: 100,
    };
    Arc::new(Vtep {
        outer: Outer::new(&ends).expect("one family"),
        confirm: AtomicBool::new(false),
    })
}

fn ports(vlans: &[Vlans]) -> Vec<FdbPort> {
    let port = |(at, vlans): (usize, &Vlans)| fdb_port_with(at as u8, |port| port.vlans = vlans.clone());
    vlans.iter().enumerate().map(port).collect()
}

/// The FDB of ports and remote stations.
fn fdb(known: Vec<FdbPort>, remotes: &Arc<Remotes>, vteps: &[Arc<Vtep>; 2]) -> Arc<Fdb> {
    let [near, far] = vteps.clone();
    let vteps = Vteps(vec![None, Some(near), Some(far)]);
    let fdb = Fdb::new(known.into_iter().map(Some).collect());
    Arc::new(fdb.with_remotes(Arc::clone(remotes), Arc::new(vteps)))
}

/// Ends another thread, also after a panic.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Where the kernel copies frames.
const COPIED: Sends = Sends {
    checksum: true,
    ..Sends::PLAIN
};
/// Where a NIC reads them, in several pieces.
const BY_DMA: Sends = Sends {
    most_pieces: 8,
    zero_copy: true,
    by_dma: true,
    ..COPIED
};

/// A queue of the uplink and one of the underlay, for a worker.
fn add_ways(world: &mut World, underlay: Sends) -> [XdpWire; 2] {
    let network = || NETWORK.into();
    let roles = [
        Role::Uplink {
            network: network(),
            queue: 0,
        },
        Role::Underlay {
            underlay: UnderlayOf {
                network: network(),
                interface: 1,
            },
            queue: 0,
        },
    ];
    roles.map(|role| {
        let sends = match role {
            Role::Underlay { .. } => underlay,
            _ => COPIED,
        };
        let (queue, wire) = XdpWire::queue(128, sends);
        let origin = Origin {
            frame_limit: 1518,
            partial_checksums: false,
        };
        let mut lane = UplinkLane::new(queue, origin, Arc::default());
        lane.set_frame_limit(match role {
            Role::Underlay { .. } => LIMIT,
            _ => 1518,
        });
        world.add_slot(Box::new(lane), role);
        wire
    })
}

impl Overlay {
    fn new(known: Vec<FdbPort>) -> Self {
        Self::of(known, false, COPIED)
    }

    fn of(known: Vec<FdbPort>, v6: bool, sends: Sends) -> Self {
        let remotes = Arc::new(Remotes::new(16));
        for (mac, number) in [(UNRESOLVED, 0), (NEAR, 1), (FAR, 2)] {
            assert!(remotes.set(mac, VtepNumber(number)));
        }
        let vteps = [2, 3].map(|number| vtep(number, v6));
        let mut world = World::offering(known.clone(), Offloads::all());
        world
            .lanes
            .fdbs
            .insert(NETWORK.into(), fdb(known, &remotes, &vteps));
        let [uplink, underlay] = add_ways(&mut world, sends);
        world.rebuild_forwarding();
        Self {
            world,
            uplink,
            underlay,
            remotes,
            vteps,
        }
    }

    /// One port without VLANs.
    fn plain() -> Self {
        Self::new(ports(&[Vlans::Untagged]))
    }

    fn counters(&self, port: usize) -> &PairCounters {
        &self.world.ports[port].counters
    }

    /// Port 0 sends these.
    fn send(&mut self, frames: &[Vec<u8>]) {
        frames
            .iter()
            .for_each(|frame| _ = self.world.ports[0].send(frame));
        self.world.poll();
    }

    /// What left by the underlay was encapsulated for this VTEP; returns the frames inside.
    #[track_caller]
    fn inside(&mut self, vtep: usize) -> Vec<Vec<u8>> {
        inside(&self.vteps[vtep], self.underlay.take())
    }
}

/// The frames inside, if the headers are those of this VTEP.
#[track_caller]
fn inside(vtep: &Vtep, frames: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let frames = frames.into_iter().map(|mut frame| {
        let inner = frame.split_off(vtep.outer.len());
        // Flow and identification are compared by other tests.
        let id = word(&frame, 18).expect("IP");
        let port = word(&frame, vtep.outer.len() - 16).expect("UDP");
        assert!(port >= 49_152, "{port}");
        let headers = vtep.outer.headers(&inner, inner.len() as u16, port - 49_152, id);
        assert_eq!(frame, headers.as_ref());
        inner
    });
    frames.collect()
}

/// UDP over IPv4 with these ports and ECN bits.
fn udp(to: Mac, ports: [u8; 2], ecn: u8, len: usize) -> Vec<u8> {
    let mut udp = frame(to, mac(0), len);
    udp[12..24].copy_from_slice(&[8, 0, 0x45, ecn, 0, 46, 0, 0, 0, 0, 64, 17]);
    udp[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    udp[34..38].copy_from_slice(&[0, ports[0], 0, ports[1]]);
    udp
}

#[test]
fn frames_to_remote_stations_leave_in_the_headers_of_their_vtep() {
    for v6 in [false, true] {
        let mut overlay = Overlay::of(ports(&[Vlans::Untagged]), v6, COPIED);
        let mut sent = 0;
        for len in [14, 60, 63, 64, 65, 128, 1000, 1514 - 20] {
            let frames = [1, 2, 3].map(|ecn| udp(NEAR, [1, 2], ecn, len.max(60)));
            let frames = [&frames[..], &[frame(NEAR, mac(0), len)]].concat();
            overlay.send(&frames);
            assert_eq!(overlay.inside(0), frames, "{len}");
            sent += frames.len() as u64;
            overlay.send(&[frame(FAR, mac(0), len)]);
            assert_eq!(overlay.inside(1).len(), 1);
            sent += 1;
        }
        assert!(overlay.uplink.take().is_empty());
        let counters = overlay.counters(0);
        assert_eq!(counters.from_guest_encapsulated.get(), sent);
        assert_eq!(counters.from_guest_frames.get(), sent);
        let used = std::iter::from_fn(|| overlay.world.ports[0].from_guest.take_used());
        assert_eq!(used.count() as u64, sent);
    }
}

#[test]
fn bytes_are_counted_as_the_guest_sent_them() {
    let mut overlay = Overlay::plain();
    // One that is only copied, and one that is not.
    overlay.send(&[frame(NEAR, mac(0), 100)]);
    let mut header = [0; HEADER as usize];
    header[..10].copy_from_slice(&[1, 0, 0, 0, 0, 0, 34, 0, 6, 0]);
    overlay.world.ports[0].send_with(header, &udp(NEAR, [1, 2], 0, 200));
    overlay.world.poll();
    let counters = overlay.counters(0);
    assert_eq!(counters.from_guest_bytes.get(), 300);
    assert_eq!(counters.from_guest_encapsulated.get(), 2);
}

#[test]
fn source_port_is_that_of_the_flow_and_identification_that_of_the_packet() {
    let mut overlay = Overlay::plain();
    let flows = [[1, 2], [1, 3], [1, 4]].map(|ports| udp(NEAR, ports, 0, 100));
    overlay.send(&[&flows[..], &flows].concat());
    let sent = overlay.underlay.take();
    let words = |at| -> Vec<u16> { sent.iter().map(|frame| word(frame, at).expect("there")).collect() };
    let (mut ports, mut ids) = (words(34), words(18));
    assert_eq!(ports[..3], ports[3..]);
    ports.sort_unstable();
    ports.dedup();
    ids.dedup();
    assert_eq!((ports.len(), ids.len()), (3, 6));
}

/// The NIC could, but would take the outer headers for those of the checksum.
#[test]
fn requested_checksum_is_completed_inside() {
    for v6 in [false, true] {
        let mut overlay = Overlay::of(ports(&[Vlans::Untagged]), v6, COPIED);
        for len in [60, 61, 1000, 1001] {
            let frame = udp(NEAR, [1, 2], 0, len);
            let at = ChecksumAt { start: 34, offset: 6 };
            let mut header = [0; HEADER as usize];
            header[..10].copy_from_slice(&[1, 0, 0, 0, 0, 0, 34, 0, 6, 0]);
            overlay.world.ports[0].send_with(header, &frame);
            overlay.world.poll();
            let mut wanted = frame.clone();
            checksum::complete(&mut wanted, at).expect("inside");
            assert_ne!(wanted, frame);
            assert_eq!(overlay.inside(0), [wanted], "{len}");
        }
        let counters = overlay.counters(0);
        assert_eq!(counters.from_guest_checksums.get(), 4);
        assert_eq!(counters.from_guest_checksums_left.get(), 0);
    }
}

/// A guest may request a checksum anywhere in its frame, and nowhere in the headers in front.
#[test]
fn checksum_of_a_guest_does_not_reach_the_outer_headers() {
    let mut overlay = Overlay::plain();
    for (start, offset) in [(14u16, 84u16), (98, 0), (34, 6)] {
        let frame = udp(NEAR, [1, 2], 0, 100);
        let mut header = [0; HEADER as usize];
        header[0] = 1;
        header[6..8].copy_from_slice(&start.to_le_bytes());
        header[8..10].copy_from_slice(&offset.to_le_bytes());
        overlay.world.ports[0].send_with(header, &frame);
        overlay.world.poll();
        let mut wanted = frame;
        checksum::complete(&mut wanted, ChecksumAt { start, offset }).expect("inside");
        assert_eq!(overlay.inside(0), [wanted], "{start} {offset}");
    }
}

#[test]
fn frame_of_a_vlan_has_its_tag_inside() {
    let mut overlay = Overlay::new(ports(&[Vlans::Access(100), Vlans::Trunk(vec![100])]));
    let bare = udp(NEAR, [1, 2], 1, 200);
    overlay.send(std::slice::from_ref(&bare));
    assert_eq!(overlay.inside(0), [tagged(&bare, 100)]);
    let mut of_trunk = bare.clone();
    of_trunk[6..12].copy_from_slice(&mac(1));
    overlay.world.ports[1].send(&tagged(&of_trunk, 100));
    overlay.world.poll();
    let sent = overlay.underlay.take();
    assert_eq!(sent[0][15] & 3, 1, "ECN of the packet behind the tag");
    assert_eq!(inside(&overlay.vteps[0], sent), [tagged(&of_trunk, 100)]);
    // Its checksum moves with the tag.
    let mut header = [0; HEADER as usize];
    header[..10].copy_from_slice(&[1, 0, 0, 0, 0, 0, 34, 0, 6, 0]);
    overlay.world.ports[0].send_with(header, &bare);
    overlay.world.poll();
    let mut wanted = bare;
    checksum::complete(&mut wanted, ChecksumAt { start: 34, offset: 6 }).expect("inside");
    assert_eq!(overlay.inside(0), [tagged(&wanted, 100)]);
}

/// The outer frame has no tag, so it is 4 bytes shorter than the longest.
#[test]
fn frame_too_long_for_the_underlay_leaves_by_the_uplink() {
    let longest = LIMIT as usize - 4 - 50;
    let mut overlay = Overlay::new(ports(&[Vlans::Untagged, Vlans::Access(7)]));
    for (port, longest) in [(0, longest), (1, longest - 4)] {
        let of = |len| frame(NEAR, mac(port as u8), len);
        let sent = [60, longest, longest + 1, 61];
        sent.iter()
            .for_each(|&len| _ = overlay.world.ports[port].send(&of(len)));
        overlay.world.poll();
        let vlan = if port == 1 { 7 } else { 0 };
        let wanted = |len| packet::ethernet::tagged(&of(len), vlan);
        assert_eq!(overlay.inside(0), [60, longest, 61].map(wanted));
        assert_eq!(overlay.uplink.take(), [wanted(longest + 1)]);
    }
}

#[test]
fn frames_to_other_addresses_leave_by_the_uplink() {
    let mut overlay = Overlay::plain();
    let sent = [STRANGER, UNRESOLVED, BROADCAST].map(|to| frame(to, mac(0), 60));
    overlay.send(&sent);
    assert_eq!(overlay.uplink.take(), sent);
    assert!(overlay.underlay.take().is_empty());
    assert_eq!(overlay.counters(0).from_guest_encapsulated.get(), 0);
}

/// The tunnel has two ends.
#[test]
fn all_stations_that_are_not_here_may_be_behind_one_vtep() {
    let mut overlay = Overlay::new(ports(&[Vlans::Untagged, Vlans::Untagged]));
    let remotes = Arc::new(Remotes::behind(VtepNumber(1)));
    let known = fdb(
        ports(&[Vlans::Untagged, Vlans::Untagged]),
        &remotes,
        &overlay.vteps,
    );
    overlay.world.lanes.fdbs.insert(NETWORK.into(), known);
    overlay.world.rebuild_forwarding();
    let [near, stranger, all] = [NEAR, STRANGER, BROADCAST].map(|to| frame(to, mac(0), 60));
    overlay.world.ports[1].post(2);
    overlay.send(&[
        near.clone(),
        stranger.clone(),
        all.clone(),
        frame(mac(1), mac(0), 61),
    ]);
    assert_eq!(overlay.inside(0), [near, stranger]);
    assert_eq!(overlay.uplink.take(), std::slice::from_ref(&all));
    assert_eq!(overlay.world.ports[1].got(), [all, frame(mac(1), mac(0), 61)]);
}

#[test]
fn station_that_moves_is_found_where_it_is() {
    let mut overlay = Overlay::plain();
    let sent = [frame(NEAR, mac(0), 60)];
    overlay.send(&sent);
    assert_eq!(overlay.inside(0), sent);
    assert!(overlay.remotes.set(NEAR, VtepNumber(2)));
    overlay.send(&sent);
    assert_eq!(overlay.inside(1), sent);
    overlay.remotes.remove(NEAR);
    overlay.send(&sent);
    assert_eq!(overlay.uplink.take(), sent);
    // It becomes a port's.
    overlay.remotes.set(mac(0), VtepNumber(1));
    overlay.send(&[frame(mac(0), mac(0), 60)]);
    assert!(overlay.uplink.take().is_empty() && overlay.underlay.take().is_empty());
}

#[test]
fn guest_that_has_moved_to_another_host_is_found_there() {
    let mut overlay = Overlay::new(ports(&[Vlans::Untagged, Vlans::Untagged]));
    overlay.remotes.set(mac(1), VtepNumber(1));
    let sent = [frame(mac(1), mac(0), 60), frame(mac(1), mac(0), 61)];
    overlay.send(&sent);
    assert!(overlay.underlay.take().is_empty(), "the guest is here");
    overlay.world.lanes.slots.remove(1).lane.stop();
    overlay.world.rebuild_forwarding();
    overlay.send(&sent);
    assert_eq!(overlay.inside(0), sent);
    assert!(overlay.uplink.take().is_empty());
}

/// Rules remember the destination of a flow.
#[test]
fn station_that_moves_is_found_where_it_is_by_flows_that_rules_know() {
    let mut overlay = Overlay::plain();
    filter(
        &mut overlay.world,
        0,
        "direction=from-guest action=allow protocol=udp destination-ports=2",
    );
    let sent = [udp(NEAR, [1, 2], 0, 60)];
    let denied = udp(NEAR, [1, 3], 0, 60);
    for vtep in [0, 1] {
        assert!(overlay.remotes.set(NEAR, VtepNumber(vtep as u16 + 1)));
        overlay.send(&[sent[0].clone(), denied.clone()]);
        assert_eq!(overlay.inside(vtep), sent, "{vtep}");
    }
    overlay.remotes.remove(NEAR);
    overlay.send(&sent);
    assert_eq!(overlay.uplink.take(), sent);
    assert!(overlay.remotes.set(NEAR, VtepNumber(1)));
    overlay.send(&sent);
    assert_eq!(overlay.inside(0), sent);
    let counters = overlay.counters(0);
    assert_eq!(
        (counters.filter_hits.get(), counters.from_guest_filter.get()),
        (4, 2)
    );
}

#[test]
fn kernel_gets_one_frame_to_confirm_a_next_hop() {
    let mut overlay = Overlay::plain();
    let sent = [60, 61, 62].map(|len| frame(NEAR, mac(0), len));
    for _ in 0..2 {
        overlay.vteps[0].confirm.store(true, Relaxed);
        overlay.send(&[frame(FAR, mac(0), 60)]);
        assert_eq!(overlay.inside(1).len(), 1, "of another VTEP");
        overlay.send(&sent);
        assert_eq!(overlay.uplink.take(), sent[..1]);
        assert_eq!(overlay.inside(0), sent[1..]);
        assert!(!overlay.vteps[0].confirm.load(Relaxed));
    }
}

#[test]
fn next_hop_is_confirmed_when_the_uplink_has_room_again() {
    let mut overlay = Overlay::plain();
    let filling: Vec<_> = (0..140).map(|_| frame(STRANGER, mac(0), 60)).collect();
    overlay.send(&filling);
    (0..3).for_each(|_| overlay.world.poll());
    overlay.vteps[0].confirm.store(true, Relaxed);
    // Behind those that wait.
    let sent = frame(NEAR, mac(0), 61);
    overlay.send(std::slice::from_ref(&sent));
    assert!(overlay.vteps[0].confirm.load(Relaxed));
    assert_eq!(overlay.uplink.take().len(), 128);
    (0..8).for_each(|_| overlay.world.poll());
    assert_eq!(overlay.uplink.take().last(), Some(&sent));
    assert!(!overlay.vteps[0].confirm.load(Relaxed));
    assert!(overlay.underlay.take().is_empty());
}

#[test]
fn frames_wait_for_room_in_the_underlay() {
    let mut overlay = Overlay::plain();
    let sent: Vec<_> = (0..200).map(|at| frame(NEAR, mac(0), 60 + at)).collect();
    overlay.send(&sent);
    (0..4).for_each(|_| overlay.world.poll());
    let mut got = overlay.inside(0);
    assert_eq!(got.len(), 128);
    assert!(overlay.counters(0).from_guest_waits.get() > 0);
    (0..8).for_each(|_| overlay.world.poll());
    got.extend(overlay.inside(0));
    assert_eq!(got, sent);
    assert!(overlay.uplink.take().is_empty());
}

#[test]
fn frames_leave_by_the_uplink_while_the_underlay_is_down() {
    let mut overlay = Overlay::plain();
    let (_, other) = XdpWire::queue(16, Sends::PLAIN);
    overlay.underlay.kernel.ask_for_kicks();
    // Kicks fail from now on.
    drop(std::mem::replace(&mut overlay.underlay, other));
    let lost = [frame(NEAR, mac(0), 60)];
    overlay.send(&lost);
    let sent = [frame(NEAR, mac(0), 61)];
    overlay.send(&sent);
    assert_eq!(overlay.uplink.take(), sent);
    assert_eq!(overlay.counters(0).from_guest_interface_down.get(), 0);
}

#[test]
fn what_a_guest_may_not_send_is_not_encapsulated() {
    let mut known = ports(&[Vlans::Untagged]);
    known[0].source_guard = Some(Arc::new(SourceGuard {
        addresses: Addresses::new(&["10.0.0.1".parse().expect("an address")]),
        ..SourceGuard::default()
    }));
    let mut overlay = Overlay::new(known);
    let good = udp(NEAR, [1, 2], 0, 100);
    let mut spoofed_ip = good.clone();
    spoofed_ip[29] = 9;
    let spoofed_mac = frame(NEAR, STRANGER, 60);
    overlay.send(&[spoofed_ip, good.clone(), spoofed_mac]);
    assert_eq!(overlay.inside(0), [good]);
    assert!(overlay.uplink.take().is_empty());
    let counters = overlay.counters(0);
    assert_eq!(counters.from_guest_ip_source.get(), 1);
    assert_eq!(counters.from_guest_source_address.get(), 1);
}

/// The checked copy leaves, whatever the guest writes there meanwhile.
#[test]
fn bytes_that_a_guest_changes_after_the_check_do_not_leave() {
    let mut overlay = Overlay::plain();
    let good = udp(NEAR, [1, 2], 0, 100);
    let addr = overlay.world.ports[0]
        .memory
        .put(&[&[0; HEADER as usize][..], &good].concat());
    let source = addr.checked_add(u64::from(HEADER) + 6).expect("inside");
    let ram = Arc::clone(&overlay.world.ports[0].memory.ram);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Relaxed) {
                ram.write(source, &STRANGER);
                ram.write(source, &mac(0));
            }
        });
        let _end = End(&is_done);
        let (mut left, mut rounds) = (0, 0);
        while left < 500 && rounds < 100_000 {
            let driver = &mut overlay.world.ports[0].from_guest;
            while driver.take_used().is_some() {}
            for _ in 0..64 {
                driver
                    .add(&[Buffer::readable(addr, HEADER + good.len() as u32)])
                    .expect("room");
            }
            driver.publish();
            overlay.world.poll();
            let frames = overlay.inside(0);
            left += frames.len();
            rounds += 1;
            assert!(frames.iter().all(|frame| frame[..64] == good[..64]));
        }
        assert!(left >= 500);
    });
    assert!(overlay.uplink.take().is_empty());
}

#[test]
fn promiscuous_port_hears_the_frame_inside() {
    let mut known = ports(&[Vlans::Untagged, Vlans::Untagged]);
    known[1].options.promiscuous = true;
    let mut overlay = Overlay::new(known);
    overlay.world.ports[1].post(8);
    let sent = [60, 61].map(|len| frame(NEAR, mac(0), len));
    overlay.send(&sent);
    assert_eq!(overlay.world.ports[1].got(), sent);
    assert_eq!(overlay.inside(0), sent);
}

#[test]
fn frames_of_the_host_are_encapsulated_by_the_kernel() {
    let mut overlay = Overlay::plain();
    let remotes = fdb(ports(&[Vlans::Untagged]), &overlay.remotes, &overlay.vteps);
    let (host, _) = super::host::add_host(&mut overlay.world, ports(&[Vlans::Untagged]), false);
    overlay.world.lanes.fdbs.insert(NETWORK.into(), remotes);
    overlay.world.rebuild_forwarding();
    let sent = frame(NEAR, super::host::HOST, 60);
    assert!(super::host::write(&host, &sent));
    (0..3).for_each(|_| overlay.world.poll());
    assert_eq!(overlay.uplink.take(), [sent]);
    assert!(overlay.underlay.take().is_empty());
}

#[test]
fn frames_of_a_worker_leave_by_the_underlay_of_another() {
    let known = ports(&[const { Vlans::Untagged }; 4]);
    let remotes = Arc::new(Remotes::new(4));
    assert!(remotes.set(NEAR, VtepNumber(1)));
    let vteps = [2, 3].map(|number| vtep(number, false));
    let mut workers = Workers::new(known.clone(), false);
    let [_uplink, mut underlay] = add_ways(&mut workers.0[0], COPIED);
    underlay.kernel.ask_for_kicks();
    for world in &mut workers.0 {
        let fdb = fdb(known.clone(), &remotes, &vteps);
        world.lanes.fdbs.insert(NETWORK.into(), fdb);
    }
    workers.spread();
    for round in 0..3 {
        for port in [2, 0, 3] {
            workers.port(port).send(&frame(NEAR, mac(port as u8), 60 + port));
        }
        // The worker without an underlay kicks the kernel itself.
        workers.0[1].poll();
        assert_eq!(underlay.kernel.kicks(), 2, "{round}");
        let sent = inside(&vteps[0], underlay.take());
        assert_eq!(sent, [2, 3].map(|port| frame(NEAR, mac(port as u8), 60 + port)));
        workers.0[0].poll();
        assert_eq!(inside(&vteps[0], underlay.take()), [frame(NEAR, mac(0), 60)]);
        underlay.kernel.kicks();
    }
    // The kernel takes nothing: the other worker may sleep, so this one asks again.
    workers.port(2).send(&frame(NEAR, mac(2), 60));
    workers.0[1].poll();
    underlay.kernel.kicks();
    let work = workers.0[1].lanes.enable_notifications(0);
    assert!(work.is_some_and(|work| work > Work::None), "{work:?}");
    assert!(underlay.kernel.kicks() > 0);
    underlay.take();
    assert_eq!(workers.0[1].lanes.enable_notifications(0), Some(Work::None));
}

#[test]
fn stations_that_move_all_the_time_get_each_frame_once_in_its_headers() {
    let mut overlay = Overlay::plain();
    let remotes = Arc::clone(&overlay.remotes);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 0;
            while !is_done.load(Relaxed) {
                number = number % 2 + 1;
                remotes.set(NEAR, VtepNumber(number));
                remotes.remove(FAR);
                remotes.remove(NEAR);
                remotes.set(FAR, VtepNumber(number));
            }
        });
        let _end = End(&is_done);
        for round in 0..100 {
            let sent: Vec<_> = (0..32)
                .map(|at| frame([NEAR, FAR][at % 2], mac(0), 60 + at))
                .collect();
            overlay.send(&sent);
            let (mut got, encapsulated) = (overlay.uplink.take(), overlay.underlay.take());
            for frame in encapsulated {
                let vtep = usize::from(frame[33]) - 2;
                got.extend(inside(&overlay.vteps[vtep], vec![frame]));
            }
            got.sort_by_key(Vec::len);
            assert_eq!(got, sent, "{round}");
            while overlay.world.ports[0].from_guest.take_used().is_some() {}
        }
    });
}

#[test]
fn encapsulation_allocates_nothing() {
    let overlay = std::cell::RefCell::new(Overlay::new(ports(&[Vlans::Untagged, Vlans::Access(7)])));
    let mut left = 0;
    let between = || {
        let mut overlay = overlay.borrow_mut();
        left += overlay.underlay.take().len();
        for port in [0, 1] {
            while overlay.world.ports[port].from_guest.take_used().is_some() {}
            for to in [NEAR, FAR, UNRESOLVED] {
                overlay.world.ports[port].send(&frame(to, mac(port as u8), 60));
            }
        }
        overlay.uplink.take();
    };
    let poll = || overlay.borrow_mut().world.poll();
    assert_eq!(allocations(poll, between), 0);
    assert!(left > 200, "{left}");
}
