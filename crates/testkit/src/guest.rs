//! A real Linux guest under QEMU, through `scripts/guest`.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use tempfile::TempDir;

use crate::daemon::private_dir;
use crate::{Qmp, wait};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/guest");

/// A guest that has booted. Ended on drop.
pub struct Guest {
    state: TempDir,
}

impl Guest {
    /// Boots one. `backend` is `--socket PATH` (a back end listens there) or `--listen PATH` (QEMU does); `address` is its
    /// eth0's, with a prefix length.
    ///
    /// # Panics
    /// If it does not come up.
    #[must_use]
    pub fn boot(backend: (&str, &Path), address: &str, options: &[&str]) -> Self {
        let guest = Self { state: private_dir() };
        let mut command = guest.script("boot");
        command
            .arg(backend.0)
            .arg(backend.1)
            .args(["--ip", address])
            .args(options);
        let output = command.output().expect("scripts/guest runs");
        assert!(
            output.status.success(),
            "the guest did not boot: {}",
            text(&output)
        );
        guest
    }

    /// Runs a command in its shell and returns what it printed.
    ///
    /// # Panics
    /// If it fails.
    #[must_use]
    pub fn run(&self, command: &str) -> String {
        let output = self.try_run(command);
        assert!(
            output.status.success(),
            "in the guest, {command}: {}",
            text(&output)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs a command in its shell.
    ///
    /// # Panics
    /// If `scripts/guest` cannot be run.
    #[must_use]
    pub fn try_run(&self, command: &str) -> Output {
        self.script("run")
            .args(["--timeout", "30", "--", command])
            .output()
            .expect("scripts/guest runs")
    }

    /// Starts a command in its shell, which goes on by itself; [`finish`](Self::finish) waits for it. `name` is of the caller's choice.
    ///
    /// # Panics
    /// If that fails.
    pub fn start(&self, name: &str, command: &str) {
        let _ = self.run(&format!(
            "({command}; echo $? >/tmp/{name}.status) >/tmp/{name}.out 2>&1 </dev/null &"
        ));
    }

    /// Whether a command that was [started](Self::start) has ended.
    #[must_use]
    pub fn finished(&self, name: &str) -> bool {
        self.try_run(&format!("test -s /tmp/{name}.status"))
            .status
            .success()
    }

    /// Waits for the end of a command that was [started](Self::start), and returns what it printed.
    ///
    /// # Panics
    /// If it failed, or does not end in time.
    #[must_use]
    pub fn finish(&self, name: &str, patience: Duration) -> String {
        let ended = wait::until(patience, || self.finished(name));
        let said = self.run(&format!("cat /tmp/{name}.out"));
        assert!(ended, "{name} in the guest did not end: {said}");
        assert_eq!(
            self.run(&format!("cat /tmp/{name}.status")).trim(),
            "0",
            "{name} in the guest: {said}"
        );
        said
    }

    /// QEMU's control socket.
    #[must_use]
    pub fn qmp(&self) -> Qmp {
        Qmp::connect(&self.state.path().join("qmp"))
    }

    fn script(&self, verb: &str) -> Command {
        let mut command = Command::new(SCRIPT);
        command.arg(verb).arg("--dir").arg(self.state.path());
        command
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["console.log", "qemu.log"] {
                let log = std::fs::read_to_string(self.state.path().join(name)).unwrap_or_default();
                let tail: Vec<_> = log.lines().rev().take(15).collect();
                eprintln!("{name}:");
                tail.iter().rev().for_each(|line| eprintln!("    {line}"));
            }
        }
        let _ = self.script("stop").output();
    }
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
