//! netcheck, the traffic checker of tests and benchmarks: requests and responses are whole, and each byte is compared.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};
use std::thread;

use rstest::rstest;
use testkit::guest::netcheck;
use testkit::{NetNs, Running, require, wait};

const ADDRESS: &str = "127.0.0.1";
const PORT: u16 = 7005;

/// A listener in a namespace of its own.
fn listen() -> (NetNs, Running) {
    let ns = NetNs::new("netcheck");
    let mut command = ns.command(netcheck());
    command.args(["rr", "listen", ADDRESS, &PORT.to_string()]);
    (ns, Running::start(command))
}

/// Sends requests, with what else the command line has.
fn connect(mut command: Command, port: u16, rest: &[&str]) -> Output {
    command.args(["rr", "connect", ADDRESS, &port.to_string()]);
    command.args(rest).output().expect("netcheck runs")
}

fn complaint(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[rstest]
fn requests_of_each_size_get_their_responses_on_each_connection(
    #[values("1", "64", "1024", "8192", "65536")] bytes: &str,
    #[values("1", "4")] connections: &str,
) {
    require!(Root, Qemu);
    let (ns, _listener) = listen();
    let output = connect(ns.command(netcheck()), PORT, &["0.1", bytes, connections]);
    assert!(output.status.success(), "{}", complaint(&output));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let figures: Vec<f64> = said
        .split_whitespace()
        .map_while(|word| word.parse().ok())
        .collect();
    let [per_second, median_us, p99_us] = figures[..] else {
        panic!("{said}");
    };
    assert!(
        per_second > 0.0 && median_us > 0.0 && p99_us >= median_us,
        "{said}"
    );
}

#[test]
fn response_begins_when_the_request_is_whole() {
    require!(Root, Qemu);
    let (ns, _listener) = listen();
    let connected = || wait::until_some(wait::SOON, || TcpStream::connect((ADDRESS, PORT)).ok());
    let mut stream = ns.enter(connected).expect("netcheck listens");
    let request = *b"whole it is";
    let size = u32::try_from(request.len()).expect("short");
    stream.write_all(&size.to_be_bytes()).expect("sent");
    stream.write_all(&request[..10]).expect("sent");
    let mut response = [0; 11];
    stream.set_read_timeout(Some(wait::QUIET)).expect("a socket");
    let early = stream.read(&mut response);
    let nothing = |error: &std::io::Error| error.kind() == ErrorKind::WouldBlock;
    assert!(early.as_ref().is_err_and(nothing), "{early:?}");
    stream.write_all(&request[10..]).expect("sent");
    stream.set_read_timeout(Some(wait::SOON)).expect("a socket");
    stream.read_exact(&mut response).expect("the response");
    assert_eq!(response, request);
}

/// Answers the first connection's requests of four bytes; the third one is passed to `spoil` before.
fn answer(listener: &TcpListener, spoil: fn(&mut [u8; 4])) {
    let (mut stream, _) = listener.accept().expect("netcheck connects");
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes).expect("the size");
    assert_eq!(bytes, 4u32.to_be_bytes());
    for number in 0.. {
        if stream.read_exact(&mut bytes).is_err() {
            return;
        }
        if number == 2 {
            spoil(&mut bytes);
        }
        if stream.write_all(&bytes).is_err() {
            return;
        }
    }
}

#[rstest]
#[case::first(|bytes: &mut [u8; 4]| bytes[0] ^= 1)]
#[case::last(|bytes: &mut [u8; 4]| bytes[3] ^= 0x80)]
#[case::moved(|bytes: &mut [u8; 4]| bytes.rotate_left(1))]
fn wrong_byte_of_a_response_is_told(#[case] spoil: fn(&mut [u8; 4])) {
    require!(Root, Qemu);
    let listener = TcpListener::bind((ADDRESS, 0)).expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    thread::scope(|scope| {
        scope.spawn(|| answer(&listener, spoil));
        let output = connect(Command::new(netcheck()), port, &["10", "4"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(
            complaint(&output).contains("response 2 has wrong bytes"),
            "{}",
            complaint(&output)
        );
        assert!(output.stdout.is_empty(), "no figures of what went wrong");
    });
}

#[rstest]
#[case::no_byte(&["1", "0"], "0 bytes over 1 connections")]
#[case::too_many_bytes(&["1", "65537"], "65537 bytes over 1 connections")]
#[case::no_connection(&["1", "1", "0"], "1 bytes over 0 connections")]
#[case::too_many_connections(&["1", "1", "65"], "1 bytes over 65 connections")]
fn request_that_cannot_be_had_is_refused(#[case] rest: &[&str], #[case] named: &str) {
    require!(Root, Qemu);
    let output = connect(Command::new(netcheck()), PORT, rest);
    assert_eq!(output.status.code(), Some(2));
    assert!(complaint(&output).contains(named), "{}", complaint(&output));
}
