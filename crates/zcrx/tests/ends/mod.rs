//! Connections and receivers that end during transfers: what remains, and when their memory can be used again.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{self, LIMIT, can_zcrx, is_dry, listening, run, sender, small, ways};
use zcrx::{
    Config, ConnectionId, Event, Memory, Offer, OpenError, OwnMemory, Piece, Prepared, Receiver, Registered,
    Request,
};

fn open(request: Request, config: Config) -> Receiver {
    Receiver::open(&Config { request, ..config }).unwrap()
}

fn connect(address: SocketAddr) -> TcpStream {
    let peer = support::connect(address);
    peer.set_read_timeout(Some(LIMIT)).unwrap();
    peer
}

/// Waits for the first event for which `wanted` returns a value.
fn first<T>(receiver: &mut Receiver, mut wanted: impl FnMut(&mut Receiver, Event) -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        while let Some(event) = receiver.next_event() {
            if let Some(found) = wanted(receiver, event) {
                return found;
            }
        }
        assert!(started.elapsed() < LIMIT, "{:?}", receiver.statistics());
        receiver.wait(Some(Duration::from_millis(200))).unwrap();
    }
}

fn add_accepted(receiver: &mut Receiver) -> ConnectionId {
    first(receiver, |receiver, event| match event {
        Event::Accepted { socket, .. } => Some(receiver.add(socket).unwrap()),
        _ => None,
    })
}

fn first_piece(receiver: &mut Receiver) -> Piece {
    first(receiver, |_, event| match event {
        Event::Received { piece, .. } => Some(piece),
        _ => None,
    })
}

#[test]
fn what_was_queued_is_not_sent_after_an_abort() {
    for way in ways() {
        let mut receiver = open(way, small(64));
        let (_, address) = listening(&mut receiver);
        let mut peer = connect(address);
        let connection = add_accepted(&mut receiver);
        receiver.wait(Some(Duration::ZERO)).unwrap();
        assert!(receiver.send(connection, vec![1; 1000]));
        receiver.abort(connection).unwrap();
        first(&mut receiver, |_, event| {
            matches!(event, Event::Closed { .. }).then_some(())
        });
        let mut got = Vec::new();
        peer.read_to_end(&mut got).unwrap();
        assert_eq!(got.len(), 0);
    }
}

/// Whether the kernel has accepted it already or does so when the receiver ends.
#[test]
fn connection_that_was_accepted_and_not_taken_ends_with_its_receiver() {
    for waits in [true, false] {
        let mut receiver = open(Request::ForceCopy, small(64));
        let (_, address) = listening(&mut receiver);
        let mut peer = connect(address);
        if waits {
            receiver.wait(Some(LIMIT)).unwrap();
        }
        drop(receiver);
        match peer.read_to_end(&mut Vec::new()) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("its descriptor was forgotten: {other:?}"),
        }
    }
}

#[test]
fn crowd_is_accepted_some_at_a_time_and_each_of_it_once() {
    let mut receiver = open(Request::ForceCopy, small(64));
    let (_, address) = listening(&mut receiver);
    let crowd: Vec<_> = (0..100).map(|_| connect(address)).collect();
    let (started, mut accepted) = (Instant::now(), HashSet::new());
    while accepted.len() < crowd.len() {
        assert!(started.elapsed() < LIMIT, "{} of them", accepted.len());
        receiver.wait(Some(LIMIT)).unwrap();
        let before = accepted.len();
        while let Some(event) = receiver.next_event() {
            if let Event::Accepted { socket, .. } = event {
                let peer = TcpStream::from(socket).peer_addr().unwrap();
                assert!(accepted.insert(peer), "{peer} came twice");
            }
        }
        assert!(accepted.len() <= before + 8);
    }
}

