//! The example server, as a program.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use support::stream;

/// Descriptors of a server that is short of them.
const LIMIT: usize = 32;
/// Time limit for a server that hangs.
const LONGEST: Duration = Duration::from_secs(60);

fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    // Cargo builds examples beside the directory of tests.
    tests.parent().unwrap().parent().unwrap().join("examples/echo")
}

/// Starts the server; returns it, its output, and its first line, which ends with its address.
fn serve(command: &mut Command) -> (Child, BufReader<ChildStdout>, String) {
    let mut server = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(server.stdout.take().unwrap());
    let mut said = String::new();
    output.read_line(&mut said).unwrap();
    (server, output, said)
}

fn address(said: &str) -> &str {
    said.trim_end().rsplit(' ').next().unwrap()
}

#[test]
fn who_connects_in_crowds_does_not_keep_others_out_when_they_are_gone() {
    let mut command = Command::new("sh");
    let limited = format!("ulimit -n {LIMIT}; exec \"$0\" 127.0.0.1:0 copy");
    let (mut server, _output, said) = serve(command.arg("-c").arg(limited).arg(program()));
    let connect = || TcpStream::connect(address(&said)).unwrap();
    let crowd: Vec<_> = (0..2 * LIMIT).map(|_| connect()).collect();
    // Until there is no descriptor left: then accepting fails.
    let directory = format!("/proc/{}/fd", server.id());
    let started = Instant::now();
    while std::fs::read_dir(&directory).unwrap().count() < LIMIT {
        assert!(started.elapsed() < LONGEST);
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(100));
    drop(crowd);
    let mut socket = connect();
    socket.set_read_timeout(Some(LONGEST)).unwrap();
    socket.write_all(b"x").unwrap();
    socket.read_exact(&mut [0]).unwrap();
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success());
}

#[test]
fn echo_gives_back_what_it_gets_and_ends_with_its_input() {
    let (mut server, mut output, mut said) = serve(Command::new(program()).args(["127.0.0.1:0", "auto"]));
    let mut socket = TcpStream::connect(address(&said)).unwrap();
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
