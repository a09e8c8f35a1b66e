//! Clients that want to hold up others: none of them does, and no frame is lost by any.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect as connect_to, socket_with};
use testkit::api::{Api, Processes};
use testkit::{Daemon, Driver, DriverConfig, NetNs, Serve, assert_soon, holdings, procfs, require, wait};

/// Longer than the server has patience.
const PATIENCE: Duration = Duration::from_secs(90);

/// A daemon whose API everybody may ask.
fn open_to_all(netns: &NetNs, dir: &tempfile::TempDir) -> (Daemon, Api) {
    let (serve, api) = super::with_api(Serve::null().with("--api-mode", "666"), dir);
    (Daemon::start(netns, &serve), api)
}

fn connect(api: &Api) -> UnixStream {
    let stream = UnixStream::connect(api.socket()).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    stream.set_write_timeout(Some(PATIENCE)).expect("a socket");
    stream
}

/// All that comes until the server closes.
fn rest(stream: &mut UnixStream) -> String {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("it is kept: {error}"),
        _ => String::from_utf8_lossy(&bytes).into_owned(),
    }
}

#[test]
fn stranger_who_takes_all_connections_leaves_others_theirs() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (mut daemon, api) = open_to_all(&netns, &dir);
    let _ = api.get("/v1/status");
    let pid = daemon.process().pid();
    let before = holdings::steady(pid, wait::QUIET);
    let strangers = api.clone();
    let held = super::as_stranger(move || (0..2000).map(|_| connect(&strangers)).collect::<Vec<_>>());
    for _ in 0..10 {
        assert_eq!(api.ask("/v1/ports", &[]).status, 200);
    }
    assert_soon!(
        holdings::of(pid).is_within(&before),
        "before {before:?}, after {:?}",
        holdings::of(pid)
    );
    // None of theirs is kept for ever.
    for mut stream in held {
        rest(&mut stream);
    }
    let strangers = api.clone();
    let mut again = super::as_stranger(move || connect(&strangers));
    again.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("open");
    assert!(
        rest(&mut again).starts_with("HTTP/1.0 200"),
        "it has a place again"
    );
}

/// Three users connect as often as they may, and each connection sends this.
fn taken_by_three(api: &Api, sent: &'static [u8]) -> Vec<UnixStream> {
    let of_user = |user: u32| {
        let api = api.clone();
        let connected = move || {
            let taken = (0..16).map(|_| {
                let mut stream = connect(&api);
                // It may be closed by then.
                let _ = stream.write_all(sent);
                stream
            });
            taken.collect::<Vec<_>>()
        };
        super::as_user(super::STRANGER + user, connected)
    };
    (1..4).flat_map(of_user).collect()
}

/// What a fourth user is told.
fn said_to_another(api: &Api) -> String {
    let api = api.clone();
    let mut stream = super::as_stranger(move || connect(&api));
    let _ = stream.write_all(b"GET /v1/status HTTP/1.0\r\n\r\n");
    rest(&mut stream)
}

#[test]
fn users_whose_requests_never_end_leave_others_their_places() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (_daemon, api) = open_to_all(&netns, &dir);
    let _slow = taken_by_three(&api, b"GET /v1/st");
    for _ in 0..10 {
        assert!(said_to_another(&api).starts_with("HTTP/1.0 200"));
        assert_eq!(api.ask("/v1/ports", &[]).status, 200);
    }
}

#[test]
fn users_who_wait_for_events_in_all_places_leave_others_theirs() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (_daemon, api) = open_to_all(&netns, &dir);
    let waits: [&[u8]; 2] = [
        b"GET /v1/events HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n",
        b"GET /v1/events?after=99&wait=60 HTTP/1.1\r\nhost: x\r\n\r\n",
    ];
    for wait in waits {
        let _waiting = taken_by_three(&api, wait);
        for _ in 0..10 {
            assert!(said_to_another(&api).starts_with("HTTP/1.0 200"));
            assert_eq!(api.ask("/v1/ports", &[]).status, 200);
        }
    }
}

