//! The thread of a network that reads learned addresses ([`super::learning`]), from the first port that learns on.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use steer::with_sources;

use super::learning::{Change, SetResult, tell_each};
use super::{Network, change, configured, mark_of};

use crate::thread;

/// Interval of checks without new addresses.
const SELDOM: Duration = Duration::from_secs(10);
/// Interval of checks while the uplink could not be updated, or a key may not move yet.
const AGAIN: Duration = Duration::from_secs(1);
/// Least time between two checks.
const PAUSE: Duration = Duration::from_millis(20);

impl Network {
    /// Starts the thread, which ends with the network.
    pub(super) fn watch_learning(self: &Arc<Self>) -> io::Result<()> {
        let (network, news) = (Arc::downgrade(self), Arc::clone(&self.news));
        let body = move || {
            while let Some(pause) = network.upgrade().and_then(|network| network.learn()) {
                let mut fds = [PollFd::new(&*news, PollFlags::IN)];
                let _ = poll(&mut fds, Timespec::try_from(pause).ok().as_ref());
                if rustix::io::read(&*news, &mut [0; 8]).is_ok() {
                    // Bounds the rate of checks, however fast a guest makes up addresses.
                    std::thread::sleep(PAUSE);
                }
            }
        };
        thread::start("learning", body).map(drop)
    }

    /// Applies new learned addresses; returns the longest pause before the next check. `None`: the network has ended.
    fn learn(&self) -> Option<Duration> {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.over {
            return None;
        }
        let fdb = configured(state);
        self.share_room(state, &fdb);
        let (interface, uplink, ports) = (state.interface.as_deref(), &state.uplink, &state.ports);
        let tell = |changes: &[Change]| {
            let changes: Vec<_> = changes
                .iter()
                .map(|&(key, port)| change(key, port.and_then(|port| mark_of(ports, port))))
                .collect();
            match interface.map(|interface| interface.steering.set_stations(&changes)) {
                None if uplink.is_some() => SetResult::Later,
                None | Some(Ok(())) => SetResult::Done,
                Some(Err(error)) if error.is_away() => SetResult::Later,
                Some(Err(error)) => {
                    // Not a warning: a guest can cause any number of these lines.
                    tracing::debug!(
                        network = self.name,
                        "an address is not learned: {}",
                        with_sources(&error)
                    );
                    SetResult::Refused
                }
            }
        };
        let tell = |changes: &[Change]| tell_each(changes, tell);
        if state.learning.look(&state.ports, &fdb, Instant::now(), tell) {
            state.advertised.forget_unlearned(&state.learning, &state.ports);
            self.set_fdb(state);
            // Its thread advertises learned addresses.
            self.look_again();
        }
        Some(if state.learning.waits { AGAIN } else { SELDOM })
    }
}
