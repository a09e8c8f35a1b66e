//! Valid messages without an end, in pieces, or with descriptors that nobody asked for.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rstest::rstest;
use rustix::fs::{FallocateFlags, fallocate};
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::message::{self, MOST_FILES};
use testkit::vmm::{
    Act, LOG, QUEUE, RAM, Shared, Vmm, event, inflight, inflight_bytes, longs, memory, table, words,
};
use testkit::{Bystander, Daemon, NetNs, Serve, require, soak, wait};
use vhost::vhost_user::message::FrontendReq;

/// VHOST_F_LOG_ALL.
const F_LOG_ALL: u64 = 1 << 26;

/// What may be said at any time, with its descriptors.
fn requests<'a>(
    shared: &'a Shared,
    event: BorrowedFd<'a>,
) -> Vec<(FrontendReq, Vec<u8>, Vec<BorrowedFd<'a>>)> {
    let ram = || vec![shared.ram.as_fd()];
    let region = inflight(inflight_bytes(false), 0, 2, QUEUE);
    let config = [words([0, 12, 0]), vec![0; 12]].concat();
    vec![
        (FrontendReq::SET_MEM_TABLE, table(&[(0, RAM, 0)]), ram()),
        (FrontendReq::SET_VRING_NUM, words([0, QUEUE.into()]), vec![]),
        (FrontendReq::SET_VRING_BASE, words([1, 0]), vec![]),
        (FrontendReq::SET_VRING_CALL, longs([0]), vec![event]),
        (FrontendReq::SET_VRING_KICK, longs([1]), vec![event]),
        (FrontendReq::SET_VRING_ERR, longs([1]), vec![event]),
        (FrontendReq::SET_VRING_ENABLE, words([0, 0]), vec![]),
        (FrontendReq::SET_VRING_ENABLE, words([0, 1]), vec![]),
        (FrontendReq::GET_INFLIGHT_FD, inflight(0, 0, 2, QUEUE), vec![]),
        (
            FrontendReq::SET_INFLIGHT_FD,
            region,
            vec![shared.inflight.as_fd()],
        ),
        (
            FrontendReq::SET_LOG_BASE,
            longs([LOG, 0]),
            vec![shared.log.as_fd()],
        ),
        (
            FrontendReq::SET_FEATURES,
            longs([shared.features | F_LOG_ALL]),
            vec![],
        ),
        (FrontendReq::SET_FEATURES, longs([shared.features]), vec![]),
        (FrontendReq::SEND_RARP, longs([0x0b00_0000_0002]), vec![]),
        (FrontendReq::GET_CONFIG, config, vec![]),
        (FrontendReq::GET_FEATURES, vec![], vec![]),
        (FrontendReq::GET_QUEUE_NUM, vec![], vec![]),
        (FrontendReq::GET_MAX_MEM_SLOTS, vec![], vec![]),
        (FrontendReq::SET_OWNER, vec![], vec![]),
    ]
}

/// A session that runs, and then one request again and again: each answer is read, or none is.
fn flood(socket: &Path, request: usize, times: usize, reads: bool) {
    let (shared, event) = (Shared::new(false), event());
    let vmm = Vmm::connect(socket);
    let mut acts = shared.session();
    // Without the last two, which stop the rings.
    acts.truncate(acts.len() - 2);
    assert_eq!(vmm.perform(&shared, &acts).expect("answered"), acts.len());
    let (request, payload, files) = requests(&shared, event.as_fd()).swap_remove(request);
    if reads {
        for _ in 0..times {
            let act = Act::Say(request, payload.clone(), files.clone());
            assert!(
                vmm.act(&shared, &act).expect("answered"),
                "{request:?} is refused"
            );
        }
    } else {
        // Until no more is taken, as the back end waits with its answers; what takes it long does not come so far.
        vmm.socket()
            .set_write_timeout(Some(wait::QUIET))
            .expect("not zero");
        let begun = Instant::now();
        while begun.elapsed() < wait::QUIET
            && message::try_send(vmm.socket(), request, &payload, &files).is_ok()
        {}
    }
    drop(vmm);
    come_in_peace(socket);
}

#[rstest]
fn valid_requests_without_end_hold_up_nobody_else(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let scene = Bystander::new(placement, 2);
    let (shared, event) = (Shared::new(false), event());
    let kinds = requests(&shared, event.as_fd()).len();
    std::thread::scope(|scope| {
        for reads in [false, true] {
            let socket = scene.socket(1 + u32::from(reads));
            scope.spawn(move || (0..kinds).for_each(|kind| flood(&socket, kind, soak::count(1, 300), reads)));
        }
    });
    scene.assert_unharmed();
}

