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


def binary(package):
    """Path of the program of an example that is a package of its own."""
    variable = f"{package.upper().replace('-', '_')}_BIN"
    if variable not in os.environ:
        os.environ[variable] = built(["-p", package], package, variable)
    return os.environ[variable]


def build(name, package, variable, features=None):
    """Builds it, with these cargo features."""
    words = ["-p", package, "--example", name, *(["--features", features] if features else [])]
    return built(words, os.path.join("examples", name), variable)


def built(words, path, variable):
    """Builds what cargo is told so; its path, below the directory of the profile."""
    cargo = shutil.which("cargo")
    if not cargo:
        raise NotHere(f"no cargo, and no {variable}")
    subprocess.run([cargo, "build", "--quiet", "--release", *words], cwd=REPO, check=True)
    target = os.environ.get("CARGO_TARGET_DIR") or os.path.join(REPO, "target")
    return os.path.join(target, "release", path)


def sample(run, contender, argv, cpu=None, seconds=120):
    """What one prints: JSON. It is given up after so many seconds."""
    with Process(contender, argv, run.log_dir, cpu=cpu) as process:
        run.remember(process)
        process.wait(seconds)
        try:
            return json.loads(process.log())
        except ValueError as error:
            raise Failed(f"{contender} printed no JSON: {process.log_tail()}") from error
