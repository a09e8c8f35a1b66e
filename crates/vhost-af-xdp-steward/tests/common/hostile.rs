//! What a hostile peer sends, and what the others notice of it.

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use steer::{HintSet, QueueConf, Station};
use steward_client::LeaseError;
use steward_protocol::{
    AddressChange, Answer, HintRequest, NetkitWanted, Part, Reason, Request, Rings, Step, UmemLayout,
    VtepChange, Wanted, ZcrxRings, ZcrxWanted,
};
use testkit::wait;

use super::raw::Raw;
use super::{World, change, soon, wanted};

/// Another lessee gets its answers.
#[track_caller]
pub(crate) fn assert_serves(world: &World) {
    // A lease that was dropped lasts while a process that another test starts has its connection, from fork to exec.
    let free = || match world.lease(1, 1) {
        Err(LeaseError::Refused(refusal)) if refusal.reason == Reason::Taken => None,
        leased => Some(leased),
    };
    let lease = wait::until_some(wait::SOON, free)
        .expect("free")
        .unwrap_or_else(|error| panic!("{error}: {}", world.steward));
    lease.counters(1, soon()).expect("ours");
}

const RINGS: Rings = Rings {
    fill: 64,
    completion: 64,
    rx: 64,
    tx: 64,
};
/// A flow for zero-copy receive.
pub(crate) const FLOW: &str = "192.0.2.1:443";

/// A request for a socket with so many parts of memory, of 2 MiB each.
pub(crate) fn registration(queue: u32, parts: usize) -> Request {
    let part = Part {
        file_offset: 0,
        len: 2 << 20,
    };
    Request::Register {
        queue,
        umem: UmemLayout {
            parts: vec![part; parts],
            chunk_bytes: 2048,
            headroom_bytes: 0,
            tx_metadata_bytes: 0,
            flags: 0,
        },
        rings: RINGS,
    }
}

/// The bind of what was registered for queue 0.
pub(crate) const BIND: Request = Request::Bind {
    queue: 0,
    flags: 2,
    wait_ms: 0,
};

/// Memory of so many bytes, all of whose pages are there.
pub(crate) fn memfd(bytes: u64) -> File {
    let file = rustix::fs::memfd_create(c"test", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    let file = File::from(file);
    file.set_len(bytes).expect("room");
    let zeros = vec![0; usize::try_from(bytes).expect("small")];
    (&file).write_all(&zeros).expect("room");
    file
}

/// Limits the steward's descriptors to so many; `None`: to those that it has.
pub(crate) fn limit_descriptors(world: &World, count: Option<usize>) {
    let pid = world.steward.pid().to_string();
    // The lowest number that is not in use, once the steward has closed what it needed for the last request.
    let used = |number: &usize| Path::new(&format!("/proc/{pid}/fd/{number}")).is_symlink();
    let lowest = || (0..).find(|number| !used(number));
    let at_rest = || {
        let before = lowest();
        std::thread::sleep(Duration::from_millis(20));
        before.filter(|_| lowest() == before)
    };
    let count = count.or_else(|| wait::until_some(wait::SOON, at_rest));
    let limit = format!("--nofile={}:", count.expect("few are"));
    let done = Command::new("prlimit").args(["--pid", &pid, &limit]).status();
    assert!(done.expect("prlimit(1)").success());
}

/// What failed.
#[track_caller]
pub(crate) fn failed(answer: Answer) -> (Step, i32) {
    match answer {
        Answer::Failed { step, errno } => (step, errno.cast_signed()),
        other => panic!("{other:?}"),
    }
}

/// A connection with a lease of queue 0.
pub(crate) fn leased(world: &World) -> Raw {
    Raw::leased_as(&world.socket(), 0, 0, &wanted(0, 1))
}

/// Both ends of a connection; much was sent by the first.
pub(crate) fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut sender = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (peer, _) = listener.accept().expect("it connects");
    let hour = Some(Duration::from_secs(3600));
    rustix::net::sockopt::set_socket_linger(&sender, hour).expect("an option");
    sender.set_nonblocking(true).expect("an option");
    while sender.write(&[0; 1 << 16]).is_ok() {}
    (sender, peer)
}

/// Requests as they should be, of all kinds, for one after the other in any order.
pub(crate) fn requests() -> Vec<Request> {
    let queue = 0;
    let conf = super::bare(1518);
    let with_hints = QueueConf { hints: true, ..conf };
    let token = [7; 16];
    let network = Wanted {
        network: true,
        ..wanted(0, 1)
    };
    let hints = |bits, tags| {
        let asked = HintSet::of_bits(bits);
        Request::Hints(HintRequest { asked, tags })
    };
    let station = |vlan, port| change(vlan, [2, 0, 0, 0, 0, 0xaa], port);
    let zcrx = |interface: &str| {
        Request::Zcrx(ZcrxWanted {
            interface: interface.to_owned(),
            queue,
            flows: vec![FLOW.parse().expect("an address and a port")],
        })
    };
    let changes = vec![station(0, Some(1)), station(7, Some(2)), station(0, None)];
    vec![
        Request::Lease(wanted(0, 1)),
        Request::Lease(wanted(0, 1)),
        Request::Lease(network),
        hints(0, false),
        hints(0, true),
        hints(9, false),
        hints(15, true),
        Request::Stations { changes },
        Request::Groups,
        Request::Host { has: 0 },
        Request::Uplink { has: 0, queues: 1 },
        Request::Uplink { has: 7, queues: 2 },
        Request::SendTap {
            queue,
            only_with_tso: false,
        },
        Request::Advertise {
            changes: vec![AddressChange {
                station: Station { vlan: 0, mac: [2; 6] },
                ip: None,
                is_added: true,
            }],
        },
        Request::Tunnel {
            share: 0,
            device: "lo".to_owned(),
        },
        Request::TunnelStations {
            share: 1,
            changes: vec![change(0, [2; 6], Some(1))],
        },
        Request::Vteps {
            share: 2,
            changes: vec![VtepChange {
                vtep: [10, 9, 0, 2].into(),
                is_added: true,
            }],
        },
        Request::DropUnknown { share: 63 },
        Request::Behind {
            after: Station { vlan: 0, mac: [0; 6] },
        },
        registration(queue, 1),
        Request::Share {
            queue,
            wait_ms: 1,
            cookie: 7,
            rings: RINGS,
        },
        BIND,
        Request::Await { queue, wait_ms: 1 },
        Request::Activate { queue, conf },
        Request::Activate {
            queue,
            conf: with_hints,
        },
        Request::Deactivate { queue },
        Request::Counters { queue },
        Request::Counters { queue: 2 },
        Request::Facts,
        Request::Keep { token },
        Request::Resume { token },
        Request::Leases { after: 0 },
        Request::Netkit(NetkitWanted {
            queue,
            name: "nk0".to_owned(),
        }),
        zcrx("lo"),
        zcrx("nic0"),
        // Rings that are no rings of this process.
        Request::ZcrxRegister(ZcrxRings {
            rings: vec![0, 7],
            area: Part {
                file_offset: 0,
                len: 2 << 20,
            },
            entries: 64,
            buffer_bytes: 0,
        }),
    ]
}
