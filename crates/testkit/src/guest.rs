//! A real Linux guest under QEMU or User-mode Linux, through `scripts/guest`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use tempfile::TempDir;

use crate::directory::private_dir;
use crate::process::{output_of, run};
use crate::{NetNs, Qmp, lessor, program, wait};

/// What a guest is made of.
#[derive(Clone, Debug)]
pub struct Images {
    /// Path of the kernel.
    pub kernel: PathBuf,
    /// Path of the initramfs.
    pub initramfs: PathBuf,
    /// The kernel's command line; `guest.ip=ADDRESS/PREFIX` may be added.
    pub cmdline: String,
}

impl Images {
    /// Those of `scripts/guest`, which are made if they are not there.
    ///
    /// # Panics
    /// If that fails.
    pub fn get() -> Self {
        let said = output_of(program::GUEST, &["images"]);
        let [kernel, initramfs, cmdline] = said.lines().collect::<Vec<_>>()[..] else {
            panic!("scripts/guest images: {said}");
        };
        Self {
            kernel: kernel.into(),
            initramfs: initramfs.into(),
            cmdline: cmdline.to_owned(),
        }
    }
}

/// Path of the traffic checker for the host's side, `scripts/lib/netcheck.c`; the guest has it as `netcheck`.
///
/// # Panics
/// If it cannot be built.
pub fn netcheck() -> String {
    output_of(program::GUEST, &["netcheck"]).trim().to_owned()
}

