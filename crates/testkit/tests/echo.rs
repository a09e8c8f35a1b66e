//! `vhost-af-xdp-bench echo`: what comes back is what was sent, by each engine; and nobody who connects does harm.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use testkit::process::assert_complaint;
use testkit::program::{bench, json_of};
use testkit::{NetNs, Running, VethPair, assert_has, procfs, require, wait};

const NEAR: &str = "10.9.0.1";
const FAR: &str = "10.9.0.2";

/// A pair whose ends have addresses.
fn addressed() -> VethPair {
    let pair = VethPair::new();
    for (netns, name, address) in [
        (&pair.near, VethPair::NIC, NEAR),
        (&pair.far, VethPair::WIRE, FAR),
    ] {
        netns.ip(&["link", "set", name, "arp", "on"]);
        netns.ip(&["address", "add", &format!("{address}/24"), "dev", name]);
    }
    pair.await_near();
    pair
}

fn start(netns: &NetNs, args: &[&str]) -> Running {
    let mut command = netns.command(bench());
    command.arg("echo").args(args);
    Running::start(command)
}

/// Starts a server alone; returns it with its port.
fn serve(netns: &NetNs, args: &[&str]) -> (Running, u16) {
    let mut server = start(netns, args);
    server.await_text(": listens");
    let said = server.said();
    let before = said.split(": listens").next().expect("there is one");
    let port = before.rsplit(':').next().and_then(|port| port.parse().ok());
    (server, port.unwrap_or_else(|| panic!("no port in {said}")))
}

/// Starts a server alone with so many places; returns it with its address.
fn serve_with_places(netns: &NetNs, engine: &str, places: &str) -> (Running, SocketAddr) {
    let args = ["--engine", engine, "--listen", "127.0.0.1:0", "--json"];
    let (server, port) = serve(netns, &[&args[..], &["--connections", places]].concat());
    (server, SocketAddr::from(([127, 0, 0, 1], port)))
}

/// The result of the only engine.
fn run_of(said: &str) -> serde_json::Value {
    json_of(said)["runs"][0].clone()
}

/// Runs a client to its end, each byte compared; its result.
fn honest_client(netns: &NetNs, address: &str, further: &[&str]) -> serde_json::Value {
    let args = ["--connect", address, "--verify", "--json"];
    let mut client = start(netns, &[&args, further].concat());
    assert!(client.wait(wait::SOON).success(), "{client}");
    let run = run_of(&client.said());
    assert!(run["messages"].as_u64() > Some(0), "{run}");
    run
}

/// Ends a server; its result.
fn end(mut server: Running) -> serde_json::Value {
    server.signal(Signal::TERM);
    assert!(server.wait(wait::SOON).success(), "{server}");
    run_of(&server.said())
}

#[rstest]
fn each_byte_comes_back_between_namespaces(
    #[values("epoll", "io-uring")] engine: &str,
    #[values("64", "1024", "4096", "16384", "65536")] size: &str,
) {
    require!(Root);
    let pair = addressed();
    let address = format!("{NEAR}:0");
    let args = [
        "--engine",
        engine,
        "--address",
        &address,
        "--client-netns",
        pair.far.name(),
    ];
    let further = ["--size", size, "--verify", "--duration", "0.5", "--json"];
    let mut running = start(&pair.near, &[&args[..], &further].concat());
    assert!(running.wait(wait::SOON).success(), "{running}");
    let run = run_of(&running.said());
    assert_eq!(run["engine"], engine);
    let messages = run["messages"].as_u64().expect("a number");
    assert!(messages > 0, "{run}");
    let rate = run["messages_per_second"].as_f64().expect("a number");
    let bits = rate * 8.0 * size.parse::<f64>().expect("a number");
    let told = run["bits_per_second"].as_f64().expect("a number");
    assert!((told / bits - 1.0).abs() < 1e-6, "{run}");
    assert_eq!(run["server"]["connections"]["accepted"], 24, "{run}");
    let latency = &run["latency_us"];
    let at = |name: &str| latency[name].as_f64().expect("a number");
    assert!(
        0.0 < at("p50") && at("p50") <= at("p99") && at("p99") <= at("most"),
        "{run}"
    );
}

