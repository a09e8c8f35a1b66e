//! The host as one more receiver of a network: the inner end of a veth pair that the steward joins with the uplink's
//! interface. It is an interface of its own, with a lease of its own, served by a lane like the uplink's. The network works
//! without it; why it is not reached is said once, and it is tried again less and less often.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use device::counters::PairCounters;
use steer::{Filter, ModeRequest, with_sources};
use steward::protocol::Wanted;
use xsk::BindRequest;

use super::uplink::RETRY;
use super::{Network, Running, State};
use crate::nic::error::InterfaceError;
use crate::nic::interface::{Interface, QueueOptions};
use crate::port::lane_facts::LaneFacts;
use crate::switch::ethernet::Mac;
use crate::switch::role::Role;

/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// As far as it is reached.
#[derive(Default)]
pub(super) struct Host {
    interface: Option<Arc<Interface>>,
    running: Option<Running>,
    counters: Arc<PairCounters>,
    /// Its addresses.
    pub(super) macs: Vec<Mac>,
    /// Changes of the uplink's lease that were seen when it was asked last.
    seen: u32,
    impaired: Option<String>,
    /// Not tried again before; and the pause after that.
    next: Option<Instant>,
    pause: Duration,
}

/// What is seen of it from outside.
pub(crate) struct ShownHost {
    pub(crate) interface: Option<Weak<Interface>>,
    pub(crate) macs: Vec<Mac>,
    pub(crate) counters: Arc<PairCounters>,
    pub(crate) lane: Option<Weak<LaneFacts>>,
    pub(crate) impaired: Option<String>,
}

impl Host {
    pub(super) fn shown(&self) -> ShownHost {
        let running = self.running.as_ref();
        ShownHost {
            interface: self.interface.as_ref().map(Arc::downgrade),
            macs: self.macs.clone(),
            counters: Arc::clone(&self.counters),
            lane: running.map(|running| Arc::downgrade(&running.facts)),
            impaired: self.impaired.clone(),
        }
    }
}

impl Network {
    /// Looks at the host again, whose uplink is there: its end may be missing, gone, or have another MTU, and the host
    /// other addresses.
    pub(super) fn look_at_host(&self, state: &mut State, uplink: &Interface) {
        if !state.uplink.as_ref().is_some_and(|uplink| uplink.host) {
            return;
        }
        if let Some(interface) = state.host.interface.clone() {
            match interface.look() {
                Ok(_) if interface.steering.is_away() => return,
                Ok(link) => {
                    let other_mtu = link.mtu != interface.mtu();
                    interface.take_note(&link);
                    if other_mtu {
                        self.stop_host(state);
                    }
                }
                Err(_) => {
                    drop(interface);
                    self.lose_host(state);
                }
            }
        }
        let changes = uplink.steering.changes();
        if state.host.seen != changes {
            (state.host.next, state.host.pause) = (None, Duration::ZERO);
        } else if state.host.running.is_some() || state.host.next.is_some_and(|next| Instant::now() < next) {
            return;
        }
        state.host.seen = changes;
        let reached = self.reach_host(state, uplink);
        self.note_host(state, reached);
    }

    /// Asks how the host is reached, and does what is missing.
    fn reach_host(&self, state: &mut State, uplink: &Interface) -> Result<(), InterfaceError> {
        let (Some(end), Some(config)) = (uplink.steering.host()?, &state.uplink) else {
            return Ok(());
        };
        let known = state.host.interface.clone();
        let interface = match known.filter(|interface| interface.name() == end.interface) {
            Some(interface) => interface,
            None => {
                let wanted = Wanted {
                    interface: end.interface,
                    start_queue: 0,
                    queues: 1,
                    mode: ModeRequest::Auto,
                    filter: Filter::default(),
                    network: false,
                };
                let options = QueueOptions {
                    bind: BindRequest::default(),
                    busy_poll: None,
                    ..config.into()
                };
                self.lose_host(state);
                self.interfaces.open(&wanted, options)?
            }
        };
        state.host.interface = Some(Arc::clone(&interface));
        if state.host.running.is_none() {
            let role = Role::Host {
                network: Arc::clone(&self.owner),
            };
            let counters = Arc::clone(&state.host.counters);
            state.host.running = Some(self.run_queue(&interface, 0, &counters, role)?);
        }
        if state.host.macs != end.macs {
            state.host.macs = end.macs;
            self.tell_table(state);
        }
        Ok(())
    }

    /// Takes note of what came of it; said when it is another thing than before.
    fn note_host(&self, state: &mut State, reached: Result<(), InterfaceError>) {
        let host = &mut state.host;
        let why = reached.err().map(|error| with_sources(&error));
        if let (Some(why), true) = (&why, why != host.impaired) {
            tracing::warn!(network = self.name, "guests do not reach the host: {why}");
        }
        (host.next, host.pause) = match why {
            Some(_) => {
                let pause = (host.pause * 2).clamp(RETRY, LONGEST_PAUSE);
                (Some(Instant::now() + pause), pause)
            }
            None => (None, Duration::ZERO),
        };
        host.impaired = why;
    }

    fn stop_host(&self, state: &mut State) {
        if let Some(running) = state.host.running.take() {
            self.stop_queue(running);
        }
    }

    /// Gives the host's end up: frames to the host go to the uplink.
    pub(super) fn lose_host(&self, state: &mut State) {
        self.stop_host(state);
        if let Some(interface) = state.host.interface.take() {
            interface.close_queues();
        }
        if !state.host.macs.is_empty() {
            state.host.macs.clear();
            self.tell_table(state);
        }
    }
}