#[test]
fn messages_that_come_byte_by_byte_or_never_end_hold_up_nobody_else() {
    require!(Root);
    let scene = Bystander::new(Placement::Copy, 2);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let slow = scene.socket(1);
        let stop = &stop;
        scope.spawn(move || {
            let vmm = Vmm::connect(&slow);
            let mut socket = vmm.socket();
            // GET_FEATURES, a byte at a time; the last message is never finished.
            let message = [FrontendReq::GET_FEATURES as u32, 1, 0]
                .map(u32::to_ne_bytes)
                .concat();
            for byte in message.iter().cycle().take(12 * 20 + 7) {
                socket.write_all(&[*byte]).expect("it is read");
                std::thread::sleep(Duration::from_millis(1));
            }
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let many = scene.socket(2);
        for size in [0u32, 1, 7, 4096, 4097, u32::MAX] {
            // A payload that never comes, or too long a one.
            let vmm = Vmm::connect(&many);
            let header = [FrontendReq::SET_MEM_TABLE as u32, 1, size]
                .map(u32::to_ne_bytes)
                .concat();
            let mut socket = vmm.socket();
            let _ = socket.write_all(&header);
            let _ = socket.write_all(&[0xff; 3]);
            drop(vmm);
            come_in_peace(&many);
        }
        scene.await_frames(100);
        stop.store(true, Ordering::Relaxed);
    });
    scene.assert_unharmed();
}

#[test]
fn descriptors_by_the_hundred_with_every_message_are_closed() {
    require!(Root);
    let scene = Bystander::new(Placement::Copy, 1);
    let socket = scene.socket(1);
    let (shared, event) = (Shared::new(false), event());
    for (request, payload, _) in requests(&shared, event.as_fd()) {
        for file in [event.as_fd(), shared.ram.as_fd()] {
            let vmm = Vmm::connect(&socket);
            let greeting = shared.greeting();
            assert_eq!(vmm.perform(&shared, &greeting).expect("answered"), greeting.len());
            // A message of which nothing was understood has no answer.
            vmm.socket()
                .set_read_timeout(Some(wait::QUIET))
                .expect("not zero");
            let _ = message::try_send(vmm.socket(), request, &payload, &[file; MOST_FILES]);
            let _ = message::try_receive(vmm.socket());
            drop(vmm);
            come_in_peace(&socket);
        }
    }
    scene.assert_unharmed();
}

/// Ticks of the CPU that threads have used whose names begin so.
fn cpu_ticks(pid: u32, name: &str) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let of = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        // Behind the name, which is in parentheses: see proc_pid_stat(5).
        let (comm, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
        let numbers = rest.split_whitespace().skip(11).take(2);
        let ticks: u64 = numbers.filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        comm.starts_with(name).then_some(ticks)
    };
    tasks.flatten().filter_map(of).sum()
}

/// Who lets go of the last of a file frees it, page by page. That must not be a worker, which has other guests to
/// serve.
#[test]
fn logs_that_the_vmm_has_closed_are_not_freed_by_a_worker() {
    require!(Root);
    const LARGE: u64 = 256 << 20;
    let netns = NetNs::new("logs");
    let mut daemon = Daemon::start(&netns, &Serve::null());
    let shared = Shared::new(false);
    let vmm = Vmm::connect(&daemon.socket());
    let mut acts = shared.session();
    // Without the last two, which stop the rings.
    acts.truncate(acts.len() - 2);
    assert_eq!(vmm.perform(&shared, &acts).expect("answered"), acts.len());
    let pid = daemon.process().pid();
    let ticks = || ["worker-0", "port "].map(|name| cpu_ticks(pid, name));
    let before = ticks();
    for _ in 0..8 {
        let log = memory(LARGE);
        fallocate(&log, FallocateFlags::empty(), 0, LARGE).expect("memory");
        let act = Act::Say(FrontendReq::SET_LOG_BASE, longs([LARGE, 0]), vec![log.as_fd()]);
        assert!(vmm.act(&shared, &act).expect("answered"));
    }
    let after = ticks();
    let [worker, port] = [0, 1].map(|at| after[at] - before[at]);
    println!("ticks of the CPU: {worker} of the worker, {port} of the port's thread");
    assert!(worker <= port, "{worker}, and {port} of the port's thread");
}
