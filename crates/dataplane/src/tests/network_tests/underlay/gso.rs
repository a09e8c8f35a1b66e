//! GSO packets to stations on other hosts.

use super::*;

/// TCP of so many bytes, to be cut into segments of 1000.
fn send_gso(overlay: &mut Overlay, payload: usize) -> Vec<u8> {
    overlay.world.ports[0].send_gso(NEAR, mac(0), payload, 1000)
}

#[test]
fn gso_packet_and_frames_behind_it_leave_by_the_uplink_until_there_are_none_for_a_while() {
    let mut overlay = Overlay::plain();
    overlay.underlay.kernel.ask_for_kicks();
    let [before, behind, later] = [60, 61, 62].map(|len| frame(NEAR, mac(0), len));
    overlay.world.ports[0].send(&before);
    let packet = send_gso(&mut overlay, 3000);
    overlay.world.ports[0].send(&behind);
    overlay.world.lanes.poll(0);
    // The kernel has sent the frame before the packet, although the underlay's lane was not polled.
    assert_eq!(overlay.underlay.kernel.kicks(), 1);
    assert_eq!(overlay.inside(0), [before]);
    let sent = overlay.uplink.take();
    assert_eq!(sent.len(), 4);
    assert_eq!(sent[0][54..], packet[54..1054]);
    assert_eq!(sent[3], behind);
    for _ in 0..3 {
        overlay.send(std::slice::from_ref(&behind));
        assert_eq!(overlay.uplink.take(), std::slice::from_ref(&behind));
    }
    std::thread::sleep(Duration::from_millis(201));
    overlay.send(std::slice::from_ref(&later));
    assert_eq!(overlay.inside(0), [later]);
}

/// Frames that left by the underlay, the pieces of each joined.
fn joined(wire: &mut XdpWire) -> Vec<Vec<u8>> {
    let (mut frames, mut goes_on) = (Vec::<Vec<u8>>::new(), false);
    wire.send_pieces(|bytes, more| {
        match (goes_on, frames.last_mut()) {
            (true, Some(frame)) => frame.extend(bytes),
            _ => frames.push(bytes),
        }
        goes_on = more;
    });
    frames
}

/// The segments of a TCP packet over IPv4, with complete checksums.
fn segments(packet: &[u8], size: u16) -> Vec<Vec<u8>> {
    let gso = Gso {
        kind: GsoKind::Tcp4,
        ecn: false,
        size,
    };
    let plan = Plan::new(packet, packet.len() as u32, gso).expect("good");
    let segment = |index| {
        let payload = plan.payload(index);
        let mut segment = vec![0; plan.header_len()];
        plan.write_header(index, &mut segment);
        segment.extend(&packet[payload.start as usize..payload.end as usize]);
        checksum::complete(&mut segment, plan.checksum_at()).expect("inside");
        segment
    };
    (0..plan.segments()).map(segment).collect()
}

#[test]
fn segments_leave_in_headers_of_their_own_where_a_nic_reads_them() {
    for (v6, refers) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut overlay = Overlay::of(ports(&[Vlans::Untagged]), v6, Sends { refers, ..BY_DMA });
        let [before, behind] = [60, 61].map(|len| frame(NEAR, mac(0), len));
        let mut bytes = 0;
        for payload in [1, 999, 1000, 1001, 2500, 20_000] {
            overlay.world.ports[0].send(&before);
            let packet = send_gso(&mut overlay, payload);
            overlay.world.ports[0].send(&behind);
            overlay.world.poll();
            let wanted = segments(&packet, 1000);
            assert_eq!(wanted.len(), payload.div_ceil(1000));
            bytes += wanted.iter().map(Vec::len).sum::<usize>() as u64;
            let left = joined(&mut overlay.underlay);
            let ids: Vec<_> = left.iter().map(|frame| word(frame, 18)).collect();
            assert!(v6 || ids.windows(2).all(|pair| pair[0] != pair[1]), "{ids:?}");
            let flows: Vec<_> = left[1..left.len() - 1]
                .iter()
                .map(|frame| frame[34..36].to_vec())
                .collect();
            assert!(v6 || flows.iter().all(|flow| *flow == flows[0]));
            let [first, last] = [&before, &behind].map(std::slice::from_ref);
            let wanted = [first, &wanted, last].concat();
            assert_eq!(inside(&overlay.vteps[0], left), wanted, "{payload} {v6} {refers}");
            bytes += 121;
        }
        assert!(overlay.uplink.take().is_empty());
        let counters = overlay.counters(0);
        assert_eq!(counters.from_guest_super_frames.get(), 6);
        assert_eq!(counters.from_guest_bytes.get(), bytes);
        assert_eq!(
            counters.from_guest_frames.get(),
            counters.from_guest_encapsulated.get()
        );
        assert_eq!(
            counters.from_guest_checksums_left.get(),
            0,
            "the NIC would read the outer headers"
        );
    }
}

