//! Memory that is only said to be there: more than can be mapped, and the same bytes many times; on all ports at once.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::RwLock;
use std::sync::mpsc::{self, Sender};

use rstest::rstest;
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::holdings::address_space_kib;
use testkit::vmm::{Act, QUEUE, Shared, Vmm, inflight, longs, memory, table};
use testkit::{Bystander, Driver, DriverConfig, Layout, assert_soon, frame, require};
use vhost::vhost_user::message::FrontendReq;
use virtqueue::GuestAddr;

const TIB: u64 = 1 << 40;
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Ports of hostile VMMs; the one behind them is a neighbour's.
const PORTS: u32 = 4;
/// `--max-memory`.
const MOST: u64 = 32 * GIB;
/// What each asks for first, of each kind: 128 TiB together. Only of an inflight region that is taken, and not mapped.
const FIRST: u64 = 128 * TIB / PORTS as u64;
/// The longest log of such a guest: a bit for each 4 KiB up to 16 TiB further.
const LOG: u64 = (MOST + 16 * TIB) / 4096 / 8;

/// A connection that has come as far as the features.
fn greeted(scene: &Bystander, port: u32, shared: &Shared) -> Vmm {
    // The next VMM is served without a pause.
    come_in_peace(&scene.socket(port));
    let vmm = Vmm::connect(&scene.socket(port));
    let acts = shared.greeting();
    assert_eq!(vmm.perform(shared, &acts).expect("answered"), acts.len());
    vmm
}

/// What can be said to be large.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Memory,
    Log,
    Inflight,
}

impl Kind {
    fn is_taken(self, vmm: &Vmm, shared: &Shared, bytes: u64, file: &OwnedFd) -> bool {
        let eighth = bytes / 8;
        let regions: Vec<_> = (0..8).map(|at| (at * eighth, eighth, at * eighth)).collect();
        let (request, payload, files) = match self {
            Self::Memory => (FrontendReq::SET_MEM_TABLE, table(&regions), 8),
            Self::Log => (FrontendReq::SET_LOG_BASE, longs([bytes, 0]), 1),
            Self::Inflight => (FrontendReq::SET_INFLIGHT_FD, inflight(bytes, 0, 2, QUEUE), 1),
        };
        let act = Act::Say(request, payload, vec![file.as_fd(); files]);
        vmm.act(shared, &act).expect("answered")
    }
}

/// Asks for all that there is, then for as much as it gets; holds that until the others do, and until it is let go.
fn greedy(scene: &Bystander, port: u32, (holds, let_go): (Sender<()>, &RwLock<()>)) {
    let (shared, file) = (Shared::new(false), memory(FIRST));
    let largest = [(Kind::Log, LOG), (Kind::Inflight, FIRST), (Kind::Memory, MOST)];
    let too_much = largest.map(|(kind, bytes)| {
        let more = if bytes < FIRST {
            [FIRST, bytes + (1 << 20)]
        } else {
            [u64::MAX; 2]
        };
        more.map(|bytes| kind.is_taken(&greeted(scene, port, &shared), &shared, bytes, &file))
    });
    let vmm = greeted(scene, port, &shared);
    let taken = largest.map(|(kind, bytes)| kind.is_taken(&vmm, &shared, bytes, &file));
    // Whatever came of it.
    let _ = holds.send(());
    drop(holds);
    drop(let_go.read());
    assert_eq!(too_much, [[false; 2]; 3]);
    assert_eq!(taken, [true; 3]);
}

