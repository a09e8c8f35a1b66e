//! Guests of a network whose VMMs do what hurts who copies from and to their memory: it hurts their own port. What they
//! put into their frames is tested in crate `dataplane` (`tests/network_attacks_tests.rs`).

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rstest::rstest;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use testkit::driver::{F_GUEST_ALL, F_HOST_ALL, region_info};
use testkit::frame::NUMBERED;
use testkit::lan::{self, mac};
use testkit::vmm::{Act, Shared, Vmm};
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Serve, driver, message, scribble, soak, wait};
use vhost::vhost_user::VhostUserFrontend;
use virtqueue::driver::{Buffer, GuestRam};
use virtqueue::{GuestAddr, Region};

const MIB: u64 = 1 << 20;
/// Where the memory of a guest is that does wrong, beside that of its rings.
const LOST: u64 = 16 * MIB;

fn frame(to: usize, from: usize, number: u32) -> Vec<u8> {
    let mut frame = [&mac(to)[..], &mac(from), &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.resize(1000, number as u8);
    frame
}

/// A network of guests, of which the last ones do wrong.
struct World {
    honest: [Driver; 2],
    daemon: Daemon,
    number: u32,
    _netns: NetNs,
}

/// The first of those that do wrong.
const LIAR: usize = 2;

impl World {
    /// With so many that do wrong.
    fn with(liars: usize) -> Self {
        let netns = NetNs::new("hostile");
        let text = lan::file(None, &vec![""; LIAR + liars]);
        let text = format!("[daemon]\nworkers = 1\n{text}");
        let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &text);
        let honest = [0, 1].map(|guest| {
            let path = daemon.path(&format!("vm{guest}.sock"));
            let mut driver = Driver::connect(&path, &DriverConfig::default()).expect("accepted");
            driver.pairs[0].post(200, &[2048]);
            driver
        });
        Self {
            honest,
            daemon,
            number: 0,
            _netns: netns,
        }
    }

    fn connect_liar(&self, ram: Arc<GuestRam>) -> Driver {
        let socket = driver::connect(&self.daemon.path("vm2.sock"));
        let config = DriverConfig::default();
        let liar = Driver::start_with(socket, &config, ram).expect("accepted");
        let runs = |port: &serde_json::Value| port["lanes"][0]["running"] == true;
        self.daemon.await_port(LIAR, "it runs", runs);
        liar
    }

    /// A frame from one honest guest to the other, behind one to the one that does wrong.
    #[track_caller]
    fn assert_goes_on(&mut self) {
        self.assert_goes_on_beside(LIAR);
    }

    /// The same, where that one does wrong.
    #[track_caller]
    fn assert_goes_on_beside(&mut self, liar: usize) {
        self.number += 1;
        let frames = [liar, 1].map(|to| frame(to, 0, self.number));
        let pair = &mut self.honest[0].pairs[0];
        pair.reap_sent();
        // What others send to this one does not matter.
        while pair.poll().is_some() {}
        pair.send_batch(&[&frames[0], &frames[1]], Layout::Whole);
        loop {
            let got = self.honest[1].pairs[0].receive(wait::SOON);
            let got = got.unwrap_or_else(|| panic!("frame {} is lost: {}", self.number, self.daemon.said()));
            // What the other sends before its end may come, too.
            if got.frame[6..12] == mac(0) {
                assert!(got.frame == frames[1], "frame {}", self.number);
                return;
            }
        }
    }
}

impl World {
    /// Frames from one honest guest to the other as long as something lasts, each behind one to who does wrong just
    /// then, whose number is told; how many.
    #[track_caller]
    fn goes_on_while(&mut self, during: impl FnOnce(&AtomicUsize) + Send) -> u32 {
        let liar = AtomicUsize::new(LIAR);
        let rounds = wait::rounds_during(
            || during(&liar),
            |_| self.assert_goes_on_beside(liar.load(Ordering::Relaxed)),
        );
        self.daemon.process().check();
        rounds
    }
}

