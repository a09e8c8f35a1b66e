//! Captures libbpf's messages instead of printing them.
//!
//! libbpf prints on stderr why a load or an attach failed: the verifier's log, or the kernel's extended
//! acknowledgement, which no return value carries. A daemon's library must not write there, and the text
//! belongs in the error. So the first use installs a print function for the whole process, which captures the
//! output on a thread while that thread is inside [`messages_of`], and drops the rest. libbpf calls it on the
//! thread that called libbpf, so concurrent calls do not mix.

use std::cell::RefCell;
use std::io;
use std::sync::Once;

use libbpf_rs::{PrintLevel, set_print};

/// Minimum number of last bytes captured of a call; a verifier log is longer, but only its end matters.
const CAPTURED_BYTES: usize = 16 * 1024;

thread_local! {
    static MESSAGES: RefCell<Option<String>> = const { RefCell::new(None) };
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the signature is libbpf_rs::PrintCallback"
)]
fn capture(_level: PrintLevel, message: String) {
    // A failed borrow would mean that libbpf printed from within this function: ignored.
    let _ = MESSAGES.try_with(|messages| {
        if let Ok(mut messages) = messages.try_borrow_mut()
            && let Some(captured) = messages.as_mut()
        {
            captured.push_str(&message);
            if captured.len() > 2 * CAPTURED_BYTES {
                let mut cut = captured.len() - CAPTURED_BYTES;
                while !captured.is_char_boundary(cut) {
                    cut += 1;
                }
                captured.drain(..cut);
            }
        }
    });
}

/// Runs `call`, and returns its result with libbpf's warnings.
pub(crate) fn messages_of<T>(call: impl FnOnce() -> T) -> (T, String) {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        set_print(Some((PrintLevel::Warn, capture)));
    });
    MESSAGES.with_borrow_mut(|messages| *messages = Some(String::new()));
    let result = call();
    let said = MESSAGES.take().unwrap_or_default();
    (result, said)
}

/// The kernel's extended acknowledgement among libbpf's messages (in the format of libbpf's nlattr.c).
pub(crate) fn kernel_message(said: &str) -> Option<String> {
    let (_, text) = said.split_once("Kernel error message: ")?;
    let line = text.lines().next()?.trim();
    (!line.is_empty()).then(|| line.to_owned())
}

/// Converts a result of libbpf: 0, or a negative error number.
pub(crate) fn checked(result: i32) -> io::Result<()> {
    match result {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_message_is_found_among_others() {
        let said =
            "libbpf: something\nlibbpf: Kernel error message: Peer MTU is too large to set XDP\nmore\n";
        assert_eq!(
            kernel_message(said).as_deref(),
            Some("Peer MTU is too large to set XDP")
        );
        assert_eq!(kernel_message("libbpf: something\n"), None);
        assert_eq!(kernel_message("Kernel error message: \n"), None);
    }

    #[test]
    fn messages_outside_a_call_are_dropped() {
        capture(PrintLevel::Warn, "lost".to_owned());
        let ((), said) = messages_of(|| capture(PrintLevel::Warn, "kept".to_owned()));
        assert_eq!(said, "kept");
        capture(PrintLevel::Warn, "lost".to_owned());
        let ((), said) = messages_of(|| ());
        assert_eq!(said, "");
    }

    #[test]
    fn long_messages_keep_their_end() {
        let ((), said) = messages_of(|| {
            for _ in 0..10_000 {
                capture(PrintLevel::Warn, "verifier says ä\n".to_owned());
            }
            capture(PrintLevel::Warn, "the end".to_owned());
        });
        assert!(said.len() <= 2 * CAPTURED_BYTES, "{}", said.len());
        assert!(said.ends_with("the end"));
    }
}
