//! Has the kernel refuse one kind of operation to programs, from a chosen moment on.
//!
//! The programs know nothing of it, and nothing in them is there for it: a seccomp filter shows this process each of
//! their calls of some kinds, and this process answers "refused" or "go on" (seccomp_unotify(2)). Programs inherit the
//! filter from the thread that starts them, and their children from them. A kind is named by what the call does, not
//! by its descriptor: `bpf 28 46` makes a link at attach point 46, `rtnetlink 19` sets an interface.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Calls that are looked at.
const CALLS: [libc::c_long; 9] = [
    libc::SYS_bpf,
    libc::SYS_ioctl,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_socket,
    libc::SYS_setsockopt,
    libc::SYS_bind,
];
/// Length of `struct seccomp_notif` (include/uapi/linux/seccomp.h) in words, and what is done with one.
const NOTIFICATION: usize = 10;
const RECEIVE: libc::Ioctl = 0xc050_2100u32 as libc::Ioctl;
const ANSWER: libc::Ioctl = 0xc018_2101u32 as libc::Ioctl;
/// `SECCOMP_USER_NOTIF_FLAG_CONTINUE`.
const GO_ON: u64 = 1 << 32;
/// Types of rtnetlink messages that change something: links, qdiscs, filters, ntuple ones aside.
const CHANGES: [u16; 7] = [16, 17, 19, 36, 37, 44, 45];

/// What programs did, and what is refused to them.
#[derive(Debug, Default)]
struct Seen {
    refused: Option<String>,
    /// Of each kind, since it was asked last.
    counts: BTreeMap<String, u64>,
    is_over: bool,
}

/// See the module's head.
#[must_use]
pub struct Refusing {
    seen: Arc<Mutex<Seen>>,
    threads: Vec<JoinHandle<()>>,
}

impl Refusing {
    /// Has `start` start programs that are watched from then on.
    ///
    /// # Panics
    /// If that cannot be, or `start` panics.
    pub fn start<T: Send + 'static>(start: impl FnOnce() -> T + Send + 'static) -> (Self, T) {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (started, programs) = std::sync::mpsc::channel();
        let (given, listener) = std::sync::mpsc::channel();
        let until = Arc::clone(&seen);
        let starts = std::thread::spawn(move || {
            given
                .send(filter().expect("we are root"))
                .expect("it is waited for");
            drop(started.send(start()));
            // What it started ends with this thread (PR_SET_PDEATHSIG).
            while !until.lock().expect("no panic").is_over {
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
        });
        let listener = listener.recv().expect("a filter");
        let shared = Arc::clone(&seen);
        let answers = std::thread::spawn(move || answer(&listener, &shared));
        let programs = programs.recv().expect("they start");
        let threads = vec![starts, answers];
        (Self { seen, threads }, programs)
    }

    /// Refuses this kind from now on, or nothing any more.
    ///
    /// # Panics
    /// If an answer panicked.
    pub fn refuse(&self, kind: Option<&str>) {
        self.seen.lock().expect("no panic").refused = kind.map(str::to_owned);
    }

    /// How often each kind was asked for since this was called last.
    ///
    /// # Panics
    /// If an answer panicked.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut self.seen.lock().expect("no panic").counts)
    }
}