#[rstest]
fn server_alone_serves_clients_of_any_size_one_after_the_other(#[values("epoll", "io-uring")] engine: &str) {
    require!(Root);
    let pair = addressed();
    let address = format!("{NEAR}:0");
    let (server, port) = serve(&pair.near, &["--engine", engine, "--listen", &address, "--json"]);
    let address = format!("{NEAR}:{port}");
    let mut messages = 0;
    for size in ["64", "1500", "65536"] {
        let run = honest_client(&pair.far, &address, &["--size", size, "--duration", "0.3"]);
        messages += run["messages"].as_u64().expect("a number");
    }
    let run = end(server);
    // It has seen those of warming up, too.
    assert!(run["messages"].as_u64() >= Some(messages), "{run}");
    assert_eq!(run["server"]["connections"]["accepted"], 72, "{run}");
    assert_eq!(run["server"]["connections"]["malformed"], 0, "{run}");
    assert!(run["server"]["cpu_percent"].is_number(), "{run}");
}

#[rstest]
fn progress_and_table_name_the_engine(#[values("epoll", "io-uring")] engine: &str) {
    require!(Root);
    let netns = NetNs::new("echo");
    let mut running = start(&netns, &["--engine", engine, "--duration", "0"]);
    running.await_text(": 1 s");
    running.signal(Signal::INT);
    assert!(running.wait(wait::SOON).success(), "{running}");
    let said = running.said();
    assert_has(&said, &[&format!("echo by {engine} at 127.0.0.1:")]);
    assert_has(
        &said,
        &["Kqps", "Gb/s", "server CPU %", "softirq %", "p50 µs", "p99"],
    );
    assert_has(&said, &["ended by signal"]);
}

#[rstest]
#[case::nothing_to_send(&["--size", "63"], "63 is not in 64 to 65536")]
#[case::too_much(&["--size", "65537"], "65537 is not in 64 to 65536")]
#[case::nobody(&["--connections", "0"], "0 is not in 1 to 1024")]
#[case::crowd(&["--connections", "1025"], "'1025' for '--connections <N>'")]
#[case::idle_thread(&["--connections", "2", "--threads", "3"], "--threads 3: choose 1 to 2")]
#[case::no_such_cpu(&["--cpu", "4000"], "--cpu 4000")]
#[case::no_port(&["--connect", "127.0.0.1:0"], "--connect 127.0.0.1:0: name the server's port")]
#[case::no_address(&["--listen", "7000"], "--listen 7000: write an address and a port")]
#[case::address_of_nobody(&["--listen", "192.0.2.1:0"], "--listen 192.0.2.1:0: cannot listen there")]
#[case::no_netns(&["--client-netns", "none-such"], "--client-netns none-such")]
#[case::two_roles(&["--listen", "127.0.0.1:0", "--connect", "127.0.0.1:1"], "--connect")]
#[case::negative(&["--duration", "-1"], "'-1' for '--duration <SECS>'")]
#[case::nobody_there(&["--connect", "127.0.0.1:1"], "--connect 127.0.0.1:1: cannot connect, start")]
#[case::of_raw_sockets(&["--ifname", "lo", "--queue", "0"], "--ifname")]
#[case::unreadable(&["--size", "x"], "`vhost-af-xdp-bench echo --help` explains")]
fn bad_value_is_one_line_that_names_it(#[case] args: &[&str], #[case] named: &str) {
    require!(Root);
    let netns = NetNs::new("echo");
    start(&netns, args).assert_complains(&[named]);
}

#[test]
fn address_that_the_client_has_no_way_to_is_named_with_the_remedy() {
    require!(Root);
    let (netns, elsewhere) = (NetNs::new("echo"), NetNs::new("echo-elsewhere"));
    let words = ["--address 127.0.0.1:0: cannot connect", "choose an --address"];
    start(&netns, &["--client-netns", elsewhere.name()]).assert_complains(&words);
}

