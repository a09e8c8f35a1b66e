//! The program; all of it is in the library, see there.

use std::process::ExitCode;

fn main() -> ExitCode {
    vhost_af_xdp::run()
}
