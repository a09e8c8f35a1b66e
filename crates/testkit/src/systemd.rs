//! A systemd of the test's own, with the units of docs/deploy.
//!
//! Theory of operation. systemd runs as the first process of a PID namespace, in a control group and a network
//! namespace of its own. Where it and its services write (/etc, /run, /tmp, /var, /dev) there are file systems that go
//! with it; of the kernel's settings it sees a copy that is read-only. It finds no units but those of docs/deploy,
//! copied unchanged, and empty ones in the place of the targets that every unit depends on: nothing of this machine's
//! is started. There is no journal: one drop-in for all services has them write to a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use crate::directory::private_dir;
use crate::{NetNs, Running, cgroup, procfs, program, sweep, wait};

/// Where Debian has it.
pub(crate) const PROGRAM: &str = "/lib/systemd/systemd";
const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/deploy");
/// Targets that units name, or that systemd cannot do without.
const TARGETS: [&str; 6] = ["sysinit", "basic", "sockets", "multi-user", "shutdown", "test"];
const LOG: &str = "/run/services.log";

/// Arguments: the control group, the network namespace, and those of [`INSIDE`].
const START: &str = r#"set -e
echo $$ >"$1/cgroup.procs"
netns="$2"
shift 2
exec ip netns exec "$netns" unshare --mount --propagation private --pid --fork --kill-child --cgroup --uts --ipc "$@""#;
/// Arguments: the directory with units, the daemon's program, beside which the gateway is, the steward's, directories to be seen in there, too.
const INSIDE: &str = r#"set -e
mount -t proc vax-proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t tmpfs -o mode=755 vax-run /run
cp -r "$1" /run/units
mkdir -p /run/none /run/bin /run/etc/upper /run/etc/work /run/dev/pts /run/dev/shm /run/dev/net
touch /run/bin/vhost-af-xdp /run/bin/vhost-af-xdp-gateway /run/bin/vhost-af-xdp-steward
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work vax-etc /etc
mount -t overlay -o lowerdir=/run/bin:/usr/bin vax-bin /usr/bin
mount --bind "$2" /usr/bin/vhost-af-xdp
mount --bind "$2-gateway" /usr/bin/vhost-af-xdp-gateway
mount --bind "$3" /usr/bin/vhost-af-xdp-steward
for device in null zero full random urandom net/tun; do
    touch "/run/dev/$device"
    mount --bind "/dev/$device" "/run/dev/$device"
done
ln -s pts/ptmx /run/dev/ptmx
mount --rbind /run/dev /dev
shift 3
for shared in "$@"; do
    mkdir -p "/run/shared$shared"
    mount --bind "$shared" "/run/shared$shared"
done
for place in /tmp /var/tmp /var/lib; do mount -t tmpfs vax-tmp "$place"; done
chmod 1777 /tmp /var/tmp
for shared in "$@"; do
    mkdir -p "$shared"
    mount --move "/run/shared$shared" "$shared"
done
mount -t cgroup2 vax-cgroup /sys/fs/cgroup
mount -t bpf vax-bpf /sys/fs/bpf
exec env -i container=vax PATH="$PATH" SYSTEMD_UNIT_PATH=/run/units SYSTEMD_GENERATOR_PATH=/run/none \
    SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/run/none SYSTEMD_LOG_TARGET=null \
    /lib/systemd/systemd --system --unit=test.target --show-status=no </dev/null"#;

/// A running systemd. Ended on drop, with its services.
#[must_use]
pub struct Systemd {
    running: Running,
    cgroup: PathBuf,
    _units: TempDir,
}

impl Systemd {
    /// Starts one in a network namespace, and waits until it takes orders.
    ///
    /// # Panics
    /// If it does not.
    pub fn start(netns: &NetNs) -> Self {
        Self::start_with(netns, &[])
    }

