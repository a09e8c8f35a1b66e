//! A hostile VMM and its file system, which answers as long as it likes: two processes that tests start (testkit's
//! `stalled.rs`).
//!
//! ```text
//! stalled serve BYTES [late]       a file system of one file of so many bytes, mounted nowhere; says where it can be
//!                                  opened
//! stalled give ROLE FILE SOCKET    a VMM that gives it as `ram`, `buffers`, `log` or `inflight` to the back end at
//!                                  SOCKET
//! stalled write FILE DESCRIPTOR    a process that writes a frame of it to a tap device, whose descriptor it inherited
//! ```
//!
//! Theory of operation. Closing a file of FUSE waits for an answer of its server, and nothing ends that wait but the
//! end of the server: so a process with such a file must not be the server itself, nor start a program while nothing is
//! answered, which closes copies of its files. Hence these processes. Either ends with its standard input, and after a
//! while in any case; both end with the process that started them. With the server its connection ends: all who wait
//! get an error. The file system is mounted nowhere, and nothing is left of it.

mod server;
mod vmm;
mod writer;

use std::io::BufRead;
use std::process::ExitCode;
use std::time::Duration;

/// After so long it ends, even if somebody waits: nothing that a test does takes half of it.
const LIMIT: Duration = Duration::from_secs(300);

fn main() -> ExitCode {
    std::thread::spawn(|| {
        std::thread::sleep(LIMIT);
        eprintln!("stalled: ends after {} s", LIMIT.as_secs());
        std::process::exit(1);
    });
    let args: Vec<_> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", bytes] => server::serve(bytes.parse().expect("a number"), false),
        ["serve", bytes, "late"] => server::serve(bytes.parse().expect("a number"), true),
        ["give", role, file, socket] => vmm::give(role, file.as_ref(), socket.as_ref()),
        ["write", file, descriptor] => writer::write(file.as_ref(), descriptor.parse().expect("a number")),
        _ => {
            eprintln!("stalled serve, give or write: see its source; the tests are what calls it");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// The next line of the standard input. At its end this process ends.
fn line() -> String {
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line) {
        Ok(1..) => line.trim_end().to_owned(),
        _ => std::process::exit(0),
    }
}
