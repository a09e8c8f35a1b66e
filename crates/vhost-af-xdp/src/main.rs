//! The program; all of its code is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    vhost_af_xdp::run()
}
