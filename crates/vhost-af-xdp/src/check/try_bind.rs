//! `check --try`: attaches a program and binds a free queue, and undoes both at once.
//!
//! The program passes all frames to the host: no queue of it is enabled. A driver may take its link down for a moment
//! when a program is attached or detached, and when a socket is bound.

use std::sync::Arc;
use std::time::Duration;

use common::binding::{LONGEST_FRAME, TX_METADATA_BYTES};
use host::links::wants_frags;
use serde::Serialize;
use steer::{Mode, ModeRequest, Program, with_sources};
use xsk::{AttachMode, OwnMemory, QueueId, RingSize, Socket, SocketConfig, Umem};

use super::facts::Facts;
use super::netkit;
use super::placements::Request;
use crate::config::Placement;
use crate::nic::mode::Fallback;
use dataplane::nic::{RECEIVE_RING, SEND_RING};

/// Chunks of the memory that is registered for the attempt.
const CHUNKS: u32 = 256;
const BIND_TIMEOUT: Duration = Duration::from_secs(2);

/// Result of the attempt.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct TryReport {
    /// The queue; none: no queue is free.
    pub(super) queue: Option<u32>,
    /// How the program was attached: `native`, `skb`.
    pub(super) program: Option<String>,
    /// The mode in which the socket was bound, as in `status`; none: it was not bound.
    pub(super) mode: Option<String>,
    /// Why not in a better mode, with the kernel's errors.
    pub(super) why_not_more: Vec<String>,
    /// Why the attempt failed.
    pub(super) refused: Option<String>,
}

/// Tries copy placement, on the first queue that nobody is known to use.
pub(super) fn run(facts: &Facts) -> TryReport {
    if facts.link.has_leased_only {
        return TryReport {
            refused: Some(netkit::REFUSED.to_owned()),
            ..TryReport::default()
        };
    }
    if let Some(whose) = facts.program_holder().filter(|_| facts.program.is_some()) {
        let why = format!(
            "the XDP program there is {whose}; `vhost-af-xdp status` says in which modes its queues are"
        );
        return TryReport {
            refused: Some(why),
            ..TryReport::default()
        };
    }
    let mut tried = TryReport {
        queue: facts.free_queues().first().copied(),
        ..TryReport::default()
    };
    tried.refused = match tried.queue {
        None => Some("no queue is free".to_owned()),
        Some(queue) => {
            let tried = attempt(facts, queue, &mut tried);
            tried.err().map(with_sources)
        }
    };
    tried
}

fn attempt(facts: &Facts, queue: u32, tried: &mut TryReport) -> anyhow::Result<()> {
    let frags = wants_frags(facts.link.mtu);
    let mode = match facts.link.only_skb() {
        Some(_) => ModeRequest::Skb,
        None => ModeRequest::Xdp,
    };
    let program = Program::attach(facts.link.index, mode, frags)?;
    let native = program.mode() == Mode::Native;
    tried.program = Some(program.mode().to_string());
    let asked = facts.queue_facts(native, &Request::of(Placement::Copy), None);
    let binding = asked.binding()?;
    let not_native = program.fallback().map(|why| Fallback::NotNative(why.to_owned()));
    let notes = [binding.note.map(Fallback::NoZeroCopy), not_native];
    tried
        .why_not_more
        .extend(notes.iter().flatten().map(ToString::to_string));
    let memory = OwnMemory::new(CHUNKS as usize * binding.chunk_bytes as usize)?;
    let umem = Umem::aligned(Arc::new(memory), binding.chunk_bytes, 0)?;
    let mut config = SocketConfig::new(facts.link.index, QueueId(queue));
    config.attach = match native {
        true => AttachMode::Native,
        false => AttachMode::Skb,
    };
    config.bind = binding.ask;
    let (receive, send) = (RingSize::at_least(RECEIVE_RING), RingSize::at_least(SEND_RING));
    (config.rx, config.tx) = (Some(receive), Some(send));
    (config.fill, config.completion) = (receive, send);
    config.multi_buffer = asked.frame_limit > LONGEST_FRAME;
    config.bind_timeout = BIND_TIMEOUT;
    let roomy = umem.clone().with_tx_metadata(TX_METADATA_BYTES)?;
    let socket = Socket::open(&roomy, &config).or_else(|_| Socket::open(&umem, &config))?;
    tried.mode = Some(socket.mode().to_string());
    let refused = socket.fallbacks().iter().map(ToString::to_string);
    tried.why_not_more.extend(refused);
    if !native && facts.link.partial_checksums {
        tried.why_not_more.push(Fallback::SkbOnVeth.to_string());
    }
    // The socket is closed before the program is detached.
    drop(socket);
    drop(program);
    Ok(())
}