impl Drop for Refusing {
    fn drop(&mut self) {
        self.seen.lock().expect("no panic").is_over = true;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Puts the filter on the calling thread.
fn filter() -> io::Result<OwnedFd> {
    let op = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    // `offsetof(struct seccomp_data, nr)` is 0.
    let mut program = vec![op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for (at, call) in (0u8..).zip(CALLS) {
        let to_end = CALLS.len() as u8 - at;
        program.push(op(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            to_end,
            0,
            call as u32,
        ));
    }
    program.push(op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW));
    program.push(op(
        libc::BPF_RET | libc::BPF_K,
        0,
        0,
        libc::SECCOMP_RET_USER_NOTIF,
    ));
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the kernel copies the program, which lives until then.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    match i32::try_from(fd) {
        // SAFETY: it is new, and nobody else's.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn answer(listener: &OwnedFd, seen: &Mutex<Seen>) {
    let pause = Timespec {
        tv_sec: 0,
        tv_nsec: 50_000_000,
    };
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&pause));
        let came = fds[0].revents();
        if !came.contains(PollFlags::IN) {
            if seen.lock().expect("no panic").is_over || came.contains(PollFlags::HUP) {
                return;
            }
            continue;
        }
        let mut call = [0u64; NOTIFICATION];
        // SAFETY: the kernel writes the 80 bytes that the number says.
        if unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, call.as_mut_ptr()) } != 0 {
            continue;
        }
        let kind = kind_of(&call);
        let mut seen = seen.lock().expect("no panic");
        let refused = kind.is_some() && seen.refused == kind;
        if let Some(kind) = kind {
            *seen.counts.entry(kind).or_default() += 1;
        }
        drop(seen);
        // Number, value; error and flags.
        let error = u64::from((-libc::ENOMEM).cast_unsigned());
        let answer = [call[0], 0, if refused { error } else { GO_ON }];
        // SAFETY: the kernel reads the 24 bytes that the number says. Who asked may be gone, which is no matter.
        let _ = unsafe { libc::ioctl(listener.as_raw_fd(), ANSWER, answer.as_ptr()) };
    }
}

/// What a call does, if it is one of those that have a kind.
fn kind_of(call: &[u64; NOTIFICATION]) -> Option<String> {
    let (number, args) = (call[2] as i32, &call[4..]);
    let memory = File::open(format!("/proc/{}/mem", call[1] as u32)).ok();
    let bytes = |at: u64| {
        let mut bytes = [0u8; 24];
        memory.as_ref()?.read_exact_at(&mut bytes, at).ok()?;
        Some(bytes)
    };
    let word = |bytes: &[u8], at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let long = |bytes: &[u8], at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let message = |at: u64, len: u64| {
        let bytes = bytes(at)?;
        let kind = u16::from_ne_bytes([bytes[4], bytes[5]]);
        // Some write its header by itself.
        let is_one = u64::from(word(&bytes, 0)?) >= len && len >= 16 && CHANGES.contains(&kind);
        is_one.then(|| format!("rtnetlink {kind}"))
    };
    match i64::from(number) {
        libc::SYS_bpf => Some(match args[0] {
            // A program, by its type; a link, by where it goes.
            5 => format!("bpf 5 {}", word(&bytes(args[1])?, 0)?),
            28 => format!("bpf 28 {}", word(&bytes(args[1])?, 8)?),
            command => format!("bpf {command}"),
        }),
        libc::SYS_ioctl => match args[1] {
            0x8946 => Some(format!(
                "ethtool {}",
                word(&bytes(long(&bytes(args[2])?, 16)?)?, 0)?
            )),
            // Of tap devices.
            request if request >> 8 & 0xff == u64::from(b'T') && request > 0xffff => {
                Some(format!("tun {}", request & 0xff))
            }
            _ => None,
        },
        libc::SYS_sendto | libc::SYS_write => message(args[1], args[2]),
        libc::SYS_writev => {
            let parts = bytes(args[1])?;
            message(long(&parts, 0)?, long(&parts, 8)?)
        }
        libc::SYS_sendmsg => {
            let parts = bytes(long(&bytes(args[1])?, 16)?)?;
            message(long(&parts, 0)?, long(&parts, 8)?)
        }
        libc::SYS_socket => (args[0] == libc::AF_XDP as u64).then(|| "xdp socket".to_owned()),
        libc::SYS_setsockopt => (args[1] == libc::SOL_XDP as u64).then(|| format!("xdp option {}", args[2])),
        libc::SYS_bind => {
            (bytes(args[1])?.starts_with(&(libc::AF_XDP as u16).to_ne_bytes())).then(|| "xdp bind".to_owned())
        }
        _ => None,
    }
}
