//! `vhost-af-xdp-bench matrix`: every benchmark by every path that frames can take, in one table.
//!
//! # Theory of operation
//! A *figure* is one benchmark by one [`Path`]. Each is set up, measured and undone alone, with nothing of another left
//! on the interface; what an interface cannot do is left out, and the table says why ([`figure`]). The benchmarks that
//! receive need frames: with `--sender` a process of this program sends some from the interface at the other end, for
//! as long as a figure that receives takes ([`sender`]). All figures are measured in turn, `--reps` times; the table
//! has medians ([`report`]).
//!
//! A measurement begins with the first frame, not before, so that the link and the sender have come up.

mod figure;
mod report;
mod sender;
mod traffic;

use anyhow::{Context as _, ensure};
use host::links::Link;

use self::report::Matrix;
use super::args::Plan;
use super::meter::Meter;
use super::setup;

/// Measures all that was chosen, and prints the table.
/// Errors: bad values, and a result that cannot be written. What an interface cannot do is no error.
pub(super) fn run(plan: &Plan) -> anyhow::Result<()> {
    let reps = plan.args.matrix.reps.unwrap_or(1);
    if let Some(sender) = &plan.args.matrix.sender {
        let link = Link::by_name(sender).with_context(|| format!("--sender {sender}"))?;
        ensure!(
            link.up,
            "--sender {sender}: it is down: `ip link set dev {sender} up`"
        );
        ensure!(
            link.name != plan.link.name,
            "--sender {sender}: name the interface at the other end"
        );
    }
    let meter = Meter::new()?;
    // A bad --cpu is reported here; each figure pins its own loop.
    let all_cpus = setup::pin(plan.args.cpu)?;
    let (benchmarks, paths) = (plan.args.matrix.benchmarks(), plan.args.matrix.paths());
    let mut matrix = Matrix::new(plan, reps, &benchmarks, &paths);
    'all: for _ in 0..reps {
        for &benchmark in &benchmarks {
            for &path in &paths {
                if meter.signalled() {
                    break 'all;
                }
                let figure = figure::Setting {
                    plan,
                    benchmark,
                    path,
                    meter: &meter,
                    all_cpus: &all_cpus,
                };
                matrix.add(benchmark, path, figure.measured());
            }
        }
    }
    matrix.print(plan.args.json)
}
