//! Where daemons are found and asked, and what signals do to them.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use testkit::daemon::{binary, private_dir, run_to_end};
use testkit::lan::Lan;
use testkit::process::output_of;
use testkit::{Daemon, DriverConfig, NetNs, Running, Serve, assert_has, assert_soon, require, wait};

/// A user that nobody else is, with a directory and a copy of the program in it.
struct Somebody {
    uid: u32,
    dir: TempDir,
}

impl Somebody {
    fn new() -> Self {
        // Nor one of another test's, which may run in this process.
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let uid = 2_000_000_000 + 16 * std::process::id() + made;
        let dir = private_dir();
        chown(dir.path(), Some(uid), Some(uid)).expect("we are root");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("we are root");
        let _ = testkit::program::daemon_in(dir.path());
        Self { uid, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The program, run as this user, who has no session.
    fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        let id = self.uid.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]);
        command.args(["--inh-caps", "-all", "--bounding-set", "-all"]);
        command
            .arg(self.path("vhost-af-xdp"))
            .env_remove("XDG_RUNTIME_DIR");
        command
    }

    /// A daemon of its, which is to say more before it is run.
    fn serve(&self) -> Command {
        let mut command = self.command();
        command
            .args(["serve", "--null", "--socket-path"])
            .arg(self.path("vm.sock"));
        command
    }

    /// Daemons that it finds.
    fn status(&self) -> Vec<Value> {
        let output = self
            .command()
            .args(["status", "--json"])
            .output()
            .expect("it runs");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Where its daemons are asked.
    fn control(&self) -> PathBuf {
        PathBuf::from(format!("/tmp/vhost-af-xdp-{}", self.uid))
    }
}

impl Drop for Somebody {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.control());
        // A link is removed as a file.
        let _ = std::fs::remove_file(self.control());
    }
}

fn status_by_root() -> Vec<Value> {
    let text = output_of(binary().to_str().expect("UTF-8"), &["status", "--json"]);
    match serde_json::from_str(&text).expect("JSON") {
        Value::Array(daemons) => daemons,
        other => panic!("no array: {other}"),
    }
}

/// Tests read the socket; users, the command.
#[test]
fn command_prints_all_that_the_control_socket_answers() {
    require!(Root);
    let rules = testkit::filter_rules::tables(0, &["direction=from-guest action=allow"]);
    let keys = format!("ips = [\"192.0.2.1\"]\nto-guest-bits = \"1G\"\n{rules}");
    let lan = Lan::new(&[&keys, ""], &DriverConfig::default());
    let control = lan.daemon.path("control");
    let args = ["status", "--json", "--control", control.to_str().expect("UTF-8")];
    let text = output_of(binary().to_str().expect("UTF-8"), &args);
    let printed: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(shape(&printed[0]), shape(&lan.daemon.status()));
}

/// Runs `status` with these arguments at a daemon's control socket.
pub(crate) fn status_text(daemon: &Daemon, args: &[&str]) -> String {
    let control = daemon.path("control");
    let control = ["--control", control.to_str().expect("UTF-8")];
    output_of(
        binary().to_str().expect("UTF-8"),
        &[&["status"], args, &control].concat(),
    )
}

#[test]
fn status_is_a_line_a_port_and_one_port_in_full_by_name() {
    require!(Root);
    let lan = Lan::new(&["to-guest-bits = \"1G\"", ""], &DriverConfig::default());
    let text = status_text(&lan.daemon, &[]);
    for name in ["vm0", "vm1"] {
        let lines = text
            .lines()
            .filter(|line| line.split_whitespace().next() == Some(name));
        let words: Vec<Vec<&str>> = lines.map(|line| line.split_whitespace().collect()).collect();
        assert!(
            matches!(words.as_slice(), [line] if line.contains(&"process")),
            "{text}"
        );
    }
    // Of the daemon, its network, and the names of the columns.
    assert_eq!(text.lines().count(), 3 + 2, "{text}");
    let port = status_text(&lan.daemon, &["vm0"]);
    for line in [
        "connected: true",
        "    bits: per_second 1000000000, burst 200000000",
        "lane 0:",
    ] {
        assert!(port.lines().any(|shown| shown == line), "{line}: {port}");
    }
    let all = status_text(&lan.daemon, &["--all"]);
    for line in ["network lan:", "port vm0:", "port vm1:"] {
        assert!(all.lines().any(|shown| shown == line), "{line}: {all}");
    }
    let control = lan.daemon.path("control").display().to_string();
    let (status, error) = run_to_end(&lan.veth.near, &["status", "vm9", "--control", &control]);
    assert!(
        !status.success() && error.contains("there is no port or network \"vm9\""),
        "{error}"
    );
}

