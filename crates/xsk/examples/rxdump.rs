//! Receives from one queue and prints the first bytes of each frame. It takes all frames of the queue; none reach the
//! host.
//!
//! `rxdump IFNAME [QUEUE] [FRAMES]`; needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF.

use std::error::Error;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketType, netdevice, socket};
use testkit::Redirect;
use xsk::{AttachMode, FramePool, OwnMemory, QueueId, Socket, SocketConfig, Umem};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().ok_or("usage: rxdump IFNAME [QUEUE] [FRAMES]")?;
    let queue = QueueId(arguments.next().as_deref().unwrap_or("0").parse()?);
    let mut wanted: u32 = arguments.next().as_deref().unwrap_or("10").parse()?;
    let ifindex = netdevice::name_to_index(socket(AddressFamily::INET, SocketType::DGRAM, None)?, &name)?;

    let (program, attach) = match Redirect::attach(ifindex, true) {
        Ok(program) => (program, AttachMode::Native),
        Err(error) => {
            println!("no native program on {name}: {error}; trying skb mode");
            (Redirect::attach(ifindex, false)?, AttachMode::Skb)
        }
    };
    let umem = Umem::aligned(Arc::new(OwnMemory::new(4096 * 2048)?), 2048, 0)?;
    let mut pool: FramePool = umem.all_frames()?.collect();
    let config = SocketConfig {
        tx: None,
        attach,
        ..SocketConfig::new(ifindex, queue)
    };
    let mut socket = Socket::open(&umem, &config)?;
    program.steer(queue.0, &socket)?;
    println!("{name} queue {queue}: {}", socket.mode());

    while wanted > 0 {
        socket.fill.refill(&mut pool, 2048);
        if socket.rx.available() == 0 {
            poll(&mut [PollFd::new(&socket.as_fd(), PollFlags::IN)], None)?;
        }
        for desc in socket.rx.peek(wanted.min(64)) {
            let mut head = [0; 32];
            let shown = head.len().min(desc.len as usize);
            umem.read(desc.data, &mut head[..shown])
                .ok_or("frame outside the UMEM")?;
            println!("{:5} bytes: {:02x?}", desc.len, &head[..shown]);
            pool.put(desc.frame);
            wanted -= 1;
        }
    }
    Ok(())
}
