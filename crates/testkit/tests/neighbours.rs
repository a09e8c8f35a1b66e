//! Two guests in one process, on one worker, one of them hostile: the other loses no frame, and gets its turn however
//! long that goes on.
//!
//! The hostile guest goes on until a number of frames of the other one have arrived each way. So few are under way at
//! a time that none is lost because somebody was not scheduled.
//! `scripts/bench --only neighbours/` measures what it loses of its throughput.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::neighbours::{
    Hostility, Scene, changes_its_memory, comes_and_goes, fills_rings_with_garbage, kicks_for_nothing,
    lies_and_comes_back, scene, takes_no_calls,
};
use testkit::traffic::Flow;
use testkit::{Traffic, frame, require, wait};

/// A frame each way.
const PACE: Duration = Duration::from_millis(1);
/// Frames that arrive each way while the other guest is hostile.
const FRAMES: usize = 1000;
/// Frames to the guest that may be under way: fewer than it has buffers.
const WINDOW: usize = 64;

#[rstest]
#[case::that_lies_and_comes_back(lies_and_comes_back)]
#[case::that_comes_and_goes(comes_and_goes)]
#[case::that_kicks_for_nothing(kicks_for_nothing)]
#[case::that_fills_rings_with_garbage(fills_rings_with_garbage)]
#[case::that_takes_no_calls(takes_no_calls)]
#[case::that_changes_its_memory(changes_its_memory)]
fn guest_loses_no_frame_beside_one(
    #[case] hostility: Hostility,
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut scene = scene(placement);
    await_to_guest(&mut scene);
    let traffic = Traffic::start_within(scene.honest, scene.wire, PACE, WINDOW);
    let arrived = || traffic.flows().map(|flow| flow.arrived.len());
    let stop = AtomicBool::new(false);
    let socket = scene.daemon.path("port1.sock");
    let gets_its_turn = std::thread::scope(|scope| {
        let hostile = scope.spawn(|| hostility(&socket, &stop));
        let limit = 4 * wait::SOON;
        let gets_its_turn = wait::until(limit, || arrived().iter().all(|&count| count >= FRAMES));
        stop.store(true, Ordering::Relaxed);
        hostile.join().expect("the hostile guest did what it was to do");
        gets_its_turn
    });
    assert!(
        gets_its_turn,
        "only {:?} frames arrived beside it: {:#}",
        arrived(),
        scene.daemon.status()
    );
    scene.daemon.process().check();
    // What was under way arrives.
    let stopped = traffic.flows().map(|flow| flow.sent.len());
    let lost = || {
        let missing = |(flow, stopped): (&Flow, usize)| -> Vec<usize> {
            let arrived: HashSet<_> = flow.arrived.iter().map(|&(number, _)| number as usize).collect();
            (0..stopped).filter(|number| !arrived.contains(number)).collect()
        };
        traffic
            .flows()
            .iter()
            .zip(stopped)
            .map(missing)
            .collect::<Vec<_>>()
    };
    let none_lost = wait::until(wait::SOON, || lost().iter().all(Vec::is_empty));
    assert!(none_lost, "of {stopped:?} frames these are lost: {:?}", lost());
    for flow in traffic.flows() {
        assert_eq!(flow.repeated(), [0; 0], "frames came twice");
    }
    let port = scene.daemon.port(0);
    assert_eq!(
        (&port["sessions"], &port["last_closed"]),
        (&1.into(), &serde_json::Value::Null)
    );
}

/// Gives the honest guest buffers, and returns when frames arrive in them.
fn await_to_guest(scene: &mut Scene) {
    let pair = &mut scene.honest.pairs[0];
    pair.post(128, &[2048]);
    let arrives = wait::until(wait::SOON, || {
        let _ = scene.wire.try_send(&frame::plain(60, 1));
        pair.receive(wait::QUIET).is_some()
    });
    assert!(arrives, "{:#}", scene.daemon.status());
    // Behind those that came after the first.
    let last = frame::last();
    scene.wire.send(&last);
    let _ = pair.receive_before(&last);
}
