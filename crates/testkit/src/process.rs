//! Child processes as guards, with what they say kept.
//!
//! Both outputs are read by a thread each, line by line, so that a child never blocks on a full pipe and a test can
//! wait for a line. A child dies with the test process, however that ends (prctl(2), PR_SET_PDEATHSIG).
#![allow(unsafe_code)]

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::wait;

/// A child process, ended on drop: SIGKILL if nothing gentler was asked for.
pub struct Running {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    said: Arc<Mutex<String>>,
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
        let said = Arc::default();
        collect(child.stdout.take().expect("piped"), &said);
        collect(child.stderr.take().expect("piped"), &said);
        let stdin = child.stdin.take();
        Self {
            name,
            child,
            stdin,
            said,
        }
    }

    /// Its process number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed so far.
    ///
    /// # Panics
    /// If a reader panicked.
    #[must_use]
    pub fn said(&self) -> String {
        self.said.lock().expect("readers do not panic").clone()
    }

    /// Waits until it has printed `text`.
    ///
    /// # Panics
    /// If it does not.
    pub fn await_text(&mut self, text: &str) {
        // Its last words may be on their way still when it has ended; each reader holds a clone of `said` until then.
        let found = wait::until(wait::SOON, || {
            self.said().contains(text) || (self.ended().is_some() && Arc::strong_count(&self.said) == 1)
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
        // The readers end with the pipes; each holds a clone of `said` until then.
        wait::until(Duration::from_secs(10), || Arc::strong_count(&self.said) == 1);
        status
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
        let tail: Vec<_> = said.lines().rev().take(20).collect();
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

fn collect(pipe: impl Read + Send + 'static, said: &Arc<Mutex<String>>) {
    let said = Arc::clone(said);
    std::thread::spawn(move || {
        let mut line = Vec::new();
        let mut reader = BufReader::new(pipe);
        while reader.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
            said.lock()
                .expect("readers do not panic")
                .push_str(&String::from_utf8_lossy(&line));
            line.clear();
        }
    });
}

/// Runs a command to its end and returns what it printed on its standard output.
///
/// # Panics
/// If it fails; with what it said.
#[must_use]
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
