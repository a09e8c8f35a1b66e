//! A file system (FUSE) of one file whose pages never come.
//!
//! It answers what is needed to open the file and to look at it, and never a READ or a WRITE; once it was told `mute`,
//! nothing any more. Each request is a line on the standard output: `asked NAME by THREAD`. The protocol is that of
//! include/uapi/linux/fuse.h, 7.31.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
/// `struct fuse_in_header`, bytes.
const HEADER: usize = 40;
/// The root's number, and the file's.
const ROOT: u64 = 1;
const FILE: u64 = 2;

/// Whether nothing is answered any more. Nothing is published through it.
static MUTE: AtomicBool = AtomicBool::new(false);

/// Serves a file of so many bytes until the standard input ends. `is_late`: what is written to it is asked for later.
pub(crate) fn serve(bytes: u64, is_late: bool) {
    let device = File::options().read(true).write(true).open("/dev/fuse");
    let device = device.expect("there is FUSE");
    let mount = mount(&device);
    std::thread::spawn(move || answer(&device, bytes, is_late));
    println!("file /proc/{}/fd/{}/file", std::process::id(), mount.as_raw_fd());
    loop {
        if crate::line() == "mute" {
            MUTE.store(true, Ordering::SeqCst);
            println!("mute");
        }
    }
}

/// Mounted nowhere: the file is opened by way of this descriptor.
fn mount(device: &File) -> OwnedFd {
    let fuse = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).expect("we are root");
    let set = |key: &str, value: String| {
        fsconfig_set_string(fuse.as_fd(), key, value.as_str()).expect("FUSE has it");
    };
    set("fd", device.as_raw_fd().to_string());
    set("rootmode", "40000".to_owned());
    set("user_id", "0".to_owned());
    set("group_id", "0".to_owned());
    fsconfig_set_flag(fuse.as_fd(), "allow_other").expect("FUSE has it");
    fsconfig_create(fuse.as_fd()).expect("all is said");
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    fsmount(fuse.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, flags).expect("made")
}

fn name(opcode: u32) -> String {
    let name = match opcode {
        LOOKUP => "LOOKUP",
        FORGET => "FORGET",
        GETATTR => "GETATTR",
        OPEN => "OPEN",
        READ => "READ",
        WRITE => "WRITE",
        STATFS => "STATFS",
        RELEASE => "RELEASE",
        FLUSH => "FLUSH",
        INIT => "INIT",
        INTERRUPT => "INTERRUPT",
        BATCH_FORGET => "BATCH_FORGET",
        other => return format!("request {other}"),
    };
    name.to_owned()
}

/// Answers until the file system is gone.
fn answer(mut device: &File, bytes: u64, is_late: bool) {
    let mut request = vec![0; (1 << 20) + 4096];
    while let Ok(len) = device.read(&mut request) {
        assert!(len >= HEADER, "a header");
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().expect("eight bytes"));
        let (opcode, unique, node, thread) = (word(4), long(8), long(16), word(32));
        println!("asked {} by {thread}", name(opcode));
        let has_answer = !matches!(opcode, READ | WRITE | FORGET | BATCH_FORGET | INTERRUPT);
        if MUTE.load(Ordering::SeqCst) || !has_answer {
            continue;
        }
        let (error, body) = match opcode {
            INIT => (0, init(is_late)),
            GETATTR => (0, [&[0; 16][..], &attributes(node, bytes)].concat()),
            LOOKUP => (0, entry(bytes)),
            OPEN => (0, vec![0; 16]),
            FLUSH => (0, vec![]),
            STATFS => (0, vec![0; 80]),
            _ => (-libc::ENOSYS, vec![]),
        };
        let len = u32::try_from(16 + body.len()).expect("short");
        let header = [
            &len.to_ne_bytes()[..],
            &error.to_ne_bytes(),
            &unique.to_ne_bytes(),
        ];
        // Who asked may be gone.
        let _ = device.write(&[&header.concat()[..], &body].concat());
    }
}

/// `struct fuse_init_out`: as little as can be.
fn init(is_late: bool) -> Vec<u8> {
    // FUSE_WRITEBACK_CACHE.
    let flags = u32::from(is_late) << 16;
    let mut body = [7u32, 31, 0, flags, 0, 4096, 1].map(u32::to_ne_bytes).concat();
    body.resize(64, 0);
    body
}

/// `struct fuse_entry_out`, of which nothing may be kept.
fn entry(bytes: u64) -> Vec<u8> {
    [&FILE.to_ne_bytes()[..], &[0; 32], &attributes(FILE, bytes)].concat()
}

/// `struct fuse_attr`.
fn attributes(node: u64, bytes: u64) -> Vec<u8> {
    let (mode, size) = match node {
        ROOT => (0o40_755u32, 0),
        _ => (0o100_666, bytes),
    };
    let longs = [node, size, size / 512, 0, 0, 0].map(u64::to_ne_bytes).concat();
    let words = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]
        .map(u32::to_ne_bytes)
        .concat();
    [longs, words].concat()
}
