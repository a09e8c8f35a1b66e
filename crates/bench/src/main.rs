//! `vhost-af-xdp-bench`, see the library.

fn main() -> std::process::ExitCode {
    bench::run()
}
