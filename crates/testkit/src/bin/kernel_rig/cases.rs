//! What is tried on each wire: a daemon is started for each setting, and goes through all that holds for every one of
//! them.

use std::fs::read_to_string;

use testkit::daemon::Placement;
use testkit::{Daemon, DriverConfig, Layout, Rig, VethPair, Wire, frame, wait};
use virtqueue::GuestAddr;

use crate::borders;
use crate::busy_poll;
use crate::canaries;
use crate::dpdk;
use crate::foreseen;
use crate::kit::{
    BUFFERS, ELSEWHERE, LONG_MTU, RAM, Seen, assert_no_strays, assert_untouched, frames_keep_coming_in_order,
    frames_pass_byte_exact, places_of_16, post, start, start_with,
};
use crate::own_queue::{self, OwnQueue};
use crate::raw;
use crate::setting::Setting;
use crate::stack;
use crate::taken_back;
use crate::underlay;
use crate::upsets::{self, Upset};

/// Lengths of frames that are too long for the NIC's MTU: without a tag what has place for one; more than a buffer;
/// more than a page's half.
const TOO_LONG: [usize; 4] = [1519, 1522, 1600, 2500];
/// An MTU for frames of 1500 bytes and a tag, which may have another one.
const TWO_TAGS_MTU: usize = 1504;
/// An MTU that makes for less memory a frame than NICs take frames for.
const SMALL_MTU: usize = 900;

/// What a frame to another station carries, which is sought in the guest's memory.
const CANARY: [u8; 2] = [0xca, 0xfe];

/// One thing to try.
pub(crate) struct Case {
    /// What it is about.
    pub(crate) name: String,
    task: Task,
}

/// What is done.
#[derive(Clone, Copy)]
enum Task {
    /// Frames of all lengths pass, and no others.
    Frames(Setting),
    /// The longest ones with two tags pass.
    TwoTags(Setting),
    /// Longer ones than a small MTU has room for do not, nor a part of one.
    SmallMtu(Setting),
    /// Receive buffers lie at borders of guest memory.
    Borders(Setting),
    /// The guest takes its queues back while frames come.
    TakenBack(Setting),
    /// Things happen meanwhile.
    Upsets(Setting, &'static [Upset]),
    /// A worker polls the driver.
    BusyPoll(Setting),
    /// Frames that are not the guest's are nowhere in its memory, nor what comes after its lease.
    Canaries(Setting),
    /// Checksums and segmentation, with a TCP/IP stack at the far end.
    Offloads(Setting),
    /// A guest that is DPDK's sends every frame back.
    Dpdk(Setting),
    /// A port of a network has a queue of its own.
    OwnQueue(OwnQueue),
    /// What is said of it beforehand.
    Foreseen,
    /// The raw benchmarks; frames of these lengths are sent.
    Raw(&'static [&'static str]),
    /// What the NIC tells of frames.
    Hints,
    /// The packets of a network's vxlan device are in a VLAN of the NIC.
    UnderlayInVlan,
    /// A network's uplink is a Geneve device.
    Geneve,
}

/// All of them, for a wire.
pub(crate) fn all(wire: &Wire, short: bool) -> Vec<Case> {
    let zero_copy = Setting::DEFAULT.expected(wire.driver()) == "zero-copy";
    let settings = match (wire.is_served(), short) {
        (true, true) => Vec::new(),
        (false, true) if wire.is_the_rigs() => vec![Setting::DEFAULT, Setting::INTO_GUEST],
        // Without zero-copy, placements differ in what the kernel's core does, and that is veth's turn.
        (false, true) if *wire != Wire::Veth && !zero_copy => vec![Setting::DEFAULT],
        // What is received into the daemon's memory though the guest's is asked for is veth's turn, too.
        (false, true) if zero_copy => Setting::few()[..2].to_vec(),
        (true, false) | (false, true) => Setting::few(),
        (false, false) => Setting::all(),
    };
    let more = match (wire.is_served(), short) {
        (true, _) => vec![Task::Raw(raw::LENGTHS)],
        (false, false) => every_task(wire),
        (false, true) if wire.is_the_rigs() => vec![Task::Upsets(Setting::DEFAULT, &Upset::FEW), Task::Hints],
        (false, true) if zero_copy => few_of_zero_copy(wire),
        (false, true) if *wire == Wire::Veth => vec![Task::UnderlayInVlan, Task::Geneve],
        (false, true) => Vec::new(),
    };
    let tasks = settings.into_iter().map(Task::Frames).chain(more);
    let case = |task: Task| Case {
        name: task.name(),
        task,
    };
    tasks.map(case).collect()
}

