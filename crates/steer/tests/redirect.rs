//! Frames in an AF_XDP socket: byte for byte, with the virtio-net header before them, and nothing else touched.

use crate::common;

use std::os::fd::AsFd;

use common::receiver::{BEFORE, Receiver, UNTOUCHED};
use common::{Pair, bare, frame};
use steer::{ModeRequest, OwnMap, Program, QueueConf, SocketMap, VirtioHeader};
use testkit::{BpfFs, wait};

const HEADERS: [Option<VirtioHeader>; 3] = [None, Some(VirtioHeader::Basic), Some(VirtioHeader::HashReport)];

fn expected_header(header: Option<VirtioHeader>) -> Vec<u8> {
    let mut bytes = vec![0; header.map_or(0, |header| header.len_bytes() as usize)];
    if header.is_some() {
        bytes[10] = 1; // num_buffers, little-endian
    }
    bytes
}

#[test]
fn frame_and_header_land_together_and_nothing_else_is_touched() {
    let Some(pair) = Pair::new(1500) else { return };
    for request in [ModeRequest::Native, ModeRequest::Skb] {
        for frags in [false, true] {
            let program = Program::attach(pair.ifindex(), request, frags).expect("veth takes XDP");
            let mut receiver = Receiver::open(&pair, &program);
            for header in HEADERS {
                let conf = QueueConf {
                    virtio_header: header,
                    frame_limit: 1514,
                    hints: false,
                };
                program
                    .enable_queue(0, receiver.socket.as_fd(), conf)
                    .expect("queue 0 is there");
                for len in [60, 64, 65, 1513, 1514] {
                    let context = format!("{request:?}, frags {frags}, {header:?}, {len} bytes");
                    pair.far_socket.send(&frame(len));
                    let desc = receiver.next();
                    assert_eq!(desc.len as usize, len, "{context}");
                    let data = desc.data.get();
                    assert_eq!(receiver.bytes(data, len), frame(len), "{context}");

                    let header_bytes = expected_header(header);
                    let mut before = vec![UNTOUCHED; BEFORE - header_bytes.len()];
                    before.extend(header_bytes);
                    assert_eq!(receiver.bytes(data - BEFORE as u64, BEFORE), before, "{context}");
                    assert_eq!(
                        receiver.bytes(data + len as u64, 16),
                        [UNTOUCHED; 16],
                        "{context}"
                    );
                    receiver.pool.put(desc.frame);
                    receiver.post();
                }
            }
            let counters = program.counters(0).expect("counters");
            assert_eq!(
                (counters.redirected, counters.dropped(), counters.no_socket),
                (15, 0, 0)
            );
            assert_eq!(
                receiver.socket.statistics().expect("statistics"),
                xsk::Statistics::default()
            );
        }
    }
}

#[test]
fn dropped_program_gives_the_interface_back_to_the_host() {
    let Some(pair) = Pair::new(1500) else { return };
    let program = Program::attach(pair.ifindex(), ModeRequest::Native, false).expect("veth takes XDP");
    let mut receiver = Receiver::open(&pair, &program);
    let conf = bare(1514);
    program
        .enable_queue(0, receiver.socket.as_fd(), conf)
        .expect("queue 0 is there");
    pair.far_socket.send(&frame(77));
    let desc = receiver.next();
    assert_eq!(receiver.bytes(desc.data.get(), 77), frame(77));
    receiver.pool.put(desc.frame);
    drop(program);
    pair.far_socket.send(&frame(78));
    assert_eq!(pair.near_socket.receive(wait::SOON), Some(frame(78)));
}

#[test]
fn socket_that_waits_takes_no_frame_before_it_takes_over() {
    let Some(pair) = Pair::new(1500) else { return };
    let program = Program::attach(pair.ifindex(), ModeRequest::Native, false).expect("free");
    let conf = bare(1514);
    for _ in 0..3 {
        let mut receiver = Receiver::open(&pair, &program);
        program
            .enable_queue(0, receiver.socket.as_fd(), conf)
            .expect("bound");
        // Two that are prepared, and not bound: the queue has one at a time.
        let waiting: Vec<_> = (0..2).map(|_| pair.unbound_xsk()).collect();
        for socket in &waiting {
            program.place_socket(0, socket.as_fd()).expect("an AF_XDP socket");
        }
        let sent = frame(100);
        pair.far_socket.send(&sent);
        let desc = receiver.next();
        assert_eq!(receiver.bytes(desc.data.get(), sent.len()), sent);
        let before = program.counters(0).expect("counters");
        drop((receiver, waiting));
        pair.await_closed(&program);
        // The kernel emptied the successor's slot when it was closed; the predecessor's slot is not used.
        program.activate_queue(0, conf).expect("in range");
        pair.far_socket.send(&frame(100));
        let counted = || program.counters(0).expect("counters").no_socket > before.no_socket;
        assert!(wait::until(wait::SOON, counted), "the frame is not counted");
    }
}

#[test]
fn queue_with_a_map_of_its_own_gives_frames_to_the_socket_that_is_there() {
    let Some(pair) = Pair::new(1500) else { return };
    let bpffs = BpfFs::new();
    let pins = bpffs.pins();
    std::fs::create_dir(&pins).expect("new");
    let mut program = Program::attach(pair.ifindex(), ModeRequest::Native, false).expect("free");
    program.pin(&pins).expect("a bpffs");
    let conf = bare(1514);
    let mut own = OwnMap::new().expect("a map");
    own.pin(&pins.join("own-0")).expect("a bpffs");
    program.activate_own_map(0, &own, conf).expect("in range");
    let given = SocketMap::from_fd(own.as_fd().try_clone_to_owned().expect("a descriptor"));
    let given = given.expect("it is one of sockets");
    // The map has no socket yet: frames go to the host.
    pair.far_socket.send(&frame(70));
    assert_eq!(pair.near_socket.receive(wait::SOON), Some(frame(70)));
    let mut receiver = Receiver::open(&pair, &program);
    given.insert(0, receiver.socket.as_fd()).expect("its place");
    let beyond = given.insert(1, receiver.socket.as_fd());
    assert!(
        beyond
            .expect_err("beyond its end")
            .to_string()
            .contains("place 1")
    );
    let mut expect = |sent: Vec<u8>| {
        pair.far_socket.send(&sent);
        let desc = receiver.next();
        assert_eq!(receiver.bytes(desc.data.get(), sent.len()), sent);
        receiver.pool.put(desc.frame);
        receiver.post();
    };
    expect(frame(71));
    // The map outlives this owner of the program, stays valid for its holder, and the next owner has it, too.
    drop((program, own));
    expect(frame(72));
    let program = Program::open_pinned(pair.ifindex(), &pins).expect("all is there");
    let own = OwnMap::open_pinned(&pins.join("own-0")).expect("it is there");
    program.deactivate_queue(0).expect("in range");
    pair.far_socket.send(&frame(73));
    assert_eq!(pair.near_socket.receive(wait::SOON), Some(frame(73)));
    program.activate_own_map(0, &own, conf).expect("in range");
    expect(frame(74));
    // A removed map has no effect any more, although its holder still has it, nor on the next map.
    program.disable_queue(0).expect("in range");
    let next = OwnMap::new().expect("a map");
    program.activate_own_map(0, &next, conf).expect("in range");
    pair.far_socket.send(&frame(75));
    assert_eq!(pair.near_socket.receive(wait::SOON), Some(frame(75)));
    let counters = program.counters(0).expect("counters");
    assert_eq!((counters.redirected, counters.no_socket), (3, 2));
    steer::detach_pinned(&pins).expect("ours");
}
