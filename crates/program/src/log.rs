//! The log of all programs: lines on standard error.
//!
//! Theory of operation. Where standard error is the journal (`JOURNAL_STREAM` names it, systemd.exec(5)), a line begins
//! with its priority (sd-daemon(3)) and has no time: the journal records when it arrived. JSON is one
//! object a line, with the message, the level, the time and the fields of the text. Processes that the daemon starts
//! get the same options.

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal as _, Write as _};
use std::process::{Command, ExitCode};
use std::sync::OnceLock;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use rustix::fs::fstat;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::{self, DefaultFields, FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// The options that the log was set up with.
static IN_USE: OnceLock<LogArgs> = OnceLock::new();

/// How much is logged, and in which form.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// Log messages of this level and above [default: RUST_LOG, else info]
    #[arg(
        long,
        value_name = "LEVEL",
        value_parser = PossibleValuesParser::new(["off", "error", "warn", "info", "debug", "trace"])
    )]
    log_level: Option<String>,
    /// Form of a log line. In the journal it has a priority and no time of its own
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Time, level, message, and fields as NAME=VALUE
    Text,
    /// One JSON object
    Json,
}

impl LogArgs {
    /// The options of a program without log options.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            log_level: None,
            log_format: LogFormat::Text,
        }
    }

    /// Starts the log, at `level` if neither an option nor `RUST_LOG` names one.
    pub fn start(&self, level: &str) {
        let _ = IN_USE.set(self.clone());
        let filter = match &self.log_level {
            Some(level) => EnvFilter::new(level),
            None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level)),
        };
        let lines = Lines {
            format: self.log_format,
            in_journal: is_journal(),
        };
        let is_terminal = io::stderr().is_terminal();
        subscriber(
            filter,
            lines,
            io::stderr,
            is_terminal,
            tracing::subscriber::set_global_default,
        );
    }

    /// The options for a process whose work its parent logs: errors only, unless the level is debug or trace.
    #[must_use]
    pub fn of_errors(&self) -> Self {
        let is_repeated = |level: &String| matches!(level.as_str(), "warn" | "info");
        Self {
            log_level: self.log_level.clone().filter(|level| !is_repeated(level)),
            log_format: self.log_format,
        }
    }
}

fn subscriber<W, R>(
    filter: EnvFilter,
    lines: Lines,
    writer: W,
    is_terminal: bool,
    with: impl FnOnce(Box<dyn Subscriber + Send + Sync>) -> R,
) where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let made = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(is_terminal)
        // Else a write error (EPIPE, EIO) ends the process: eprintln panics.
        .log_internal_errors(false)
        .fmt_fields(EscapedFields)
        .event_format(lines)
        .finish();
    let _ = with(Box::new(made));
}

/// Passes the same options to a process that this one starts.
pub fn pass_on(command: &mut Command) {
    let Some(args) = IN_USE.get() else { return };
    if let Some(level) = &args.log_level {
        command.args(["--log-level", level]);
    }
    if args.log_format == LogFormat::Json {
        command.args(["--log-format", "json"]);
    }
}

