//! Sends 64-byte frames from one queue as fast as the kernel takes them, and prints their number.
//!
//! `txonly IFNAME [QUEUE] [SECONDS]`; needs CAP_NET_RAW. For a trial: `ip link add near type veth peer name far`, both
//! up, then `txonly near`.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, netdevice, socket};
use xsk::{FramePool, Kick, OwnMemory, QueueId, RingSize, Socket, SocketConfig, TxDesc, Umem};

const BATCH: u32 = 64;
const LEN: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().ok_or("usage: txonly IFNAME [QUEUE] [SECONDS]")?;
    let queue = QueueId(arguments.next().as_deref().unwrap_or("0").parse()?);
    let duration = Duration::from_secs(arguments.next().as_deref().unwrap_or("3").parse()?);
    let ifindex = netdevice::name_to_index(socket(AddressFamily::INET, SocketType::DGRAM, None)?, &name)?;

    let memory = OwnMemory::new(4096 * 2048)?;
    println!("UMEM in {}", memory.backing());
    let umem = Umem::aligned(Arc::new(memory), 2048, 0)?;
    let mut frame = [0; LEN];
    frame[..14].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    let mut pool = FramePool::with_capacity(4096);
    for chunk in umem.all_frames()? {
        umem.write(chunk.offset(), &frame)
            .ok_or("chunk outside its UMEM")?;
        pool.put(chunk);
    }

    let budget = Some(RingSize::DEFAULT.get());
    let config = SocketConfig {
        rx: None,
        max_tx_skb_budget: budget,
        ..SocketConfig::new(ifindex, queue)
    };
    let mut socket = Socket::open(&umem, &config)?;
    println!("{name} queue {queue}: {}", socket.mode());
    for fallback in socket.fallbacks() {
        println!("  {fallback}");
    }

    let start = Instant::now();
    let mut sent = 0_u64;
    while start.elapsed() < duration {
        sent += send_batch(&mut socket, &mut pool)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{sent} frames, {:.3} Mpps", sent as f64 / seconds / 1e6);
    println!("{:?}", socket.statistics()?);
    Ok(())
}

/// Takes completions, sends a batch, wakes the kernel; returns the number of completed frames.
fn send_batch(socket: &mut Socket, pool: &mut FramePool) -> Result<u64, xsk::WakeError> {
    let completed = socket.completion.peek(BATCH);
    let count = completed.len() as u64;
    pool.extend(completed);
    let mut batch = socket.tx.reserve(BATCH);
    while batch.room() > 0 {
        let Some(frame) = pool.take() else { break };
        batch.push(TxDesc::whole(frame, LEN as u32));
    }
    batch.submit();
    if socket.tx.needs_wakeup() && socket.kick_tx()? == Kick::Busy {
        std::thread::yield_now();
    }
    Ok(count)
}
