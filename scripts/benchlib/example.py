"""Examples of the crates that benchmarks run: built when they are first asked for, or named by the environment (OFFLOAD_COST_BIN)."""

import json
import os
import shutil
import subprocess

from .process import Failed, NotHere, Process

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def program(name, package="testkit"):
    """Path of an example of a crate."""
    variable = f"{name.upper()}_BIN"
    if variable not in os.environ:
        os.environ[variable] = build(name, package, variable)
    return os.environ[variable]


def build(name, package, variable, features=None):
    """Builds it, with these cargo features."""
    cargo = shutil.which("cargo")
    if not cargo:
        raise NotHere(f"no cargo, and no {variable}")
    argv = [cargo, "build", "--quiet", "--release", "-p", package, "--example", name]
    argv += ["--features", features] if features else []
    subprocess.run(argv, cwd=REPO, check=True)
    target = os.environ.get("CARGO_TARGET_DIR") or os.path.join(REPO, "target")
    return os.path.join(target, "release", "examples", name)


def sample(run, contender, argv, cpu=None):
    """What one prints: JSON."""
    with Process(contender, argv, run.log_dir, cpu=cpu) as process:
        run.remember(process)
        process.wait(120)
        try:
            return json.loads(process.log())
        except ValueError as error:
            raise Failed(f"{contender} printed no JSON: {process.log_tail()}") from error
