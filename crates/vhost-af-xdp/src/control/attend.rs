//! A port's thread: meets VMMs, one after the other, and speaks vhost-user with each.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vhost::vhost_user::{BackendReqHandler, Error};

use super::front;
use super::port::Port;

/// Pause between attempts to connect to a VMM that is not there: short, because the guest's outage lasts as
/// long, and cheap.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// Pause before a VMM that did wrong is met again: doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a port's thread meets VMMs with.
pub(crate) enum Meeting {
    Listen(UnixListener),
    Connect(PathBuf),
    Once(UnixStream),
}

/// Meets VMMs, one after the other.
pub(crate) fn attend(port: &Arc<Port>, meeting: Meeting) {
    let mut pause = FIRST_PAUSE;
    match meeting {
        Meeting::Once(stream) => {
            serve_connection(port, stream);
        }
        Meeting::Listen(listener) => {
            let mut said = false;
            loop {
                match listener.accept() {
                    Ok((stream, _)) => {
                        said = false;
                        if serve_connection(port, stream) {
                            rest(&mut pause);
                        } else {
                            pause = FIRST_PAUSE;
                        }
                    }
                    Err(error) => {
                        if !said {
                            tracing::warn!(port = %port.config.endpoint, "cannot accept a connection, trying again: {error}{}", crate::shortage(&error.to_string()));
                            said = true;
                        }
                        rest(&mut pause);
                    }
                }
            }
        }
        Meeting::Connect(path) => {
            let mut said = false;
            loop {
                match UnixStream::connect(&path) {
                    Ok(stream) => {
                        said = false;
                        if serve_connection(port, stream) {
                            rest(&mut pause);
                            continue;
                        }
                        pause = FIRST_PAUSE;
                    }
                    Err(error) if !said && error.kind() == io::ErrorKind::PermissionDenied => {
                        tracing::warn!(path = %path.display(), "the VMM's socket may not be connected to by this user ({}): let it, or choose another with --user; trying again", rustix::process::geteuid().as_raw());
                        said = true;
                    }
                    Err(error) if !said => {
                        tracing::info!(path = %path.display(), %error, "no VMM there yet, trying again");
                        said = true;
                    }
                    Err(_) => {}
                }
                std::thread::sleep(CONNECT_PAUSE);
            }
        }
    }
}

fn rest(pause: &mut Duration) {
    std::thread::sleep(*pause);
    *pause = (*pause * 2).min(LONGEST_PAUSE);
}

/// Speaks vhost-user until the connection ends; true if the VMM or its guest did wrong.
pub(crate) fn serve_connection(port: &Arc<Port>, stream: UnixStream) -> bool {
    let (Ok(connection), Ok(ahead)) = (stream.try_clone(), stream.try_clone()) else {
        tracing::warn!(port = %port.config.endpoint, "no descriptors left, the connection is dropped: raise the limit of open files (`ulimit -n`, systemd: LimitNOFILE=)");
        return true;
    };
    port.begin_session(connection);
    tracing::info!(port = %port.config.endpoint, "a VMM connected");
    let mut requests = BackendReqHandler::from_stream(stream, Arc::clone(port));
    loop {
        match front::take(&ahead, port) {
            Ok(true) => continue,
            Ok(false) => {}
            Err(error) => return port.end_session(false, format!("vhost-user: {error}")),
        }
        match requests.handle_request() {
            Ok(()) | Err(Error::SocketRetry(_)) => {}
            Err(error @ (Error::Disconnected | Error::SocketBroken(_))) => {
                return port.end_session(true, error.to_string());
            }
            Err(error) => return port.end_session(false, format!("vhost-user: {error}")),
        }
    }
}
