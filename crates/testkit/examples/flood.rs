//! What a flood of new flows costs another guest of the same worker, whose filter rules judge both; run by
//! `scripts/bench --only flood/`.
//!
//! `VHOST_AF_XDP_BIN=DAEMON flood alone|one-flow|new-flows RULES SECONDS WORKER_CPU GUEST_CPU`. Two guests send to null
//! NICs, both played by this thread, which gives each all that its ring takes. One sends TCP of one flow, in packets
//! that the daemon cuts into segments, so that the worker has more to do than the guests. The other one floods with
//! datagrams of 64 bytes: each of a new flow (`new-flows`); or all of one flow, as many a second as it gets out of new
//! ones, which is tried before (`one-flow`); or nothing (`alone`). Prints JSON: `kpps`, thousand frames that the daemon
//! takes of the first, and `flood_kpps` of the other one, each in a second of its CPU time, in the best of ten parts of
//! the time: what others take of the CPUs meanwhile is not the flood's doing. `busy_percent`: how much of the time that
//! was.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use testkit::daemon::DIR;
use testkit::driver::{F_HOST_ALL, HEADER};
use testkit::gso_packet::{GsoPacket, Ip};
use testkit::holdings::cpu_time;
use testkit::{Daemon, Driver, DriverConfig, NetNs, Serve};
use virtqueue::driver::Buffer;

/// Frames that a guest has ready.
const SLOTS: usize = 256;
/// Frames that it makes available at a time, a part of them.
const BURST: usize = 32;
/// Of the time. In some the guests may lack their CPU.
const PARTS: u32 = 10;
/// Segments of a packet, and bytes of a segment.
const SEGMENTS: usize = 16;
const SEGMENT: usize = 500;
/// The source of the first flow.
const FIRST: u32 = 0x0a00_0000;

/// A guest with its frames in memory, and how many it has sent.
struct Guest {
    driver: Driver,
    slots: Vec<Buffer>,
    sent: usize,
}

impl Guest {
    fn connect(daemon: &Daemon, name: &str, bytes: &[u8]) -> Self {
        let config = DriverConfig::with(F_HOST_ALL);
        let mut driver = Driver::connect(&daemon.path(name), &config).expect("accepted");
        let pair = &mut driver.pairs[0];
        let slot = |_| {
            let addr = pair.ram().alloc(bytes.len() as u64, 64).expect("room");
            pair.ram().write(addr, bytes);
            Buffer::readable(addr, bytes.len() as u32)
        };
        Self {
            slots: (0..SLOTS).map(slot).collect(),
            sent: 0,
            driver,
        }
    }

    /// Sends a burst, if half of the ring is free; each frame of a flow of its own, or all of the same.
    fn send(&mut self, new_flows: bool) {
        let pair = &mut self.driver.pairs[0];
        pair.reap_sent();
        if !pair.has_room() {
            return;
        }
        let from = self.sent % SLOTS;
        let burst = &self.slots[from..from + BURST];
        if new_flows {
            for (at, slot) in burst.iter().enumerate() {
                let source = slot.addr.checked_add(HEADER as u64 + 26).expect("inside");
                // Few of all there are.
                let flow = FIRST.wrapping_add((self.sent + at) as u32);
                pair.ram().write(source, &flow.to_be_bytes());
            }
        }
        pair.send_each(burst);
        self.sent += BURST;
    }
}

/// A datagram over IPv4 from the first flow's source to port 53, as a guest sends it.
fn udp() -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    frame.extend([0x45, 0, 0, 50, 0, 0, 0, 0, 64, 17, 0, 0]);
    frame.extend(FIRST.to_be_bytes());
    frame.extend([10, 255, 0, 1, 4, 0, 0, 53]);
    frame.resize(64, 0);
    [&[0; HEADER][..], &frame].concat()
}

/// TCP that the daemon cuts into segments: work for it, and little for the guest.
fn tcp() -> Vec<u8> {
    let packet = GsoPacket {
        payload_len: SEGMENTS * SEGMENT,
        ..GsoPacket::tcp(Ip::V4(0), 0)
    };
    let size = u16::try_from(SEGMENT).expect("short");
    [&packet.request(size)[..], &[0, 0], &packet.bytes()].concat()
}

