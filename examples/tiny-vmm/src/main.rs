//! Runs one piece of work of the guest program: `tiny-vmm --help`.

use std::process::ExitCode;

#[cfg(target_arch = "x86_64")]
fn main() -> ExitCode {
    use clap::Parser as _;
    use tiny_vmm::options::Options;
    use tiny_vmm::report::run;

    let options = Options::parse();
    match run(&options) {
        Ok(report) if options.json => match serde_json::to_string(&report) {
            Ok(text) => println!("{text}"),
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::FAILURE;
            }
        },
        Ok(report) => print!("{report}"),
        Err(error) => {
            eprintln!("error: {}", steer::with_sources(&error));
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

#[cfg(not(target_arch = "x86_64"))]
fn main() -> ExitCode {
    eprintln!("error: this guest program is for x86-64");
    ExitCode::FAILURE
}