/// Linux has it without a device from 7.1 on, for root.
#[test]
fn zero_copy_is_had_or_refused_by_name() {
    require!(Root);
    let netns = NetNs::new("echo");
    let args = ["--engine", "zcrx", "--verify", "--duration", "0.3", "--json"];
    let mut running = start(&netns, &args);
    let is_had = running.wait(wait::SOON).success();
    let said = running.said();
    if is_had {
        assert!(run_of(&said)["messages"].as_u64() > Some(0), "{said}");
    } else {
        assert_complaint(
            running.wait(wait::SOON),
            &said,
            &["--engine zcrx", "7.1", "--engine io-uring, which"],
        );
    }
    // Among several it is no error: the others are measured.
    let mut running = start(&netns, &["--engine", "epoll,zcrx", "--duration", "0.3", "--json"]);
    assert!(running.wait(wait::SOON).success(), "{running}");
    let runs = json_of(&running.said())["runs"].clone();
    assert!(runs[0]["messages"].as_u64() > Some(0), "{runs}");
    assert_eq!(runs[1]["engine"], "zcrx", "{runs}");
    assert_eq!(runs[1]["reason"].is_string(), !is_had, "{runs}");
}

/// A veth has no queue that zero-copy receive could lease.
#[test]
fn interface_without_zero_copy_is_refused_by_name() {
    require!(Root);
    let pair = addressed();
    let args = ["--engine", "zcrx", "--ifname", VethPair::NIC, "--duration", "0.3"];
    start(&pair.near, &args).assert_complains(&["--engine zcrx", "zcrx"]);
    start(&pair.near, &[&args[..], &["--queue", "7"]].concat())
        .assert_complains(&["--queue 7: nic0 has 1 receive queue"]);
}

#[test]
fn port_that_is_taken_is_named() {
    require!(Root);
    let netns = NetNs::new("echo");
    let (_server, port) = serve(&netns, &["--listen", "127.0.0.1:0"]);
    let address = format!("127.0.0.1:{port}");
    start(&netns, &["--listen", &address]).assert_complains(&[&address, "free port", "ss -ltnp"]);
}

#[test]
fn server_that_dies_ends_the_client_with_the_result_so_far() {
    require!(Root);
    let netns = NetNs::new("echo");
    let (mut server, port) = serve(&netns, &["--listen", "127.0.0.1:0"]);
    let address = format!("127.0.0.1:{port}");
    let mut client = start(&netns, &["--connect", &address, "--duration", "0"]);
    client.await_text(": 1 s");
    server.signal(Signal::KILL);
    assert!(!client.wait(wait::SOON).success(), "{client}");
    let said = client.said();
    assert_has(&said, &["ended by error"]);
    assert_has(&said, &[&format!("--connect {address}: connection ")]);
}

#[test]
fn somebody_else_at_the_port_is_found_out() {
    require!(Root);
    let netns = NetNs::new("echo");
    let listener = netns.enter(|| TcpListener::bind("127.0.0.1:0")).expect("a port");
    let address = listener.local_addr().expect("it is bound").to_string();
    let mut client = start(
        &netns,
        &[
            "--connect",
            &address,
            "--connections",
            "1",
            "--threads",
            "1",
            "--verify",
        ],
    );
    let (mut stream, _) = listener.accept().expect("it connects");
    stream.write_all(&vec![0; 65536]).expect("it reads");
    assert!(!client.wait(wait::SOON).success(), "{client}");
    let said = client.said();
    assert_has(&said, &["bytes of a reply are not those of its message"]);
}

/// What somebody who is not a client of ours does with a connection.
fn connect(netns: &NetNs, address: SocketAddr) -> TcpStream {
    let stream = netns.enter(|| TcpStream::connect_timeout(&address, wait::SOON));
    let stream = stream.expect("the kernel accepts it");
    stream.set_read_timeout(Some(wait::SOON)).expect("a timeout");
    stream
}

fn header(length: u32) -> Vec<u8> {
    [&b"Echo"[..], &length.to_be_bytes()].concat()
}