/// Two ports that have so many rules each, of which the last two match.
fn file(rules: u32, cpu: u32) -> String {
    let mut text = format!("[daemon]\nworkers = 1\ncpus = [{cpu}]\n");
    let denied = |at: u32| {
        let [_, a, b, c] = at.to_be_bytes();
        let source = format!("172.{}.{b}.{c}", 16 + a);
        format!(
            "direction=from-guest action=deny protocol=tcp source={source} destination-ports={}\n",
            at % 1000
        )
    };
    let list: String = (2..rules).map(denied).collect();
    for name in ["flood", "other"] {
        let allows = "direction=from-guest action=allow protocol";
        let last = format!("{allows}=tcp source-ports=4000\n{allows}=udp destination-ports=53");
        write!(
            text,
            "[port.{name}]\nsocket-path = \"{DIR}/{name}.sock\"\nnull = true\nframe-size = 0\nrule = \"\"\"\n{list}{last}\"\"\"\n"
        )
        .expect("room");
    }
    text
}

/// How the second guest floods.
#[derive(Clone, Copy)]
enum Flood {
    Nothing,
    /// So many frames a second at most.
    OneFlow(f64),
    NewFlows,
}

/// Thousand frames a second of CPU time that are taken of each in so much of that.
fn rates(daemon: &mut Daemon, guests: &mut [Guest; 2], (flood, time): (Flood, Duration)) -> [f64; 3] {
    let [flooder, other] = guests;
    let pid = daemon.process().pid();
    let taken = || ["flood", "other"].map(|port| daemon.counter_of(port, "from_guest_frames"));
    let (before, first) = (taken(), flooder.sent);
    let (begun, wall) = (cpu_time(pid), Instant::now());
    loop {
        let elapsed = cpu_time(pid) - begun;
        if elapsed >= time {
            break;
        }
        // Between two looks, which are system calls.
        for _ in 0..8 {
            other.send(false);
            match flood {
                Flood::Nothing => {}
                Flood::NewFlows => flooder.send(true),
                Flood::OneFlow(a_second) => {
                    if ((flooder.sent - first) as f64) < a_second * elapsed.as_secs_f64() {
                        flooder.send(false);
                    }
                }
            }
        }
    }
    let (elapsed, wall) = (
        (cpu_time(pid) - begun).as_secs_f64(),
        wall.elapsed().as_secs_f64(),
    );
    let after = taken();
    let [flooded, others] = [0, 1].map(|at| (after[at] - before[at]) as f64 / elapsed / 1000.0);
    [flooded, others, 100.0 * elapsed / wall]
}

fn main() {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let [kind, rules, seconds, worker_cpu, guest_cpu] = args.as_slice() else {
        panic!("flood alone|one-flow|new-flows RULES SECONDS WORKER_CPU GUEST_CPU")
    };
    let time = Duration::from_secs_f64(seconds.parse().expect("a number of seconds"));
    let text = file(
        rules.parse().expect("a number of rules"),
        worker_cpu.parse().expect("a CPU"),
    );
    let netns = NetNs::new("flood");
    let mut daemon = Daemon::start_file(&netns, &Serve::file(), &[], &text);
    let mut guests = [("flood.sock", udp()), ("other.sock", tcp())]
        .map(|(name, bytes)| Guest::connect(&daemon, name, &bytes));
    let mut own = CpuSet::new();
    own.set(guest_cpu.parse().expect("a CPU"));
    sched_setaffinity(None, &own).expect("it is there");
    let mut measure = |flood, time| rates(&mut daemon, &mut guests, (flood, time));
    let mut best = |flood, time: Duration| {
        measure(flood, time / 4);
        let parts = (0..PARTS).map(|_| measure(flood, time / PARTS));
        let most = parts.max_by(|[_, a, _], [_, b, _]| a.total_cmp(b));
        most.expect("several")
    };
    let flood = match kind.as_str() {
        "alone" => Flood::Nothing,
        "new-flows" => Flood::NewFlows,
        "one-flow" => {
            let [flooded, ..] = best(Flood::NewFlows, time / 2);
            Flood::OneFlow(flooded * 1000.0)
        }
        _ => panic!("alone, one-flow or new-flows"),
    };
    let [flood_kpps, kpps, busy_percent] = best(flood, time);
    println!(r#"{{"kpps": {kpps:.1}, "flood_kpps": {flood_kpps:.1}, "busy_percent": {busy_percent:.0}}}"#);
}