/// More than there is ever room for at once.
#[test]
fn segments_wait_for_room_in_the_underlay() {
    for refers in [false, true] {
        let mut overlay = Overlay::of(ports(&[Vlans::Untagged]), false, Sends { refers, ..BY_DMA });
        let filling: Vec<_> = (0..100).map(|_| frame(NEAR, mac(0), 60)).collect();
        overlay.send(&filling);
        let packet = overlay.world.ports[0].send_gso(NEAR, mac(0), 60_000, 200);
        let behind = frame(NEAR, mac(0), 61);
        overlay.world.ports[0].send(&behind);
        let mut left = Vec::new();
        for _ in 0..40 {
            overlay.world.poll();
            left.extend(joined(&mut overlay.underlay));
        }
        let wanted = [&filling[..], &segments(&packet, 200), &[behind]].concat();
        assert!(inside(&overlay.vteps[0], left) == wanted, "{refers}");
        assert!(overlay.uplink.take().is_empty());
        let counters = overlay.counters(0);
        assert_eq!(counters.from_guest_frames.get(), 401);
        assert_eq!(counters.from_guest_encapsulated.get(), 401);
        let bytes = wanted.iter().map(|frame| frame.len() as u64).sum::<u64>();
        assert_eq!(counters.from_guest_bytes.get(), bytes);
    }
}

/// The tag of the VLAN is part of what has to fit.
#[test]
fn segments_that_are_too_long_for_the_underlay_leave_by_the_uplink() {
    for (vlans, tag) in [(Vlans::Untagged, 0), (Vlans::Access(7), 4)] {
        let longest = (LIMIT as usize - 4 - 50 - tag - 54) as u16;
        for (size, is_encapsulated) in [(longest, true), (longest + 1, false)] {
            let mut overlay = Overlay::of(ports(std::slice::from_ref(&vlans)), false, BY_DMA);
            let [before, behind] = [60, 61].map(|len| frame(NEAR, mac(0), len));
            overlay.world.ports[0].send(&before);
            let packet = overlay.world.ports[0].send_gso(NEAR, mac(0), 4000, size);
            overlay.send(std::slice::from_ref(&behind));
            let got = joined(&mut overlay.underlay);
            let encapsulated = match is_encapsulated {
                true => [&[before], &segments(&packet, size)[..], &[behind]].concat(),
                false => vec![before],
            };
            let tagged = |frame: &Vec<u8>| packet::ethernet::tagged(frame, tag as u16 / 4 * 7);
            let wanted: Vec<_> = encapsulated.iter().map(tagged).collect();
            assert_eq!(inside(&overlay.vteps[0], got), wanted);
            let by_uplink = if is_encapsulated { 0 } else { 3 + 1 };
            assert_eq!(overlay.uplink.take().len(), by_uplink);
        }
    }
}

#[test]
fn rest_of_a_gso_packet_is_counted_when_the_underlay_goes() {
    let mut overlay = Overlay::of(ports(&[Vlans::Untagged]), false, BY_DMA);
    overlay.world.ports[0].send_gso(NEAR, mac(0), 60_000, 200);
    overlay.world.poll();
    // Slots: the port's lane, the uplink's, the underlay's.
    overlay.world.lanes.slots.remove(2).lane.stop();
    overlay.world.rebuild_forwarding();
    let sent = frame(NEAR, mac(0), 61);
    overlay.send(std::slice::from_ref(&sent));
    overlay.world.poll();
    assert_eq!(overlay.counters(0).from_guest_rest_of_super_frame.get(), 1);
    assert_eq!(overlay.uplink.take(), [sent]);
}

/// What is left of a GSO packet holds up the guest's other frames, so it must not stay for ever.
#[test]
fn rest_of_a_gso_packet_that_does_not_fit_any_more_is_counted() {
    let mut overlay = Overlay::of(ports(&[Vlans::Untagged]), false, BY_DMA);
    overlay.world.ports[0].send_gso(NEAR, mac(0), 60_000, 200);
    let behind = frame(NEAR, mac(0), 61);
    overlay.world.ports[0].send(&behind);
    overlay.world.poll();
    joined(&mut overlay.underlay);
    overlay.world.lanes.change(2, |lane, _| lane.set_frame_limit(303));
    overlay.world.poll();
    assert_eq!(overlay.counters(0).from_guest_rest_of_super_frame.get(), 1);
    assert_eq!(overlay.inside(0), [behind]);
}

