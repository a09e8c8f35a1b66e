//! Descriptors of every kind in the place of memory and of eventfds.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rstest::rstest;
use rustix::event::{epoll, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open};
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::vmm::{LOG, QUEUE, RAM, Shared, Vmm, inflight, inflight_bytes, longs, memory, table};
use testkit::{Bystander, require, sys};
use vhost::vhost_user::message::FrontendReq;

/// Where a descriptor is asked for.
#[derive(Clone, Copy, Debug)]
enum Role {
    Memory,
    Log,
    Inflight,
    Kick,
    Call,
}

const ROLES: [Role; 5] = [Role::Memory, Role::Log, Role::Inflight, Role::Kick, Role::Call];

/// What is no memory that can be shared, and no eventfd; those that this kernel has.
fn kinds() -> Vec<(&'static str, OwnedFd)> {
    let file = |path: &str| {
        File::options()
            .read(true)
            .write(true)
            .open(path)
            .map(OwnedFd::from)
    };
    let (reader, writer) = io::pipe().expect("a descriptor is left");
    let (one, other) = std::os::unix::net::UnixStream::pair().expect("a descriptor is left");
    let mut kinds = vec![
        ("pipe to read", reader.into()),
        ("pipe to write", writer.into()),
        ("socket", one.into()),
        ("other socket", other.into()),
        (
            "epoll",
            epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor is left"),
        ),
        ("directory", File::open("/tmp").expect("there is one").into()),
        (
            "netns",
            File::open("/proc/self/ns/net").expect("there is one").into(),
        ),
        (
            "text",
            File::open("/proc/self/maps").expect("there is one").into(),
        ),
    ];
    let raw = |number, arguments: [usize; 3]| sys::descriptor(number, arguments);
    let more: [(&str, io::Result<OwnedFd>); 9] = [
        ("null", file("/dev/null")),
        ("zero", file("/dev/zero")),
        ("memory of a process", file("/proc/self/mem")),
        ("fuse", file("/dev/fuse")),
        ("kvm", file("/dev/kvm")),
        ("timer", raw(libc::SYS_timerfd_create, [1, 0, 0])),
        ("inotify", raw(libc::SYS_inotify_init1, [0, 0, 0])),
        ("userfaultfd", raw(libc::SYS_userfaultfd, [1, 0, 0])),
        ("secret memory", raw(libc::SYS_memfd_secret, [0, 0, 0])),
    ];
    kinds.extend(more.into_iter().filter_map(|(name, fd)| Some((name, fd.ok()?))));
    kinds.push((
        "io_uring",
        match sys::io_uring() {
            Ok(ring) => ring,
            Err(_) => return kinds,
        },
    ));
    kinds
}

/// Files in memory that cannot be mapped shared and writable.
fn unfit_memory(bytes: u64) -> Vec<(&'static str, OwnedFd)> {
    let path = |fd: &OwnedFd| format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
    let whole = memory(bytes);
    let sealed = |seal| {
        let fd = memfd_create("sealed", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, bytes).expect("room");
        fcntl_add_seals(&fd, seal).expect("it may be sealed");
        fd
    };
    vec![
        (
            "read only",
            open(path(&whole), OFlags::RDONLY, Mode::empty()).expect("ours"),
        ),
        (
            "write only",
            open(path(&whole), OFlags::WRONLY, Mode::empty()).expect("ours"),
        ),
        (
            "path only",
            open(path(&whole), OFlags::PATH, Mode::empty()).expect("ours"),
        ),
        ("sealed against writes", sealed(SealFlags::WRITE)),
        ("sealed against writes to come", sealed(SealFlags::FUTURE_WRITE)),
        ("too short", memory(bytes - 1)),
        ("empty", memory(0)),
    ]
}

fn says(vmm: &Vmm, role: Role, file: &OwnedFd) -> bool {
    let (request, payload) = match role {
        Role::Memory => (FrontendReq::SET_MEM_TABLE, table(&[(0, RAM, 0)])),
        Role::Log => (FrontendReq::SET_LOG_BASE, longs([LOG, 0])),
        Role::Inflight => (
            FrontendReq::SET_INFLIGHT_FD,
            inflight(inflight_bytes(false), 0, 2, QUEUE),
        ),
        Role::Kick => (FrontendReq::SET_VRING_KICK, longs([0])),
        Role::Call => (FrontendReq::SET_VRING_CALL, longs([0])),
    };
    vmm.says(request, &payload, &[file.as_fd()])
}

fn assert_refused(scene: &Bystander, role: Role, what: &str, file: &OwnedFd) {
    let (shared, vmm) = (Shared::new(false), Vmm::connect(&scene.socket(1)));
    let greeting = shared.greeting();
    assert_eq!(vmm.perform(&shared, &greeting).expect("answered"), greeting.len());
    assert!(!says(&vmm, role, file), "{what} was accepted as {role:?}");
    drop(vmm);
    come_in_peace(&scene.socket(1));
}

#[rstest]
fn descriptors_of_other_kinds_are_refused() {
    require!(Root);
    let scene = Bystander::new(Placement::Copy, 1);
    for (what, file) in kinds() {
        for role in ROLES {
            // A stream socket carries calls (User-mode Linux).
            if matches!(role, Role::Call) && what.ends_with("socket") {
                continue;
            }
            assert_refused(&scene, role, what, &file);
        }
    }
    let count = eventfd(0, rustix::event::EventfdFlags::empty()).expect("a descriptor is left");
    for role in [Role::Memory, Role::Log, Role::Inflight] {
        assert_refused(&scene, role, "eventfd", &count);
    }
    scene.assert_unharmed();
}

#[rstest]
fn memory_that_cannot_be_shared_is_refused() {
    require!(Root);
    let scene = Bystander::new(Placement::Copy, 1);
    let roles = [
        (Role::Memory, RAM),
        (Role::Log, LOG),
        (Role::Inflight, inflight_bytes(false)),
    ];
    for (role, bytes) in roles {
        for (what, file) in unfit_memory(bytes) {
            assert_refused(&scene, role, what, &file);
        }
    }
    scene.assert_unharmed();
}

/// Whether any file is taken or not: memory that only the machine itself may touch is SIGBUS for everybody else.
#[rstest]
fn memory_of_kvm_is_refused_or_costs_its_port_alone(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
    #[values("shared", "any")] taken: &str,
) {
    require!(Root);
    // Not to be mapped, private to the machine, shared with those who map it (GUEST_MEMFD_FLAG_MMAP, …_INIT_SHARED).
    let files: Vec<_> = [0, 1, 3]
        .into_iter()
        .filter_map(|flags| sys::kvm_memory(RAM, flags).ok())
        .collect();
    if files.is_empty() {
        println!("SKIPPED: no KVM here that has guest_memfd");
        return;
    }
    let scene = Bystander::with(placement, 1, |serve| serve.with("--memory-files", taken));
    for file in files {
        let shared = Shared::as_they_are([file, memory(LOG), memory(inflight_bytes(false))], false);
        let acts = shared.session();
        let done = Vmm::connect(&scene.socket(1)).perform(&shared, &acts);
        let done = done.expect("answered or refused");
        assert!(taken == "any" || done < acts.len(), "it was taken");
        println!("{placement:?} {taken}: {done} of {}", acts.len());
        come_in_peace(&scene.socket(1));
    }
    scene.assert_unharmed();
}