    /// Starts one that has these directories, too, in which it may write.
    ///
    /// # Panics
    /// If it does not.
    pub fn start_with(netns: &NetNs, shared: &[&Path]) -> Self {
        let units = units();
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "{}{}-systemd",
            sweep::prefix(),
            SERIAL.fetch_add(1, Ordering::Relaxed)
        );
        let cgroup = cgroup::mounted().expect("there are control groups").join(name);
        fs::create_dir(&cgroup).expect("we are root");
        let mut command = Command::new("sh");
        command.args(["-c", START, "sh"]).arg(&cgroup).arg(netns.name());
        command.args(["sh", "-c", INSIDE, "sh"]).arg(units.path());
        command.args([program::daemon(), program::steward()]).args(shared);
        let mut systemd = Self {
            running: Running::start(command),
            cgroup,
            _units: units,
        };
        let up = wait::until(wait::SOON, || {
            systemd.running.check();
            systemd.first().is_some()
                && systemd.root().join("run/systemd/private").exists()
                && systemd
                    .try_run(&["systemctl", "is-active", "test.target"])
                    .status
                    .success()
        });
        assert!(up, "systemd does not answer: {}", systemd.running);
        systemd
    }

    /// Runs a command in its namespaces and returns what it printed.
    ///
    /// # Panics
    /// If it fails.
    pub fn run(&self, command: &[&str]) -> String {
        let output = self.try_run(command);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{command:?}: {said}{complained}\n{}",
            self.log()
        );
        said
    }

    /// Runs a command in its namespaces.
    ///
    /// # Panics
    /// If there is no nsenter(1).
    pub fn try_run(&self, command: &[&str]) -> Output {
        let mut inside = self.command();
        inside.args(command).output().expect("nsenter is installed")
    }

    /// What runs a command in its namespaces: its words are to be added.
    ///
    /// # Panics
    /// If it has ended.
    pub fn command(&self) -> Command {
        let first = self.first().expect("it runs").to_string();
        let mut command = Command::new("nsenter");
        command.args(["--target", &first, "--all", "--"]);
        command
    }

    /// Whether somebody may connect to a socket in there: `as_whom` is what runs a command as that user.
    ///
    /// # Panics
    /// If it is not refused, but goes wrong.
    pub fn may_connect(&self, as_whom: &[&str], socket: &str) -> bool {
        let connect =
            "use Socket; socket(S, PF_UNIX, SOCK_STREAM, 0); exit !connect(S, sockaddr_un($ARGV[0]))";
        let output = self.try_run(&[as_whom, &["perl", "-e", connect, socket]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said, "", "it is only refused");
        output.status.success()
    }

    /// Waits until a unit is in a state (`active`, `failed`).
    ///
    /// # Panics
    /// If it is not in time.
    pub fn await_state(&self, unit: &str, state: &str) {
        let is =
            || String::from_utf8_lossy(&self.try_run(&["systemctl", "is-active", unit]).stdout).into_owned();
        let so = wait::until(wait::SOON, || is().trim() == state);
        assert!(so, "{unit} is {} and not {state}:\n{}", is().trim(), self.log());
    }

    /// Waits until the services' output has a text so many times.
    ///
    /// # Panics
    /// If it has not in time.
    pub fn await_log(&self, text: &str, times: usize) {
        let so = wait::until(wait::SOON, || self.log().matches(text).count() >= times);
        assert!(so, "{text:?} was not said {times} times:\n{}", self.log());
    }

    /// What services have written.
    pub fn log(&self) -> String {
        fs::read_to_string(self.path(LOG)).unwrap_or_default()
    }

    /// A path of its, seen from here.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.root().join(inside.trim_start_matches('/'))
    }

    fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.first().expect("it runs")))
    }

    /// The number that its first process has here.
    fn first(&self) -> Option<u32> {
        procfs::children(self.running.pid()).first().copied()
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = Command::new("kill")
            .args(["-KILL", &self.running.pid().to_string()])
            .output();
        // A group can be removed when its processes have ended.
        wait::until(wait::SOON, || {
            cgroup::remove(&self.cgroup);
            !self.cgroup.exists()
        });
    }
}

/// The units: those of docs/deploy, and what stands for the rest of a system.
fn units() -> TempDir {
    let dir = private_dir();
    let place = |name: &str| dir.path().join(name);
    for entry in fs::read_dir(DEPLOY).expect("part of the tree").flatten() {
        let name = entry.file_name().into_string().expect("ASCII");
        if name.ends_with(".service") || name.ends_with(".socket") {
            fs::copy(entry.path(), place(&name)).expect("writable");
        }
    }
    for target in TARGETS {
        fs::write(
            place(&format!("{target}.target")),
            "[Unit]\nDefaultDependencies=no\n",
        )
        .expect("writable");
    }
    fs::create_dir(place("service.d")).expect("writable");
    let output = format!("[Service]\nStandardOutput=append:{LOG}\nStandardError=append:{LOG}\n");
    fs::write(place("service.d/output.conf"), output).expect("writable");
    dir
}