/// The exit code of a program; reports the error that it ends with.
pub fn exit<E: fmt::Display>(program: &str, ended: Result<(), E>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report_end(program, &format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Reports the error that a program ends with.
pub fn report_end(program: &str, error: &str) {
    if IN_USE
        .get()
        .is_some_and(|args| args.log_format == LogFormat::Json)
    {
        tracing::error!("{error}");
        return;
    }
    let text = match is_journal() {
        true => with_priority(Level::ERROR, error),
        false => format!("{program}: {error}\n"),
    };
    // The reader may be gone.
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Whether standard error is the journal.
fn is_journal() -> bool {
    let named = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    fstat(io::stderr()).is_ok_and(|file| named == format!("{}:{}", file.st_dev, file.st_ino))
}

/// Each line with a priority (syslog(3)).
fn with_priority(level: Level, text: &str) -> String {
    let priority = match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    };
    let lines = text.lines();
    lines.map(|line| format!("<{priority}>{line}\n")).collect()
}

/// Fields of a line of text, with control characters escaped: a name from a file, a peer or the kernel cannot begin a
/// line of the log, and has no effect on a terminal.
struct EscapedFields;

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

/// Formats the lines.
struct Lines {
    format: LogFormat,
    in_journal: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let text = format::format().with_target(false);
        if (self.format, self.in_journal) == (LogFormat::Text, false) {
            return text.format_event(context, writer, event);
        }
        let level = *event.metadata().level();
        let mut line = String::new();
        match self.format {
            LogFormat::Text => {
                let text = text.with_level(false).without_time();
                text.format_event(context, Writer::new(&mut line), event)?;
            }
            LogFormat::Json => {
                let mut members = Members::default();
                if !self.in_journal {
                    let mut time = String::new();
                    SystemTime.format_time(&mut Writer::new(&mut time))?;
                    members.0.insert("time".to_owned(), time.into());
                }
                let name = level.to_string().to_lowercase();
                members.0.insert("level".to_owned(), name.into());
                event.record(&mut members);
                // JSON allows unescaped DEL and C1 control characters, but a terminal would obey them.
                for c in Value::Object(members.0).to_string().chars() {
                    match c.is_control() {
                        true => write!(line, "\\u{:04x}", u32::from(c))?,
                        false => line.push(c),
                    }
                }
            }
        }
        match self.in_journal {
            true => writer.write_str(&with_priority(level, &line)),
            false => writeln!(writer, "{line}"),
        }
    }
}

/// Members of a line's JSON object, in the order in which they are logged.
#[derive(Default)]
struct Members(Map<String, Value>);

impl Members {
    /// A field cannot replace a member that each line has.
    fn add(&mut self, field: &Field, value: impl Into<Value>) {
        let name = match field.name() {
            name @ ("time" | "level") => format!("field.{name}"),
            name => name.to_owned(),
        };
        self.0.insert(name, value.into());
    }
}

impl Visit for Members {
    fn record_f64(&mut self, field: &Field, value: f64) {
        match value.is_finite() {
            true => self.add(field, value),
            // JSON has no such numbers.
            false => self.add(field, value.to_string()),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
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

    fn logged(format: LogFormat, in_journal: bool, level: &str, log: impl FnOnce()) -> String {
        let kept = Kept::default();
        let writer = kept.clone();
        let lines = Lines { format, in_journal };
        let filter = EnvFilter::new(level);
        subscriber(
            filter,
            lines,
            move || writer.clone(),
            false,
            |made| {
                tracing::subscriber::with_default(made, log);
            },
        );
        let bytes = kept.0.lock().expect("no panic").clone();
        String::from_utf8(bytes).expect("text")
    }

    fn three_levels() {
        tracing::error!(port = "vm1", "lost");
        tracing::warn!("late");
        tracing::info!(queue = 3, "ready");
    }

    #[test]
    fn lines_of_the_journal_have_a_priority_and_no_time() {
        assert_eq!(
            logged(LogFormat::Text, true, "info", three_levels),
            "<3>lost port=\"vm1\"\n<4>late\n<6>ready queue=3\n"
        );
    }

    #[test]
    fn name_with_control_characters_makes_no_line_of_its_own() {
        let odd = "a\nWARN b\r\u{1b}[2J\u{9b}ü";
        for in_journal in [false, true] {
            let text = logged(LogFormat::Text, in_journal, "info", || {
                tracing::warn!(port = %odd, queue = 3, "closed: {odd}");
            });
            let line = text.strip_suffix('\n').expect("a line");
            assert!(!line.contains(char::is_control), "{line:?}");
            assert!(
                line.contains("closed: a\\nWARN b\\r") && line.ends_with("ü queue=3"),
                "{line}"
            );
        }
    }

    #[test]
    fn lines_elsewhere_have_time_and_level() {
        let text = logged(LogFormat::Text, false, "info", || tracing::warn!("late"));
        assert!(
            text.contains("Z  WARN late\n") && text.starts_with("20"),
            "{text}"
        );
    }

    #[test]
    fn json_has_message_level_and_fields_and_is_escaped() {
        let odd = "a \"quote\", a \\, a\nline, \u{9b} and ü";
        let text = logged(LogFormat::Json, true, "info", || {
            tracing::warn!(port = %odd, queue = 3, up = true, "not {}", "up");
        });
        assert_eq!(
            text,
            "<4>{\"level\":\"warn\",\"message\":\"not up\",\
             \"port\":\"a \\\"quote\\\", a \\\\, a\\nline, \\u009b and ü\",\"queue\":3,\"up\":true}\n"
        );
        let text = logged(LogFormat::Json, false, "info", || tracing::info!("ready"));
        assert!(text.starts_with("{\"time\":\"20"), "{text}");
        let fields = logged(LogFormat::Json, true, "info", || {
            tracing::info!(level = 3, time = "late", load = 0.25, ratio = f64::NAN, "ready");
        });
        assert_eq!(
            fields,
            "<6>{\"level\":\"info\",\"message\":\"ready\",\"field.level\":3,\"field.time\":\"late\",\
             \"load\":0.25,\"ratio\":\"NaN\"}\n"
        );
        assert!(
            text.ends_with("Z\",\"level\":\"info\",\"message\":\"ready\"}\n"),
            "{text}"
        );
    }

    #[test]
    fn level_is_the_least_that_is_logged() {
        assert_eq!(
            logged(LogFormat::Text, true, "error", three_levels),
            "<3>lost port=\"vm1\"\n"
        );
        assert_eq!(logged(LogFormat::Text, true, "off", three_levels), "");
        let level = |level: &str| LogArgs {
            log_level: Some(level.to_owned()),
            log_format: LogFormat::Text,
        };
        assert_eq!(level("info").of_errors().log_level, None);
        assert_eq!(level("debug").of_errors().log_level.as_deref(), Some("debug"));
    }
}