#[test]
fn addresses_of_this_host_that_take_all_connections_leave_it_places() {
    require!(Root);
    let netns = NetNs::new("api");
    netns.ip(&["link", "set", "lo", "up"]);
    let _daemon = Daemon::start(&netns, &Serve::null().with("--metrics", "127.0.0.1:9419"));
    // A thread of this namespace: sockets keep it.
    let from = |last: u8| {
        netns.enter(|| {
            let own = SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, last), 0);
            let socket = socket_with(
                AddressFamily::INET,
                SocketType::STREAM,
                SocketFlags::CLOEXEC,
                None,
            );
            let socket = socket.expect("a socket");
            bind(&socket, &own).expect("an address of lo");
            connect_to(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9419)).expect("it listens");
            TcpStream::from(socket)
        })
    };
    let metrics = |last| {
        let mut stream = from(last);
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut said = String::new();
        // It may be closed before it is read.
        let _ = stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n");
        let _ = stream.read_to_string(&mut said);
        said
    };
    let slow = |last| {
        let mut stream = from(last);
        let _ = stream.write_all(b"GET /met");
        stream
    };
    let _slow: Vec<_> = (0..80).map(|number| slow(2 + number % 2)).collect();
    for last in [2, 3, 4, 4, 4] {
        assert!(metrics(last).starts_with("HTTP/1.0 200"));
    }
}

#[test]
fn process_that_talks_to_clients_has_so_much_memory_and_no_more() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (mut daemon, _api) = super::on_null(&netns, &dir);
    let Processes { parent, child } = Processes::of(&mut daemon);
    for pid in [parent, child] {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
        let line = limits.lines().find(|line| line.starts_with("Max address space"));
        let words: Vec<_> = line.expect("a limit").split_ascii_whitespace().collect();
        assert_eq!(words[3..5], ["1073741824"; 2]);
    }
}

#[test]
fn heads_that_never_end_or_are_too_long_are_given_up() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (mut daemon, api) = super::on_null(&netns, &dir);
    let child = Processes::of(&mut daemon).child;
    // A byte now and then.
    let slow = {
        let mut stream = connect(&api);
        std::thread::spawn(move || {
            let begun = Instant::now();
            while stream.write_all(b"G").is_ok() {
                assert!(begun.elapsed() < PATIENCE, "it is kept");
                std::thread::sleep(Duration::from_millis(500));
            }
        })
    };
    let mut silent = connect(&api);
    let mut long = connect(&api);
    let header = format!(
        "GET /v1/status HTTP/1.1\r\nhost: x\r\nlong: {}\r\n\r\n",
        "x".repeat(1 << 20)
    );
    // It may be closed before all of it is sent.
    let _ = long.write_all(header.as_bytes());
    let said = rest(&mut long);
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 431"), "{said}");
    let mut many = connect(&api);
    let _ = many.write_all(b"GET /v1/status HTTP/1.1\r\nhost: x\r\n");
    for number in 0..1000 {
        let _ = many.write_all(format!("a{number}: b\r\n").as_bytes());
    }
    let _ = many.write_all(b"\r\n");
    let said = rest(&mut many);
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 431"), "{said}");
    for nonsense in [
        b"\0\0\0\0\r\n\r\n" as &[u8],
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        &[0xff; 5000],
    ] {
        let mut stream = connect(&api);
        let _ = stream.write_all(nonsense);
        let _ = stream.shutdown(Shutdown::Write);
        let said = rest(&mut stream);
        assert!(!said.contains("200 OK"), "{said}");
    }
    assert_eq!(api.ask("/v1/status", &[]).status, 200);
    assert_eq!(rest(&mut silent), "");
    slow.join().expect("it was closed");
    assert_eq!(Processes::of(&mut daemon).child, child, "it is the same process");
}

