//! DPDK's virtio-user as the guest: another driver than ours, which uses its rings differently.

use std::time::Duration;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::testpmd::Testpmd;
use testkit::{Daemon, PacketPort, Serve, VethPair, frame, require, soak, wait};

/// One testpmd at a time: each wants huge pages and CPU 0.
static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[rstest]
fn every_frame_comes_back_byte_exact(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values("packed_vq=0", "packed_vq=1")] ring: &str,
    #[values("mrg_rxbuf=1,in_order=1", "mrg_rxbuf=1,in_order=0", "mrg_rxbuf=0,in_order=0")] options: &str,
) {
    require!(Root, Dpdk);
    // Each placement with all options, and with both rings in turn.
    let is_packed = options.ends_with("in_order=1") == (placement == Placement::SendDirect);
    if soak::leaves_out((ring == "packed_vq=1") == is_packed) {
        return;
    }
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let veth = VethPair::new();
    let daemon = Daemon::start(&veth.near, &Serve::interface(VethPair::NIC).placement(placement));
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let mut guest = Testpmd::start(&daemon.socket(), &format!("{ring},{options}"), "io");
    let first = frame::plain(60, 0xff);
    let up = wait::until(wait::SOON, || {
        wire.send(&first);
        wire.receive(Duration::from_millis(200)).is_some()
    });
    assert!(
        up,
        "nothing comes back; {}\n{:#}",
        guest.process(),
        daemon.status()
    );
    let last = frame::last();
    wire.send(&last);
    let _ = wire.receive_before(&last);
    for (seed, size) in [60, 64, 65, 128, 1513, 1514]
        .into_iter()
        .cycle()
        .take(600)
        .enumerate()
    {
        let sent = frame::plain(size, seed as u8);
        wire.send(&sent);
        frame::assert_same(
            &wire
                .receive(wait::SOON)
                .unwrap_or_else(|| panic!("frame {seed} of {size} bytes is lost")),
            &sent,
        );
    }
    for batch in 0..50 {
        let frames: Vec<_> = (0..32)
            .map(|i| frame::plain(60 + (batch * 32 + i) * 41 % 1455, i as u8))
            .collect();
        frames.iter().for_each(|sent| wire.send(sent));
        for sent in &frames {
            frame::assert_same(&wire.receive(wait::SOON).expect("it comes back"), sent);
        }
    }
    guest.process().check();
}
