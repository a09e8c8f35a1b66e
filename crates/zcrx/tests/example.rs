//! The example server, as a program.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use support::stream;

#[test]
fn echo_gives_back_what_it_gets_and_ends_with_its_input() {
    let tests = std::env::current_exe().unwrap();
    // Cargo builds examples beside the directory of tests.
    let program = tests.parent().unwrap().parent().unwrap().join("examples/echo");
    let mut server = Command::new(program)
        .args(["127.0.0.1:0", "auto"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(server.stdout.take().unwrap());
    let mut said = String::new();
    output.read_line(&mut said).unwrap();
    let address = said.trim_end().rsplit(' ').next().unwrap();
    let mut socket = TcpStream::connect(address).unwrap();
    let bytes = stream(7, 100_000);
    let mut back = vec![0; bytes.len()];
    socket.write_all(&bytes).unwrap();
    socket.read_exact(&mut back).unwrap();
    assert!(back == bytes, "{said}");
    drop(server.stdin.take());
    output.read_to_string(&mut said).unwrap();
    assert!(
        server.wait().unwrap().success() && said.contains("bytes: 100000"),
        "{said}"
    );
}
