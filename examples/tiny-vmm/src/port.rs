//! The data path: the queue pairs of the network device, and the sink.

use anyhow::{Context as _, Result};
use device::counters::{PairCounters, ReceiveCounters};
use device::deliver::Incoming;
use device::hash::Report;
use device::net_device::NetDevice;
use device::pair::{Fault, QueuePair, Sending};
use device::receive::Receive;
use notifier::notifiers::Left;
use virtqueue::{Buffer, Chains, MemoryMap};

use crate::sink::{BATCH, Sink};

/// Maximum number of batches that one call moves: other queues wait.
const MOST_BATCHES: usize = 64;

/// The context of a sink's errors: the host's fault.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("no frames move any more")]
pub struct SinkFailed;

/// Frames that were moved or dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Frames that the sink took.
    pub from_guest: u64,
    /// Frames that the guest received.
    pub to_guest: u64,
    /// Frames that the sink dropped, and frames for the guest that no queue pair accepts.
    pub dropped: u64,
}

/// The queue pairs of a started device, and its sink. The thread that has locked the device uses them.
pub struct Port {
    /// `None`: not set up.
    pairs: Vec<Option<QueuePair>>,
    receive: Receive,
    chains: Chains,
    from_guest: Vec<u8>,
    to_guest: Vec<u8>,
    /// The pair without a buffer for `to_guest`.
    waits_for: Option<usize>,
    /// The sink.
    pub sink: Box<dyn Sink>,
    /// The sink has to be flushed again.
    is_pending: bool,
    /// A worker polls: kicks stay off.
    polled: bool,
    /// For the report.
    pub counts: Counts,
    counters: PairCounters,
    receive_counters: ReceiveCounters,
}

impl Port {
    /// A port without queue pairs. `polled`: a thread calls [`Port::poll`] without pause.
    #[must_use]
    pub fn new(sink: Box<dyn Sink>, device: &NetDevice, polled: bool) -> Self {
        Self {
            pairs: Vec::new(),
            receive: device.receive(None),
            chains: Chains::default(),
            from_guest: Vec::new(),
            to_guest: Vec::new(),
            waits_for: None,
            sink,
            is_pending: false,
            polled,
            counts: Counts::default(),
            counters: PairCounters::default(),
            receive_counters: ReceiveCounters::default(),
        }
    }

    /// Uses these pairs from now on, and discards the frame that waits for the ones before.
    pub fn set_pairs(&mut self, pairs: Vec<Option<QueuePair>>) {
        self.pairs = pairs;
        self.waits_for = None;
        if self.polled {
            self.disable_kicks();
        }
    }

    /// Removes a pair; returns it.
    pub fn take_pair(&mut self, pair: usize) -> Option<QueuePair> {
        self.pairs.get_mut(pair)?.take()
    }

    /// Applies the settings that the driver has made by the control queue.
    pub fn follow(&mut self, device: &NetDevice) {
        self.receive = device.receive(None);
        let offloads = device.negotiated().offloads;
        for (index, pair) in (0..).zip(&mut self.pairs) {
            let Some(pair) = pair else { continue };
            let is_on = |vring: u32| device.vring(vring).is_ok_and(|vring| vring.enabled);
            pair.to_guest.enabled = is_on(2 * index);
            pair.from_guest.enabled = is_on(2 * index + 1);
            pair.set_offloads(offloads);
        }
    }

    /// Serves the queues after a kick, until they are empty and kicks are on.
    ///
    /// # Errors
    /// As [`Port::poll`].
    pub fn serve(&mut self) -> Result<Left> {
        if self.polled {
            return Ok(Left::Nothing);
        }
        for _ in 0..MOST_BATCHES {
            self.disable_kicks();
            if self.poll()? == 0 && !self.enable_kicks() && !self.is_pending {
                return Ok(Left::Nothing);
            }
        }
        Ok(Left::Something)
    }

    /// Moves a batch in each direction; returns the number of frames.
    ///
    /// # Errors
    /// [`SinkFailed`], [`Fault`].
    pub fn poll(&mut self) -> Result<usize> {
        let mut moved = 0;
        if self.is_pending {
            self.flush()?;
        }
        for at in 0..self.pairs.len() {
            moved += self.from_guest(at)?;
        }
        Ok(moved + self.deliver()?)
    }

