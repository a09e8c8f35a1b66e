//! How a socket opens, and every refusal that has a remedy.
//!
//! Needs CAP_SYS_ADMIN (a namespace) and ip(8); without them the tests are skipped, or fail with REQUIRE_PRIV=1.

use crate::support;
use testkit::assert_has;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::xdp::SocketAddrXdpFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
use support::rig::{Rig, config, refused};
use support::{own_umem, with_veth};
use testkit::Redirect;
use testkit::frame::plain;
use testkit::wait::SOON;
use xsk::{
    BindRequest, BusyPoll, FramePool, Kick, Mode, OpenError, QueueId, RingSize, Socket, SocketConfig, TxDesc,
    Umem, made_rx_ring,
};

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
        assert_has(&fallback.reason, &["the driver has no zero-copy"]);
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
        assert_has(&error.to_string(), &["cannot do zero-copy"]);
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
                bind_timeout: SOON,
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
            drop(Rig::open(&SocketConfig {
                bind_timeout: SOON,
                ..config(veth)
            }));
        }
    });
}

/// As a steward does it: it makes, registers and binds, in any order of attempts, and passes the result on.
#[test]
fn socket_that_somebody_else_binds_is_like_one_of_our_own() {
    with_veth(1, 1500, |veth| {
        let (umem, mut pool) = own_umem(64);
        let config = config(veth);
        let mut tried = Vec::new();
        let socket = Socket::bound_by(&umem, &config, |flags| {
            tried.push(flags);
            let flags = SocketAddrXdpFlags::from_bits_retain(flags);
            if flags.contains(SocketAddrXdpFlags::XDP_ZEROCOPY) {
                return Ok::<_, OpenError>(Err(Errno::OPNOTSUPP.into()));
            }
            let theirs = Socket::open(&umem, &config)?;
            Ok(theirs.as_fd().try_clone_to_owned())
        });
        let mut socket = socket.unwrap();
        assert_eq!((tried.len(), socket.mode()), (2, Mode::NativeCopy));
        assert_eq!(socket.fallbacks()[0].tried, "zero-copy");
        assert_eq!(socket.fill.refill(&mut pool, 16), 16);
        // A descriptor that is no socket is refused, and an error of the other process is passed on.
        let file = || Ok::<_, OpenError>(Ok(File::open("/dev/null").unwrap().into()));
        let other = Socket::bound_by(&umem, &config, |_| file()).unwrap_err();
        assert!(matches!(other, OpenError::NotXdp { .. }), "{other}");
        let busy = Socket::bound_by(&umem, &config, |_| Ok::<_, OpenError>(Err(Errno::BUSY.into())));
        assert!(matches!(busy, Err(OpenError::Busy { .. })), "{busy:?}");
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

/// A process whose socket was passed in may not create another one for the query: its sandbox would kill it.
#[test]
fn passed_descriptor_is_refused_without_asking_the_driver() {
    with_veth(2, 1500, |veth| {
        let fd = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
        let (umem, _) = own_umem(64);
        let beyond = SocketConfig {
            queue: QueueId(7),
            ..config(veth)
        };
        let error = Socket::from_fd(fd, &umem, &beyond).unwrap_err();
        assert!(
            matches!(
                error,
                OpenError::Bind {
                    queue: QueueId(7),
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
fn memlock_too_small_says_how_much_is_needed() {
    with_veth(1, 1500, |veth| {
        use rustix::process::{Resource, getrlimit, setrlimit};
        use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
        let (umem, _) = own_umem(2048);
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        // Only this thread drops it; the others keep the capability, so the limit does not apply to them.
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
        assert_has(&error.to_string(), &["ulimit -l 4096"]);
    });
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
            bind_timeout: SOON,
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
        let peer = veth.peer();
        let fd = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
        let spare = fd.try_clone().unwrap();
        let (umem, pool) = own_umem(64);
        let socket = Socket::from_fd(fd, &umem, &config(veth)).unwrap();
        let mut rig = Rig {
            umem: umem.clone(),
            pool,
            socket,
        };
        let frame = plain(99, 4);
        rig.send(&[&frame]);
        assert_eq!(peer.receive(SOON), Some(frame));
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

/// A socket as a privileged process passes it on, with an rx ring of so many entries, or without one.
fn handed_over(entries: Option<u32>) -> OwnedFd {
    let socket = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
    if let Some(entries) = entries {
        sockopt::set_xdp_rx_ring_size(&socket, entries).unwrap();
    }
    socket
}

#[test]
fn rx_ring_of_somebody_else_is_used_and_placed_before_there_is_memory() {
    with_veth(1, 1500, |veth| {
        let peer = veth.peer();
        let fd = handed_over(Some(512));
        let program = Redirect::attach(veth.near, true).unwrap();
        program.steer(0, &fd).unwrap();
        let config = SocketConfig {
            rx: Some(RingSize::at_least(512)),
            rx_is_made: true,
            ..config(veth)
        };
        let (umem, pool) = own_umem(1024);
        let socket = Socket::from_fd(fd, &umem, &config).unwrap();
        let mut rig = Rig { umem, pool, socket };
        rig.socket.fill.refill(&mut rig.pool, 1024);
        // More than twice around, and no frame twice.
        for at in 0..1200_u32 {
            let frame = plain(60 + at as usize % 1000, at as u8);
            peer.send(&frame);
            let (received, pieces) = rig.receive().expect("it arrives");
            assert_eq!((received, pieces), (frame, 1), "frame {at}");
            rig.socket.fill.refill(&mut rig.pool, 1);
        }
    });
}

#[test]
fn size_of_an_rx_ring_of_somebody_else_is_found_out_or_refused() {
    with_veth(1, 1500, |_| {
        assert_eq!(made_rx_ring(handed_over(None).as_fd()).unwrap(), None);
        for entries in [512, 1024, 2048, 4096, 1 << 16] {
            if entries as usize * 16 < rustix::param::page_size() {
                continue;
            }
            let found = made_rx_ring(handed_over(Some(entries)).as_fd()).unwrap();
            assert_eq!(found.map(RingSize::get), Some(entries));
        }
        let error = made_rx_ring(handed_over(Some(2)).as_fd()).unwrap_err();
        assert!(matches!(error, OpenError::RxRingTooSmall { .. }), "{error}");
    });
}

#[test]
fn rx_ring_that_is_not_there_or_smaller_is_named() {
    with_veth(1, 1500, |veth| {
        let expecting = SocketConfig {
            rx_is_made: true,
            ..config(veth)
        };
        for made in [None, Some(512)] {
            let (umem, _) = own_umem(64);
            let error = Socket::from_fd(handed_over(made), &umem, &expecting).unwrap_err();
            assert!(
                matches!(error, OpenError::RxRingNotMade { entries: 2048 }),
                "{error}"
            );
        }
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
fn shared_mapping_of_a_file_on_disk_is_named() {
    with_veth(1, 1500, |veth| {
        let path = format!("{}/umem-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
        let options = File::options().read(true).write(true).create_new(true).clone();
        let file = options.open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let umem = Umem::unaligned(support::map::shared(&file, 1 << 16), 4096, 0).unwrap();
        match Socket::open(&umem, &config(veth)) {
            Err(error) => assert!(matches!(error, OpenError::MemoryKind { .. }), "{error}"),
            // A file system without dirty tracking (tmpfs, overlay on it): nothing to refuse.
            Ok(_) => println!("SKIPPED: {} is not on a disk", env!("CARGO_TARGET_TMPDIR")),
        }
    });
}

#[test]
fn sockets_and_rings_move_between_threads() {
    fn moves<T: Send>() {}
    moves::<Socket>();
    moves::<Umem>();
    moves::<FramePool>();
}
