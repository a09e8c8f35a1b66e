//! A VMM's connection: its protocol features, and the kicks of its control queue.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use steer::with_sources;

use super::error::MessageError;
use crate::guard::alarm::Alarm;
use crate::port::Port;
use crate::port::session::Session;

/// Between two looks at the control queue: a guest can have lanes rebuilt 200 times a second at most.
const CONTROL_PAUSE: Duration = Duration::from_millis(5);
/// A look is followed by a pause so many times as long: in direct placement lanes that are rebuilt register all guest
/// memory and bind the NIC's queue again.
const CONTROL_SHARE: u32 = 10;
/// At most so long: messages of the VMM wait meanwhile.
const LONGEST_CONTROL_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct Connection {
    pub(crate) port: Arc<Port>,
    /// Protocol features that the VMM took.
    pub(super) protocol: u64,
    /// Of the control queue, once there is one.
    kicks: Option<Kicks>,
}

/// Kicks of the control queue, as workers wait for those of lanes: an epoll set that tells of each, and no read(2),
/// which waits where the VMM has made the eventfd do so.
struct Kicks(OwnedFd);

impl Kicks {
    fn of(kick: &OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, kick, epoll::EventData::new_u64(0), flags)?;
        Ok(Self(epoll))
    }

    /// Takes note of those that came.
    fn clear(&self) {
        let now = Timespec::default();
        let mut event = [MaybeUninit::<epoll::Event>::uninit(); 1];
        let _ = epoll::wait(&self.0, &mut event, Some(&now));
    }
}

impl Connection {
    pub(crate) fn new(port: &Arc<Port>) -> Self {
        Self {
            port: Arc::clone(port),
            protocol: 0,
            kicks: None,
        }
    }

    /// Waits for kicks of the control queue by that descriptor from now on.
    pub(super) fn watch(&mut self, kick: &OwnedFd) -> Result<(), MessageError> {
        self.kicks = Some(Kicks::of(kick).map_err(MessageError::Watch)?);
        Ok(())
    }

    /// Waits for a message, or a kick of the control queue, whose commands are served; whether there is a message.
    /// `pending`: a command may wait, and afterwards: another one may.
    /// Errors: the session is over.
    pub(super) fn wait(&self, alarm: &Alarm, stream: &UnixStream, pending: &mut bool) -> io::Result<bool> {
        let Some(kicks) = &self.kicks else {
            return alarm.await_message(stream).map(|()| true);
        };
        let [message, kicked] = alarm.await_either(stream, &kicks.0, *pending)?;
        if kicked || *pending {
            kicks.clear();
            let began = Instant::now();
            let served = self.port.with_session(Session::serve_control);
            *pending = served.map_err(|error| io::Error::other(with_sources(&error)))?;
            // A guest can have lanes rebuilt, and kick without end.
            if kicked || *pending {
                std::thread::sleep(control_pause(began.elapsed()));
            }
        }
        Ok(message)
    }
}

/// The pause after a look at the control queue that took so long.
fn control_pause(took: Duration) -> Duration {
    (took * CONTROL_SHARE).clamp(CONTROL_PAUSE, LONGEST_CONTROL_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_queue_pauses_longer_after_commands_that_take_long() {
        let paused = [0, 1, 20, 500].map(|ms| control_pause(Duration::from_millis(ms)).as_millis());
        assert_eq!(paused, [5, 10, 200, 1000]);
    }
}
