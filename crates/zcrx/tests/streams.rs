//! Byte-exact streams over loopback, in every mode of receiving that the kernel has: ordinary receives on every kernel,
//! zcrx without a device from Linux 7.1 on, with CAP_NET_ADMIN. With ZCRX_NIC, over a NIC, with zcrx on its queue.

#![allow(unsafe_code, reason = "an instance is taken up from its parts")]

mod ends;
mod support;

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use support::{
    LIMIT, can_zcrx, connect, is_dry, kills, listening, run, sender, small, source, stream, ways, zcrx_mode,
};
use zcrx::{Config, ConnectionId, Event, Mode, OpenError, Piece, Receiver, Request, Source};

const MIB: usize = 1 << 20;

fn open(request: Request, config: Config) -> Receiver {
    Receiver::open(&Config { request, ..config }).unwrap()
}

#[test]
fn streams_arrive_byte_for_byte() {
    for way in ways() {
        let mut receiver = open(way, Config::new(source()));
        let (_, address) = listening(&mut receiver);
        let senders: Vec<_> = (0..3).map(|seed| sender(address, seed, 4 * MIB)).collect();
        run(&mut receiver, 3, 4 * MIB as u64, |_, event| Some(event));
        senders.into_iter().for_each(|it| it.join().unwrap());
        let statistics = receiver.statistics();
        assert_eq!(statistics.bytes, 3 * (4 * MIB as u64 + 8));
        // Without a device the kernel copies all; what it counts of that is most. A NIC writes all.
        let copied = statistics.kernel_copies.map(|(_, bytes)| bytes);
        println!("{}: {statistics:?}", receiver.mode());
        match receiver.mode() {
            Mode::Zcrx => assert_eq!(copied, Some(0)),
            _ => assert!(copied.is_none_or(|bytes| bytes > 0 && bytes <= statistics.bytes)),
        }
        let must = receiver.mode() == zcrx_mode() && std::env::var_os("ZCRX_MUST").is_some();
        assert!(copied.is_some() || !must, "the newest kernel counts copies");
    }
}

#[test]
fn slow_reader_in_another_thread_runs_the_pool_dry_and_loses_nothing() {
    for way in ways() {
        let mut receiver = open(way, small(32));
        let (_, address) = listening(&mut receiver);
        let (to_reader, pieces) = mpsc::channel::<Piece>();
        let (to_us, dry) = mpsc::channel();
        // Holds all buffers until the receiver has run out, then each for a while.
        let reader = std::thread::spawn(move || {
            let mut held = VecDeque::new();
            let mut bytes = 0;
            dry.recv_timeout(LIMIT).unwrap();
            for piece in pieces {
                bytes += piece.len() as u64;
                held.push_back(piece);
                if held.len() > 20 {
                    held.pop_front();
                }
            }
            bytes
        });
        let sending = sender(address, 9, 2 * MIB);
        let mut told = false;
        let mut came = 0;
        while came < 2 * MIB as u64 + 8 {
            receiver.wait(Some(LIMIT)).unwrap();
            while let Some(event) = receiver.next_event() {
                match event {
                    Event::Accepted { socket, .. } => drop(receiver.add(socket).unwrap()),
                    Event::Received { piece, .. } => {
                        came += piece.len() as u64;
                        to_reader.send(piece).unwrap();
                    }
                    Event::Ended { error, .. } => assert!(
                        error.is_none() && came == 2 * MIB as u64 + 8,
                        "ended at {came}: {error:?}"
                    ),
                    _ => {}
                }
            }
            if !told && is_dry(&receiver) {
                told = true;
                to_us.send(()).unwrap();
            }
        }
        assert!(told, "it never ran out: {:?}", receiver.statistics());
        drop(to_reader);
        assert_eq!(reader.join().unwrap(), came);
        drop(receiver);
        sending.join().unwrap();
    }
}

#[test]
fn full_completion_queue_ends_no_stream() {
    for way in ways() {
        let config = Config {
            completions: 4,
            requests: 4,
            ..small(512)
        };
        let mut receiver = open(way, config);
        let (_, address) = listening(&mut receiver);
        let senders: Vec<_> = (0..4).map(|seed| sender(address, seed, MIB)).collect();
        run(&mut receiver, 4, MIB as u64, |_, event| Some(event));
        senders.into_iter().for_each(|it| it.join().unwrap());
    }
}

