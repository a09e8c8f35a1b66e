//! The system call filter (seccomp(2)), made of [the table](super::calls).
//!
//! A call that is not allowed does not happen. The kernel raises SIGSYS instead (SECCOMP_RET_TRAP); our handler prints
//! which call it was, in one line, and ends the process by the same signal. The filter does not allow to replace the
//! handler, and a SIGSYS that is blocked ends the process without a message (`force_sig_info`, kernel/signal.c). So the
//! process always ends after a violation, as with SECCOMP_RET_KILL_PROCESS, and the journal shows why.
//!
//! A second filter returns ENOSYS for calls that libraries try but do not need; the stricter of two verdicts counts.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::{Context as _, anyhow};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads,
};

use super::calls::{ABSENT, CALLS, Call, EXTERNAL, If};
use super::failed;
use crate::signal_handler;

/// Rules by number of the system call; none: always.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The tables of a worker. `external`: another program's sockets or maps are used.
pub(super) fn worker(external: bool) -> Vec<&'static [Call]> {
    let external = Some(EXTERNAL).filter(|_| external);
    [CALLS].into_iter().chain(external).collect()
}

/// Installs handler and filters, for all threads; returns how many calls are allowed, in words.
pub(super) fn install(tables: &[&[Call]]) -> anyhow::Result<String> {
    // The signal is raised again in the handler, and must not be blocked there; once, since then it has its default
    // action.
    let flags = libc::SA_NODEFER | libc::SA_RESETHAND;
    // SAFETY: it writes a line, formatted in place, and ends the process.
    let handled = unsafe { signal_handler::install(libc::SIGSYS, on_sigsys, flags, &[]) };
    handled.with_context(|| failed("handler for SIGSYS"))?;
    // Without CAP_SYS_ADMIN, seccomp(2) requires it.
    rustix::thread::set_no_new_privs(true).with_context(|| failed("no_new_privs"))?;
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

fn refused(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!(
        "cannot enter the sandbox: seccomp: {error} (`--sandbox=-calls` omits it; under a service manager's filter, that \
         one must allow seccomp)"
    )
}

fn add(rules: &mut Rules, call: &Call) -> anyhow::Result<()> {
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
    // Of an int argument the kernel uses the low 32 bits only; the upper half of the register can hold anything.
    let (argument, length, operator, value) = match *condition {
        If::Is(argument, value) => (argument, Dword, SeccompCmpOp::Eq, value),
        If::IsNot(argument, value) => (argument, Dword, SeccompCmpOp::Ne, value),
        If::Bits(argument, mask, value) => (argument, Qword, SeccompCmpOp::MaskedEq(mask), value),
        If::Own(argument) => (argument, Dword, SeccompCmpOp::Eq, own),
    };
    SeccompCondition::new(argument, length, operator, value)
}

fn compile(rules: Rules, otherwise: SeccompAction, then: SeccompAction) -> anyhow::Result<BpfProgram> {
    let machine = TargetArch::try_from(std::env::consts::ARCH).map_err(refused)?;
    let filter = SeccompFilter::new(rules, otherwise, then, machine).map_err(refused)?;
    BpfProgram::try_from(filter).map_err(refused)
}

/// Offset of `si_syscall` in the kernel's siginfo of SIGSYS: three ints and a pad, an address (`_sigsys` in
/// include/uapi/asm-generic/siginfo.h, 64 bits).
const SI_SYSCALL: usize = 24;

extern "C" fn on_sigsys(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo, 128 bytes long, of which this offset is an int in every form that it
    // has.
    let number = unsafe { info.cast::<u8>().add(SI_SYSCALL).cast::<libc::c_int>().read() };
    let mut line = [0; 240];
    let len = describe(number, &mut line);
    // SAFETY: the calls are async-signal-safe. SA_RESETHAND has restored the default action, so `raise` does not
    // return; if it does, `_exit` ends the process.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), len);
        libc::raise(libc::SIGSYS);
        libc::_exit(159);
    }
}

/// Writes the last line of a process that made this call; returns its length. It runs in a signal handler: it formats
/// without allocating.
fn describe(number: libc::c_int, line: &mut [u8]) -> usize {
    let (room, mut rest) = (line.len(), line);
    let _ = write!(
        rest,
        "vhost-af-xdp: the sandbox ends this process: system call {number}"
    );
    let mut calls = CALLS.iter();
    if let Some(call) = calls.find(|call| call.number == libc::c_long::from(number)) {
        let _ = write!(rest, " ({}, with these arguments)", call.name);
    }
    let _ = rest.write_all(b" is not allowed to it (docs/sandbox.md; `ausyscall NUMBER` names it)\n");
    room - rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_line_names_the_call_and_ends_with_a_newline() {
        let mut line = [0; 240];
        for (number, named) in [
            (libc::SYS_execve, format!("call {} is not", libc::SYS_execve)),
            (
                libc::SYS_socket,
                format!("call {} (socket, with", libc::SYS_socket),
            ),
        ] {
            let len = describe(i32::try_from(number).expect("a number"), &mut line);
            let text = str::from_utf8(&line[..len]).expect("text");
            assert!(text.contains(&named) && text.ends_with("names it)\n"), "{text}");
        }
        assert!(
            CALLS.iter().all(|call| call.name.len() < 40),
            "there is room for each"
        );
    }
}
