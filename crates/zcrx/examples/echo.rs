//! Sends received bytes back to their peer, without a copy.
//!
//! `echo ADDRESS:PORT [auto|zcrx|copy] [IFINDEX QUEUE]`; ends when its standard input does. Without a queue it receives
//! without a device. zcrx takes CAP_NET_ADMIN.
//!
//! For trusted peers only: a peer that reads nothing keeps buffers, and its connection, as long as it likes. A
//! server for other peers limits the number of connections (`Receiver::stop_listening`), and aborts slow ones
//! (`Receiver::abort`).

use std::error::Error;
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use zcrx::{Config, Event, QueueId, Receiver, Request, Source};

/// A connection whose peer has not read so many pieces is paused.
const MOST_QUEUED: usize = 32;
/// Longest pause before accepting is retried after a failure, which is mostly a lack of descriptors.
const RETRY: Duration = Duration::from_secs(1);

const USAGE: &str = "usage: echo ADDRESS:PORT [auto|zcrx|copy] [IFINDEX QUEUE]";

/// Address, and configuration of the receiver.
fn plan(arguments: &[String]) -> Option<(SocketAddr, Config)> {
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    let (address, request, source) = match words[..] {
        [address] => (address, "auto", Source::NoDevice),
        [address, request] => (address, request, Source::NoDevice),
        [address, request, ifindex, queue] => {
            let (ifindex, queue) = (ifindex.parse().ok()?, QueueId(queue.parse().ok()?));
            (address, request, Source::Queue { ifindex, queue })
        }
        _ => return None,
    };
    let mut config = Config::new(source);
    config.request = match request {
        "auto" => Request::Auto,
        "zcrx" => Request::ForceZcrx,
        "copy" => Request::ForceCopy,
        _ => return None,
    };
    Some((address.parse().ok()?, config))
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match serve(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("echo: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let (address, config) = plan(arguments).ok_or(USAGE)?;
    let mut receiver = Receiver::open(&config)?;
    let listener =
        TcpListener::bind(address).map_err(|error| format!("cannot listen on {address}: {error}"))?;
    println!("{} on {}", receiver.mode(), listener.local_addr()?);
    receiver.fallbacks().iter().for_each(|it| println!("{it}"));
    receiver.listen(listener)?;
    let waker = receiver.waker();
    let has_ended = Arc::new(AtomicBool::new(false));
    let input_has_ended = Arc::clone(&has_ended);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        // Published before the wake-up.
        input_has_ended.store(true, Ordering::Release);
        waker.wake();
    });
    let mut failed = None;
    while !has_ended.load(Ordering::Acquire) {
        receiver.wait(failed.map(|_| RETRY))?;
        if let Some(listener) = failed.take() {
            receiver.listen_again(listener)?;
        }
        while let Some(event) = receiver.next_event() {
            match event {
                Event::Accepted { socket, .. } => drop(receiver.add(socket)?),
                Event::AcceptFailed { listener, .. } => failed = Some(listener),
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
