//! Binds a socket to a queue: which attempts, in which order, and what a refusal means.
//!
//! # Theory of operation
//!
//! Attempts go from best to plainest: zero-copy (only with a native program) before copy, each with multi-buffer (if
//! requested) before without. A failed bind leaves the socket unchanged (`xsk_bind`, `net/xdp/xsk.c`), so that one
//! socket serves all attempts. Each step down is kept as a [`Fallback`].
//!
//! The copy attempt sets `XDP_COPY`: without a flag the kernel would try zero-copy again, even if the caller
//! forbids it. Some refusals are final, whatever the mode: no interface, interface down, no such queue, and
//! EBUSY after the retries. (EBUSY must not lead to copy mode: on a queue that io_uring zcrx holds the copy
//! bind *succeeds*, and then receives nothing.)

use std::io;
use std::os::fd::BorrowedFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::bind;
use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags as Flags};

use crate::config::{AttachMode, BindRequest, Fallback, SocketConfig};
use crate::error::OpenError;
use crate::netdevice::Netdevice;

/// The kernel-internal ENOTSUPP, which some drivers return.
const ENOTSUPP: i32 = 524;

/// Time between two attempts on a busy queue.
const PAUSE: Duration = Duration::from_millis(2);

/// One way to bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attempt {
    zero_copy: bool,
    multi_buffer: bool,
}

impl Attempt {
    fn name(self) -> &'static str {
        match (self.zero_copy, self.multi_buffer) {
            (true, true) => "zero-copy with multi-buffer",
            (true, false) => "zero-copy",
            (false, true) => "copy with multi-buffer",
            (false, false) => "copy",
        }
    }

    fn flags(self, need_wakeup: bool) -> Flags {
        let mut flags = if self.zero_copy {
            Flags::XDP_ZEROCOPY
        } else {
            Flags::XDP_COPY
        };
        flags.set(Flags::XDP_USE_SG, self.multi_buffer);
        flags.set(Flags::XDP_USE_NEED_WAKEUP, need_wakeup);
        flags
    }
}

/// Result of a successful bind.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) multi_buffer: bool,
    pub(crate) fallbacks: Vec<Fallback>,
}

/// Binds by the first attempt that works. `may_ask`: whether this process may query the driver for the reason
/// of a refusal. The query needs a socket and access to the interface; a process whose AF_XDP socket was
/// passed in may have neither, and its system call filter may kill it.
pub(crate) fn bind_queue(
    fd: BorrowedFd<'_>,
    config: &SocketConfig,
    may_ask: bool,
) -> Result<Bound, OpenError> {
    try_all(config, may_ask, |flags| Ok(bind_in_time(fd, config, flags)))
}

/// As [`bind_queue`], with the caller's `bind`. An error `E` of `bind` itself ends the attempts.
pub(crate) fn try_all<E: From<OpenError>>(
    config: &SocketConfig,
    may_ask: bool,
    mut bind: impl FnMut(Flags) -> Result<Result<(), Errno>, E>,
) -> Result<Bound, E> {
    let Plan {
        attempts,
        mut fallbacks,
    } = plan(config)?;
    let mut last = None;
    for attempt in attempts {
        if let Some((attempt, errno)) = last.take() {
            fallbacks.push(refused(attempt, errno));
        }
        match bind(attempt.flags(config.need_wakeup))? {
            Ok(()) => {
                return Ok(Bound {
                    multi_buffer: attempt.multi_buffer,
                    fallbacks,
                });
            }
            Err(errno) => match final_error(config, errno, may_ask) {
                Some(error) => return Err(error.into()),
                None => last = Some((attempt, errno)),
            },
        }
    }
    let (attempt, errno) = last.unwrap_or((
        Attempt {
            zero_copy: false,
            multi_buffer: false,
        },
        Errno::INVAL,
    ));
    Err(refused_error(config, attempt, errno).into())
}

/// Why a bind with a single attempt failed.
pub(crate) fn refusal(config: &SocketConfig, zero_copy: bool, errno: Errno, may_ask: bool) -> OpenError {
    let attempt = Attempt {
        zero_copy,
        multi_buffer: false,
    };
    final_error(config, errno, may_ask).unwrap_or_else(|| refused_error(config, attempt, errno))
}

fn refused_error(config: &SocketConfig, attempt: Attempt, errno: Errno) -> OpenError {
    let SocketConfig { ifindex, queue, .. } = *config;
    let source = io::Error::from(errno);
    if attempt.zero_copy {
        OpenError::ZeroCopyRefused {
            ifindex,
            queue,
            reason: refused(attempt, errno).reason,
            source,
        }
    } else {
        OpenError::Bind {
            ifindex,
            queue,
            source,
        }
    }
}

/// The attempts to bind.
struct Plan {
    /// In the order in which to try them.
    attempts: Vec<Attempt>,
    /// Attempts that are skipped without a system call.
    fallbacks: Vec<Fallback>,
}

fn plan(config: &SocketConfig) -> Result<Plan, OpenError> {
    let native = config.attach == AttachMode::Native;
    let mut fallbacks = Vec::new();
    let modes: &[bool] = match config.bind {
        BindRequest::ForceZeroCopy if !native => return Err(OpenError::ZeroCopyNeedsNative),
        BindRequest::ForceZeroCopy => &[true],
        BindRequest::ForceCopy => &[false],
        BindRequest::Auto if native => &[true, false],
        BindRequest::Auto => {
            let reason = "the XDP program is attached in skb mode".to_owned();
            fallbacks.push(Fallback {
                tried: "zero-copy",
                errno: 0,
                reason,
            });
            &[false]
        }
    };
    let buffers: &[bool] = if config.multi_buffer {
        &[true, false]
    } else {
        &[false]
    };
    let attempts = modes
        .iter()
        .flat_map(|&zero_copy| {
            buffers.iter().map(move |&multi_buffer| Attempt {
                zero_copy,
                multi_buffer,
            })
        })
        .collect();
    Ok(Plan { attempts, fallbacks })
}