/// All that there is beside frames of all settings.
fn every_task(wire: &Wire) -> Vec<Task> {
    let mut tasks: Vec<_> = Setting::few().into_iter().map(Task::TwoTags).collect();
    let upset = |setting| Task::Upsets(setting, &Upset::MOST);
    tasks.extend(Setting::few().into_iter().map(upset));
    tasks.push(Task::Upsets(Setting::INTO_GUEST, &Upset::ALL));
    tasks.extend([Setting::DEFAULT, Setting::INTO_GUEST].map(Task::SmallMtu));
    tasks.push(Task::Borders(Setting::INTO_GUEST));
    tasks.push(Task::TakenBack(Setting::INTO_GUEST));
    tasks.extend(Setting::few().into_iter().map(Task::with_busy_poll));
    tasks.extend(Setting::leased().into_iter().map(Task::Canaries));
    tasks.extend([Setting::WHOLE_QUEUE, Setting::INTO_GUEST].map(Task::Canaries));
    if *wire != Wire::Veth {
        tasks.extend(Setting::leased().into_iter().map(Task::Offloads));
        tasks.extend(Setting::few().into_iter().map(Task::Dpdk));
        tasks.push(Task::Dpdk(Setting::WHOLE_QUEUE));
    }
    if wire.has_a_queue_to_spare() {
        tasks.extend(OwnQueue::all().map(Task::OwnQueue));
    }
    if *wire == Wire::Veth {
        tasks.extend([Task::UnderlayInVlan, Task::Geneve]);
    }
    tasks.extend([Task::Foreseen, Task::Raw(raw::LENGTHS), Task::Hints]);
    tasks
}

/// One of each that zero-copy makes a difference for. What is the same with every such driver is done with one of them:
/// DPDK's guest with virtio_net, the rest with the others; hints with the rig's own NIC, as no other one here has any.
fn few_of_zero_copy(wire: &Wire) -> Vec<Task> {
    let mut tasks = vec![
        Task::Upsets(Setting::DEFAULT, &Upset::FEW),
        Task::Frames(Setting::INTO_GUEST),
        Task::TakenBack(Setting::INTO_GUEST),
    ];
    if wire.driver() == "virtio_net" {
        tasks.push(Task::Dpdk(Setting::SEND_DIRECT));
    } else {
        tasks.extend([
            Task::with_busy_poll(Setting::DEFAULT),
            Task::Canaries(Setting::SEND_DIRECT),
            Task::Foreseen,
            Task::Raw(raw::FEW_LENGTHS),
        ]);
    }
    if wire.has_a_queue_to_spare() {
        tasks.push(Task::OwnQueue(OwnQueue::SHORT));
    }
    tasks
}

impl Task {
    fn with_busy_poll(setting: Setting) -> Self {
        Self::BusyPoll(Setting {
            busy_poll: true,
            ..setting
        })
    }

    fn name(self) -> String {
        match self {
            Self::Frames(setting) | Self::BusyPoll(setting) => setting.name(),
            Self::TwoTags(setting) => format!("{}, MTU {TWO_TAGS_MTU}", setting.name()),
            Self::SmallMtu(setting) => format!("{}, MTU {SMALL_MTU}", setting.name()),
            Self::Borders(setting) => format!("{}, buffers at borders", setting.name()),
            Self::TakenBack(setting) => format!("{}, queues taken back", setting.name()),
            Self::Upsets(setting, upsets) => {
                let upsets: Vec<_> = upsets.iter().map(|upset| upset.name()).collect();
                format!("{}, {}", setting.name(), upsets.join(", "))
            }
            Self::Canaries(setting) => match setting.filtered {
                true => format!("{} --vlan, canaries", setting.name()),
                false => format!("{}, canaries", setting.name()),
            },
            Self::Offloads(setting) => format!("{} --offload all, TCP, UDP", setting.name()),
            Self::Dpdk(setting) => format!("{}, DPDK's guest", setting.name()),
            Self::OwnQueue(own) => own.name(),
            Self::Foreseen => "check --try, then serve".to_owned(),
            Self::Raw(_) => "bench rxdrop, l2fwd, txonly".to_owned(),
            Self::Hints => "bench rxdrop --hints auto".to_owned(),
            Self::UnderlayInVlan => "underlay in a VLAN".to_owned(),
            Self::Geneve => "Geneve".to_owned(),
        }
    }
}

