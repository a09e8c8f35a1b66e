//! What fails is tried again less and less often: with each privileged operation refused in turn, none is repeated
//! again and again, the log is not flooded, no device stays behind, and all goes on when it is allowed again.

use std::collections::BTreeMap;
use std::time::Duration;

use testkit::daemon::DIR;
use testkit::refusing::Refusing;
use testkit::{Daemon, Driver, DriverConfig, NetNs, Serve, VethPair, assert_soon, require, soak};

/// Attempts in the time that is looked at, by what is tried again after 1 s, 2 s, and at changes: of ten seconds they
/// are ten.
const ATTEMPTS: u64 = 8;
/// An attempt may do a thing in two modes.
const WAYS: u64 = 2;
const LOOKED_AT: Duration = Duration::from_secs(4);
/// Worlds at a time.
const AT_ONCE: usize = 8;

/// What the short form refuses: a program loaded, on the interface, at its egress, at the tap's ingress; a tap made, and
/// set; a socket's memory, its queue. Kinds are those of [`Refusing`].
const SHORT: [&str; 8] = [
    "bpf 5 6",
    "bpf 28 37",
    "bpf 28 47",
    "bpf 28 46",
    "tun 202",
    "rtnetlink 19",
    "xdp option 4",
    "xdp bind",
];

/// A daemon by root, whose helper does what takes a privilege, and a guest.
struct World {
    refusing: Refusing,
    daemon: Daemon,
    _guest: Driver,
    veth: VethPair,
    is_network: bool,
}

impl World {
    fn new(is_network: bool) -> Self {
        let veth = VethPair::new();
        let (refusing, (veth, daemon)) = Refusing::start(move || {
            let daemon = start(&veth.near, is_network);
            (veth, daemon)
        });
        let socket = daemon.path("vm.sock");
        let mut guest = Driver::connect(&socket, &DriverConfig::with(0)).expect("accepted");
        guest.pairs[0].post(64, &[2048]);
        let world = Self {
            refusing,
            daemon,
            _guest: guest,
            veth,
            is_network,
        };
        world.await_whole();
        world
    }

    /// Whether all runs.
    fn is_whole(&self) -> bool {
        let status = self.daemon.status();
        let (port, network) = (&status["ports"][0], &status["networks"][0]);
        let runs = port["impaired"].is_null() && port["lanes"][0]["running"] == true;
        let host = &network["host"];
        let reaches =
            network["impaired"].is_null() && host["interface"].is_string() && host["impaired"].is_null();
        runs && (reaches || !self.is_network)
    }

    #[track_caller]
    fn await_whole(&self) {
        assert_soon!(self.is_whole(), "{:#}", self.daemon.status());
    }

    /// Has all be done again that is done for an interface.
    fn make_anew(&self) {
        self.veth.near.ip(&["link", "delete", VethPair::NIC]);
        self.veth.join(1, 1500);
    }
}

fn start(near: &NetNs, is_network: bool) -> Daemon {
    let file = match is_network {
        true => format!(
            "[network.lan]\nuplink = \"{}\"\n[port.vm]\nnetwork = \"lan\"\nmac = \"02:00:00:00:00:01\"\n",
            VethPair::NIC
        ),
        false => format!("[port.vm]\nifname = \"{}\"\n", VethPair::NIC),
    };
    let file = format!("{file}socket-path = \"{DIR}/vm.sock\"\n");
    Daemon::start_file(near, &Serve::file().by_root(), &[], &file)
}

/// What is wrong with what a world did while it was refused an operation; none if it never asked for it.
fn refused(kind: &str, is_network: bool, usual: &BTreeMap<String, u64>) -> Option<String> {
    let mut world = World::new(is_network);
    let lines = world.daemon.said().lines().count();
    let _ = world.refusing.counts();
    world.refusing.refuse(Some(kind));
    world.make_anew();
    std::thread::sleep(LOOKED_AT);
    let counts = world.refusing.counts();
    counts.get(kind)?;
    let said = world.daemon.said();
    let new: Vec<&str> = said.lines().skip(lines).collect();
    let once = |kind: &String| usual.get(kind).copied().unwrap_or(2);
    let many = counts
        .iter()
        .filter(|&(of, &times)| times > ATTEMPTS * WAYS * once(of));
    let many: Vec<_> = many
        .map(|(of, times)| format!("{of}: {times}, usually {}", once(of)))
        .collect();
    world.refusing.refuse(None);
    world.await_whole();
    world.daemon.terminate();
    let links = world.veth.near.output_of("ip", &["-o", "link"]);
    let wrong = [
        (!many.is_empty()).then(|| many.join(", ")),
        (new.len() > 30).then(|| format!("{} lines: {:#?}", new.len(), &new[..30])),
        links.contains("vaxh").then(|| links.clone()),
    ];
    let wrong: Vec<String> = wrong.into_iter().flatten().collect();
    println!("{kind}: {:?} {} lines", counts.get(kind), new.len());
    (!wrong.is_empty()).then(|| format!("{kind}: {}", wrong.join("; ")))
}

fn each_refused(is_network: bool) {
    // What is done for an interface that comes back, and how often.
    let world = World::new(is_network);
    let _ = world.refusing.counts();
    world.make_anew();
    let began = std::time::Instant::now();
    world
        .daemon
        .await_that(|| began.elapsed() > Duration::from_secs(1) && world.is_whole());
    let usual = world.refusing.counts();
    drop(world);
    println!("usually: {usual:?}");
    let is_long = soak::count(1, 2) > 1;
    let kinds = usual
        .keys()
        .filter(|kind| is_long || SHORT.contains(&kind.as_str()));
    let kinds: Vec<&String> = kinds.collect();
    let mut wrong = Vec::new();
    for some in kinds.chunks(AT_ONCE) {
        std::thread::scope(|scope| {
            let worlds: Vec<_> = some
                .iter()
                .map(|&kind| scope.spawn(|| refused(kind, is_network, &usual)))
                .collect();
            for (world, kind) in worlds.into_iter().zip(some) {
                wrong.extend(world.join().unwrap_or_else(|_| Some(format!("{kind}: panicked"))));
            }
        });
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_refused_operation_of_a_network_is_repeated_without_pause() {
    require!(Root);
    each_refused(true);
}

#[test]
fn no_refused_operation_of_a_lone_port_is_repeated_without_pause() {
    require!(Root);
    each_refused(false);
}