/// Memory of a guest, of which a part can be lost, and that part's file.
fn memory() -> (Arc<GuestRam>, File) {
    let region = |name: &str, at: u64, flags: MemfdFlags| {
        let file = File::from(memfd_create(name, flags | MemfdFlags::CLOEXEC).expect("memory"));
        ftruncate(&file, LOST).expect("room");
        let region = Region {
            guest_addr: GuestAddr(at),
            user_addr: at,
            len: LOST,
            file: file.try_clone().expect("a descriptor").into(),
            file_offset: 0,
        };
        (region, file)
    };
    let (kept, _) = region("kept", 0, MemfdFlags::empty());
    let (lost, file) = region("lost", LOST, MemfdFlags::empty());
    let ram = GuestRam::from_regions(vec![kept, lost]).expect("memory");
    (Arc::new(ram), file)
}

/// Frames are being copied to it, or from it.
#[rstest]
fn memory_that_is_truncated_under_a_copy_closes_its_own_port(#[values(false, true)] sends: bool) {
    let mut world = World::with(1);
    let (ram, file) = memory();
    let mut liar = world.connect_liar(Arc::clone(&ram));
    let at = |number: u64| GuestAddr(LOST + number * 4096);
    for number in 0..64 {
        liar.pairs[0].post_buffers(vec![Buffer::writable(at(number), 2048)]);
    }
    liar.pairs[0].to_guest.publish();
    for number in 0..100u64 {
        if number == 20 {
            ftruncate(&file, 0).expect("not sealed");
        }
        if sends && number < 40 {
            // Header and the frame's first bytes are where they were; the rest is not.
            let header = [&[0; 12][..], &frame(1, LIAR, 0)[..88]].concat();
            let start = ram.alloc(header.len() as u64, 64).expect("room");
            ram.write(start, &header);
            let buffers = [
                Buffer::readable(start, 100),
                Buffer::readable(at(100 + number), 900),
            ];
            liar.pairs[0].from_guest.driver.add(&buffers);
            liar.pairs[0].from_guest.publish();
        }
        world.assert_goes_on();
    }
    assert!(liar.await_close(wait::SOON));
    world.daemon.await_port(LIAR, "its reason", |port| {
        port["last_closed"]["reason"].as_str() == Some("memory-truncated")
    });
    for guest in &world.honest {
        assert!(!guest.await_close(wait::QUIET));
    }
    let _again = world.connect_liar(memory().0);
    world.assert_goes_on();
}

/// Rings, descriptors, frames with their headers change while the switch reads and copies them.
#[rstest]
fn shared_bytes_that_change_under_copies_cost_others_no_frame() {
    const LIARS: usize = 4;
    let mut world = World::with(LIARS);
    let paths: Vec<_> = (LIAR..LIAR + LIARS)
        .map(|liar| world.daemon.path(&format!("vm{liar}.sock")))
        .collect();
    let whole = AtomicUsize::new(0);
    let frames = world.goes_on_while(|now| {
        for number in 0..soak::count(28, 2000) {
            let liar = LIAR + number % LIARS;
            now.store(liar, Ordering::Relaxed);
            let mut sent = frame(0, liar, 0);
            sent.truncate(NUMBERED);
            let kind = (F_HOST_ALL | F_GUEST_ALL, number % 8 >= LIARS);
            if scribble::session(&paths[liar - LIAR], kind, &sent, number) {
                whole.fetch_add(1, Ordering::Relaxed);
            }
            // Who came once and did no wrong is met without a pause the next time.
            drop(driver::connect(&paths[liar - LIAR]));
        }
    });
    println!("{frames} frames, {whole:?} sessions to their end");
    assert!(
        whole.into_inner() > 0,
        "no session comes to its end: they show little"
    );
}

/// Memory is plugged in and out of a guest that gets frames and sends some.
#[rstest]
fn memory_that_is_plugged_and_unplugged_under_copies_costs_others_no_frame() {
    let mut world = World::with(1);
    let mut liar = world.connect_liar(memory().0);
    liar.pairs[0].post(64, &[2048]);
    let (more, _file) = memory();
    let mut more = more.regions().expect("a descriptor is left").remove(0);
    (more.guest_addr, more.user_addr) = (GuestAddr(1 << 32), 1 << 46);
    let frames = world.goes_on_while(|_| {
        for number in 0..100 {
            liar.frontend()
                .add_mem_region(&region_info(&more))
                .expect("a slot");
            liar.pairs[0].reap_sent();
            liar.pairs[0].send(&frame(0, LIAR, number), Layout::Pieces(100));
            let gone = liar.frontend().remove_mem_region(&region_info(&more));
            gone.expect("it is one");
            while liar.pairs[0].poll().is_some() {}
        }
    });
    println!("{frames} frames");
    assert!(!liar.await_close(wait::QUIET));
}