/// In a terminal of its own (script(1)), which repeats what a key makes the program draw.
#[test]
fn top_shows_ports_until_its_key_to_quit() {
    require!(Root);
    let lan = Lan::new(&["", ""], &DriverConfig::default());
    let (drawn, number) = (lan.daemon.path("drawn"), lan.daemon.path("number"));
    let program = testkit::program::top().display();
    let top = format!(
        "stty rows 40 columns 200; echo $$ >{}; exec {program} --control {}",
        number.display(),
        lan.daemon.path("control").display()
    );
    let start = || {
        let _ = std::fs::remove_file(&drawn);
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &top]);
        command.arg(&drawn).env("TERM", "xterm");
        Running::start(command)
    };
    let await_drawn = |text: &str| {
        let drawn = || String::from_utf8_lossy(&std::fs::read(&drawn).unwrap_or_default()).into_owned();
        assert_soon!(drawn().contains(text), "{text}: {}", drawn());
    };
    let mut running = start();
    await_drawn("vm1");
    running.type_in("3");
    // Reversed, and so drawn as a whole.
    await_drawn("\u{1b}[7m 3 workers ");
    running.type_in("q");
    assert!(running.wait(wait::SOON).success(), "{running}");
    // It ends with its terminal.
    let mut running = start();
    await_drawn("vm1");
    let number = std::fs::read_to_string(&number).expect("a process number");
    let process = Path::new("/proc").join(number.trim());
    assert!(process.exists());
    running.signal(Signal::KILL);
    assert_soon!(!process.exists(), "{process:?}");
    // Without a terminal it names the command that needs none.
    let output = Command::new(testkit::program::top()).output().expect("it runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && error.contains("`vhost-af-xdp status`"),
        "{error}"
    );
}

/// The same with nothing in the place of numbers and texts, which change.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| (key.clone(), shape(value)))
            .collect(),
        Value::Array(items) => items.iter().map(shape).collect(),
        _ => Value::Null,
    }
}

#[test]
fn daemon_of_a_user_without_a_session_is_found_by_that_user_and_by_root() {
    require!(Root);
    let user = Somebody::new();
    let mut running = Running::start(user.serve());
    running.await_text("ready");
    let control = user.control().join(format!("{}.sock", running.pid()));
    assert_soon!(control.exists(), "{running}");
    let (directory, socket) = (std::fs::metadata(user.control()), std::fs::metadata(&control));
    assert_eq!(directory.expect("made").mode() & 0o7777, 0o700);
    assert_eq!(socket.expect("made").mode() & 0o7777, 0o600);

    let is_it = |daemon: &Value| daemon["pid"] == running.pid();
    assert_soon!(status_by_root().iter().any(is_it), "{running}");
    let daemons = user.status();
    assert!(daemons.len() == 1 && is_it(&daemons[0]), "{daemons:?}");
}

#[test]
fn directory_of_the_default_is_made_for_another_name_in_it_too() {
    require!(Root);
    let user = Somebody::new();
    let mut command = user.serve();
    command.arg("--control").arg(user.control().join("mine"));
    Running::start(command).await_text("ready");
    let directory = std::fs::metadata(user.control()).expect("made");
    assert_eq!(directory.mode() & 0o7777, 0o700);
}

