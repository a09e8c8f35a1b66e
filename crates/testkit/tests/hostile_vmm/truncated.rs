//! Files that shrink and grow while the daemon has them mapped.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use rustix::fs::{SealFlags, fcntl_add_seals, ftruncate};
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::vmm::{Shared, Vmm};
use testkit::{Bystander, require, soak};

/// Guest memory, log, inflight.
const FILES: [usize; 3] = [0, 1, 2];

/// A session in which a file is cut off before the act `at`; how many acts the back end went along with.
fn cut(socket: &Path, shared: &Shared, at: usize, file: &OwnedFd, bytes: u64) -> usize {
    let vmm = Vmm::connect(socket);
    let acts = shared.session();
    let (before, after) = acts.split_at(at);
    let done = vmm.perform(shared, before).expect("answered");
    assert_eq!(done, at, "nothing is wrong before");
    ftruncate(file, bytes).expect("not sealed");
    done + vmm.perform(shared, after).expect("answered or closed")
}

#[rstest]
#[case(Placement::Copy, false)]
#[case(Placement::Direct, true)]
fn file_cut_off_between_any_two_messages_harms_nobody_else(
    #[case] placement: Placement,
    #[case] packed: bool,
) {
    require!(Root);
    let scene = Bystander::new(placement, 3);
    // The first session shows that all of this is accepted, if nothing is cut off.
    let socket = scene.socket(1);
    let good = Shared::new(packed);
    let acts = good.session();
    assert_eq!(
        Vmm::connect(&socket).perform(&good, &acts).expect("answered"),
        acts.len()
    );
    std::thread::scope(|scope| {
        for file in FILES {
            let socket = scene.socket(1 + file as u32);
            scope.spawn(move || {
                for at in 0..=Shared::new(packed).session().len() {
                    let shared = Shared::new(packed);
                    // To nothing, or to a part.
                    let bytes = if at % 2 == 0 {
                        0
                    } else {
                        4096 * u64::from(file == 0)
                    };
                    cut(&socket, &shared, at, shared.files()[file], bytes);
                    come_in_peace(&socket);
                }
            });
        }
    });
    scene.assert_unharmed();
}

#[rstest]
fn files_that_shrink_and_grow_all_the_time_harm_nobody_else(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let scene = Bystander::new(placement, 2);
    std::thread::scope(|scope| {
        for packed in [false, true] {
            let socket = scene.socket(1 + u32::from(packed));
            scope.spawn(move || {
                for _ in 0..soak::count(10, 800) {
                    shrinks_and_grows(&socket, packed);
                    come_in_peace(&socket);
                }
            });
        }
    });
    scene.assert_unharmed();
}

fn shrinks_and_grows(socket: &Path, packed: bool) {
    let shared = Shared::new(packed);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let sizes = shared
                .files()
                .map(|file| rustix::fs::fstat(file).expect("open").st_size as u64);
            let mut noise = 0x9e37_79b9_7f4a_7c15u64;
            while !stop.load(Ordering::Relaxed) {
                noise ^= noise << 13;
                noise ^= noise >> 7;
                noise ^= noise << 17;
                let (file, act) = (noise as usize % 3, noise >> 32);
                // Mostly whole, so that sessions come far.
                let bytes = if act % 16 == 0 {
                    act % sizes[file]
                } else {
                    sizes[file]
                };
                ftruncate(shared.files()[file], bytes).expect("not sealed");
                std::thread::sleep(Duration::from_micros(act % 300));
            }
        });
        let acts = shared.session();
        let done = Vmm::connect(socket).perform(&shared, &acts);
        stop.store(true, Ordering::Relaxed);
        done.expect("answered or closed");
    });
}

#[rstest]
fn sealed_files_cannot_be_cut_off_and_serve(#[values(false, true)] packed: bool) {
    require!(Root);
    let scene = Bystander::new(Placement::Copy, 1);
    let shared = Shared::new(packed);
    for file in shared.files() {
        fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .expect("it may be sealed");
        ftruncate(file, 0).expect_err("sealed");
    }
    let acts = shared.session();
    let done = Vmm::connect(&scene.socket(1)).perform(&shared, &acts);
    assert_eq!(done.expect("answered"), acts.len());
    scene.assert_unharmed();
}
