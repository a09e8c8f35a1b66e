//! What the kernel does with our sockets: frames byte for byte, modes, and every refusal that has a remedy.
//!
//! Needs CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF and ip(8); without them the tests are skipped, or fail with REQUIRE_PRIV=1.

mod support;

use std::fs::File;
use std::time::{Duration, Instant};

use support::packet::Packet;
use support::redirect::Redirect;
use support::{Veth, ip, own_umem, test_frame, with_veth};
use xsk::{
    AttachMode, BindRequest, BusyPoll, Frame, FramePool, Kick, Mode, OpenError, QueueId, RingSize, Socket,
    SocketConfig, TxDesc, Umem, UmemOffset, WakeError,
};

const SECOND: Duration = Duration::from_secs(1);

/// A socket on the near end with a UMEM of its own.
struct Rig {
    umem: Umem,
    pool: FramePool,
    socket: Socket,
}

impl Rig {
    fn open(config: &SocketConfig) -> Self {
        let (umem, pool) = own_umem(256);
        Self::over(umem, pool, config)
    }

    fn over(umem: Umem, pool: FramePool, config: &SocketConfig) -> Self {
        let socket = Socket::open(&umem, config).unwrap();
        Self { umem, pool, socket }
    }

    /// Sends `pieces` as one frame, a descriptor each.
    fn send(&mut self, pieces: &[&[u8]]) {
        let mut batch = self.socket.tx.reserve(pieces.len() as u32);
        for (at, piece) in pieces.iter().enumerate() {
            let frame = self.pool.take().unwrap();
            self.umem.write(frame.offset(), piece).unwrap();
            batch.push(TxDesc {
                more: at + 1 < pieces.len(),
                ..TxDesc::whole(frame, piece.len() as u32)
            });
        }
        assert_eq!(batch.submit() as usize, pieces.len());
        assert!(
            self.socket.tx.needs_wakeup(),
            "copy mode must always ask for a kick"
        );
        self.kick();
    }

    fn kick(&self) -> Kick {
        loop {
            match self.socket.kick_tx().unwrap() {
                Kick::Again => {}
                outcome => return outcome,
            }
        }
    }

    /// Waits for `wanted` completions.
    fn complete(&mut self, wanted: usize) -> Vec<Frame> {
        let deadline = Instant::now() + SECOND;
        let mut frames = Vec::new();
        while frames.len() < wanted && Instant::now() < deadline {
            frames.extend(self.socket.completion.peek(64));
        }
        frames
    }

    /// Waits for a frame, of one or more pieces; says its bytes and how many pieces it had.
    fn receive(&mut self) -> Option<(Vec<u8>, usize)> {
        let deadline = Instant::now() + SECOND;
        let (mut bytes, mut pieces) = (Vec::new(), 0);
        while Instant::now() < deadline {
            let Some(desc) = self.socket.rx.peek(1).next() else {
                continue;
            };
            let mut piece = vec![0; desc.len as usize];
            self.umem.read(desc.data, &mut piece).unwrap();
            bytes.extend(piece);
            pieces += 1;
            self.pool.put(desc.frame);
            if !desc.more {
                return Some((bytes, pieces));
            }
        }
        None
    }
}

fn config(veth: &Veth) -> SocketConfig {
    SocketConfig::new(veth.near, QueueId(0))
}

fn refused(umem: &Umem, config: &SocketConfig) -> OpenError {
    Socket::open(umem, config).map(drop).unwrap_err()
}