#[test]
fn flood_of_connections_is_served() {
    const PEERS: usize = 300;
    for way in ways() {
        let mut receiver = open(way, small(256));
        let (_, address) = listening(&mut receiver);
        let flood = std::thread::spawn(move || {
            for round in 0..PEERS / 50 {
                let peers: Vec<_> = (0..50)
                    .map(|n| sender(address, (round * 50 + n) as u64, 5000))
                    .collect();
                peers.into_iter().for_each(|it| it.join().unwrap());
            }
        });
        run(&mut receiver, PEERS, 5000, |_, event| Some(event));
        flood.join().unwrap();
        receiver.wait(Some(Duration::ZERO)).unwrap();
        while receiver.next_event().is_some() {}
        assert_eq!(receiver.connections(), 0);
    }
}

#[test]
fn echo_sends_what_came_in_order() {
    for way in ways() {
        let mut receiver = open(way, small(256));
        let (_, address) = listening(&mut receiver);
        let peer = std::thread::spawn(move || {
            let mut socket = connect(address);
            let mut reading = socket.try_clone().unwrap();
            let sent = stream(1, 3 * MIB);
            let expected = sent.clone();
            let reader = std::thread::spawn(move || {
                let mut got = vec![0; expected.len()];
                reading.read_exact(&mut got).unwrap();
                assert!(got == expected, "what comes back is not what was sent");
            });
            socket.write_all(&sent).unwrap();
            reader.join().unwrap();
        });
        while !peer.is_finished() {
            receiver.wait(Some(Duration::from_millis(50))).unwrap();
            while let Some(event) = receiver.next_event() {
                match event {
                    Event::Accepted { socket, .. } => drop(receiver.add(socket).unwrap()),
                    Event::Received { from, piece } => assert!(receiver.send(from, piece)),
                    Event::Ended { connection, .. } => receiver.close(connection).unwrap(),
                    Event::SendFailed { error, .. } => panic!("{error}"),
                    _ => {}
                }
            }
        }
        peer.join().unwrap();
    }
}

#[test]
fn two_threads_receive_by_one_queue() {
    for way in ways() {
        let mut first = open(way, small(64));
        let share = first.share().unwrap();
        let (_, address) = listening(&mut first);
        let (to_us, other_address) = mpsc::channel();
        let other = std::thread::spawn(move || {
            let mut second = Receiver::join(&share).unwrap();
            let (_, address) = listening(&mut second);
            to_us.send((address, second.mode())).unwrap();
            run(&mut second, 4, 2 * MIB as u64, |_, event| Some(event));
        });
        let (second_address, mode) = other_address.recv_timeout(LIMIT).unwrap();
        assert_eq!(mode, first.mode());
        let to = |n: u64| if n < 4 { address } else { second_address };
        let senders: Vec<_> = (0..8).map(|n| sender(to(n), n, 2 * MIB)).collect();
        run(&mut first, 4, 2 * MIB as u64, |_, event| Some(event));
        other.join().unwrap();
        senders.into_iter().for_each(|it| it.join().unwrap());
    }
}

