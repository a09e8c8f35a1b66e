//! Writes to clients, which may read slowly or not at all.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use model::control::{Answer, Refused, line};
use serde::Serialize;

/// How long a client may take to read an answer.
pub(super) const WRITE: Duration = Duration::from_secs(10);

/// Answers a request.
/// Errors: the client is gone, or does not read.
pub(crate) fn answer<T: Serialize>(stream: &UnixStream, result: Result<T, Refused>) -> io::Result<()> {
    write_within(stream, &line(&Answer::from(result))?, WRITE)
}

/// Writes all of `bytes`.
/// Errors: the peer is gone, or does not read them within `time`.
pub(super) fn write_within(mut stream: &UnixStream, mut bytes: &[u8], time: Duration) -> io::Result<()> {
    let until = Instant::now() + time;
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn client_that_reads_ever_so_slowly_is_given_up() {
        let (mut client, stream) = UnixStream::pair().expect("sockets");
        let reads = std::thread::spawn(move || {
            while matches!(client.read(&mut [0; 64]), Ok(1..)) {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let begun = Instant::now();
        let all = vec![0; 16 << 20];
        let error = write_within(&stream, &all, Duration::from_millis(300)).expect_err("slow");
        assert!(
            matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock),
            "{error}"
        );
        assert!(begun.elapsed() < Duration::from_secs(20));
        // What the client has not read yet stays readable: its thread ends later.
        drop((stream, reads));
    }
}