#[test]
fn frames_sent_in_copy_mode_arrive_byte_exact() {
    for attach in [AttachMode::Native, AttachMode::Skb] {
        with_veth(1, 1500, move |veth| {
            let peer = Packet::on(veth.far, SECOND);
            let mut rig = Rig::open(&SocketConfig {
                attach,
                ..config(veth)
            });
            for (seed, len) in (1..).zip([14, 60, 64, 65, 1513, 1514]) {
                let frame = test_frame(len, seed);
                rig.send(&[&frame]);
                assert_eq!(peer.receive().as_deref(), Some(&frame[..]), "{len} bytes");
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
            rig.umem.write(start, &test_frame(60, seed)).unwrap();
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
            let peer = Packet::on(veth.far, SECOND);
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
                let frame = test_frame(60 + usize::from(seed) * 37, seed);
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
fn fallback_to_copy_tells_what_was_tried_and_why() {
    with_veth(1, 1500, |veth| {
        let _program = Redirect::attach(veth.near, true).unwrap();
        let rig = Rig::open(&config(veth));
        assert_eq!(rig.socket.mode(), Mode::NativeCopy);
        let [fallback] = rig.socket.fallbacks() else {
            panic!("{:?}", rig.socket.fallbacks())
        };
        assert_eq!((fallback.tried, fallback.errno), ("zero-copy", libc::EOPNOTSUPP));
        assert!(
            fallback.reason.contains("the driver has no zero-copy"),
            "{fallback}"
        );
    });
}

#[test]
fn forced_copy_has_nothing_to_explain() {
    with_veth(1, 1500, |veth| {
        let rig = Rig::open(&SocketConfig {
            bind: BindRequest::ForceCopy,
            ..config(veth)
        });
        assert_eq!(
            (rig.socket.mode(), rig.socket.fallbacks()),
            (Mode::NativeCopy, &[][..])
        );
    });
}

#[test]
fn forced_zero_copy_on_veth_is_refused_with_the_reason() {
    with_veth(1, 1500, |veth| {
        let (umem, _) = own_umem(64);
        let error = refused(
            &umem,
            &SocketConfig {
                bind: BindRequest::ForceZeroCopy,
                ..config(veth)
            },
        );
        assert!(matches!(error, OpenError::ZeroCopyRefused { .. }), "{error}");
        assert!(error.to_string().contains("cannot do zero-copy"), "{error}");
    });
}

#[test]
fn second_socket_on_a_queue_is_told_that_it_is_busy() {
    with_veth(2, 1500, |veth| {
        let first = Rig::open(&config(veth));
        let (umem, _) = own_umem(64);
        let start = Instant::now();
        let error = refused(&umem, &config(veth));
        assert!(
            matches!(
                error,
                OpenError::Busy {
                    queue: QueueId(0),
                    ..
                }
            ),
            "{error}"
        );
        assert!(
            start.elapsed() >= Duration::from_millis(100),
            "EBUSY must be retried up to bind_timeout"
        );
        drop(
            Socket::open(
                &umem,
                &SocketConfig {
                    queue: QueueId(1),
                    ..config(veth)
                },
            )
            .unwrap(),
        );
        drop(first);
        Socket::open(
            &umem,
            &SocketConfig {
                bind_timeout: SECOND,
                ..config(veth)
            },
        )
        .unwrap();
    });
}

#[test]
fn dropped_socket_frees_its_queue() {
    with_veth(1, 1500, |veth| {
        for _ in 0..10 {
            let start = Instant::now();
            drop(Rig::open(&SocketConfig {
                bind_timeout: SECOND,
                ..config(veth)
            }));
            assert!(start.elapsed() < SECOND);
        }
    });
}

#[test]
fn queue_beyond_the_channels_is_named_with_their_number() {
    with_veth(2, 1500, |veth| {
        let (umem, _) = own_umem(64);
        let error = refused(
            &umem,
            &SocketConfig {
                queue: QueueId(7),
                ..config(veth)
            },
        );
        assert!(
            matches!(
                error,
                OpenError::NoQueue {
                    queue: QueueId(7),
                    queues: 2,
                    ..
                }
            ),
            "{error}"
        );
    });
}

#[test]
fn missing_interface_is_named() {
    with_veth(1, 1500, |veth| {
        let (umem, _) = own_umem(64);
        let missing = refused(
            &umem,
            &SocketConfig {
                ifindex: 4_000_000,
                ..config(veth)
            },
        );
        assert!(
            matches!(missing, OpenError::NoInterface { ifindex: 4_000_000 }),
            "{missing}"
        );
    });
}

#[test]
fn interface_down_and_deleted_are_told_apart_when_kicked() {
    with_veth(1, 1500, |veth| {
        let mut rig = Rig::open(&config(veth));
        ip("link set near down");
        rig.socket
            .tx
            .reserve(1)
            .push(TxDesc::whole(rig.pool.take().unwrap(), 60));
        assert!(matches!(rig.socket.kick_tx(), Err(WakeError::InterfaceDown)));
        ip("link set near up");
        assert!(rig.socket.kick_tx().is_ok());
        ip("link del near");
        let outcome = (0..100)
            .map(|_| rig.socket.kick_tx())
            .find(|kick| matches!(kick, Err(WakeError::InterfaceGone)));
        assert!(outcome.is_some());
    });
}

#[test]
fn memlock_too_small_says_how_much_is_needed() {
    with_veth(1, 1500, |veth| {
        use rustix::process::{Resource, getrlimit, setrlimit};
        use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
        let (umem, _) = own_umem(2048);
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        // Of this thread only; the others keep the capability and so do not feel the limit.
        set_capabilities(None, sets).unwrap();
        let mut limit = getrlimit(Resource::Memlock);
        limit.current = Some(1 << 20);
        setrlimit(Resource::Memlock, limit).unwrap();
        let error = refused(&umem, &config(veth));
        assert!(
            matches!(
                error,
                OpenError::MemoryLock {
                    needed_bytes: 4_194_304,
                    limit_bytes: Some(1_048_576)
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("ulimit -l 4096"), "{error}");
    });
}

#[test]
fn unaligned_umem_over_a_memfd_carries_frames_both_ways() {
    for (native, attach) in [(true, AttachMode::Native), (false, AttachMode::Skb)] {
        with_veth(1, 1500, move |veth| {
            let program = Redirect::attach(veth.near, native).unwrap();
            let peer = Packet::on(veth.far, SECOND);
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
            let frame = test_frame(777, 9);
            peer.send(&frame);
            let deadline = Instant::now() + SECOND;
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
            assert_eq!(peer.receive(), Some(frame));
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
        let peer = Packet::on(veth.far, SECOND);
        let mut rig = Rig::open(&SocketConfig {
            multi_buffer: true,
            ..config(veth)
        });
        assert!(rig.socket.multi_buffer());
        let frame = test_frame(5000, 3);
        rig.send(&frame.chunks(2048).collect::<Vec<_>>());
        assert_eq!(peer.receive(), Some(frame));
        assert_eq!(rig.complete(3).len(), 3);
    });
}

#[test]
fn frame_of_5000_bytes_is_received_in_three_chunks() {
    for (native, attach) in [(true, AttachMode::Native), (false, AttachMode::Skb)] {
        with_veth(1, 9000, move |veth| {
            let program = Redirect::attach(veth.near, native).unwrap();
            let peer = Packet::on(veth.far, SECOND);
            let mut rig = Rig::open(&SocketConfig {
                attach,
                multi_buffer: true,
                ..config(veth)
            });
            program.steer(0, &rig.socket).unwrap();
            rig.socket.fill.refill(&mut rig.pool, 16);
            let frame = test_frame(5000, 5);
            peer.send(&frame);
            assert_eq!(rig.receive(), Some((frame, 3)));
        });
    }
}

#[test]
fn statistics_count_what_was_lost_and_why() {
    with_veth(1, 1500, |veth| {
        let program = Redirect::attach(veth.near, true).unwrap();
        let peer = Packet::on(veth.far, SECOND);
        let mut rig = Rig::open(&SocketConfig {
            rx: RingSize::try_from(2).ok(),
            ..config(veth)
        });
        program.steer(0, &rig.socket).unwrap();
        assert_eq!(rig.socket.statistics().unwrap(), xsk::Statistics::default());
        peer.send(&test_frame(60, 1));
        wait_until(|| rig.socket.statistics().unwrap().rx_fill_ring_empty_descs == 1);
        rig.socket.fill.refill(&mut rig.pool, 8);
        for seed in 0..4 {
            peer.send(&test_frame(60, seed));
        }
        wait_until(|| rig.socket.statistics().unwrap().rx_ring_full == 2);
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

fn wait_until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + SECOND;
    while !done() {
        assert!(Instant::now() < deadline, "did not come about within a second");
    }
}

#[test]
fn tx_budget_is_taken_and_a_wrong_one_is_named() {
    with_veth(1, 1500, |veth| {
        let mut rig = Rig::open(&SocketConfig {
            max_tx_skb_budget: Some(256),
            ..config(veth)
        });
        let mut batch = rig.socket.tx.reserve(200);
        while batch.room() > 0 {
            batch.push(TxDesc::whole(rig.pool.take().unwrap(), 60));
        }
        batch.submit();
        // On a kernel without the option it takes seven calls.
        assert!(matches!(rig.socket.kick_tx().unwrap(), Kick::Done | Kick::Again));
        rig.kick();
        assert_eq!(rig.complete(200).len(), 200);
        drop(rig);
        let (umem, _) = own_umem(64);
        let wrong = SocketConfig {
            max_tx_skb_budget: Some(1 << 20),
            bind_timeout: SECOND,
            ..config(veth)
        };
        if let Err(error) = Socket::open(&umem, &wrong) {
            assert!(
                matches!(
                    error,
                    OpenError::TxBudget {
                        budget: 1_048_576,
                        tx_entries: 2048,
                        ..
                    }
                ),
                "{error}"
            );
        }
    });
}

#[test]
fn busy_poll_options_are_taken() {
    with_veth(1, 1500, |veth| {
        let busy_poll = Some(BusyPoll {
            usecs: 20,
            budget: 64,
            prefer: true,
        });
        let rig = Rig::open(&SocketConfig {
            busy_poll,
            ..config(veth)
        });
        assert!(rig.socket.wake_rx().is_ok());
    });
}

#[test]
fn passed_descriptor_serves_once_and_others_are_refused() {
    with_veth(1, 1500, |veth| {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
        let peer = Packet::on(veth.far, SECOND);
        let fd = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
        let spare = fd.try_clone().unwrap();
        let (umem, pool) = own_umem(64);
        let socket = Socket::from_fd(fd, &umem, &config(veth)).unwrap();
        let mut rig = Rig {
            umem: umem.clone(),
            pool,
            socket,
        };
        let frame = test_frame(99, 4);
        rig.send(&[&frame]);
        assert_eq!(peer.receive(), Some(frame));
        let again = Socket::from_fd(spare, &umem, &config(veth)).unwrap_err();
        assert!(matches!(again, OpenError::InUse), "{again}");
        let udp = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap();
        let other = Socket::from_fd(udp, &umem, &config(veth)).unwrap_err();
        assert!(matches!(other, OpenError::NotXdp { domain: 2 }), "{other}");
        let file =
            Socket::from_fd(File::open("/dev/null").unwrap().into(), &umem, &config(veth)).unwrap_err();
        assert!(matches!(file, OpenError::NotXdp { domain: 0 }), "{file}");
    });
}

#[test]
fn memory_with_a_hole_or_read_only_is_named() {
    with_veth(1, 1500, |veth| {
        let holed = Umem::unaligned(support::map::with_hole(16 * 4096, 8 * 4096), 4096, 0).unwrap();
        let error = refused(&holed, &config(veth));
        assert!(
            matches!(error, OpenError::MemoryHole { len_bytes: 65536, .. }),
            "{error}"
        );
        let unreadable = Umem::unaligned(support::map::with_hole(16 * 4096, 0), 4096, 0).unwrap();
        let error = refused(&unreadable, &config(veth));
        assert!(matches!(error, OpenError::MemoryKind { .. }), "{error}");
    });
}

#[test]
fn socket_that_only_sends_has_an_empty_rx_ring() {
    with_veth(1, 1500, |veth| {
        let mut rig = Rig::open(&SocketConfig {
            rx: None,
            ..config(veth)
        });
        assert_eq!((rig.socket.rx.size(), rig.socket.rx.peek(8).len()), (0, 0));
        rig.send(&[&test_frame(60, 1)]);
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
fn sockets_and_rings_move_between_threads() {
    fn moves<T: Send>() {}
    moves::<Socket>();
    moves::<Umem>();
    moves::<FramePool>();
}