impl Case {
    /// Does it; panics if it does not go well.
    pub(crate) fn run(&self, wire: &Wire) -> Seen {
        match self.task {
            Task::Frames(setting) => frames(wire, setting),
            Task::TwoTags(setting) => two_tags(wire, setting),
            Task::SmallMtu(setting) => small_mtu(wire, setting),
            Task::Borders(setting) => borders::run(wire, setting),
            Task::TakenBack(setting) => taken_back::run(wire, setting),
            Task::Upsets(setting, upsets) => upsets::run(wire, setting, upsets),
            Task::BusyPoll(setting) => busy_poll::run(wire, setting),
            Task::Canaries(setting) => canaries::run(wire, setting),
            Task::Offloads(setting) => stack::run(wire, setting),
            Task::Dpdk(setting) => dpdk::run(wire, setting),
            Task::OwnQueue(own) => own_queue::run(wire, own),
            Task::Foreseen => foreseen::run(wire),
            Task::Raw(lengths) => raw::run(wire, lengths),
            Task::Hints => raw::hints(wire),
            Task::UnderlayInVlan => underlay::in_vlan(),
            Task::Geneve => underlay::geneve(),
        }
    }
}

/// What holds in every setting.
fn frames(wire: &Wire, setting: Setting) -> Seen {
    let (mut rig, _program) = start(wire, setting);
    let guards = post(&mut rig, setting.buffer(wire.driver()));
    rig.await_passes_both_ways();
    let seen = Seen::of(&rig.daemon);
    let expected = setting.expected(wire.driver());
    assert!(
        seen.mode == expected,
        "in use is {}, not {expected}: {}",
        seen.mode,
        seen.note
    );
    let driver = rig.daemon.port(0)["driver"].clone();
    let said = driver.as_str().unwrap_or_default();
    assert!(said.starts_with(wire.driver()), "of the driver is said: {said}");
    everything_is_on_the_node_of_the_nic(&mut rig, wire, setting);
    frames_pass_byte_exact(&mut rig);
    frames_that_are_too_long_overwrite_nothing(&mut rig, &guards, setting.passed_in);
    if setting.filtered {
        frames_to_others_leave_nothing(&mut rig);
    }
    let bounced = rig.daemon.counter("bounced_frames");
    frames_keep_coming_in_order(&mut rig);
    if setting.into_guest {
        let now = rig.daemon.counter("bounced_frames");
        assert_eq!(now, bounced, "frames reach the guest's buffers by others");
    }
    assert_no_strays(&rig.daemon);
    seen
}

/// As `status` has it, and the kernel: the worker may run on no other node's CPUs. Guest memory is where the guest has
/// it.
fn everything_is_on_the_node_of_the_nic(rig: &mut Rig, wire: &Wire, setting: Setting) {
    let status = rig.daemon.status();
    let port = &status["ports"][0];
    let said = [&port["node"], &status["workers"][0]["node"]].map(serde_json::Value::as_u64);
    assert_eq!(said, [wire.node(); 2], "nodes of the NIC and of the worker");
    if setting.placement == Placement::Copy {
        assert_eq!(
            port["lanes"][0]["node"].as_u64(),
            wire.node(),
            "node of packet memory"
        );
    }
    let file = match wire.node() {
        Some(node) => format!("/sys/devices/system/node/node{node}/cpulist"),
        None => "/sys/devices/system/cpu/online".to_owned(),
    };
    let cpus = read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
    assert_eq!(cpus_of_worker(rig.daemon.process().pid()), cpus.trim());
}

/// The CPUs that the first worker of a daemon may run on, as the kernel lists them.
fn cpus_of_worker(daemon: u32) -> String {
    let threads = std::fs::read_dir(format!("/proc/{daemon}/task")).expect("it runs");
    let status =
        |thread: std::io::Result<std::fs::DirEntry>| read_to_string(thread.ok()?.path().join("status")).ok();
    let worker = threads
        .filter_map(status)
        .find(|status| status.starts_with("Name:\tworker-0\n"))
        .expect("it has a worker");
    let line = worker
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.expect("the kernel tells").trim().to_owned()
}

