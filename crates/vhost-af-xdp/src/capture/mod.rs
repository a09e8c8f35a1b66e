//! `vhost-af-xdp capture`: writes the frames that a daemon sends to a pcapng file.
//!
//! A daemon of another user may send anything: lengths are checked, and its texts are written to the terminal and the
//! file only up to a length. [`connection`] has replaced their control characters.

mod pcapng;

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use model::control::{CaptureBegun, CaptureRequest};

use self::pcapng::PcapNg;
use crate::api::capture::link::{End, Message, message_of};
use crate::cli::capture::{CaptureArgs, CaptureClock, CaptureDirection};
use crate::termination;
use client::connection::{self, Error};
use dataplane::policy::capture::SHOWN_BYTES;

/// Pause between two checks for the end.
const LOOK: Duration = Duration::from_millis(100);
/// How long the daemon may take to send the rest after the client has ended the capture.
const REST: Duration = Duration::from_secs(5);
/// Most notes of a daemon about what is not captured, and their length.
const MOST_NOTES: usize = 8;
const LONGEST_NOTE: usize = 500;

/// Captures until there are enough frames, the time is over, or a signal or the daemon ends it.
/// Errors: no daemon captures frames of the port, or they cannot be written.
pub(crate) fn run(args: &CaptureArgs) -> anyhow::Result<()> {
    let to_stdout = args.write == Path::new("-");
    if to_stdout && io::stdout().is_terminal() {
        bail!(
            "--write -: this is for a program, not for a terminal: add `| tcpdump -n -r -`, or name a file"
        );
    }
    let signalled = termination::flag()?;
    let control = match &args.control {
        Some(path) => path.clone(),
        None => daemon_with(&args.port)?,
    };
    let request = CaptureRequest {
        port: args.port.clone(),
        from_guest: args.direction != CaptureDirection::ToGuest,
        to_guest: args.direction != CaptureDirection::FromGuest,
    };
    let (stream, rest, CaptureBegun { notes }) = match connection::capture(&control, request) {
        Ok(begun) => begun,
        Err(Error::Refused(refused)) => bail!("{}", refused.message),
        Err(error) => {
            return Err(error).with_context(|| format!("no daemon shows frames at {}", control.display()));
        }
    };
    let cut = |note: &String| note.chars().take(LONGEST_NOTE).collect();
    let notes: Vec<String> = notes.iter().take(MOST_NOTES).map(cut).collect();
    notes.iter().for_each(|note| eprintln!("note: {note}"));
    let file = output(&args.write, to_stdout)?;
    let mut writer = Writer {
        file: PcapNg::new(BufWriter::new(file), args.clock == CaptureClock::Nic),
        frames: 0,
        most: args.count.unwrap_or(u64::MAX),
    };
    eprintln!(
        "{}: capturing the first {SHOWN_BYTES} bytes of each frame",
        args.port
    );
    let until = args
        .duration
        .map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let is_over = || signalled.load(Relaxed) || until.is_some_and(|until| Instant::now() >= until);
    match writer
        .begin(&args.port, &notes)
        .and_then(|()| writer.copy((&stream, rest), is_over))
    {
        Ok(ended) => tell(&args.port, writer.frames, ended),
        // The reader of the pipe has closed it.
        Err(error) if to_stdout && error.kind() == ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot write {}", args.write.display())),
    }
}

/// The control socket of the daemon that has this port.
/// Errors: none has, or several have.
fn daemon_with(port: &str) -> anyhow::Result<PathBuf> {
    let (mut found, mut others) = (Vec::new(), Vec::new());
    for (path, status) in connection::found() {
        let Ok(status) = status else { continue };
        match status.ports.iter().any(|its| its.name == port) {
            true => found.push(path),
            false => others.extend(status.ports.into_iter().map(|its| its.name)),
        }
    }
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] if others.is_empty() => bail!("no daemon with ports found: name its socket with --control PATH"),
        [] => bail!("no daemon has a port {port}: there are {}", others.join(", ")),
        [first, ..] => bail!(
            "{} daemons have a port {port}: name one with --control PATH, as {}",
            found.len(),
            first.display()
        ),
    }
}

