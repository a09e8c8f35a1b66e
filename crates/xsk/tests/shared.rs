//! Several sockets over one UMEM: frames go from one to the other without being copied, and each chunk is with one of
//! them at a time.
//!
//! Needs CAP_SYS_ADMIN (a namespace) and ip(8); without them the tests are skipped, or fail with REQUIRE_PRIV=1.

use crate::support;

use std::time::Instant;

use support::rig::{Rig, config};
use support::{own_umem, with_veth};
use testkit::frame::udp;
use testkit::wait::{self, SOON};
use testkit::{PacketPort, Redirect};
use xsk::{
    AttachMode, BindRequest, Frame, FramePool, Kick, Mode, OpenError, QueueId, RxDesc, Socket, SocketConfig,
    TxDesc, Unbound,
};

/// Chunks of a test's UMEM.
const CHUNKS: usize = 64;

/// Returns the received frames; waits for the first.
fn received(socket: &mut Socket) -> Vec<RxDesc> {
    let deadline = Instant::now() + SOON;
    while Instant::now() < deadline {
        let came: Vec<RxDesc> = socket.rx.peek(64).collect();
        if !came.is_empty() {
            return came;
        }
    }
    panic!("nothing came");
}

/// Sends a received frame from another socket, without a copy.
fn forward(desc: RxDesc, to: &mut Socket) {
    let mut batch = to.tx.reserve(1);
    batch.push(TxDesc {
        frame: desc.frame,
        offset: desc.data,
        len: desc.len,
        more: false,
        metadata: false,
    });
    batch.submit();
    while to.kick_tx().expect("the interface is up") == Kick::Again {}
}

fn completed(socket: &mut Socket) -> Frame {
    let deadline = Instant::now() + SOON;
    while Instant::now() < deadline {
        if let Some(frame) = socket.completion.peek(1).next() {
            return frame;
        }
    }
    panic!("nothing was completed");
}

/// Sends a frame into `wire`, lets `from` receive it and `to` send it on; returns where it was in the UMEM.
fn once_round(
    (wire, out): (&PacketPort, &PacketPort),
    from: &mut Socket,
    to: &mut Socket,
    frame: &[u8],
) -> Frame {
    wire.send(frame);
    let mut came = received(from);
    let desc = came.pop().expect("one");
    assert!(came.is_empty());
    forward(desc, to);
    assert_eq!(out.receive(SOON).as_deref(), Some(frame));
    completed(to)
}

#[test]
fn frame_received_on_one_interface_is_sent_by_another_from_where_it_lies() {
    for (native, attach) in [(true, AttachMode::Native), (false, AttachMode::Skb)] {
        with_veth(1, 1500, move |veth| {
            let (other, other_wire) = veth.second();
            let wire = veth.peer();
            let programs =
                [veth.near, other].map(|index| Redirect::attach(index, native).expect("it attaches"));
            let (umem, mut pool) = own_umem(CHUNKS);
            let first = SocketConfig {
                attach,
                ..config(veth)
            };
            let mut first = Socket::open(&umem, &first).expect("it opens");
            let second = SocketConfig {
                attach,
                ..SocketConfig::new(other, QueueId(0))
            };
            let mut second = first.share(&second).expect("it shares");
            assert_eq!(second.mode(), first.mode());
            assert_eq!(second.umem().chunks(), CHUNKS as u64);
            for (program, socket) in programs.iter().zip([&first, &second]) {
                program.steer(0, socket).expect("it is an AF_XDP socket");
            }
            // Each has half of the chunks in its fill ring.
            assert_eq!(first.fill.refill(&mut pool, 32), 32);
            assert_eq!(second.fill.refill(&mut pool, 32), 32);
            // Chunks of one go to the other with the frames, and stay there; more frames than there are chunks.
            for number in 0..3 * CHUNKS {
                let frame = udp(number as u16, 60 + number);
                let back = once_round((&wire, &other_wire), &mut first, &mut second, &frame);
                first.fill.reserve(1).push(back);
                let frame = udp(number as u16, 1514 - number);
                let back = once_round((&other_wire, &wire), &mut second, &mut first, &frame);
                second.fill.reserve(1).push(back);
            }
            assert!(pool.is_empty());
            for socket in [&first, &second] {
                let counted = socket.statistics().expect("it answers");
                // How often the kernel found nothing to send is no loss.
                let mut lost = counted.named().into_iter();
                let is_none = lost.all(|(name, count)| count == 0 || name == "tx_ring_empty_descs");
                assert!(is_none, "{counted:?}");
            }
        });
    }
}