#[test]
fn daemon_of_an_impostor_is_not_taken_for_one_of_the_user_that_its_directory_is_named_after() {
    require!(Root);
    let (user, stranger) = (Somebody::new(), Somebody::new());
    let make = |directory: &Path, owner: &Somebody, mode| {
        std::fs::create_dir(directory).expect("made");
        chown(directory, Some(owner.uid), Some(owner.uid)).expect("we are root");
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(mode)).expect("we are root");
    };
    // A daemon of the stranger's that everybody may ask.
    let begin = |control: &Path| {
        let mut command = stranger.command();
        command
            .args(["serve", "--null", "--socket-path"])
            .arg(stranger.path("vm.sock"));
        command.arg("--control").arg(control);
        let mut running = Running::start(command);
        running.await_text("ready");
        std::fs::set_permissions(control, std::fs::Permissions::from_mode(0o666)).expect("we are root");
        running
    };
    let is_seen = |running: &Running| {
        let is_it = |daemon: &Value| daemon["pid"] == running.pid();
        (
            user.status().iter().any(is_it),
            status_by_root().iter().any(is_it),
        )
    };

    // It is the stranger's, under the user's name.
    make(&user.control(), &stranger, 0o755);
    let running = begin(&user.control().join("7.sock"));
    assert_eq!(is_seen(&running), (false, false), "another's directory");
    drop(running);
    std::fs::remove_dir_all(user.control()).expect("we are root");

    // A link.
    make(&stranger.path("sockets"), &stranger, 0o755);
    std::os::unix::fs::symlink(stranger.path("sockets"), user.control()).expect("made");
    let running = begin(&stranger.path("sockets").join("7.sock"));
    assert_eq!(is_seen(&running), (false, false), "a link");
    drop(running);
    std::fs::remove_file(user.control()).expect("we are root");

    // The user's own, to which the stranger may write.
    make(&user.control(), &user, 0o777);
    let running = begin(&user.control().join("7.sock"));
    assert_eq!(is_seen(&running), (false, false), "open to all");
    // What is seen otherwise: this is what all of the above would have been.
    let closed = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(user.control(), closed).expect("we are root");
    assert_eq!(is_seen(&running), (true, true), "{running}");
}

#[test]
fn status_of_root_does_not_wait_for_a_user_who_never_answers() {
    require!(Root);
    let user = Somebody::new();
    std::fs::create_dir(user.control()).expect("made");
    chown(user.control(), Some(user.uid), Some(user.uid)).expect("we are root");
    // Sixteen that let everybody connect and say nothing.
    let silent: Vec<_> = (1..=16)
        .map(|pid| {
            std::os::unix::net::UnixListener::bind(user.control().join(format!("{pid}.sock")))
                .expect("listens")
        })
        .collect();
    let daemon = Daemon::start(&NetNs::new("status"), &Serve::null().by_root());
    let begun = std::time::Instant::now();
    let mut command = Command::new(binary());
    command.arg("status");
    let mut running = Running::start(command);
    // Ten seconds for all of them together; one after the other they would take 160.
    let _ = running.wait(std::time::Duration::from_secs(60));
    assert!(
        running
            .said()
            .contains("no answer within 10 s: is its process stopped"),
        "{running}, {:?}",
        begun.elapsed()
    );
    drop((daemon, silent));
}

#[test]
fn hang_up_is_ignored_and_status_by_signal_needs_no_reader() {
    require!(Root);
    let directory = private_dir();
    let mut command = Command::new(binary());
    command
        .args(["serve", "--null", "--socket-path"])
        .arg(directory.path().join("vm.sock"));
    command.arg("--control").arg(directory.path().join("control"));
    let mut child = command.stderr(Stdio::piped()).spawn().expect("it runs");
    let control = directory.path().join("control");
    let status = |path: &Path| {
        let text = output_of(
            binary().to_str().expect("UTF-8"),
            &["status", "--json", "--control", path.to_str().expect("UTF-8")],
        );
        !text.is_empty()
    };
    // Its file is there before anybody listens.
    assert_soon!(UnixStream::connect(&control).is_ok());
    assert!(status(&control));
    // Nobody reads what it says from here on: each write fails.
    drop(child.stderr.take());
    let pid = Pid::from_child(&child);
    for signal in [Signal::HUP, Signal::USR1, Signal::HUP] {
        kill_process(pid, signal).expect("it runs");
        assert!(status(&control), "{signal:?}");
        // The signal was dealt with: the next one is, too.
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(child.try_wait().expect("ours").is_none(), "{signal:?}");
    }
    kill_process(pid, Signal::TERM).expect("it runs");
    let ended = wait::until_some(wait::SOON, || child.try_wait().expect("ours"));
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
}

#[test]
fn descriptor_that_is_no_stream_is_refused() {
    require!(Root);
    let netns = NetNs::new("fd");
    let (datagram, _other) = UnixDatagram::pair().expect("sockets");
    let datagram = OwnedFd::from(datagram);
    Daemon::spawn_on_fd(&netns, &datagram, &Serve::null().by_root()).assert_complains(&["fd ", "stream"]);
    let lonely = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    );
    let lonely = lonely.expect("a socket");
    assert!(lonely.as_raw_fd() > 2);
    Daemon::spawn_on_fd(&netns, &lonely, &Serve::null().by_root())
        .assert_complains(&["neither listens nor is connected"]);
}

