//! Sends back what it gets, from where it was received.
//!
//! `echo ADDRESS:PORT [auto|zcrx|copy] [IFINDEX QUEUE]`; ends when its standard input does. Without a queue it receives
//! without a device. zcrx takes CAP_NET_ADMIN.

use std::error::Error;
use std::io::Read;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use zcrx::{Config, Event, QueueId, Receiver, Request, Source};

/// Who has so many pieces to read first is not read from.
const MOST_QUEUED: usize = 32;

fn config(arguments: &[String]) -> Result<Config, Box<dyn Error>> {
    let source = match arguments {
        [_, _, ifindex, queue, ..] => Source::Queue {
            ifindex: ifindex.parse()?,
            queue: QueueId(queue.parse()?),
        },
        _ => Source::NoDevice,
    };
    let mut config = Config::new(source);
    config.request = match arguments.get(1).map_or("auto", String::as_str) {
        "zcrx" => Request::ForceZcrx,
        "copy" => Request::ForceCopy,
        _ => Request::Auto,
    };
    Ok(config)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let address = arguments
        .first()
        .ok_or("usage: echo ADDRESS:PORT [auto|zcrx|copy] [IFINDEX QUEUE]")?;
    let mut receiver = Receiver::open(&config(&arguments)?)?;
    let listener = TcpListener::bind(address)?;
    println!("{} on {}", receiver.mode(), listener.local_addr()?);
    receiver.fallbacks().iter().for_each(|it| println!("{it}"));
    receiver.listen(listener)?;
    let waker = receiver.waker();
    let has_ended = Arc::new(AtomicBool::new(false));
    let input_has_ended = Arc::clone(&has_ended);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        // Before it wakes us: seen by then.
        input_has_ended.store(true, Ordering::Release);
        waker.wake();
    });
    while !has_ended.load(Ordering::Acquire) {
        receiver.wait(None)?;
        while let Some(event) = receiver.next_event() {
            match event {
                Event::Accepted { socket, .. } => drop(receiver.add(socket)?),
                Event::Received { from, piece } => {
                    receiver.send(from, piece);
                    if receiver.queued(from) >= MOST_QUEUED {
                        receiver.pause(from)?;
                    }
                }
                Event::Sent { to } => receiver.resume(to)?,
                Event::Ended { connection, .. } => receiver.close(connection)?,
                Event::SendFailed { to, .. } => receiver.abort(to)?,
                _ => {}
            }
        }
    }
    println!("{:?}", receiver.statistics());
    Ok(())
}