#[test]
fn queues_of_one_interface_share_and_no_chunk_is_with_two() {
    const FLOWS: u16 = 32;
    with_veth(2, 1500, |veth| {
        let program = Redirect::attach(veth.near, true).expect("it attaches");
        let wire = veth.peer();
        let (umem, mut pool) = own_umem(CHUNKS);
        let first = Socket::open(&umem, &config(veth)).expect("it opens");
        let queue = SocketConfig {
            queue: QueueId(1),
            ..config(veth)
        };
        let second = first.share(&queue).expect("it shares");
        let mut sockets = [first, second];
        for (queue, socket) in (0..).zip(&mut sockets) {
            program.steer(queue, &*socket).expect("it is an AF_XDP socket");
            assert_eq!(socket.fill.refill(&mut pool, 32), 32);
        }
        let (mut seen, mut offsets) = ([0u16; 2], Vec::new());
        // Flows on one queue only would not need the other's chunks. veth selects by a hash with a key made at boot.
        for flow in 0..FLOWS {
            wire.send(&udp(flow, 100));
        }
        let all_came = wait::until(SOON, || {
            for (at, socket) in sockets.iter_mut().enumerate() {
                for desc in socket.rx.peek(64) {
                    seen[at] += 1;
                    offsets.push(desc.frame.into_offset());
                }
            }
            seen[0] + seen[1] == FLOWS
        });
        assert!(all_came && seen[0] > 0 && seen[1] > 0, "{seen:?}");
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!(
            offsets.len(),
            usize::from(FLOWS),
            "each frame in a chunk of its own"
        );
    });
}

#[test]
fn sharer_goes_on_when_the_first_socket_is_closed() {
    with_veth(1, 1500, |veth| {
        let (other, other_wire) = veth.second();
        let (umem, pool) = own_umem(CHUNKS);
        let first = Socket::open(&umem, &config(veth)).expect("it opens");
        let sharer = SocketConfig::new(other, QueueId(0));
        let socket = first.share(&sharer).expect("it shares");
        drop(first);
        let mut rig = Rig { umem, pool, socket };
        for number in 0..3 * CHUNKS as u16 {
            let frame = udp(number, 200);
            rig.send(&[&frame]);
            assert_eq!(other_wire.receive(SOON).as_deref(), Some(&frame[..]));
            let back = rig.complete(1);
            rig.pool.extend(back);
        }
        // The sharer does not keep the first socket's queue bound.
        let again = SocketConfig {
            bind_timeout: SOON,
            ..config(veth)
        };
        rig.socket.share(&again).expect("a sharer can be shared from");
    });
}

#[test]
fn sharer_that_asks_for_what_the_first_one_is_not_is_told() {
    with_veth(2, 1500, |veth| {
        let (umem, _pool): (_, FramePool) = own_umem(CHUNKS);
        let first = Socket::open(&umem, &config(veth)).expect("it opens");
        assert_eq!(first.mode(), Mode::NativeCopy);
        let refused = |config: &SocketConfig| first.share(config).map(drop).expect_err("it is refused");
        let error = refused(&config(veth));
        assert!(matches!(error, OpenError::SharedQueue { .. }), "{error}");
        let other = SocketConfig {
            queue: QueueId(1),
            ..config(veth)
        };
        let error = refused(&SocketConfig {
            bind: BindRequest::ForceZeroCopy,
            ..other.clone()
        });
        assert!(error.to_string().contains("zero-copy was requested"), "{error}");
        let error = refused(&SocketConfig {
            queue: QueueId(7),
            ..config(veth)
        });
        assert!(matches!(error, OpenError::NoQueue { queues: 2, .. }), "{error}");
        // Missing multi-buffer is no error, but is reported as a fallback.
        let plain = first
            .share(&SocketConfig {
                multi_buffer: true,
                bind: BindRequest::ForceCopy,
                ..other.clone()
            })
            .expect("it shares");
        assert!(!plain.multi_buffer());
        assert_eq!(plain.fallbacks()[0].tried, "multi-buffer");
        let error = refused(&other);
        assert!(matches!(error, OpenError::Busy { .. }), "{error}");
    });
}

#[test]
fn sharer_of_a_socket_whose_interface_is_gone_is_told() {
    with_veth(1, 1500, |veth| {
        let (other, _wire) = veth.second();
        let (umem, _pool) = own_umem(CHUNKS);
        let first = Socket::open(&umem, &SocketConfig::new(other, QueueId(0))).expect("it opens");
        let prepared = Unbound::share(&first, &config(veth)).expect("nothing is asked of the kernel yet");
        veth.near_namespace().ip(&["link", "delete", "nic1"]);
        let error = prepared.bind().map(drop).expect_err("it is refused");
        assert!(matches!(error, OpenError::SharedGone), "{error}");
    });
}