#[test]
fn start_that_is_not_possible_names_the_remedy() {
    require!(Root);
    let netns = NetNs::new("start");
    let directory = private_dir();
    let path = directory.path().join("no/vm.sock");
    let path = path.to_str().expect("UTF-8");
    let serve = ["serve", "--null", "--control", "none", "--socket-path", path];
    let (status, said) = run_to_end(&netns, &serve);
    assert_eq!(status.code(), Some(1), "{said}");
    assert_has(&said, &["mkdir -p"]);
    let unknown = [&serve[..], &["--sandbox", "nothing-of-it"]].concat();
    let (status, said) = run_to_end(&netns, &unknown);
    assert_eq!(status.code(), Some(2), "{said}");
    assert_has(&said, &["nothing-of-it"]);
    let contradiction = [&serve[..], &["--queues", "0"]].concat();
    let (status, said) = run_to_end(&netns, &contradiction);
    assert_eq!(status.code(), Some(2), "{said}");
    assert_has(&said, &["--queues 0"]);

    // A place for `status` that was asked for, and cannot be.
    let vm = directory.path().join("vm.sock");
    let serve = [
        "serve",
        "--null",
        "--control",
        path,
        "--socket-path",
        vm.to_str().expect("UTF-8"),
    ];
    let (status, said) = run_to_end(&netns, &serve);
    assert!(!status.success(), "{said}");
    assert_has(&said, &[&format!("--control {path}"), "mkdir -p"]);
    assert!(!directory.path().join("no").exists() && !vm.exists(), "{said}");

    let mut command = Command::new("prlimit");
    command.arg("--nofile=12:12").arg(binary()).args([
        "serve",
        "--null",
        "--control",
        "none",
        "--socket-path",
    ]);
    command.arg(directory.path().join("vm.sock"));
    let mut running = Running::start(command);
    let status = running.wait(wait::SOON);
    assert!(
        !status.success() && running.said().contains("LimitNOFILE="),
        "{running}"
    );

    let user = Somebody::new();
    let mut command = user.command();
    command.args(["serve", "--ifname", "lo", "--control", "none", "--socket-path"]);
    command.arg(user.path("vm.sock"));
    let mut running = Running::start(command);
    let status = running.wait(wait::SOON);
    for words in [
        "interface lo",
        "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF",
        "--steward /run/vhost-af-xdp/steward.sock",
    ] {
        assert!(!status.success() && running.said().contains(words), "{running}");
    }
    assert!(!user.path("vm.sock").exists(), "{running}");

    let mut command = user.command();
    command.args([
        "serve",
        "--null",
        "--control",
        "none",
        "--user",
        "root",
        "--socket-path",
    ]);
    command.arg(user.path("vm.sock"));
    let mut running = Running::start(command);
    let status = running.wait(wait::SOON);
    assert!(
        !status.success() && running.said().contains("start as root"),
        "{running}"
    );
}

#[test]
fn soft_limit_of_open_files_is_raised() {
    require!(Root);
    let directory = private_dir();
    let mut command = Command::new("prlimit");
    command
        .arg("--nofile=16:1024")
        .arg(binary())
        .args(["serve", "--null", "--socket-path"]);
    command
        .arg(directory.path().join("vm.sock"))
        .args(["--control", "none"]);
    Running::start(command).await_text("ready");
}

#[test]
fn error_has_its_priority_where_stderr_is_the_journal() {
    let dir = private_dir();
    let path = dir.path().join("log");
    let complain = |journal: &str| {
        let log = std::fs::File::create(&path).expect("a directory of our own");
        let file = log.metadata().expect("it is open");
        let named = journal.replace("FILE", &format!("{}:{}", file.dev(), file.ino()));
        let mut command = Command::new(binary());
        command.args(["serve", "--null", "--bridge"]).stderr(log);
        assert!(
            !command
                .env("JOURNAL_STREAM", named)
                .status()
                .expect("it runs")
                .success()
        );
        std::fs::read_to_string(&path).expect("it is there")
    };
    let text = complain("FILE");
    assert!(text.starts_with("<3>unknown option --bridge"), "{text}");
    let text = complain("1:1");
    assert!(
        text.starts_with("vhost-af-xdp: unknown option --bridge"),
        "{text}"
    );
}
