//! Programs that outlive the process that attached them.

use crate::common;

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use common::{Pair, program_on};
use steer::{ModeRequest, Program, QueueConf};
use testkit::BpfFs;

fn new_dir(bpffs: &BpfFs) -> PathBuf {
    let dir = bpffs.pins();
    fs::create_dir(&dir).expect("new");
    dir
}

fn attach(pair: &Pair, mode: ModeRequest) -> Program {
    Program::attach(pair.ifindex(), mode, false).expect("veth takes XDP")
}

fn conf(frame_limit: u32) -> QueueConf {
    QueueConf {
        virtio_header: None,
        frame_limit,
        hints: false,
    }
}

/// Checks that opening fails with these words.
#[track_caller]
fn assert_refused(ifindex: u32, dir: &Path, words: &str) {
    let error = Program::open_pinned(ifindex, dir).expect_err("not usable");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn pinned_program_outlives_its_owner_and_goes_on_with_the_next_as_it_was_left() {
    let Some(pair) = Pair::new(1500) else { return };
    let bpffs = BpfFs::new();
    for mode in [ModeRequest::Native, ModeRequest::Skb] {
        let dir = new_dir(&bpffs);
        let mut program = attach(&pair, mode);
        program.pin(&dir).expect("a bpffs");
        let xsk = pair.unbound_xsk();
        program.place_socket(0, xsk.as_fd()).expect("an AF_XDP socket");
        let (id, mode) = (program.id(), program.mode());
        drop(program);
        assert_eq!(program_on(pair.ifindex()), Some(id), "it stays");

        let next = Program::open_pinned(pair.ifindex(), &dir).expect("all is there");
        assert_eq!((next.id(), next.mode()), (id, mode));
        // The next owner knows that a socket waits: activation uses it, once.
        next.activate_queue(0, conf(1514)).expect("in range");
        next.counters(0).expect("the same map");
        drop(next);
        assert_eq!(program_on(pair.ifindex()), Some(id), "it stays again");

        steer::detach_pinned(&dir).expect("ours");
        assert_eq!(program_on(pair.ifindex()), None);
        steer::detach_pinned(&dir).expect("nothing to do");
        assert_refused(pair.ifindex(), &dir, "is not the link");
        fs::remove_dir_all(&dir).expect("empty of what lives");
    }
}

#[test]
fn owner_takes_a_pinned_program_off_when_it_says_so() {
    let Some(pair) = Pair::new(1500) else { return };
    let bpffs = BpfFs::new();
    let dir = new_dir(&bpffs);
    let mut program = attach(&pair, ModeRequest::Xdp);
    program.pin(&dir).expect("a bpffs");
    program.detach().expect("ours");
    assert_eq!(program_on(pair.ifindex()), None);
    program.detach().expect("nothing to do");
}

#[test]
fn what_is_not_whole_or_not_of_the_interface_is_not_taken_over() {
    let Some(pair) = Pair::new(1500) else { return };
    let bpffs = BpfFs::new();
    let dir = new_dir(&bpffs);
    assert_refused(pair.ifindex(), &dir, "cannot pin or open");
    steer::detach_pinned(&dir).expect("nothing to do");
    let mut program = attach(&pair, ModeRequest::Xdp);
    // Not a bpffs: the program ends with its owner, as without the attempt.
    program.pin(Path::new("/proc")).expect_err("no bpffs");
    let id = program.id();
    program.pin(&dir).expect("a bpffs");
    drop(program);
    let elsewhere = pair.ifindex() + 1000;
    assert_refused(elsewhere, &dir, "is not the link");
    fs::rename(dir.join("counts"), dir.join("old")).expect("one file system");
    assert_refused(pair.ifindex(), &dir, "cannot pin or open");
    fs::rename(dir.join("queues"), dir.join("counts")).expect("one file system");
    fs::rename(dir.join("old"), dir.join("queues")).expect("one file system");
    assert_refused(pair.ifindex(), &dir, "not a map of this version");
    assert_eq!(program_on(pair.ifindex()), Some(id), "as it was");
    steer::detach_pinned(&dir).expect("ours");
}