/// Binds; retries while the queue is busy, until the time-out.
fn bind_in_time(fd: BorrowedFd<'_>, config: &SocketConfig, flags: Flags) -> Result<(), Errno> {
    let address = SocketAddrXdp::new(flags, config.ifindex, config.queue.0);
    in_time(config, || bind(fd, &address))
}

/// Retries `attempt` while the queue is busy, until the time-out.
pub(crate) fn in_time(
    config: &SocketConfig,
    mut attempt: impl FnMut() -> Result<(), Errno>,
) -> Result<(), Errno> {
    let deadline = Instant::now() + config.bind_timeout;
    loop {
        match attempt() {
            Err(Errno::BUSY) if Instant::now() < deadline => sleep(PAUSE),
            result => return result,
        }
    }
}

fn busy(config: &SocketConfig) -> OpenError {
    OpenError::Busy {
        ifindex: config.ifindex,
        queue: config.queue,
        waited: config.bind_timeout,
    }
}

/// The error, if no other attempt can succeed after `errno`.
fn final_error(config: &SocketConfig, errno: Errno, may_ask: bool) -> Option<OpenError> {
    let SocketConfig { ifindex, queue, .. } = *config;
    match errno {
        Errno::BUSY => Some(busy(config)),
        Errno::NODEV => Some(OpenError::NoInterface { ifindex }),
        Errno::NETDOWN => Some(OpenError::InterfaceDown { ifindex }),
        Errno::INVAL if may_ask => match Netdevice::by_index(ifindex).and_then(|it| it.channels()) {
            Ok(channels) if queue.0 >= channels.queues() => Some(OpenError::NoQueue {
                ifindex,
                queue,
                queues: channels.queues(),
            }),
            _ => None,
        },
        _ => None,
    }
}

fn refused(attempt: Attempt, errno: Errno) -> Fallback {
    let number = errno.raw_os_error();
    let what = match (errno, attempt.zero_copy, attempt.multi_buffer) {
        (Errno::OPNOTSUPP, true, true) => "the driver has no zero-copy, or none with multi-buffer",
        (Errno::OPNOTSUPP, true, false) => "the driver has no zero-copy",
        (Errno::INVAL, true, _) => {
            "the driver refuses zero-copy here (unsupported, or its settings do not allow it)"
        }
        (Errno::INVAL, false, true) => "the kernel does not know XDP_USE_SG (Linux 6.6 and later do)",
        (Errno::NOMEM, ..) => "the driver has not enough memory",
        _ if number == ENOTSUPP => "the driver does not support it",
        _ => "the kernel refuses it",
    };
    let reason = format!("{what}: {}", io::Error::from(errno));
    Fallback {
        tried: attempt.name(),
        errno: number,
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::QueueId;

    fn config(attach: AttachMode, bind: BindRequest, multi_buffer: bool) -> SocketConfig {
        SocketConfig {
            attach,
            bind,
            multi_buffer,
            ..SocketConfig::new(1, QueueId(0))
        }
    }

    fn names(config: &SocketConfig) -> Vec<&'static str> {
        plan(config)
            .unwrap()
            .attempts
            .into_iter()
            .map(Attempt::name)
            .collect()
    }

    #[test]
    fn auto_goes_from_best_to_plainest() {
        let all = [
            "zero-copy with multi-buffer",
            "zero-copy",
            "copy with multi-buffer",
            "copy",
        ];
        assert_eq!(names(&config(AttachMode::Native, BindRequest::Auto, true)), all);
        assert_eq!(
            names(&config(AttachMode::Native, BindRequest::Auto, false)),
            ["zero-copy", "copy"]
        );
    }

    #[test]
    fn skb_program_never_gets_zero_copy_and_says_so() {
        let config = config(AttachMode::Skb, BindRequest::Auto, false);
        assert_eq!(names(&config), ["copy"]);
        let skipped = plan(&config).unwrap().fallbacks;
        assert_eq!((skipped[0].tried, skipped[0].errno), ("zero-copy", 0));
        let forced = self::config(AttachMode::Skb, BindRequest::ForceZeroCopy, false);
        assert!(matches!(plan(&forced), Err(OpenError::ZeroCopyNeedsNative)));
    }

    #[test]
    fn forced_modes_do_not_change_mode() {
        assert_eq!(
            names(&config(AttachMode::Native, BindRequest::ForceCopy, false)),
            ["copy"]
        );
        let forced = config(AttachMode::Native, BindRequest::ForceZeroCopy, true);
        assert_eq!(names(&forced), ["zero-copy with multi-buffer", "zero-copy"]);
    }

    #[test]
    fn copy_is_asked_for_outright() {
        let copy = Attempt {
            zero_copy: false,
            multi_buffer: false,
        };
        assert_eq!(copy.flags(true), Flags::XDP_COPY | Flags::XDP_USE_NEED_WAKEUP);
        let best = Attempt {
            zero_copy: true,
            multi_buffer: true,
        };
        assert_eq!(best.flags(false), Flags::XDP_ZEROCOPY | Flags::XDP_USE_SG);
    }
}
