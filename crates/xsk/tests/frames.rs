//! Frames byte for byte through the kernel, both ways, in every mode that veth has.
//!
//! Needs CAP_SYS_ADMIN (a namespace) and ip(8); without them the tests are skipped, or fail with REQUIRE_PRIV=1.

use crate::support;

use std::fs::File;
use std::time::Instant;

use support::rig::{Rig, config, refused};
use support::{own_umem, with_veth};
use testkit::frame::plain;
use testkit::late_nic;
use testkit::wait::{self, SOON};
use testkit::{Redirect, VethPair};
use xsk::{
    AttachMode, Frame, FramePool, Kick, Mode, OpenError, QueueId, RingSize, SocketConfig, TxDesc, Umem,
    UmemOffset, WakeError,
};

#[test]
fn frames_sent_in_copy_mode_arrive_byte_exact() {
    for attach in [AttachMode::Native, AttachMode::Skb] {
        with_veth(1, 1500, move |veth| {
            let peer = veth.peer();
            let mut rig = Rig::open(&SocketConfig {
                attach,
                ..config(veth)
            });
            for (seed, len) in (1..).zip([14, 60, 64, 65, 1513, 1514]) {
                let frame = plain(len, seed);
                rig.send(&[&frame]);
                assert_eq!(peer.receive(SOON).as_deref(), Some(&frame[..]), "{len} bytes");
            }
            assert_eq!(rig.complete(6).len(), 6);
        });
    }
}

#[test]
fn completions_bring_back_the_frames_that_were_pushed() {
    with_veth(1, 1500, |veth| {
        let mut rig = Rig::open(&config(veth));
        let mut pushed = Vec::new();
        let mut batch = rig.socket.tx.reserve(100);
        for seed in 0..100 {
            let frame = rig.pool.take().unwrap();
            let start = UmemOffset::new(frame.offset().get() + 100);
            rig.umem.write(start, &plain(60, seed)).unwrap();
            pushed.push(frame.offset());
            batch.push(TxDesc {
                offset: start,
                ..TxDesc::whole(frame, 60)
            });
        }
        batch.submit();
        assert_eq!(rig.kick(), Kick::Done);
        let mut back: Vec<UmemOffset> = rig.complete(100).iter().map(Frame::offset).collect();
        back.sort_unstable();
        pushed.sort_unstable();
        assert_eq!(back, pushed);
    });
}

#[test]
fn frames_received_arrive_byte_exact_and_the_fill_ring_goes_round() {
    for (native, attach, mode) in [
        (true, AttachMode::Native, Mode::NativeCopy),
        (false, AttachMode::Skb, Mode::SkbCopy),
    ] {
        with_veth(1, 1500, move |veth| {
            let program = Redirect::attach(veth.near, native).unwrap();
            let peer = veth.peer();
            let small = RingSize::try_from(8).unwrap();
            let mut rig = Rig::open(&SocketConfig {
                attach,
                fill: small,
                ..config(veth)
            });
            assert_eq!(rig.socket.mode(), mode);
            program.steer(0, &rig.socket).unwrap();
            for seed in 0..40 {
                rig.socket.fill.refill(&mut rig.pool, 64);
                let frame = plain(60 + usize::from(seed) * 37, seed);
                peer.send(&frame);
                assert_eq!(rig.receive(), Some((frame, 1)), "frame {seed}");
            }
            assert_eq!(
                rig.pool.len() as u32 + rig.socket.fill.size() - rig.socket.fill.free(),
                256
            );
        });
    }
}

#[test]
fn interface_down_and_deleted_are_told_apart_when_kicked() {
    with_veth(1, 1500, |veth| {
        let mut rig = Rig::open(&config(veth));
        veth.near_namespace().ip(&["link", "set", VethPair::NIC, "down"]);
        rig.socket
            .tx
            .reserve(1)
            .push(TxDesc::whole(rig.pool.take().unwrap(), 60));
        assert!(matches!(rig.socket.kick_tx(), Err(WakeError::InterfaceDown)));
        veth.near_namespace().ip(&["link", "set", VethPair::NIC, "up"]);
        assert!(rig.socket.kick_tx().is_ok());
        veth.near_namespace().ip(&["link", "delete", VethPair::NIC]);
        let outcome = (0..100)
            .map(|_| rig.socket.kick_tx())
            .find(|kick| matches!(kick, Err(WakeError::InterfaceGone)));
        assert!(outcome.is_some());
    });
}

#[test]
fn unaligned_umem_over_a_memfd_carries_frames_both_ways() {
    for (native, attach) in [(true, AttachMode::Native), (false, AttachMode::Skb)] {
        with_veth(1, 1500, move |veth| {
            let program = Redirect::attach(veth.near, native).unwrap();
            let peer = veth.peer();
            let (memory, guest) = support::map::memfd(1 << 20);
            let umem = Umem::unaligned(memory, 4096, 0).unwrap();
            let mut rig = Rig::over(
                umem,
                FramePool::default(),
                &SocketConfig {
                    attach,
                    ..config(veth)
                },
            );
            program.steer(0, &rig.socket).unwrap();

            let base = UmemOffset::new(0x12345);
            rig.socket.fill.reserve(1).push(rig.umem.adopt(base).unwrap());
            let frame = plain(777, 9);
            peer.send(&frame);
            let deadline = Instant::now() + SOON;
            let desc = loop {
                if let Some(desc) = rig.socket.rx.peek(1).next() {
                    break desc;
                }
                assert!(Instant::now() < deadline, "nothing received");
            };
            assert_eq!(
                (desc.frame.offset(), desc.data.get(), desc.len),
                (base, 0x12345 + 256, 777)
            );
            // Another mapping of the file, as the guest has one, shows the frame.
            assert_eq!(read_at(&guest, desc.data.get(), 777), frame);

            rig.socket.tx.reserve(1).push(TxDesc {
                offset: desc.data,
                ..TxDesc::whole(desc.frame, desc.len)
            });
            rig.kick();
            assert_eq!(peer.receive(SOON), Some(frame));
            assert_eq!(rig.complete(1), [rig.umem.adopt(base).unwrap()]);
        });
    }
}

