//! What fails between the hosts, and is mended.

use rstest::rstest;
use testkit::lan::mac;
use testkit::overlay::{Overlay, Underlay};
use testkit::{DriverConfig, Serve, require};

use super::{HOSTS, World};

/// The others forget the guests of a host that is cut off, and those of its own reach each other.
#[rstest]
#[case::its_carrier_is_lost(Overlay::set_link, Underlay::BY_XDP)]
#[case::frames_are_dropped(Overlay::set_forwarding, Underlay::PLAIN)]
fn guests_of_a_host_are_forgotten_while_it_is_cut_off(
    #[case] set: fn(&Overlay, usize, bool),
    #[case] underlay: Underlay,
) {
    require!(Root, Frr);
    let overlay = Overlay::with_frr_timers(underlay, 3, "1 3");
    let mut world = World::on(overlay, &Serve::file(), &DriverConfig::default());
    for _ in 0..2 {
        set(&world.overlay, 0, false);
        for (number, host) in world.overlay.hosts.iter().enumerate() {
            let is_behind_cut = |at: usize| (at == 0) != (number == 0);
            for (guest, _) in HOSTS.iter().enumerate().filter(|&(_, &at)| is_behind_cut(at)) {
                host.await_remote(mac(guest), None);
            }
        }
        for (from, to) in [(0, 3), (3, 0), (1, 2), (2, 1)] {
            world.assert_passes(from, to, 100);
        }
        set(&world.overlay, 0, true);
        world.await_all();
    }
}

#[test]
fn guests_reach_each_other_by_either_of_two_links() {
    require!(Root);
    let overlay = Overlay::with_two_links(Underlay::PLAIN, 3);
    let mut world = World::with_entries(overlay, &Serve::file(), &DriverConfig::default());
    for switch in [0, 1, 0] {
        world.assert_all_deliver(100);
        world.overlay.set_switch(switch, false);
        world.assert_all_deliver(100);
        world.overlay.set_switch(switch, true);
    }
}