#[test]
fn bodies_that_never_end_or_are_too_long_are_given_up() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (mut daemon, api) = super::on_null(&netns, &dir);
    let child = Processes::of(&mut daemon).child;
    let head = "PUT /v1/ports/x HTTP/1.1\r\nhost: x\r\n";
    let mut chunked = connect(&api);
    chunked
        .write_all(format!("{head}transfer-encoding: chunked\r\n\r\n").as_bytes())
        .expect("open");
    let chunk = format!("1000\r\n{}\r\n", "x".repeat(0x1000));
    // It may be closed before all of it is sent.
    for _ in 0..1000 {
        let _ = chunked.write_all(chunk.as_bytes());
    }
    let said = rest(&mut chunked);
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 413"), "{said}");
    // It says that it will send a lot, and sends a little now and then.
    let mut slow = connect(&api);
    slow.write_all(format!("{head}content-length: 8000\r\n\r\n").as_bytes())
        .expect("open");
    let mut sender = slow.try_clone().expect("a copy");
    let sending = std::thread::spawn(move || {
        let begun = Instant::now();
        while sender.write_all(b" ").is_ok() {
            assert!(begun.elapsed() < PATIENCE, "it is kept");
            std::thread::sleep(Duration::from_millis(500));
        }
    });
    assert_eq!(api.ask("/v1/status", &[]).status, 200);
    let said = rest(&mut slow);
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 408"), "{said}");
    sending.join().expect("it was closed");
    assert_eq!(Processes::of(&mut daemon).child, child, "it is the same process");
}

#[test]
fn unread_streams_of_events_hold_up_nobody() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (mut daemon, api) = super::on_null(&netns, &dir);
    let child = Processes::of(&mut daemon).child;
    let mut deaf: Vec<_> = (0..12).map(|_| connect(&api)).collect();
    for stream in &mut deaf {
        let asked = b"GET /v1/events HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n";
        stream.write_all(asked).expect("open");
    }
    for _ in 0..100 {
        drop(Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted"));
    }
    let all = || {
        let read = api.get("/v1/events");
        (read["lost"].as_u64(), read["events"].as_array().map(Vec::len))
    };
    assert_soon!(all() == (Some(0), Some(200)), "{:?}", all());
    assert_eq!(Processes::of(&mut daemon).child, child, "it is the same process");
}

#[test]
fn requests_in_a_row_are_answered_in_a_row() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (_daemon, api) = super::on_null(&netns, &dir);
    let mut stream = connect(&api);
    let one = "GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n";
    let last = "GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    stream
        .write_all(format!("{}{last}", one.repeat(20)).as_bytes())
        .expect("open");
    let said = rest(&mut stream);
    assert_eq!(said.matches("HTTP/1.1 200 OK").count(), 20, "{said}");
    assert_eq!(said.matches("HTTP/1.1 404 Not Found").count(), 1, "{said}");
}

#[test]
fn client_that_does_not_read_is_given_up_and_no_frame_waits_for_it() {
    require!(Root);
    let dir = super::open_dir();
    let (mut rig, api) = super::rig(&dir);
    let child = Processes::of(&mut rig.daemon).child;
    let mut deaf: Vec<_> = (0..8).map(|_| connect(&api)).collect();
    for stream in &mut deaf {
        stream.set_nonblocking(true).expect("a socket");
        // As much as it takes.
        for _ in 0..2000 {
            if stream
                .write(b"GET /v1/counters HTTP/1.1\r\nhost: x\r\n\r\n")
                .is_err()
            {
                break;
            }
        }
    }
    rig.assert_passes_both_ways();
    assert_eq!(api.ask("/v1/status", &[]).status, 200);
    let places = || procfs::descriptors(child);
    let with_them = places();
    let given_up = wait::until(PATIENCE, || places() + deaf.len() <= with_them);
    assert!(given_up, "{} descriptors of {with_them}", places());
    rig.assert_passes_both_ways();
    // What stops reading a stream of events costs no more.
    assert_eq!(api.ask("/v1/status", &[]).status, 200);
}