/// Where frames may have 1522 bytes; beyond an MTU of 1500 no driver here is asked for zero-copy.
fn two_tags(wire: &Wire, setting: Setting) -> Seen {
    let veth = wire.lay();
    let mtu = TWO_TAGS_MTU.to_string();
    veth.near.ip(&["link", "set", VethPair::NIC, "mtu", &mtu]);
    veth.far.ip(&["link", "set", VethPair::WIRE, "mtu", &mtu]);
    let daemon = Daemon::start(&veth.near, &setting.serve());
    let mut rig = Rig::around(veth, daemon, &DriverConfig::default());
    rig.pair().post(BUFFERS, &[2048]);
    rig.await_passes_both_ways();
    let seen = Seen::of(&rig.daemon);
    assert_eq!(seen.mode, "copy (native)", "{}", seen.note);
    let mut longest = frame::tagged(TWO_TAGS_MTU + 18, 42, 1);
    // The inner tag.
    longest[16..20].copy_from_slice(&[0x81, 0, 0, 43]);
    for sent in [
        frame::plain(TWO_TAGS_MTU + 14, 2),
        frame::tagged(1518, 42, 3),
        longest,
    ] {
        rig.assert_from_guest(&sent, Layout::Whole);
        rig.assert_to_guest(&sent);
    }
    seen
}

/// A NIC that takes them all the same must not make two of one.
fn small_mtu(wire: &Wire, setting: Setting) -> Seen {
    let veth = wire.lay();
    veth.near
        .ip(&["link", "set", VethPair::NIC, "mtu", &SMALL_MTU.to_string()]);
    let mut rig = start_with(veth, &setting.serve(), &setting.guest());
    let guards = post(&mut rig, setting.buffer(wire.driver()));
    rig.await_to_guest();
    let seen = Seen::of(&rig.daemon);
    assert_eq!(seen.mode, setting.expected(wire.driver()), "{}", seen.note);
    for length in [
        SMALL_MTU + 19,
        1000,
        1024,
        1025,
        1040,
        1084,
        1200,
        1300,
        1400,
        1514,
    ] {
        let (too_long, next) = (frame::plain(length, 1), frame::plain(SMALL_MTU + 14, 2));
        // Some wires refuse it themselves.
        let _ = rig.wire.try_send(&too_long);
        rig.assert_to_guest(&next);
    }
    assert_untouched(&mut rig, &guards);
    assert_no_strays(&rig.daemon);
    seen
}

/// Neither in the guest's rings nor behind its buffers. Where the program is somebody else's, it is the one that
/// judges, and lets them pass: then each is whole, in as many buffers as it takes.
fn frames_that_are_too_long_overwrite_nothing(rig: &mut Rig, guards: &[GuestAddr], may_arrive: bool) {
    let set_mtu = |rig: &Rig, mtu| rig.veth.far.ip(&["link", "set", VethPair::WIRE, "mtu", mtu]);
    set_mtu(rig, LONG_MTU);
    // Some NICs lose their link by that.
    rig.await_to_guest();
    for (seed, length) in (0..).zip(TOO_LONG) {
        let (too_long, next) = (frame::plain(length, seed), frame::plain(1514, seed));
        for _ in 0..10 {
            // Some wires refuse it themselves.
            let _ = rig.wire.try_send(&too_long);
        }
        if may_arrive {
            rig.wire.send(&next);
            while let Some(got) = rig.pair().receive(wait::SOON)
                && got.frame != next
            {
                frame::assert_same(&got.frame, &too_long);
            }
        } else {
            // It is the next one to arrive.
            rig.assert_to_guest(&next);
        }
    }
    assert_untouched(rig, guards);
    set_mtu(rig, "1500");
    rig.await_to_guest();
}

/// Not one byte of a frame to another station gets into the guest's memory, and no part of one passes for a frame to
/// the guest.
fn frames_to_others_leave_nothing(rig: &mut Rig) {
    let (mut foreign, own) = (foreign(), frame::plain(200, 1));
    for seed in 0..50 {
        foreign[frame::HEADER] = seed;
        rig.wire.send(&foreign);
    }
    rig.assert_to_guest(&own);
    assert_eq!(rig.pair().receive(wait::QUIET), None, "nothing else arrives");
    let (even, odd) = ([CANARY; 8].concat(), [[CANARY[1], CANARY[0]]; 8].concat());
    let memory = rig.pair().ram().read_vec(GuestAddr(0), RAM as usize);
    assert_eq!(
        places_of_16(&memory, &even) + places_of_16(&memory, &odd),
        0,
        "places of guest memory with bytes of frames to others"
    );
}

/// A long frame to another station which looks, wherever a NIC may cut it, like the beginning of one to the guest.
fn foreign() -> Vec<u8> {
    let mut bytes = [&ELSEWHERE[..], &frame::FROM, &frame::EXPERIMENTAL.to_be_bytes()].concat();
    bytes.resize(64, CANARY[0]);
    let unit = [&frame::plain(frame::HEADER, 0)[..], &[CANARY; 25].concat()].concat();
    while bytes.len() + unit.len() < 1514 {
        bytes.extend(&unit);
    }
    bytes.resize(1514, 0);
    bytes
}