/// Its receive buffers are in memory that is taken out.
#[rstest]
fn buffers_in_memory_that_is_unplugged_close_their_own_port() {
    let mut world = World::with(1);
    let (ram, _file) = memory();
    let mut liar = world.connect_liar(Arc::clone(&ram));
    let post = |liar: &mut Driver| {
        for number in 0..64 {
            let at = GuestAddr(LOST + number * 4096);
            liar.pairs[0].post_buffers(vec![Buffer::writable(at, 2048)]);
        }
        liar.pairs[0].to_guest.publish();
    };
    post(&mut liar);
    (0..10).for_each(|_| world.assert_goes_on());
    let lost = ram.regions().expect("a descriptor is left").remove(1);
    world.goes_on_while(|_| {
        // The connection may be over before the answer.
        let _ = liar.frontend().remove_mem_region(&region_info(&lost));
        // Frames that came before may have had all the buffers.
        post(&mut liar);
        assert!(liar.await_close(wait::SOON), "it goes on without its buffers");
    });
    world.daemon.await_port(LIAR, "its reason", |port| {
        port["last_closed"]["reason"].as_str() == Some("outside-memory")
    });
}

/// How far a VMM comes with what it says last.
#[derive(Debug, Clone, Copy)]
enum Last {
    HalfTheHeader,
    HalfThePayload,
    WithoutWaitingForTheAnswer,
}

/// A VMM is killed in the middle of each of its requests, while others send to its guest: the connection ends, with all
/// that it shared.
#[rstest]
fn vmm_that_is_killed_in_a_request_costs_others_no_frame(
    #[values(Last::HalfTheHeader, Last::HalfThePayload, Last::WithoutWaitingForTheAnswer)] last: Last,
    #[values(false, true)] packed: bool,
) {
    let acts = Shared::new(packed).session().len();
    let mut world = World::with(acts);
    let paths: Vec<_> = (LIAR..LIAR + acts)
        .map(|liar| world.daemon.path(&format!("vm{liar}.sock")))
        .collect();
    let frames = world.goes_on_while(|now| {
        for (at, path) in paths.iter().enumerate() {
            let liar = LIAR + at;
            now.store(liar, Ordering::Relaxed);
            let shared = Shared::new(packed);
            shared.set_frame(&frame(0, liar, 0)[..NUMBERED]);
            let acts = shared.session();
            let vmm = Vmm::connect(path);
            let done = vmm.perform(&shared, &acts[..at]).expect("answered");
            assert_eq!(done, at, "refused");
            say_last(&vmm, &shared, &acts[at], last);
        }
    });
    println!("{} requests, {frames} frames", paths.len());
    // Its successor is served.
    for liar in [LIAR, LIAR + acts / 2, LIAR + acts - 1] {
        let mut guest = world
            .daemon
            .connect(liar, &paths[liar - LIAR], &DriverConfig::default(), 64);
        world.assert_goes_on_beside(liar);
        let got = guest.pairs[0].receive(wait::SOON).expect("it comes");
        assert!(got.frame == frame(liar, 0, world.number), "guest {liar}");
    }
}

fn say_last(vmm: &Vmm, shared: &Shared, act: &Act<'_>, last: Last) {
    let (request, payload, files) = match act {
        Act::Say(request, payload, files) => (*request, &payload[..], &files[..]),
        Act::Tell(request, payload) => (*request, &payload[..], &[][..]),
        Act::Send(_) => {
            vmm.act(shared, act).expect("nothing is answered");
            return;
        }
    };
    match last {
        Last::HalfTheHeader => {
            let half = (request as u32).to_ne_bytes();
            vmm.socket()
                .write_all(&[half, [1, 0, 0, 0]].concat())
                .expect("room");
        }
        Last::HalfThePayload => {
            let half = payload.len() / 2;
            let more = (payload.len() - half).max(8) as i32;
            let file = files.first().map(AsFd::as_fd);
            message::send_saying(vmm.socket(), request, &payload[..half], more, file);
        }
        Last::WithoutWaitingForTheAnswer => {
            message::try_send(vmm.socket(), request, payload, files).expect("room");
        }
    }
}