    fn flush(&mut self) -> Result<()> {
        self.is_pending = !self.sink.flush().context(SinkFailed)?;
        Ok(())
    }

    /// Passes a batch of one pair's frames to the sink.
    fn from_guest(&mut self, at: usize) -> Result<usize> {
        let room = self.sink.room().min(BATCH);
        let Some(pair) = self.pairs[at].as_mut().filter(|pair| pair.from_guest.enabled) else {
            return Ok(0);
        };
        if room == 0 {
            self.flush()?;
            return Ok(0);
        }
        let popped = pair.from_guest.queue.pop(&mut self.chains, room);
        let count = popped.map_err(Fault::from)?;
        if count == 0 {
            return Ok(0);
        }
        let mut sending = Sending::default();
        let mut checked = Ok(false);
        for chain in &self.chains {
            let buffers = self.chains.buffers(chain);
            checked = pair
                .from_guest
                .check_into(chain, buffers, None, &self.counters, &mut sending);
            match checked {
                Ok(true) => {
                    copy_out(
                        &pair.from_guest.guest.memory,
                        buffers,
                        &sending,
                        &mut self.from_guest,
                    );
                    let is_taken = self.sink.put(&self.from_guest);
                    self.counts.from_guest += u64::from(is_taken);
                    self.counts.dropped += u64::from(!is_taken);
                }
                Ok(false) => (),
                Err(_) => break,
            }
            // Copied, or dropped and counted: the buffer is the guest's again.
            pair.from_guest.queue.push_used(chain.id, 0);
        }
        pair.from_guest.publish(&self.counters);
        self.flush()?;
        checked?;
        Ok(count)
    }

    /// Delivers frames of the sink, one at a time. A VMM for many frames passes a batch to [`QueuePair::deliver`].
    fn deliver(&mut self) -> Result<usize> {
        for done in 0..BATCH {
            if self.waits_for.is_none() && !self.sink.take(&mut self.to_guest).context(SinkFailed)? {
                return Ok(done);
            }
            self.waits_for = None;
            let Some((index, report)) = self.place(&self.to_guest) else {
                self.counts.dropped += 1;
                continue;
            };
            let pair = self.pairs[index].as_mut().expect("it accepts the frame");
            let frames = [Incoming::plain(&self.to_guest, report)];
            if pair.to_guest.deliver(&frames, &mut self.chains, &self.counters)? == 0 {
                self.waits_for = Some(index);
                return Ok(done);
            }
            self.counts.to_guest += 1;
        }
        Ok(BATCH)
    }

    /// The pair that accepts a frame for the guest, and its hash report; `None`: the driver wants no such frame.
    fn place(&self, frame: &[u8]) -> Option<(usize, Report)> {
        let place = self.receive.place(frame, None, &self.receive_counters)?;
        // Without RSS the device chooses: the first pair.
        let pair = usize::from(place.pair.unwrap_or(0));
        let is_on = self.pairs.get(pair)?.as_ref()?.to_guest.enabled;
        is_on.then_some((pair, place.report))
    }

    fn disable_kicks(&mut self) {
        for pair in self.pairs.iter_mut().flatten() {
            pair.from_guest.queue.disable_kicks();
            pair.to_guest.queue.disable_kicks();
        }
    }

    /// Enables kicks of the queues that are waited for; returns whether one has entries already.
    fn enable_kicks(&mut self) -> bool {
        let mut more = false;
        for (at, pair) in self.pairs.iter_mut().enumerate() {
            let Some(pair) = pair else { continue };
            if pair.from_guest.enabled {
                more |= pair.from_guest.queue.enable_kicks();
            }
            if self.waits_for == Some(at) {
                more |= pair.to_guest.queue.enable_kicks();
            }
        }
        more
    }
}

/// Copies a frame out of guest memory, each byte once.
fn copy_out(memory: &MemoryMap, buffers: &[Buffer], sending: &Sending, frame: &mut Vec<u8>) {
    frame.resize(sending.len as usize, 0);
    let mut rest = &mut frame[..];
    for piece in sending.start.pieces(buffers) {
        let (to, later) = rest.split_at_mut(rest.len().min(piece.len as usize));
        // Inside the map, as checked when the descriptor was read.
        let _ = memory.copy_from_guest(piece.offset, to);
        rest = later;
    }
}
