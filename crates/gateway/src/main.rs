//! The gateway; its parts are in the library of this package.

fn main() -> std::process::ExitCode {
    gateway::main()
}
