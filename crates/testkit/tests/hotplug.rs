//! Memory that is plugged in and out while traffic runs: frames pass on. How long traffic stops for it is printed.

use std::time::{Duration, Instant};

use rstest::rstest;
use serde_json::json;
use testkit::daemon::{Mode, Placement};
use testkit::driver::region_info;
use testkit::world::{HOST, Setting, received_bytes};
use testkit::{Rig, Traffic, World, require, soak, wait};
use vhost::vhost_user::VhostUserFrontend;
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

const MIB: u64 = 1 << 20;
const PACE: Duration = Duration::from_millis(1);
/// Frames that pass each way before and after each change.
const CALM: usize = 50;
/// Frames to the guest that may be under way: fewer than it has buffers, so that in copy placement none has to be lost.
const WINDOW: usize = 64;

/// So many frames more pass each way.
fn await_frames(traffic: &Traffic) {
    let since = Instant::now();
    let pass = wait::until(wait::SOON, || {
        let counts = traffic.flows().map(|flow| flow.arrived_since(since));
        counts.into_iter().all(|count| count >= CALM)
    });
    assert!(pass, "frames pass no more");
}

#[rstest]
fn memory_comes_and_goes_while_frames_pass_each_millisecond(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(64, 512)] mib: u64,
) {
    require!(Root);
    if soak::leaves_out(mib == 64 || placement == Placement::Copy) {
        return;
    }
    let mut rig = Rig::new(placement, Mode::Native);
    rig.post(128, &[2048]);
    let (driver, daemon, wire, veth) = rig.into_parts();
    let traffic = match placement {
        Placement::Copy => Traffic::start_within(driver, wire, PACE, WINDOW),
        // Another socket is bound: what comes meanwhile is lost.
        _ => Traffic::start(driver, wire, PACE),
    };
    let more = GuestRam::new(&[(GuestAddr(16 << 30), mib * MIB)]).expect("memory");
    let regions = more.regions().expect("regions");
    let info = region_info(&regions[0]);
    // A clone, so that the guest's thread goes on meanwhile.
    let mut frontend = traffic.with_guest(|guest| guest.frontend().clone());
    let mut stops = [Vec::new(), Vec::new()];
    for _ in 0..5 {
        for plug_in in [true, false] {
            await_frames(&traffic);
            let begun = Instant::now();
            if plug_in {
                frontend.add_mem_region(&info).expect("added");
            } else {
                frontend.remove_mem_region(&info).expect("removed");
            }
            let ended = Instant::now();
            await_frames(&traffic);
            let flows = traffic.flows();
            for (stops, flow) in stops.iter_mut().zip(&flows) {
                stops.push(flow.longest_gap(begun, ended));
            }
        }
    }
    // What the guest sent waited in its ring; in copy placement nothing at all stops.
    let (now, kept) = (traffic.flows(), [placement == Placement::Copy, true]);
    for (direction, (flow, kept)) in now.iter().zip(kept).enumerate() {
        let lost = || traffic.flows()[direction].lost_of(flow.sent[0], *flow.sent.last().expect("frames"));
        assert!(
            !kept || wait::until(wait::SOON, || lost() == 0),
            "{} frames are lost",
            lost()
        );
    }
    for ((stops, flow), direction) in stops.iter_mut().zip(traffic.flows()).zip(["to", "from"]) {
        stops.sort();
        let (median, longest) = (stops[stops.len() / 2], stops[stops.len() - 1]);
        println!(
            "{placement:?}, {mib} MiB plugged in and out, {direction} the guest: {} of {} frames lost, longest silence of each change: median {median:.1?}, longest {longest:.1?}",
            flow.lost(),
            flow.sent.len(),
        );
        assert_eq!(flow.repeated(), [0; 0]);
    }
    drop((traffic, daemon, veth));
}

/// The guest pings while 256 MiB are plugged in, puts them to use, and gives them back.
#[rstest]
fn linux_guest_gets_memory_while_it_sends(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root, Qemu);
    if soak::leaves_out(placement == Placement::Direct) {
        return;
    }
    let world = World::new(Setting {
        options: &["--hotplug", "512"],
        ..Setting::new(placement)
    });
    world.assert_pings();
    let total = || -> u64 {
        let said = world.guest.run("awk '/MemTotal/ { print $2 }' /proc/meminfo");
        said.trim().parse().expect("a number")
    };
    let before = total();
    let mut qmp = world.guest.qmp();
    world
        .guest
        .start("ping", &format!("ping -i 0.2 -c 30 -W 60 {HOST}"));
    let backend = json!({"qom-type": "memory-backend-memfd", "id": "more", "size": 256 * MIB, "share": true});
    qmp.execute("object-add", &backend);
    qmp.execute(
        "device_add",
        &json!({"driver": "pc-dimm", "id": "dimm", "memdev": "more"}),
    );
    let online = "for block in /sys/devices/system/memory/memory*/state; do grep -q online $block || echo online >$block; done";
    let grown = wait::until(6 * wait::SOON, || {
        let _ = world.guest.try_run(online);
        total() > before + 200 * 1024
    });
    assert!(grown, "the guest has {} KiB and had {before}", total());
    // Fills the new memory, so that buffers come to lie in it.
    let _ = world.guest.run("mount -t tmpfs -o size=380M none /tmp/fill 2>/dev/null || { mkdir -p /tmp/fill; mount -t tmpfs -o size=380M none /tmp/fill; }");
    let _ = world
        .guest
        .run("dd if=/dev/zero of=/tmp/fill/some bs=1M count=220");
    world.assert_pings();
    let _server = world.iperf_server();
    let report = world.guest.run(&format!("iperf3 -c {HOST} -t 2 --bidir -J"));
    for sum in ["sum_received", "sum_received_bidir_reverse"] {
        assert!(received_bytes(&report, sum) > MIB / 8, "{sum}: {report}");
    }
    let said = world.guest.finish("ping", 6 * wait::SOON);
    assert!(said.contains(" 0% packet loss"), "{said}");
}
