//! Child processes as guards, with what they say kept.
//!
//! Both outputs are read by a thread each, so that a child never blocks on a full pipe. Who asks what was said gets all
//! that was printed before, however busy the machine is: what is still in a pipe is waited for. A child dies with the
//! test process, however that ends (prctl(2), PR_SET_PDEATHSIG).
#![allow(unsafe_code)]

use std::fmt;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{ioctl_fionread, read, retry_on_intr};
use rustix::process::{Pid, Signal};

use crate::{procfs, wait};

/// A child process, ended on drop: SIGKILL if nothing gentler was asked for.
#[must_use]
pub struct Running {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    outputs: Arc<Outputs>,
}

/// What a child prints. Each thread that reads holds a clone until its pipe's last writer has gone.
struct Outputs {
    pipes: [OwnedFd; 2],
    said: Mutex<Vec<u8>>,
}

impl Running {
    /// Starts a command. What it prints on both outputs is kept together.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(mut command: Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // SAFETY: between fork and exec only prctl is called, which is async-signal-safe and passes no memory.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let stdout = child.stdout.take().expect("piped");
        let stderr = child.stderr.take().expect("piped");
        let outputs = Arc::new(Outputs {
            pipes: [stdout.into(), stderr.into()],
            said: Mutex::default(),
        });
        for at in 0..outputs.pipes.len() {
            let outputs = Arc::clone(&outputs);
            std::thread::spawn(move || outputs.collect(at));
        }
        let stdin = child.stdin.take();
        Self {
            name,
            child,
            stdin,
            outputs,
        }
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed so far.
    ///
    /// # Panics
    /// If a reader panicked.
    pub fn said(&self) -> String {
        let mut said = String::new();
        // Of what prints without end it is all until then.
        wait::until(wait::SOON, || self.outputs.copy_to(&mut said));
        said
    }

    /// Waits until it has printed `text`.
    ///
    /// # Panics
    /// If it does not.
    pub fn await_text(&mut self, text: &str) {
        // A child of its own may say something still when it has ended.
        let found = wait::until(wait::SOON, || {
            self.said().contains(text) || (self.ended().is_some() && self.outputs_ended())
        });
        assert!(found && self.said().contains(text), "{self} never said {text:?}");
    }

    /// Its status, if it has ended.
    ///
    /// # Panics
    /// If the system does not know it.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    /// Panics, with what it said, if it has ended.
    ///
    /// # Panics
    /// See there.
    pub fn check(&mut self) {
        let status = self.ended();
        assert!(status.is_none(), "{self} ended ({status:?})");
    }

    /// Waits for its end; what it printed is complete afterwards.
    ///
    /// # Panics
    /// If it does not end in time.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let status = wait::until_some(limit, || self.ended());
        let status = status.unwrap_or_else(|| panic!("{self} did not end within {limit:?}"));
        wait::until(Duration::from_secs(10), || self.outputs_ended());
        status
    }

    /// Waits until it has failed, with one line that contains all of `words`.
    ///
    /// # Panics
    /// If that is not so.
    #[track_caller]
    pub fn assert_complains(mut self, words: &[&str]) {
        let status = self.wait(wait::SOON);
        assert_complaint(status, &self.said(), words);
    }

    fn outputs_ended(&self) -> bool {
        Arc::strong_count(&self.outputs) == 1
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// If it has ended.
    pub fn signal(&mut self, signal: Signal) {
        self.check();
        let pid = Pid::from_raw(self.child.id().cast_signed()).expect("a process number is not zero");
        rustix::process::kill_process(pid, signal).expect("it is our child and has not been waited for");
    }

    /// Waits until its first thread has slept `count` times more, and so has done what it does between two sleeps, however
    /// slow the machine is. The thread must wake without help.
    ///
    /// # Panics
    /// If it does not, or the process ends.
    pub fn await_sleeps(&mut self, count: u64) {
        let before = self.sleeps();
        let slept = wait::until(wait::SOON, || {
            self.check();
            self.sleeps() >= before + count
        });
        assert!(slept, "{self} does not wake again and again");
    }

    /// How often its first thread has given up its CPU by itself.
    fn sleeps(&self) -> u64 {
        procfs::number(self.pid(), "voluntary_ctxt_switches")
    }

    /// Writes to its standard input.
    ///
    /// # Panics
    /// If nobody reads.
    pub fn type_in(&mut self, text: &str) {
        self.stdin
            .as_mut()
            .expect("piped")
            .write_all(text.as_bytes())
            .expect("it reads its standard input");
    }
}

impl fmt::Display for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = self.said();
        let tail: Vec<_> = said.lines().rev().take(60).collect();
        write!(f, "{} (pid {}), which said:", self.name, self.pid())?;
        tail.iter().rev().try_for_each(|line| write!(f, "\n    {line}"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{self}");
        }
    }
}

impl Outputs {
    /// Keeps what comes by a pipe, until its end.
    fn collect(&self, at: usize) {
        let (pipe, mut bytes) = (&self.pipes[at], [0; 4096]);
        loop {
            // Read under the lock: what has left the pipe is in `said`.
            if poll(&mut [PollFd::new(pipe, PollFlags::IN)], None).is_err() {
                continue;
            }
            let mut said = self.said.lock().expect("readers do not panic");
            match retry_on_intr(|| read(pipe, &mut bytes)) {
                Ok(count @ 1..) => said.extend_from_slice(&bytes[..count]),
                Ok(0) | Err(_) => break,
            }
        }
    }

    /// What was printed; whether that is all, and nothing of it is in a pipe.
    fn copy_to(&self, text: &mut String) -> bool {
        let said = self.said.lock().expect("readers do not panic");
        *text = String::from_utf8_lossy(&said).into_owned();
        let is_read = |pipe| ioctl_fionread(pipe).is_ok_and(|bytes| bytes == 0);
        self.pipes.iter().all(is_read)
    }
}

/// Asserts that a process which ended with `status` has failed, and that it printed one line with all of `words`.
///
/// # Panics
/// If that is not so.
#[track_caller]
pub fn assert_complaint(status: ExitStatus, said: &str, words: &[&str]) {
    assert!(!status.success(), "it should have failed: {said}");
    assert_eq!(said.trim_end().lines().count(), 1, "one line, and not: {said}");
    assert_has(said, words);
}

/// Asserts that a text has all of `words`.
///
/// # Panics
/// If it has not.
#[track_caller]
pub fn assert_has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

/// Runs a command to its end and returns what it printed on its standard output.
///
/// # Panics
/// If it fails; with what it said.
pub fn output_of(program: &str, args: &[&str]) -> String {
    let output = Command::new(program)
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let (said, complained) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{program} {args:?}: {said}{complained}");
    said.into_owned()
}

/// As [`output_of`], for what prints nothing of interest.
///
/// # Panics
/// If it fails.
pub fn run(program: &str, args: &[&str]) {
    let _ = output_of(program, args);
}