/// Accepts the next waiting connection; returns its peer's address.
fn accept_next(socket: &TcpListener) -> SocketAddr {
    socket.set_nonblocking(true).unwrap();
    let started = Instant::now();
    loop {
        match socket.accept() {
            Ok((_, peer)) => return peer,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        assert!(started.elapsed() < LIMIT, "nobody waits");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn listener_that_is_stopped_accepts_nobody_and_gives_its_socket_back() {
    for way in ways() {
        let mut receiver = open(way, small(64));
        let (listener, address) = listening(&mut receiver);
        let mut served = connect(address);
        add_accepted(&mut receiver);
        receiver.stop_listening(listener).unwrap();
        receiver.stop_listening(listener).unwrap();
        let socket = first(&mut receiver, |_, event| match event {
            Event::Stopped { listener: of, socket } => (of == listener).then_some(socket),
            _ => None,
        });
        // No effect: the ID is not valid any more.
        receiver.listen_again(listener).unwrap();
        receiver.stop_listening(listener).unwrap();
        let waiting = connect(address);
        served.write_all(b"it goes on").unwrap();
        let piece = first(&mut receiver, |_, event| match event {
            Event::Received { piece, .. } => Some(piece),
            Event::Accepted { .. } | Event::Stopped { .. } => panic!("{event:?}"),
            _ => None,
        });
        assert_eq!(&piece[..], b"it goes on");
        let socket = TcpListener::from(socket);
        assert_eq!(accept_next(&socket), waiting.local_addr().unwrap());
        drop(socket);
        TcpStream::connect(address).expect_err("nobody listens");
        // Another one is not mistaken for it.
        let (another, address) = listening(&mut receiver);
        assert_ne!(another, listener);
        receiver.stop_listening(listener).unwrap();
        let _peer = connect(address);
        let by = first(&mut receiver, |_, event| match event {
            Event::Accepted { listener, .. } => Some(listener),
            _ => None,
        });
        assert_eq!(by, another);
    }
}

#[test]
fn nobody_of_a_crowd_is_lost_when_its_listener_is_stopped() {
    let mut receiver = open(Request::ForceCopy, small(64));
    let (listener, address) = listening(&mut receiver);
    let crowd: Vec<_> = (0..100).map(|_| connect(address)).collect();
    receiver.wait(Some(LIMIT)).unwrap();
    receiver.stop_listening(listener).unwrap();
    let mut met = HashSet::new();
    let socket = first(&mut receiver, |_, event| match event {
        Event::Accepted { socket, .. } => {
            let peer = TcpStream::from(socket).peer_addr().unwrap();
            assert!(met.insert(peer), "{peer} came twice");
            None
        }
        Event::Stopped { socket, .. } => Some(socket),
        _ => None,
    });
    let accepted = met.len();
    assert!(0 < accepted && accepted < crowd.len(), "{accepted}");
    let socket = TcpListener::from(socket);
    for _ in accepted..crowd.len() {
        let peer = accept_next(&socket);
        assert!(met.insert(peer), "{peer} came twice");
    }
}

/// The reported values of a lease are checked before its ring is mapped.
#[test]
fn lease_of_other_buffers_than_were_offered_is_refused_with_their_size() {
    let config = small(64);
    let (ring, offer) = (Prepared::new(&config).unwrap(), Offer::new(&config).unwrap());
    let said = Registered {
        refill_entries: offer.refill_entries(),
        buffer_bytes: 65536,
        offsets: [0, 4, 64],
        map_offset: 0,
        map_bytes: 4096,
        no_device: true,
    };
    // SAFETY: it is refused, and nothing is mapped.
    #[allow(unsafe_code)]
    let refused = unsafe { offer.registered(&ring, said) };
    let text = refused.err().expect("refused").to_string();
    assert!(text.contains("65536") && text.contains("offered"), "{text}");
}

#[test]
fn memory_is_of_one_receiver_and_its_pieces_at_a_time() {
    let config = Config {
        request: Request::ForceCopy,
        memory: Memory::Given(Arc::new(OwnMemory::new(64 * 4096).unwrap())),
        ..small(64)
    };
    let is_in_use = || matches!(Receiver::open(&config).err(), Some(OpenError::InUse { .. }));
    let mut receiver = Receiver::open(&config).unwrap();
    assert!(is_in_use());
    let second = Receiver::join(&receiver.share().unwrap()).unwrap();
    assert_eq!(second.buffers(), 64, "of its own");
    let (_, address) = listening(&mut receiver);
    connect(address).write_all(b"kept").unwrap();
    add_accepted(&mut receiver);
    let piece = first_piece(&mut receiver);
    drop(receiver);
    assert!(is_in_use(), "a piece is there");
    assert_eq!(&piece[..], b"kept");
    drop(piece);
    assert!(Receiver::open(&config).is_ok());
}

/// On a queue that other receivers continue to use: buffers that were filled for the ended one are returned, too.
#[test]
fn receiver_that_ends_with_unread_completions_takes_no_buffers_along() {
    if !can_zcrx() {
        return;
    }
    let mut stays = open(Request::ForceZcrx, small(64));
    let share = stays.share().unwrap();
    for seed in 0..20 {
        let mut ends = Receiver::join(&share).unwrap();
        let (_, address) = listening(&mut ends);
        let mut peer = connect(address);
        add_accepted(&mut ends);
        peer.write_all(&[seed; 30_000]).unwrap();
        drop(first_piece(&mut ends));
        // Further completions are not read.
        ends.wait(Some(Duration::ZERO)).unwrap();
    }
    let (_, address) = listening(&mut stays);
    let sending = sender(address, 7, 1 << 20);
    run(&mut stays, 1, 1 << 20, |_, event| Some(event));
    sending.join().unwrap();
}

/// It has sent so much by then that all buffers wait to be sent back to it.
#[test]
fn peer_that_never_reads_gives_its_buffers_back_when_it_is_aborted() {
    for way in ways() {
        let mut receiver = open(way, small(64));
        let (_, address) = listening(&mut receiver);
        let greedy = std::thread::spawn(move || {
            let mut peer = connect(address);
            while peer.write_all(&[1; 4096]).is_ok() {}
        });
        echo(&mut receiver, true, || greedy.is_finished());
        greedy.join().unwrap();
        let other = std::thread::spawn(move || {
            let mut peer = connect(address);
            peer.write_all(&[2; 100_000]).unwrap();
            let mut got = vec![0; 100_000];
            peer.read_exact(&mut got).unwrap();
            assert!(got.iter().all(|&byte| byte == 2));
        });
        echo(&mut receiver, false, || other.is_finished());
        other.join().unwrap();
    }
}

/// Echoes received pieces without a copy. With `aborts`, aborts a connection that holds most of the buffers.
fn echo(receiver: &mut Receiver, aborts: bool, is_over: impl Fn() -> bool) {
    let (started, mut peers) = (Instant::now(), Vec::new());
    while !is_over() {
        assert!(started.elapsed() < 2 * LIMIT, "{:?}", receiver.statistics());
        receiver.wait(Some(Duration::from_millis(50))).unwrap();
        while let Some(event) = receiver.next_event() {
            match event {
                Event::Accepted { socket, .. } => peers.push(receiver.add(socket).unwrap()),
                Event::Received { from, piece } => drop(receiver.send(from, piece)),
                Event::Ended { connection, .. } => receiver.close(connection).unwrap(),
                _ => {}
            }
        }
        let is_dry = is_dry(receiver);
        peers.retain(|&peer| {
            let has_most = aborts && is_dry && receiver.queued(peer) >= 32;
            if has_most {
                receiver.abort(peer).unwrap();
            }
            !has_most
        });
    }
}