/// Program of the QEMU under which guests run: Debian's, or the one that `GUEST_QEMU` names.
pub fn qemu() -> String {
    std::env::var("GUEST_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned())
}

/// `true` if that QEMU has an AF_XDP back end of its own: it is of 8.2 or later and was built with libxdp. Otherwise
/// says what is not run.
///
/// # Panics
/// If it does not run.
pub fn qemu_has_af_xdp() -> bool {
    let has = output_of(&qemu(), &["-machine", "none", "-netdev", "help"])
        .lines()
        .any(|line| line.trim() == "af-xdp");
    if !has {
        println!(
            "SKIPPED: QEMU's own part: {} has no -netdev af-xdp; GUEST_QEMU may name one that has",
            qemu()
        );
    }
    has
}

/// Who listens on the vhost-user socket, and where.
#[derive(Clone, Copy, Debug)]
pub enum Backend<'a> {
    /// A back end.
    Daemon(&'a Path),
    /// QEMU; a daemon without privileges may connect.
    Qemu(&'a Path),
}

/// Options of a guest under User-mode Linux.
pub const UML: [&str; 4] = ["--accel", "uml", "--mem", "256"];

/// A guest that has booted. Ended on drop.
#[must_use]
pub struct Guest {
    state: TempDir,
    /// QEMU was started by somebody else, who also ends it.
    elsewhere: bool,
}

impl Guest {
    /// Boots one. `address` is its eth0's, with a prefix length.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn boot(backend: Backend<'_>, address: &str, options: &[&str]) -> Self {
        let group = lessor::ID.to_string();
        Self::boot_by(Command::new(program::GUEST), |command| {
            match backend {
                Backend::Daemon(socket) => command.arg("--socket").arg(socket),
                Backend::Qemu(socket) => command.arg("--listen").arg(socket),
            };
            command.args(["--ip", address, "--group", &group]).args(options);
        })
    }

    /// Boots one under User-mode Linux: one queue pair, and the MAC address that the back end has. It is the guest for
    /// what is no matter of QEMU's: seconds to boot, no KVM.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn boot_uml(socket: &Path, address: &str) -> Self {
        Self::boot(Backend::Daemon(socket), address, &UML)
    }

    /// Boots one whose QEMU is in a namespace and has a network of its own making there: `netdev` is what follows
    /// `-netdev`.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn boot_in(netns: &NetNs, netdev: &str, address: &str, options: &[&str]) -> Self {
        Self::boot_by(netns.command(program::GUEST), |command| {
            command.args(["--netdev", netdev, "--ip", address]).args(options);
        })
    }

    fn boot_by(mut command: Command, add: impl FnOnce(&mut Command)) -> Self {
        let guest = Self {
            state: private_dir(),
            elsewhere: false,
        };
        command.arg("boot").arg("--dir").arg(guest.state.path());
        add(&mut command);
        let output = command.output().expect("scripts/guest runs");
        assert!(
            output.status.success(),
            "the guest did not boot: {}",
            text(&output)
        );
        guest
    }

    /// The state directory for a guest whose QEMU somebody else will start and end: with the pipes `shell.in` and
    /// `shell.out` for its second serial line; its first goes to `console.log`.
    ///
    /// # Panics
    /// If the pipes cannot be made.
    pub fn elsewhere() -> Self {
        let state = private_dir();
        for name in ["shell.in", "shell.out"] {
            run("mkfifo", &[state.path().join(name).to_str().expect("ASCII")]);
        }
        Self {
            state,
            elsewhere: true,
        }
    }

    /// Waits until a guest that was started [elsewhere](Self::elsewhere) takes commands. Its QEMU is found by the path
    /// of the pipes in its command line, which no other guest has.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn await_ready(&self) {
        let console = self.state.path().join("console.log");
        let ready =
            || std::fs::read(&console).is_ok_and(|text| String::from_utf8_lossy(&text).contains("@ready"));
        assert!(wait::until(6 * wait::SOON, ready), "the guest does not boot");
        let pipes = self.state.path().join("shell");
        let pid = output_of("pgrep", &["-f", &format!("^[^ ]*qemu.*path={}", pipes.display())]);
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).expect("one process");
        // The 22nd field is the start time, the 3rd the first behind the name in brackets (proc_pid_stat(5)).
        let (_, fields) = stat.rsplit_once(") ").expect("a name in brackets");
        let started = fields.split(' ').nth(19).expect("a start time");
        std::fs::write(
            self.state.path().join("pid"),
            format!("{} {started}\n", pid.trim()),
        )
        .expect("a directory of our own");
    }

    /// The file that its memory is.
    ///
    /// # Panics
    /// If it does not run.
    pub fn memory(&self) -> File {
        let pid = std::fs::read_to_string(self.state.path().join("pid")).expect("it runs");
        let pid = pid.split_whitespace().next().unwrap_or_default();
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
        let is_memory = |path: &PathBuf| {
            let target = std::fs::read_link(path).unwrap_or_default();
            target
                .to_string_lossy()
                .starts_with("/memfd:memory-backend-memfd")
        };
        let mut paths = fds.map(|entry| entry.expect("readable").path());
        File::open(paths.find(is_memory).expect("its memory is a memfd")).expect("we are root")
    }

    /// SIGKILL for its QEMU.
    ///
    /// # Panics
    /// If it does not run.
    pub fn kill(self) {
        let said = std::fs::read_to_string(self.state.path().join("pid")).expect("it runs");
        run(
            "kill",
            &["-KILL", said.split_whitespace().next().expect("a number")],
        );
    }

    /// Its state directory.
    pub fn state(&self) -> &Path {
        self.state.path()
    }

    /// Runs a command in its shell and returns what it printed.
    ///
    /// # Panics
    /// If it fails.
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
    pub fn try_run(&self, command: &str) -> Output {
        self.script("run")
            .args(["--timeout", "120", "--", command])
            .output()
            .expect("scripts/guest runs")
    }

    /// Starts an iperf3 in it that listens, in a namespace of its own if `within` is a command that runs others there.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn serve_iperf(&self, within: &str) {
        // In the background it is before it listens; 0A is TCP_LISTEN, and 1451 is 5201.
        let listens = "grep -qs ':1451 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6";
        let serve = format!("iperf3 -s -D; until {listens}; do sleep 0.1; done");
        let _ = self.run(&format!("{within} sh -c \"{serve}\""));
    }

    /// Runs a command in its shell until it succeeds.
    ///
    /// # Errors
    /// It does not within `limit`; what was said last.
    pub fn run_until_success(&self, limit: Duration, command: &str) -> Result<(), String> {
        let mut said = String::new();
        let succeeded = || {
            let output = self.try_run(command);
            said = text(&output);
            output.status.success()
        };
        if wait::until(limit, succeeded) {
            Ok(())
        } else {
            Err(said)
        }
    }

    /// Has it ask for an address, and take what it gets.
    ///
    /// # Panics
    /// If it gets none.
    #[track_caller]
    pub fn ask_for_address(&self) {
        let _ = self.run(
            "printf '#!/bin/sh\n[ \"$1\" = bound ] && ip addr add $ip/24 dev eth0; true\n' >/tmp/take && chmod +x /tmp/take",
        );
        let asked = self.run_until_success(10 * wait::SOON, "udhcpc -i eth0 -n -q -t 10 -s /tmp/take");
        asked.unwrap_or_else(|said| panic!("no address: {said}"));
    }

    /// Whether its shell answers, within some seconds.
    ///
    /// # Panics
    /// If `scripts/guest` cannot be run.
    pub fn answers(&self) -> bool {
        let mut run = self.script("run");
        run.args(["--timeout", "10", "--", "true"]);
        run.output().expect("scripts/guest runs").status.success()
    }

    /// Starts a command in its shell, which goes on by itself; [`finish`](Self::finish) waits for it. `name` is of the
    /// caller's choice.
    ///
    /// # Panics
    /// If that fails.
    pub fn start(&self, name: &str, command: &str) {
        let _ = self.run(&format!(
            "({command}; echo $? >/tmp/{name}.status) >/tmp/{name}.out 2>&1 </dev/null &"
        ));
    }

    /// Whether a command that was [started](Self::start) has ended.
    pub fn finished(&self, name: &str) -> bool {
        self.try_run(&format!("test -s /tmp/{name}.status"))
            .status
            .success()
    }

    /// Waits for the end of a command that was [started](Self::start), and returns what it printed.
    ///
    /// # Panics
    /// If it failed, or does not end in time.
    pub fn finish(&self, name: &str, limit: Duration) -> String {
        let ended = wait::until(limit, || self.finished(name));
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
    pub fn qmp(&self) -> Qmp {
        Qmp::connect(&self.state.path().join("qmp"))
    }

    fn script(&self, verb: &str) -> Command {
        program::guest(verb, self.state.path())
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
        if !self.elsewhere {
            let _ = self.script("stop").output();
        }
    }
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
