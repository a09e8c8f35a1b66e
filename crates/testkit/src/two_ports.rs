//! Two guests of a network, of which one has limits: as fast as they can.

use std::time::{Duration, Instant};

use crate::daemon::DIR;
use crate::{Daemon, Driver, DriverConfig, Layout, NetNs, Serve, wait};

/// Bytes of the frames.
pub const LEN: usize = 1250;

/// The file of two ports of a network, the first with these keys.
#[must_use]
pub fn file(keys: &str) -> String {
    let port = |at: usize, keys: &str| {
        format!(
            "[port.vm{at}]\nnetwork = \"lan\"\nsocket-path = \"{DIR}/vm{at}.sock\"\nmac = \"02:00:00:00:00:0{at}\"\n{keys}\n"
        )
    };
    format!("[network.lan]\n{}{}", port(0, keys), port(1, ""))
}

/// A frame of one of them to the other, of an EtherType for local experiments.
#[must_use]
pub fn frame(to: usize, from: usize) -> Vec<u8> {
    // There are two.
    let mac = |at: usize| [2, 0, 0, 0, 0, at as u8];
    let mut frame = [&mac(to)[..], &mac(from), &[0x88, 0xb5]].concat();
    frame.resize(LEN, 7);
    frame
}

/// Both with their daemon.
pub struct TwoPorts {
    /// The daemon.
    pub daemon: Daemon,
    /// The guests.
    pub guests: Vec<Driver>,
    _netns: NetNs,
}

impl TwoPorts {
    /// The first with these keys.
    ///
    /// # Panics
    /// If the daemon does not start, or refuses a guest.
    #[must_use]
    pub fn new(keys: &str) -> Self {
        let netns = NetNs::new("limits");
        let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &file(keys));
        let guests = (0..2).map(|at| {
            let path = daemon.path(&format!("vm{at}.sock"));
            daemon.connect(at, &path, &DriverConfig::default(), 128)
        });
        Self {
            guests: guests.collect(),
            daemon,
            _netns: netns,
        }
    }

    /// A guest sends to the other one as much as it can, for so long, and until more than so many frames have arrived;
    /// frames that arrived, and the time from before the first one was sent until after the last one came.
    pub fn flood(&mut self, from: usize, lasts: Duration, more_than: u64) -> (u64, Duration) {
        let [sends, receives] = [from, 1 - from];
        let frame = frame(receives, sends);
        let batch = [&frame[..]; 16];
        let began = Instant::now();
        let mut arrived = 0;
        loop {
            let pair = &mut self.guests[sends].pairs[0];
            pair.reap_sent();
            let has_room = pair.has_room();
            if has_room {
                pair.send_batch(&batch, Layout::Whole);
            }
            let before = arrived;
            while self.guests[receives].pairs[0].poll().is_some() {
                arrived += 1;
            }
            let elapsed = began.elapsed();
            if elapsed >= lasts && (arrived > more_than || elapsed >= wait::SOON) {
                return (arrived, began.elapsed());
            }
            if !has_room && arrived == before {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}