/// Nothing was read of it but what it asks for; the rest of its entry is an earlier frame's.
#[test]
fn chain_without_a_frame_among_those_to_a_vtep_is_only_returned() {
    let mut overlay = Overlay::of(ports(&[Vlans::Untagged]), false, BY_DMA);
    let sent = frame(NEAR, mac(0), 1000);
    overlay.send(std::slice::from_ref(&sent));
    let port = &mut overlay.world.ports[0];
    // A GSO packet with a checksum in the ten bytes that there are.
    let addr = port
        .memory
        .put(&[&[1, 1, 0, 0, 232, 3, 0, 0, 2, 0, 0, 0][..], &sent[..10]].concat());
    let rest = addr.checked_add(4).expect("inside");
    let runt = [Buffer::readable(addr, 4), Buffer::readable(rest, 18)];
    port.from_guest.add(&runt).expect("room");
    overlay.send(std::slice::from_ref(&sent));
    assert_eq!(overlay.inside(0), [sent.clone(), sent]);
    let counters = overlay.counters(0);
    assert_eq!(counters.from_guest_runt.get(), 1);
    let used = std::iter::from_fn(|| overlay.world.ports[0].from_guest.take_used());
    assert_eq!(used.count(), 3);
}

/// They are measured by the headers that they are sent with.
#[test]
fn longest_segments_of_the_underlay_are_those_that_fit_with_the_outer_headers() {
    for v6 in [false, true] {
        let outer = &vtep(2, v6).outer;
        let room = if v6 { 0 } else { 4 };
        let longest = LIMIT as usize - room - outer.len() - 54;
        for (size, fits) in [(longest, true), (longest + 1, false)] {
            let memory = Memory::new(1 << 20, 0);
            let (mut port, mut pair) = Port::new(memory, 16, QueueFeatures::default(), Offloads::all());
            pair.from_guest.guest.frame_limit = u32::MAX;
            port.send_gso(NEAR, mac(0), 4000, size as u16);
            let (vring, mut chains, mut sending) =
                (&mut pair.from_guest, Chains::default(), Sending::default());
            vring.queue.pop(&mut chains, 1).expect("a good chain");
            let (chain, counters) = (chains.chains[0], &*port.counters);
            let buffers = chains.buffers(&chain);
            let is_sent = vring.check_into(&chain, buffers, None, counters, &mut sending);
            assert!(is_sent.is_ok_and(|is_sent| is_sent));
            let (mut queue, _wire) = XdpWire::queue(128, BY_DMA);
            queue.frame_limit = LIMIT;
            let (mut transmit, mut budget) = (Transmit::shared(), Budget::new(64));
            let mut sink = NicSink::new(&mut queue, &mut transmit, counters);
            let gso = sending.request.gso.expect("asked for");
            let frame = GuestFrame::new(vring, buffers, &sending);
            let tunnel = Tunnel {
                outer: outer.clone(),
                flow: 1,
                id: 1,
            };
            let put = sink.put_segments((frame, gso), tunnel, &mut budget);
            assert_eq!(put, fits.then_some(Put::Done));
            assert_eq!(transmit.is_empty(), !fits, "{size} {v6}");
            assert_eq!(counters.from_guest_segment_too_long.get(), 0);
        }
    }
}

#[test]
fn frames_behind_a_gso_packet_that_confirms_a_next_hop_do_not_overtake_it_where_the_kernel_gets_all() {
    let mut overlay = Overlay::plain();
    overlay.vteps[0].confirm.store(true, Relaxed);
    send_gso(&mut overlay, 2500);
    overlay.send(&[frame(NEAR, mac(0), 60)]);
    assert_eq!(overlay.uplink.take().len(), 4);
    assert!(overlay.underlay.take().is_empty() && !overlay.vteps[0].confirm.load(Relaxed));
}

#[test]
fn kernel_gets_one_gso_packet_to_confirm_a_next_hop() {
    let mut overlay = Overlay::of(ports(&[Vlans::Untagged]), false, BY_DMA);
    for _ in 0..2 {
        overlay.vteps[0].confirm.store(true, Relaxed);
        let [first, second] = [2500, 2600].map(|payload| send_gso(&mut overlay, payload));
        overlay.world.poll();
        assert_eq!(joined(&mut overlay.uplink)[2][54..], first[2054..]);
        let left = joined(&mut overlay.underlay);
        assert_eq!(inside(&overlay.vteps[0], left), segments(&second, 1000));
        assert!(!overlay.vteps[0].confirm.load(Relaxed));
    }
}