/// Receives until one connection has sent exactly these bytes; returns it.
fn until_one_has(
    receiver: &mut Receiver,
    came: &mut HashMap<ConnectionId, Vec<u8>>,
    bytes: &[u8],
) -> ConnectionId {
    let started = Instant::now();
    loop {
        if let Some((&connection, _)) = came.iter().find(|(_, had)| *had == bytes) {
            return connection;
        }
        assert!(started.elapsed() < LIMIT, "{bytes:?} of {came:?}");
        receiver.wait(Some(LIMIT)).unwrap();
        while let Some(event) = receiver.next_event() {
            match event {
                Event::Accepted { socket, .. } => drop(receiver.add(socket).unwrap()),
                Event::Received { from, piece } => came.entry(from).or_default().extend_from_slice(&piece),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn paused_connection_brings_nothing_until_resumed() {
    for way in ways() {
        let (mut receiver, mut came) = (open(way, small(64)), HashMap::new());
        let (_, address) = listening(&mut receiver);
        let [mut peer, mut other] = [0, 1].map(|_| connect(address));
        peer.write_all(b"peer").unwrap();
        other.write_all(b"o").unwrap();
        let paused = until_one_has(&mut receiver, &mut came, b"peer");
        until_one_has(&mut receiver, &mut came, b"o");
        receiver.pause(paused).unwrap();
        // The kernel is told so before it hands out what comes next, and that before what comes last.
        other.write_all(b"1").unwrap();
        until_one_has(&mut receiver, &mut came, b"o1");
        peer.write_all(b", later").unwrap();
        other.write_all(b"2").unwrap();
        until_one_has(&mut receiver, &mut came, b"o12");
        assert_eq!(came[&paused], b"peer");
        receiver.resume(paused).unwrap();
        until_one_has(&mut receiver, &mut came, b"peer, later");
    }
}

#[test]
fn pieces_outlive_their_receiver() {
    for way in ways() {
        let mut receiver = open(way, small(64));
        let (_, address) = listening(&mut receiver);
        let sending = sender(address, 5, 40_000);
        let mut kept = Vec::new();
        let mut came = 0;
        while came < 40_008 {
            receiver.wait(Some(LIMIT)).unwrap();
            while let Some(event) = receiver.next_event() {
                match event {
                    Event::Accepted { socket, .. } => drop(receiver.add(socket).unwrap()),
                    Event::Received { piece, .. } => {
                        came += piece.len();
                        kept.push(piece);
                    }
                    _ => {}
                }
            }
        }
        drop(receiver);
        sending.join().unwrap();
        let bytes = kept.iter().flat_map(|piece| piece.iter().copied());
        assert!(bytes.skip(8).eq(stream(5, 40_000)));
    }
}

/// A file that is written past the page cache, where its file system can.
fn create_direct(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    let file = options.custom_flags(libc::O_DIRECT).open(path);
    file.inspect_err(|error| println!("SKIPPED: no O_DIRECT in {}: {error}", path.display()))
        .ok()
}

#[test]
fn blocks_go_to_a_file_past_the_page_cache() {
    const LEN: usize = 3 * MIB + 12_345;
    const BLOCK: u32 = 64 << 10;
    let path = std::env::current_dir()
        .unwrap()
        .join(format!("blocks-{}", std::process::id()));
    let Some(file) = create_direct(&path) else {
        return;
    };
    let config = Config {
        block_bytes: Some(BLOCK),
        ..Config::new(source())
    };
    let mut receiver = Receiver::open(&config).unwrap();
    assert_eq!(receiver.mode(), Mode::Blocks);
    assert!(
        receiver.fallbacks()[0]
            .reason
            .contains("only a copy fills blocks")
    );
    let (_, address) = listening(&mut receiver);
    let sending = sender(address, 2, LEN - 8);
    let (mut at, mut over) = (0, false);
    while !over {
        receiver.wait(Some(LIMIT)).unwrap();
        while let Some(event) = receiver.next_event() {
            match event {
                Event::Accepted { socket, .. } => drop(receiver.add(socket).unwrap()),
                Event::Received { mut piece, .. } => {
                    assert_eq!(piece.as_ptr() as usize % 4096, 0);
                    let len = piece.len() as u64;
                    file.write_all_at(piece.padded(4096).unwrap(), at).unwrap();
                    at += len;
                    assert!(
                        len == u64::from(BLOCK) || at == LEN as u64,
                        "{len} bytes before {at}"
                    );
                }
                Event::Ended { connection, .. } => {
                    receiver.close(connection).unwrap();
                    over = true;
                }
                _ => {}
            }
        }
    }
    file.set_len(at).unwrap();
    sending.join().unwrap();
    let mut written = Vec::new();
    File::open(&path).unwrap().read_to_end(&mut written).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(written == [&2_u64.to_le_bytes()[..], &stream(2, LEN - 8)].concat());
}

#[test]
fn auto_tells_why_it_is_no_zcrx() {
    let mut config = small(64);
    config.source = Source::Queue {
        ifindex: 1,
        queue: zcrx::QueueId(0),
    };
    let receiver = Receiver::open(&config).unwrap();
    assert_eq!(receiver.mode(), Mode::Copy);
    let [fallback] = receiver.fallbacks() else {
        panic!("{:?}", receiver.fallbacks())
    };
    assert_eq!(fallback.tried, "zcrx");
    assert!(
        fallback.errno != 0 && fallback.reason.contains("interface 1, queue 0"),
        "{fallback}"
    );
    config.request = Request::ForceZcrx;
    assert!(matches!(Receiver::open(&config), Err(OpenError::Zcrx(_))));
}

#[test]
fn waker_ends_a_wait_without_limit() {
    let mut receiver = open(Request::ForceCopy, small(64));
    let waker = receiver.waker();
    let other = std::thread::spawn(move || waker.wake());
    receiver.wait(None).unwrap();
    other.join().unwrap();
    assert!(receiver.next_event().is_none());
}

#[test]
fn sizes_that_cannot_be_are_refused_with_the_value() {
    let refused = |change: fn(&mut Config)| {
        let mut config = small(64);
        config.request = Request::ForceCopy;
        change(&mut config);
        Receiver::open(&config).err().expect("refused").to_string()
    };
    assert!(refused(|it| it.block_bytes = Some(1000)).contains("1000 bytes"));
    assert!(refused(|it| it.copy_buffer_bytes = 0).contains("buffers of 0 bytes"));
    assert!(refused(|it| it.copy_buffer_bytes = 1 << 22).contains("no room for a buffer of 4194304"));
}

/// Receives, keeps all pieces, and prints their number; until it is killed.
#[test]
#[ignore = "a part of the next test, as a process of its own"]
fn holder() {
    let mut receiver = Receiver::open(&small(64)).unwrap();
    let (_, address) = listening(&mut receiver);
    let _sending = sender(address, 1, MIB);
    let mut kept = Vec::new();
    while !is_dry(&receiver) {
        receiver.wait(Some(LIMIT)).unwrap();
        while let Some(event) = receiver.next_event() {
            match event {
                Event::Accepted { socket, .. } => drop(receiver.add(socket).unwrap()),
                Event::Received { piece, .. } => kept.push(piece),
                _ => {}
            }
        }
    }
    eprintln!("holds {} pieces of {}", kept.len(), receiver.mode());
    receiver.wait(None).unwrap();
    receiver.wait(Some(LIMIT)).unwrap();
}

#[test]
fn holder_killed_with_buffers_out_leaves_nothing() {
    for _ in 0..kills() {
        let mut holder = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "holder", "--ignored", "--nocapture"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(holder.stderr.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        assert!(said.starts_with("holds "), "{said}");
        holder.kill().unwrap();
        holder.wait().unwrap();
    }
    let mut receiver = Receiver::open(&small(64)).unwrap();
    let (_, address) = listening(&mut receiver);
    let sending = sender(address, 6, MIB);
    run(&mut receiver, 1, MIB as u64, |_, event| Some(event));
    sending.join().unwrap();
}

/// A process registers, exports and passes; here both are this one, and the ring is imported into before it is enabled.
#[test]
fn instance_is_imported_by_another_ring_and_into_a_prepared_one() {
    if !can_zcrx() {
        return;
    }
    let config = small(64);
    let pass = |instance: &zcrx::Instance| {
        let [descriptor, area, refill] = instance.descriptors().map(|it| it.try_clone_to_owned().unwrap());
        let shape = zcrx::Shape::from_bytes(&instance.shape().to_bytes());
        // SAFETY: those of one instance, by which nobody else receives.
        unsafe { zcrx::Instance::from_parts([descriptor, area, refill], shape) }
    };
    for prepared in [false, true] {
        let instance = zcrx::Instance::register(&config).unwrap();
        let passed = pass(&instance);
        drop(instance);
        let mut receiver = if prepared {
            let ring = zcrx::Prepared::new(&config).unwrap();
            let imported = passed.import_into(ring.as_fd()).unwrap();
            Receiver::start(ring, &passed, imported, &config).unwrap()
        } else {
            Receiver::import(&passed, &config).unwrap()
        };
        assert_eq!(receiver.mode(), zcrx_mode());
        let (_, address) = listening(&mut receiver);
        let sending = sender(address, 4, MIB);
        run(&mut receiver, 1, MIB as u64, |_, event| Some(event));
        sending.join().unwrap();
    }
}

/// Capabilities are per thread. The kernel lets no thread without them import, which is why `Prepared` exists: if a
/// kernel drops this rule, the test fails, and `Prepared` is not needed any more.
#[test]
fn who_has_no_privilege_receives_by_an_instance_that_another_imports() {
    if !can_zcrx() {
        return;
    }
    let config = small(64);
    let instance = zcrx::Instance::register(&config).unwrap();
    let (to_privileged, prepared) = mpsc::channel();
    let (to_us, imported) = mpsc::channel();
    std::thread::scope(|scope| {
        let (instance, config) = (&instance, &config);
        scope.spawn(move || {
            let none = CapabilitySets {
                effective: CapabilitySet::empty(),
                permitted: CapabilitySet::empty(),
                inheritable: CapabilitySet::empty(),
            };
            set_capabilities(None, none).unwrap();
            let refused = Receiver::import(instance, config)
                .err()
                .expect("refused")
                .to_string();
            assert!(refused.contains("CAP_NET_ADMIN"), "{refused}");
            let ring = zcrx::Prepared::new(config).unwrap();
            to_privileged
                .send(ring.as_fd().try_clone_to_owned().unwrap())
                .unwrap();
            let imported = imported.recv_timeout(LIMIT).unwrap();
            let mut receiver = Receiver::start(ring, instance, imported, config).unwrap();
            let (_, address) = listening(&mut receiver);
            let sending = sender(address, 8, MIB);
            run(&mut receiver, 1, MIB as u64, |_, event| Some(event));
            sending.join().unwrap();
        });
        let ring = prepared.recv_timeout(LIMIT).unwrap();
        let bytes = instance.import_into(ring.as_fd()).unwrap().to_bytes();
        // SAFETY: of the ring and the instance that it is used with.
        to_us.send(unsafe { zcrx::Imported::from_bytes(&bytes) }).unwrap();
    });
}