#[rstest]
fn sparse_files_of_128_tib_on_all_ports_leave_room_for_a_neighbour(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut scene = Bystander::with(placement, PORTS + 1, |serve| serve.with("--max-memory", "32G"));
    let pid = scene.daemon.process().pid();
    let before = address_space_kib(pid);
    let rest = match placement {
        Placement::Copy => MOST - 2 * GIB,
        // All of it would be made and pinned.
        _ => 128 * MIB,
    };
    let config = DriverConfig::with_memory(vec![
        (GuestAddr(0), 2 * GIB.min(rest)),
        (GuestAddr(4 * GIB), rest),
    ]);
    let let_go = RwLock::new(());
    let neighbour = std::thread::scope(|scope| {
        let (holds, all_hold) = mpsc::channel();
        let hold = let_go.write();
        for port in 1..=PORTS {
            let (scene, let_go, holds) = (&scene, &let_go, holds.clone());
            scope.spawn(move || greedy(scene, port, (holds, let_go)));
        }
        drop(holds);
        // To the end, which comes also where one of them panics.
        all_hold.iter().for_each(drop);
        let held = address_space_kib(pid);
        println!("{before} KiB of address space before, {held} KiB while they hold what they get");
        let neighbour = Driver::connect(&scene.socket(PORTS + 1), &config);
        scene.await_frames(100);
        drop(hold);
        neighbour
    });
    let mut neighbour = neighbour.unwrap_or_else(|refused| panic!("{refused}: {}", scene.daemon.said()));
    let pair = &mut neighbour.pairs[0];
    (0..100).for_each(|_| pair.send(&frame::plain(100, 0x22), Layout::Whole));
    pair.await_sent();
    drop(neighbour);
    // Arenas of the allocator are kept, 64 MiB each.
    assert_soon!(
        address_space_kib(pid) < before + GIB / 1024,
        "before {before}, now {} KiB",
        address_space_kib(pid)
    );
    scene.assert_unharmed();
}

/// A memory slot: ADD_MEM_REG.
fn adds(vmm: &Vmm, (guest, bytes, offset): (u64, u64, u64), file: BorrowedFd<'_>) -> bool {
    let slot = longs([0, guest, bytes, TIB + guest, offset]);
    vmm.says(FrontendReq::ADD_MEM_REG, &slot, &[file])
}

/// Tries one way after the other to have the same bytes twice.
fn aliases(scene: &Bystander, port: u32) {
    let shared = Shared::new(false);
    let (file, again) = (memory(64 * MIB), memory(64 * MIB));
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = std::fs::File::options().read(true).write(true).open(path);
    let other = OwnedFd::from(opened.expect("ours"));
    // Wholly, partly, by a page, and by another descriptor of the same file.
    for (offset, second) in [
        (0, &file),
        (32 * MIB, &file),
        (64 * MIB - 4096, &file),
        (0, &other),
    ] {
        let whole = (0, 64 * MIB, 0);
        let part = (TIB, 64 * MIB - offset, offset);
        let files = [file.as_fd(), second.as_fd()];
        let vmm = greeted(scene, port, &shared);
        let taken = vmm.says(FrontendReq::SET_MEM_TABLE, &table(&[whole, part]), &files);
        assert!(!taken, "the same bytes twice were accepted, from {offset} on");
        let vmm = greeted(scene, port, &shared);
        assert!(adds(&vmm, whole, files[0]));
        assert!(
            !adds(&vmm, part, files[1]),
            "a slot with the same bytes, from {offset} on"
        );
    }
    // Eight times, which fill a message, and as slots until one is refused.
    let eight: Vec<_> = (0..8).map(|at| (at * TIB, 64 * MIB, 0)).collect();
    let vmm = greeted(scene, port, &shared);
    assert!(!vmm.says(FrontendReq::SET_MEM_TABLE, &table(&eight), &[file.as_fd(); 8]));
    let vmm = greeted(scene, port, &shared);
    let slots = (0..32).take_while(|&at| adds(&vmm, (at * TIB, 64 * MIB, 0), file.as_fd()));
    assert_eq!(slots.count(), 1);
    // Parts of a file are none.
    let apart = [
        (0, 32 * MIB, 0),
        (TIB, 32 * MIB, 32 * MIB),
        (2 * TIB, 64 * MIB, 0),
    ];
    let files = [file.as_fd(), file.as_fd(), again.as_fd()];
    let vmm = greeted(scene, port, &shared);
    assert!(
        vmm.says(FrontendReq::SET_MEM_TABLE, &table(&apart), &files),
        "parts of a file"
    );
}

#[rstest]
fn same_bytes_under_many_addresses_are_refused_on_all_ports(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let scene = Bystander::new(placement, PORTS);
    std::thread::scope(|scope| {
        for port in 1..=PORTS {
            let scene = &scene;
            scope.spawn(move || aliases(scene, port));
        }
    });
    scene.assert_unharmed();
}