/// Opens the output. A file is readable for this user only: guests' frames are confidential.
/// Errors: it cannot be written, or exists and belongs to another user.
fn output(path: &Path, to_stdout: bool) -> anyhow::Result<File> {
    if to_stdout {
        return Ok(File::from(
            rustix::io::dup(io::stdout()).context("no standard output")?,
        ));
    }
    let cannot = || format!("cannot write {}", path.display());
    let mut options = OpenOptions::new();
    match options.write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => return made.with_context(cannot),
    }
    let file = OpenOptions::new().write(true).open(path).with_context(cannot)?;
    let there = file.metadata().with_context(cannot)?;
    // A pipe stores nothing, and its reader could read it before, too.
    if there.is_file() {
        let (owner, user) = (there.uid(), rustix::process::geteuid().as_raw());
        if owner != user {
            bail!(
                "{} belongs to user {owner}, who must not see what guests send: name another file",
                path.display()
            );
        }
        file.set_permissions(Permissions::from_mode(0o600))
            .with_context(cannot)?;
        file.set_len(0).with_context(cannot)?;
    }
    Ok(file)
}

/// How a capture ended.
#[derive(Clone, Copy)]
enum Ended {
    /// All messages were received: how many frames were lost, and whether the port was removed.
    Whole { lost: u64, port_gone: bool },
    /// The daemon ended, or did not send the rest in time.
    Cut,
    /// The daemon sent something else than a message.
    Wrong,
}

fn tell(port: &str, frames: u64, ended: Ended) -> anyhow::Result<()> {
    match ended {
        Ended::Whole { lost, port_gone } => {
            let gone = if port_gone { ", and the port is gone" } else { "" };
            let lost = match lost {
                0 => "none lost".to_owned(),
                lost => format!("{lost} more lost, as they were not read fast enough"),
            };
            eprintln!("{port}: {frames} frames captured, {lost}{gone}");
            Ok(())
        }
        Ended::Cut => bail!("the daemon ended: {frames} frames captured until then, others may be lost"),
        Ended::Wrong => bail!("the daemon sent an invalid message: is it another version?"),
    }
}

struct Writer<W: Write> {
    file: PcapNg<W>,
    frames: u64,
    most: u64,
}

impl<W: Write> Writer<W> {
    fn begin(&mut self, port: &str, notes: &[String]) -> io::Result<()> {
        self.file.begin(port, notes)?;
        self.file.flush()
    }

    /// Writes frames until the capture is over, then the rest.
    /// Errors: it cannot be written.
    fn copy(
        &mut self,
        (mut stream, rest): (&UnixStream, Vec<u8>),
        is_over: impl Fn() -> bool,
    ) -> io::Result<Ended> {
        let mut part = vec![0; 64 << 10];
        let mut bytes = rest;
        let mut asked: Option<Instant> = None;
        stream.set_read_timeout(Some(LOOK))?;
        let ended = loop {
            if let Some(ended) = self.messages(&mut bytes)? {
                break ended;
            }
            // The file's reader gets everything that has arrived.
            self.file.flush()?;
            if asked.is_none() && (self.frames >= self.most || is_over()) {
                asked = Some(Instant::now());
                // Fails if the daemon has closed the connection, which the next read reports.
                let _ = stream.shutdown(Shutdown::Write);
            }
            if asked.is_some_and(|asked| asked.elapsed() > REST) {
                break Ended::Cut;
            }
            match stream.read(&mut part) {
                Ok(0) => break Ended::Cut,
                Ok(read) => bytes.extend_from_slice(&part[..read]),
                Err(error) if is_later(error.kind()) => continue,
                Err(_) => break Ended::Cut,
            }
        };
        if let Ended::Whole { lost, .. } = ended {
            self.file.end(self.frames, lost)?;
        }
        self.file.flush()?;
        Ok(ended)
    }

    /// Writes the frames in these bytes; an incomplete message is left in `bytes`. `Some`: the capture is over.
    fn messages(&mut self, bytes: &mut Vec<u8>) -> io::Result<Option<Ended>> {
        let mut at = 0;
        let ended = loop {
            match message_of(&bytes[at..]) {
                Ok(Some((Message::Frame(record), len))) => {
                    at += len;
                    if self.frames < self.most {
                        self.frames += 1;
                        self.file.frame(&record)?;
                    }
                }
                Ok(Some((Message::End { why, lost }, _))) => {
                    let port_gone = why == End::PortGone;
                    break Some(Ended::Whole { lost, port_gone });
                }
                Ok(None) => break None,
                Err(_) => break Some(Ended::Wrong),
            }
        };
        bytes.drain(..at);
        Ok(ended)
    }
}

fn is_later(kind: ErrorKind) -> bool {
    [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted].contains(&kind)
}
