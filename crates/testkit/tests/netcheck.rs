//! netcheck, the traffic checker of tests and benchmarks, compares each byte of a response.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output};
use std::thread;
use testkit::assert_has;

use rstest::rstest;
use testkit::guest::netcheck;
use testkit::require;

const ADDRESS: &str = "127.0.0.1";

/// Sends requests, with what else the command line has.
fn connect(mut command: Command, port: u16, rest: &[&str]) -> Output {
    command.args(["rr", "connect", ADDRESS, &port.to_string()]);
    command.args(rest).output().expect("netcheck runs")
}

fn complaint(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
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
        assert_has(&complaint(&output), &["response 2 has wrong bytes"]);
        assert!(output.stdout.is_empty(), "no figures of what went wrong");
    });
}