/// Whether the server has ended the connection.
fn is_over(stream: &mut TcpStream) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[rstest]
fn garbage_ends_its_connection_and_no_other(#[values("epoll", "io-uring")] engine: &str) {
    require!(Root);
    let netns = NetNs::new("echo");
    let (server, port) = serve(&netns, &["--engine", engine, "--listen", "127.0.0.1:0", "--json"]);
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut honest = connect(&netns, address);
    let two = [header(64), vec![1; 56], header(64), vec![2; 56]].concat();
    for garbage in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        header(0),
        header(63),
        header(65537),
        header(u32::MAX),
        two,
    ] {
        let mut stream = connect(&netns, address);
        stream.write_all(&garbage).expect("room in the socket");
        assert!(is_over(&mut stream), "{garbage:?}");
    }
    let message = [header(64), (0..56).collect()].concat();
    honest.write_all(&message).expect("it is served");
    let mut reply = vec![0; 64];
    honest.read_exact(&mut reply).expect("it is served");
    assert_eq!(reply, message);
    drop(honest);
    let run = end(server);
    assert_eq!(run["server"]["connections"]["malformed"], 6, "{run}");
}

#[rstest]
fn crowd_of_hostile_clients_has_its_bounds(#[values("epoll", "io-uring")] engine: &str) {
    require!(Root);
    let netns = NetNs::new("echo");
    let (server, address) = serve_with_places(&netns, engine, "64");
    let descriptors = || procfs::descriptors(server.pid());
    // Who sends byte by byte, and who takes no reply.
    let mut slow: Vec<_> = (0..8).map(|_| connect(&netns, address)).collect();
    let mut deaf: Vec<_> = (0..8).map(|_| connect(&netns, address)).collect();
    for stream in &mut deaf {
        stream.set_nonblocking(true).expect("a socket");
        let message = [header(65536), vec![9; 65528]].concat();
        while stream.write(&message).is_ok_and(|count| count == message.len()) {}
    }
    for byte in [header(65536), vec![7; 4000]].concat() {
        slow.iter_mut().for_each(|stream| {
            // Nothing is to be put together on the way.
            let _ = stream.set_nodelay(true);
            stream.write_all(&[byte]).expect("it is read");
        });
    }
    // Who comes and is reset, many of them, beside an honest client.
    let mut most = 0;
    let rounds = wait::rounds_during(
        || {
            let honest = ["--connections", "6", "--threads", "2", "--duration", "2"];
            honest_client(&netns, &address.to_string(), &honest);
        },
        |_| {
            let crowd: Vec<_> = (0..8).map(|_| connect(&netns, address)).collect();
            for stream in crowd {
                rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).expect("a socket");
                let mut stream = stream;
                let _ = stream.write(b"Echo");
            }
            most = most.max(descriptors());
        },
    );
    assert!(rounds > 0);
    // All places, and some that are just being refused, beside its own.
    assert!(most < 64 + 16 + 32, "{most} descriptors");
    // Twice a message for each place, and the program itself.
    let memory = procfs::number(server.pid(), "VmHWM") << 10;
    assert!(memory < (64 << 17) + (32 << 20), "{memory} bytes");
    // A place that was taken is free again.
    drop((slow, deaf));
    let again = wait::until(wait::SOON, || {
        let mut stream = connect(&netns, address);
        let message = [header(64), vec![1; 56]].concat();
        let mut reply = vec![0; 64];
        stream.write_all(&message).is_ok() && stream.read_exact(&mut reply).is_ok() && reply == message
    });
    assert!(again);
    let run = end(server);
    assert!(run["server"]["connections"]["cut"].as_u64() > Some(0), "{run}");
}

#[rstest]
fn who_finds_no_place_is_refused(#[values("epoll", "io-uring")] engine: &str) {
    require!(Root);
    let netns = NetNs::new("echo");
    let (server, address) = serve_with_places(&netns, engine, "4");
    let mut held: Vec<_> = (0..4).map(|_| connect(&netns, address)).collect();
    for stream in &mut held {
        // It is accepted for sure when it has been served.
        let message = [header(64), vec![1; 56]].concat();
        stream.write_all(&message).expect("it is served");
        stream.read_exact(&mut [0; 64]).expect("it is served");
    }
    let mut client = start(&netns, &["--connect", &address.to_string(), "--duration", "1"]);
    assert!(!client.wait(wait::SOON).success(), "{client}");
    assert_has(&client.said(), &["--connections"]);
    drop(held);
    let run = end(server);
    assert_eq!(run["server"]["connections"]["accepted"], 4, "{run}");
    assert!(
        run["server"]["connections"]["refused"].as_u64() > Some(0),
        "{run}"
    );
}
