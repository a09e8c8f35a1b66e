//! Fields of log lines, with control characters escaped: what a file, a peer or the kernel names has no line of its own
//! in the log, and no effect on a terminal.

use std::fmt;

use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};

/// See the module's head. Else as tracing-subscriber formats them, without colours.
#[derive(Debug, Clone, Copy)]
pub struct EscapedFields;

impl<'w> FormatFields<'w> for EscapedFields {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut text = String::new();
        DefaultFields::new().format_fields(Writer::new(&mut text), fields)?;
        text.chars().try_for_each(|c| match c.is_control() {
            true => write!(writer, "{}", c.escape_default()),
            false => writer.write_char(c),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panic").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn name_with_control_characters_makes_no_line_of_its_own() {
        let kept = Kept::default();
        let writer = kept.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .without_time()
            .with_target(false)
            .fmt_fields(EscapedFields)
            .finish();
        let odd = "a\nWARN b\r\u{1b}[2J\u{9b}ü";
        tracing::subscriber::with_default(log, || tracing::warn!(port = %odd, queue = 3, "closed: {odd}"));
        let text = String::from_utf8(kept.0.lock().expect("no panic").clone()).expect("text");
        let line = text.strip_suffix('\n').expect("a line");
        assert!(!line.contains(char::is_control), "{line:?}");
        assert!(
            line.starts_with(" WARN closed: a\\nWARN b\\r") && line.ends_with("ü queue=3"),
            "{line}"
        );
    }
}