fn read_at(file: &File, offset: u64, len: usize) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn frame_of_5000_bytes_is_sent_from_three_chunks() {
    with_veth(1, 9000, |veth| {
        let peer = veth.peer();
        let mut rig = Rig::open(&SocketConfig {
            multi_buffer: true,
            ..config(veth)
        });
        assert!(rig.socket.multi_buffer());
        let frame = plain(5000, 3);
        rig.send(&frame.chunks(2048).collect::<Vec<_>>());
        assert_eq!(peer.receive(SOON), Some(frame));
        assert_eq!(rig.complete(3).len(), 3);
    });
}

#[test]
fn frame_of_5000_bytes_is_received_in_three_chunks() {
    for (native, attach) in [(true, AttachMode::Native), (false, AttachMode::Skb)] {
        with_veth(1, 9000, move |veth| {
            let program = Redirect::attach(veth.near, native).unwrap();
            let peer = veth.peer();
            let mut rig = Rig::open(&SocketConfig {
                attach,
                multi_buffer: true,
                ..config(veth)
            });
            program.steer(0, &rig.socket).unwrap();
            rig.socket.fill.refill(&mut rig.pool, 16);
            let frame = plain(5000, 5);
            peer.send(&frame);
            assert_eq!(rig.receive(), Some((frame, 3)));
        });
    }
}

#[test]
fn statistics_count_what_was_lost_and_why() {
    with_veth(1, 1500, |veth| {
        let program = Redirect::attach(veth.near, true).unwrap();
        let peer = veth.peer();
        let mut rig = Rig::open(&SocketConfig {
            rx: RingSize::try_from(2).ok(),
            ..config(veth)
        });
        program.steer(0, &rig.socket).unwrap();
        assert_eq!(rig.socket.statistics().unwrap(), xsk::Statistics::default());
        peer.send(&plain(60, 1));
        await_true(|| rig.socket.statistics().unwrap().rx_fill_ring_empty_descs == 1);
        rig.socket.fill.refill(&mut rig.pool, 8);
        for seed in 0..4 {
            peer.send(&plain(60, seed));
        }
        await_true(|| rig.socket.statistics().unwrap().rx_ring_full == 2);
        let frame = rig.pool.take().unwrap();
        let invalid = frame.offset();
        rig.socket.tx.reserve(1).push(TxDesc::whole(frame, 4000));
        rig.kick();
        let statistics = rig.socket.statistics().unwrap();
        assert_eq!((statistics.tx_invalid_descs, statistics.rx_invalid_descs), (1, 0));
        // Linux 6.18 completes an invalid descriptor all the same, kernels before it do not.
        assert!(
            rig.socket
                .completion
                .peek(8)
                .all(|frame| frame.offset() == invalid)
        );
    });
}

fn await_true(done: impl FnMut() -> bool) {
    assert!(wait::until(SOON, done), "did not come about");
}

#[test]
fn socket_that_only_sends_has_an_empty_rx_ring() {
    with_veth(1, 1500, |veth| {
        let mut rig = Rig::open(&SocketConfig {
            rx: None,
            ..config(veth)
        });
        assert_eq!((rig.socket.rx.size(), rig.socket.rx.peek(8).len()), (0, 0));
        rig.send(&[&plain(60, 1)]);
        assert_eq!(rig.complete(1).len(), 1);
        let (umem, _) = own_umem(64);
        assert!(matches!(
            refused(
                &umem,
                &SocketConfig {
                    rx: None,
                    tx: None,
                    ..config(veth)
                }
            ),
            OpenError::NoRings
        ));
    });
}

#[test]
fn whole_tx_ring_is_taken_before_the_nic_completes_a_frame() {
    with_veth(1, 1500, |veth| {
        let near = veth.near_namespace();
        late_nic::make(near);
        let (umem, pool) = own_umem(1024);
        let config = SocketConfig {
            tx: RingSize::try_from(1024).ok(),
            attach: AttachMode::Skb,
            ..SocketConfig::new(near.index_of(late_nic::LATE), QueueId(0))
        };
        let mut rig = Rig::over(umem, pool, &config);
        let mut batch = rig.socket.tx.reserve(1024);
        while let Some(frame) = rig.pool.take() {
            rig.umem.write(frame.offset(), &plain(1514, 1)).unwrap();
            batch.push(TxDesc::whole(frame, 1514));
        }
        assert_eq!(batch.submit(), 1024);
        // Each call sends some of the frames, until the send buffer is full.
        for _ in 0..1024 {
            if rig.socket.kick_tx().unwrap() == Kick::Done {
                break;
            }
        }
        assert_eq!(rig.socket.tx.free(), 1024, "the send buffer is full");
        // Frames that the qdisc passed at once.
        let done = rig.socket.completion.peek(1024).count();
        assert!(done < 92, "{done} were completed");
        late_nic::complete(near);
        assert_eq!(rig.complete(1024 - done).len(), 1024 - done);
    });
}
