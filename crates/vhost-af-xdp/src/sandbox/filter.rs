//! The system call filter (seccomp(2)), made of [the table](super::calls).
//!
//! A call that is not allowed does not happen. The kernel raises SIGSYS instead (SECCOMP_RET_TRAP); our handler says
//! which call it was, in one line, and ends the process by the same signal. The filter does not let the handler be
//! replaced, and a SIGSYS that is blocked ends the process without a word (`force_sig_info`, kernel/signal.c). So
//! nothing goes on after a violation, as with SECCOMP_RET_KILL_PROCESS, and the journal says why.
//!
//! A second filter on top answers ENOSYS to what libraries try and do without; of two verdicts the stricter one counts.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads,
};

use super::SandboxError;
use super::calls::{ABSENT, BPF_MAP, CALLS, Call, INTERFACES, If};

/// What is allowed beyond the table, for QEMU's ways.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Extra {
    /// Elements of BPF maps.
    pub(crate) bpf_map: bool,
    /// AF_XDP sockets and netlink.
    pub(crate) interfaces: bool,
}

/// Rules by number of the system call; none: always.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Installs handler and filters, for all threads; says what is in force.
///
/// # Errors
/// [`SandboxError`].
pub(super) fn install(extra: Extra) -> Result<String, SandboxError> {
    handle_sigsys().map_err(SandboxError::at("handler for SIGSYS"))?;
    // Has its effect with seccomp's own privilege check.
    rustix::thread::set_no_new_privs(true).map_err(SandboxError::at("no_new_privs"))?;
    let mut tables = vec![CALLS];
    if extra.bpf_map {
        tables.push(BPF_MAP);
    }
    if extra.interfaces {
        tables.push(INTERFACES);
    }
    let mut calls = Rules::new();
    for call in tables.iter().copied().flatten() {
        add(&mut calls, call)?;
    }
    let mut absent = Rules::new();
    for call in ABSENT {
        add(&mut calls, call)?;
        add(&mut absent, call)?;
    }
    let count = calls.len();
    let enosys = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let absent = compile(absent, SeccompAction::Allow, enosys)?;
    let calls = compile(calls, SeccompAction::Trap, SeccompAction::Allow)?;
    for filter in [absent, calls] {
        apply_filter_all_threads(&filter).map_err(refused)?;
    }
    Ok(format!("{count} allowed"))
}

fn refused(error: impl std::fmt::Display) -> SandboxError {
    SandboxError::Refused(format!("seccomp: {error}"))
}

fn add(rules: &mut Rules, call: &Call) -> Result<(), SandboxError> {
    let cases = rules.entry(call.number).or_default();
    for conditions in call.cases {
        let conditions: Result<Vec<_>, _> = conditions.iter().map(condition).collect();
        let rule = conditions.and_then(SeccompRule::new).map_err(refused)?;
        cases.push(rule);
    }
    Ok(())
}

fn condition(condition: &If) -> Result<SeccompCondition, seccompiler::BackendError> {
    use SeccompCmpArgLen::{Dword, Qword};
    let own = u64::from(std::process::id());
    // Numbers that the kernel takes as int have 32 bits that count; the rest is what was left in the register.
    let (argument, length, operator, value) = match *condition {
        If::Is(argument, value) => (argument, Dword, SeccompCmpOp::Eq, value),
        If::IsNot(argument, value) => (argument, Dword, SeccompCmpOp::Ne, value),
        If::Bits(argument, mask, value) => (argument, Qword, SeccompCmpOp::MaskedEq(mask), value),
        If::Own(argument) => (argument, Dword, SeccompCmpOp::Eq, own),
    };
    SeccompCondition::new(argument, length, operator, value)
}

fn compile(rules: Rules, otherwise: SeccompAction, then: SeccompAction) -> Result<BpfProgram, SandboxError> {
    let machine = TargetArch::try_from(std::env::consts::ARCH).map_err(refused)?;
    let filter = SeccompFilter::new(rules, otherwise, then, machine).map_err(refused)?;
    BpfProgram::try_from(filter).map_err(refused)
}

fn handle_sigsys() -> std::io::Result<()> {
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigsys;
    // SAFETY: sigaction is plain data, for which zeros are a value; the handler has the signature that SA_SIGINFO
    // asks for, and does only what signal-safety(7) allows.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        // The signal is raised again in the handler, and must not be blocked there; once, since then it has its default action.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESETHAND;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGSYS, &raw const action, ptr::null_mut())
    };
    match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Offset of `si_syscall` in the kernel's siginfo of SIGSYS: three ints and a pad, an address (`_sigsys` in
/// include/uapi/asm-generic/siginfo.h, 64 bits).
const SI_SYSCALL: usize = 24;

extern "C" fn on_sigsys(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo, 128 bytes long, of which this offset is an int in every form that it has.
    let number = unsafe { info.cast::<u8>().add(SI_SYSCALL).cast::<libc::c_int>().read() };
    let mut line = Line::default();
    line.push(b"vhost-af-xdp: the sandbox ends this process: system call ");
    line.push_number(number.unsigned_abs());
    if let Some(call) = CALLS
        .iter()
        .find(|call| call.number == libc::c_long::from(number))
    {
        line.push(b" (");
        line.push(call.name.as_bytes());
        line.push(b", with these arguments)");
    }
    line.push(b" is not allowed to it (docs/sandbox.md; `ausyscall NUMBER` names it)\n");
    // SAFETY: async-signal-safe. The action is the default one by SA_RESETHAND: this does not come back. Should it, that does not either.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.len);
        libc::raise(libc::SIGSYS);
        libc::_exit(159);
    }
}

/// A line made without allocating.
struct Line {
    bytes: [u8; 240],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            bytes: [0; 240],
            len: 0,
        }
    }
}

impl Line {
    fn push(&mut self, text: &[u8]) {
        for &byte in text {
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = byte;
                self.len += 1;
            }
        }
    }

    fn push_number(&mut self, number: u32) {
        let mut divisor = 1_000_000_000;
        let mut begun = false;
        while divisor > 0 {
            let digit = u8::try_from(number / divisor % 10).unwrap_or(0);
            begun |= digit != 0 || divisor == 1;
            if begun {
                self.push(&[b'0' + digit]);
            }
            divisor /= 10;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_without_allocating() {
        for (number, text) in [(0, "0"), (59, "59"), (425, "425"), (u32::MAX, "4294967295")] {
            let mut line = Line::default();
            line.push_number(number);
            assert_eq!(&line.bytes[..line.len], text.as_bytes());
        }
    }
}
