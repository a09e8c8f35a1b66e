//! What the kernel tests share: a network namespace with a veth pair, a packet socket at its far end, a UMEM.
//!
//! A namespace belongs to one thread (`unshare`), in which the test runs; it has no name and goes with the thread,
//! however the test ends.

#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod map;
pub(crate) mod packet;
pub(crate) mod redirect;
pub(crate) mod rig;

use std::io;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use xsk::{FramePool, OwnMemory, Umem};

/// A veth pair in a namespace of its own: `near` for the AF_XDP socket, `far` for the packet socket.
pub(crate) struct Veth {
    pub(crate) near: u32,
    pub(crate) far: u32,
}

pub(crate) const NEAR: &str = "near";
pub(crate) const FAR: &str = "far";

/// Runs `claim` in a fresh namespace with a veth pair of `queues` queues and this MTU.
pub(crate) fn with_veth(queues: u32, mtu: u32, claim: impl FnOnce(&Veth) + Send + 'static) {
    let thread = thread::spawn(move || {
        if let Err(error) = enter_namespace() {
            skip(&format!("no network namespace: {error}"));
            return;
        }
        ip(&format!(
            "link add {NEAR} numrxqueues {queues} numtxqueues {queues} mtu {mtu} type veth \
             peer name {FAR} numrxqueues {queues} numtxqueues {queues} mtu {mtu}"
        ));
        for end in [NEAR, FAR] {
            // No router solicitations and the like among the frames.
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{end}/disable_ipv6"), "1");
            ip(&format!("link set {end} up"));
        }
        let veth = Veth {
            near: index(NEAR),
            far: index(FAR),
        };
        wait_for_carrier();
        claim(&veth);
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

#[allow(unsafe_code)]
fn enter_namespace() -> io::Result<()> {
    // SAFETY: the thread is new and has no state that depends on its network namespace; nothing else is unshared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
    Ok(())
}

/// A missing privilege: says so, and fails where none may be missing.
pub(crate) fn skip(reason: &str) {
    println!("SKIPPED: {reason}");
    assert!(
        std::env::var_os("REQUIRE_PRIV").is_none_or(|value| value != "1"),
        "SKIPPED with REQUIRE_PRIV=1: {reason}"
    );
}

/// Runs `ip` with these arguments in the namespace of this thread.
pub(crate) fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .expect("ip(8) is installed");
    assert!(
        output.status.success(),
        "ip {arguments}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn index(name: &str) -> u32 {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap();
    netdevice::name_to_index(socket, name).unwrap()
}

fn wait_for_carrier() {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let output = Command::new("ip")
            .args(["-o", "link", "show", NEAR])
            .output()
            .unwrap();
        if String::from_utf8_lossy(&output.stdout).contains("LOWER_UP") || Instant::now() > deadline {
            return;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// A UMEM of our own, 2048-byte chunks, and all its frames.
pub(crate) fn own_umem(chunks: usize) -> (Umem, FramePool) {
    let umem = Umem::aligned(Arc::new(OwnMemory::new(chunks * 2048).unwrap()), 2048, 0).unwrap();
    let pool = umem.all_frames().unwrap().collect();
    (umem, pool)
}

/// A frame of the experimental EtherType, `len` bytes, different for each `seed`.
pub(crate) fn test_frame(len: usize, seed: u8) -> Vec<u8> {
    let mut frame = vec![
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, seed, 0x88, 0xb5,
    ];
    frame.extend((frame.len()..len).map(|at| (at as u8).wrapping_mul(31) ^ seed));
    frame.truncate(len);
    frame
}
