//! Many claims.

use std::time::Instant;

use testkit::{holdings, procfs, require, soak};

use crate::support::scene::{State, on_node};

#[test]
fn claims_leave_no_descriptor_and_no_memory() {
    require!(Root);
    on_node(State::Kept, |scene, _| {
        let pid = scene.driver.pid();
        // Some of them at the same time.
        let (rounds, at_once) = (soak::count(4, 20), 50);
        let mut settled = None;
        let (mut times, started) = (Vec::new(), Instant::now());
        for round in 0..rounds {
            let name = |number: usize| format!("c-{round}-{number}");
            let claims: Vec<_> = (0..at_once)
                .map(|number| {
                    scene
                        .cluster
                        .allocate(&name(number), &[("net", "lan", 1, None)], &[])
                })
                .collect();
            for claim in &claims {
                let before = Instant::now();
                scene.kubelet.prepared(claim);
                times.push(before.elapsed());
            }
            for claim in &claims {
                scene.kubelet.release(claim).expect("released");
                scene.cluster.delete(claim);
            }
            if round == 0 {
                settled = Some((holdings::of(pid), procfs::number(pid, "RssAnon")));
            }
        }
        let (before, memory_before) = settled.expect("rounds");
        let count = rounds * at_once;
        times.sort_unstable();
        let (half, most, all) = (times[times.len() / 2], times[times.len() - 1], started.elapsed());
        println!("{count} claims in {all:?}, prepared in {half:?} (median), {most:?} (most)");
        scene.assert_empty();
        // It keeps some connections to the API server open: more than before, perhaps, but not one for each claim.
        let few = holdings::Holdings {
            descriptors: before.descriptors + 8,
            mappings: before.mappings + 8,
            threads: before.threads + 2,
        };
        holdings::await_within(&[pid], &[few]);
        let memory_after = procfs::number(pid, "RssAnon");
        println!("memory: {memory_before} KiB, then {memory_after} KiB");
        // 10 KiB of each claim would be more.
        let more = memory_after.saturating_sub(memory_before);
        assert!(
            more < 512 + count as u64 * 5,
            "{memory_before} KiB, then {memory_after} KiB"
        );
    });
}
