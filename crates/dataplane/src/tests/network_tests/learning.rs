//! Ports whose guests have several addresses.

use super::*;
use crate::fdb::FdbKey;
use crate::fdb::learned::{LEARNED_MAX, Learned};
use crate::policy::guard::SourceGuard;

const HOST: Mac = [2, 0, 0, 0, 3, 0];

/// Ports with 16 receive buffers each, of which the first learns.
fn world() -> (World, Arc<Learned>) {
    world_with(None)
}

/// The same where the first one's guest has these IP addresses alone.
fn world_with(source_guard: Option<&Arc<SourceGuard>>) -> (World, Arc<Learned>) {
    let news = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
    let learned = Arc::new(Learned::new(Arc::new(news)));
    let port = |at: u8| {
        fdb_port_with(at, |port| {
            port.learned = (at == 0).then(|| Arc::clone(&learned));
            port.source_guard = source_guard.filter(|_| at == 0).cloned();
        })
    };
    let known: Vec<_> = (0..3).map(port).collect();
    let mut world = World::of(known.clone());
    let fdb = Fdb::new(known.into_iter().map(Some).collect()).with_host(Some(HOST));
    let its = std::iter::once((FdbKey::new(0, STRANGER), PortNumber(0)));
    let fdb = fdb.with_learned(its);
    world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
    world.rebuild_forwarding();
    world.ports.iter_mut().for_each(|port| port.post(80));
    (world, learned)
}

#[test]
fn guest_uses_free_addresses_and_receives_frames_for_learned_ones() {
    let (mut world, learned) = world();
    let inner = [2, 0, 0, 0, 5, 1];
    let sent = [frame(mac(1), inner, 60), frame(mac(1), STRANGER, 60)];
    sent.iter().for_each(|frame| _ = world.ports[0].send(frame));
    world.poll();
    assert_eq!(world.ports[1].got(), sent);
    let noted = learned.entries().map(|note| note.key().mac());
    let mut noted: Vec<_> = noted.collect();
    noted.sort_unstable();
    assert_eq!(noted, [STRANGER, inner]);
    // Learned, as control has told; the other one not yet.
    let back = frame(STRANGER, mac(1), 60);
    world.ports[1].send(&back);
    world.ports[1].send(&frame(inner, mac(1), 60));
    world.poll();
    assert_eq!(world.ports[0].got(), [back]);
}

#[test]
fn guest_that_learns_does_not_send_as_others_or_as_the_host() {
    let (mut world, learned) = world();
    for from in [mac(1), HOST, BROADCAST] {
        world.ports[0].send(&frame(mac(2), from, 60));
    }
    world.ports[1].send(&frame(mac(2), [2, 0, 0, 0, 5, 1], 60));
    world.poll();
    assert!(world.ports[2].got().is_empty());
    assert_eq!(world.ports[0].counters.from_guest_source_address.get(), 3);
    assert_eq!(world.ports[1].counters.from_guest_source_address.get(), 1);
    assert!(learned.entries().next().is_none());
}

#[test]
fn rejected_frames_record_no_address() {
    let (mut world, learned) = world_with(Some(&Arc::default()));
    let sent = frame(mac(1), [2, 0, 0, 0, 5, 1], 60);
    (0..2).for_each(|_| _ = world.ports[0].send(&sent));
    world.poll();
    assert!(world.ports[1].got().is_empty());
    assert_eq!(world.ports[0].counters.from_guest_protocol.get(), 2);
    assert!(learned.entries().next().is_none());
}

#[test]
fn addresses_beyond_the_most_are_counted_and_do_not_send() {
    let (mut world, _) = world();
    for at in 0..LEARNED_MAX as u8 + 3 {
        world.ports[0].send(&frame(mac(1), [2, 0, 0, 0, 6, at], 60));
        world.poll();
    }
    assert_eq!(world.ports[1].got().len(), LEARNED_MAX);
    assert_eq!(world.ports[0].counters.from_guest_not_learned.get(), 3);
}
