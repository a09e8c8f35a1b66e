//! How a program ends: with help, with what is wrong with its command line, or with the error that stopped it.

use std::error::Error;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};
use model::mistakes::nearest;
use program::log::report_end;

use crate::shortage::shortage;

/// Reports the error that stopped a program, with its remedy if it is a shortage; returns `code`.
pub fn report(program: &str, error: &(dyn Error + 'static), code: u8) -> ExitCode {
    let text = steer::with_sources(error);
    report_end(program, &format!("{text}{}", shortage(&text)));
    ExitCode::from(code)
}

/// Prints help where help was asked for; else what is wrong with the command line, in one line.
pub fn explain(command: &Command, error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    report_end(
        command.get_name(),
        &mistake(command, std::env::args().skip(1), error),
    );
    ExitCode::from(2)
}

/// What is wrong with these words, and where the command is explained.
#[must_use]
pub fn mistake(command: &Command, words: impl Iterator<Item = String>, error: &clap::Error) -> String {
    let (innermost, named) = named_command(command, words);
    let what = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) if option.starts_with("--") => {
            let known = innermost.get_arguments().filter_map(Arg::get_long);
            let near = nearest(option.trim_start_matches('-'), known);
            let near = near.map_or_else(String::new, |near| format!(": did you mean --{near}?"));
            format!("unknown option {option}{near}")
        }
        _ => sentence(error),
    };
    format!("{what}; `{} {named}--help` explains", command.get_name())
}

/// The command that a command line names, and its name with those of the outer ones: `port add `.
pub fn named_command(command: &Command, words: impl Iterator<Item = String>) -> (&Command, String) {
    let (mut innermost, mut named) = (command, String::new());
    for word in words {
        if let Some(inner) = innermost.find_subcommand(&word) {
            innermost = inner;
            named += &format!("{word} ");
        }
    }
    (innermost, named)
}

/// What is wrong with a command line, in one line.
#[must_use]
pub fn sentence(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let said: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    let mut said = said.join(" ").replace(" tip: ", "; ");
    if let Some(source) = error.source() {
        said = said.replace(&source.to_string(), &reason(source));
    }
    said.trim_start_matches("error: ").replace("..=", " to ")
}

/// Why a value is rejected. For an invalid number, std reports the step that failed, not what is expected.
#[must_use]
pub fn reason(source: &(dyn Error + 'static)) -> String {
    if let Some(error) = source.downcast_ref::<ParseIntError>() {
        return match error.kind() {
            IntErrorKind::PosOverflow => "the number is too large",
            IntErrorKind::NegOverflow => "the number is too small",
            _ => "give a whole number such as 4",
        }
        .to_owned();
    }
    if source.is::<ParseFloatError>() {
        return "give a number such as 4 or 0.5".to_owned();
    }
    source.to_string().replace("..=", " to ")
}
