//! What a test that was killed by force has left is removed by the next one.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use testkit::daemon::private_dir;
use testkit::process::{output_of, run};
use testkit::{BpfFs, NetNs, require, sweep};

/// What a process of this number would leave.
struct Left {
    namespace: String,
    directory: PathBuf,
}

impl Left {
    fn of(pid: u32) -> Self {
        let name = format!("vax-{pid}-999-left");
        let directory = Path::new(sweep::DIRECTORIES).join(&name);
        run("ip", &["netns", "add", &name]);
        fs::create_dir(&directory).expect("nobody else has it");
        mount("bpf", &directory, "bpf", MountFlags::empty(), c"mode=0700").expect("we are root");
        Self {
            namespace: name,
            directory,
        }
    }

    fn is_there(&self) -> [bool; 3] {
        let place = self.directory.to_str().expect("ASCII");
        [
            output_of("ip", &["netns", "list"]).contains(&self.namespace),
            fs::read_to_string("/proc/self/mountinfo").is_ok_and(|table| table.contains(place)),
            self.directory.exists(),
        ]
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "delete", &self.namespace])
            .output();
        let _ = unmount(&self.directory, UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.directory);
    }
}

/// A process as `scripts/guest` notes it: its number, and when it was started (proc_pid_stat(5)).
fn identity(pid: u32) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let after_name = stat.rsplit(')').next().expect("a name");
    let started = after_name.split_whitespace().nth(19).expect("its field 22");
    format!("{pid} {started}")
}

#[test]
fn guest_of_a_dead_process_is_ended() {
    require!(Root);
    let mut child = Command::new("true").spawn().expect("a program");
    child.wait().expect("it is our child");
    let state = Path::new(sweep::DIRECTORIES).join(format!("vax-{}-998-guest", child.id()));
    let mut qemu = Command::new("sleep").arg("60").spawn().expect("a program");
    // As a whole: the other test sweeps, too.
    let made = private_dir().keep();
    fs::write(made.join("pid"), identity(qemu.id())).expect("writable");
    fs::rename(made, &state).expect("nobody else has it");
    sweep::sweep();
    assert!(!state.exists());
    let ended = qemu.try_wait().expect("it is our child");
    assert!(
        ended.is_some_and(|status| status.signal() == Some(15)),
        "{ended:?}"
    );
}

#[test]
fn what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not() {
    require!(Root);
    let mut child = Command::new("true").spawn().expect("a program");
    let dead = child.id();
    child.wait().expect("it is our child");
    let (dead, living) = (Left::of(dead), Left::of(std::process::id()));
    let (own, bpffs) = (NetNs::new("own"), BpfFs::new());
    sweep::sweep();
    assert_eq!(dead.is_there(), [false; 3]);
    assert_eq!(living.is_there(), [true; 3]);
    own.run("true", &[]);
    fs::create_dir(bpffs.pins()).expect("it is mounted");
}
