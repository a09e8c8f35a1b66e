//! What a test that was killed by force has left is removed by the next one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
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
