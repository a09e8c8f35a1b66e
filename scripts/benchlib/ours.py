"""Our own side: the daemon in the place under test, and the raw socket benchmarks beside it."""

import json
import os

from .lease import LeasedDaemon
from .machine import output
from .process import Failed, Process

# By default the daemon has a tap where there is no zero-copy.
XDP = ("--mode", "xdp")


def daemon(run, cpu, socket_path, placement, interface=None, netns=None, queues=1, size=None, spin_us=None, further=()):
    """`vhost-af-xdp serve` with its worker on `cpu`, or its workers on such a list; without an interface, over the null NIC."""
    argv = [run.binary, "serve", "--socket-path", socket_path, "--memory", placement]
    argv += ["--ifname", interface, *([] if "--mode" in further else XDP)] if interface else ["--null"]
    if not interface and size is not None:
        argv += ["--frame-size", str(size)]
    argv += ["--spin-us", str(spin_us)] if spin_us else []
    argv += ["--queues", str(queues), "--cpus", str(cpu), "--control", control_path(run), *further]
    return start(run, argv, run.log_dir, netns, interface)


def client(run, cpu, socket_path, placement, interface, netns):
    """`vhost-af-xdp serve --client`, by root, which connects to a guest that listens."""
    argv = [run.binary, "serve", "--socket-path", socket_path, "--client", "--memory", placement]
    argv += ["--ifname", interface, *XDP, "--cpus", str(cpu), "--control", control_path(run)]
    return Process("daemon", argv, run.log_dir, netns)


def cable(run, cpu, socket_paths, directory=None):
    """`vhost-af-xdp serve` with two ports joined by a cable; its worker runs anywhere if no CPU is named. `directory`: for log and control."""
    directory = directory or run.log_dir
    argv = [run.binary, "serve", *(["--cpus", str(cpu)] if cpu is not None else []), "--control", os.path.join(directory, "control")]
    for path in socket_paths:
        argv += ["--port", f"socket-path={path},cable=between"]
    return Process("daemon", argv, directory)


def network(run, cpu, socket_paths, directory=None, uplink=None, rules="", mode="xdp", first=0, keys="", leased=True):
    """`vhost-af-xdp serve` with a network of ports, as `cable`; the ports' addresses count up as the guests' do, from `first`. `uplink`: an
    interface and its namespace, which may have a mode. `rules`: further lines of each port, `keys`: of the network. `leased`: from a steward."""
    directory = directory or run.log_dir
    interface, netns = uplink or (None, None)
    text = "[network.between]\n" + (f'uplink = "{interface}"\n' if interface else "")
    text += (f'mode = "{mode}"\n' if interface and mode else "") + keys
    for number, path in enumerate(socket_paths, first):
        text += f'[port.p{number}]\nnetwork = "between"\nmac = "{mac(number)}"\nsocket-path = "{path}"\n{rules}'
    config = os.path.join(run.config_dir, f"network{first}.toml")
    with open(config, "w", encoding="ascii") as file:
        file.write(text)
    argv = [run.binary, "serve", "--config", config, *(["--cpus", str(cpu)] if cpu is not None else [])]
    return start(run, [*argv, "--control", os.path.join(directory, "control")], directory, netns, interface if leased else None)


def mac(number):
    """The address of a guest of many."""
    return f"02:00:00:00:01:{number:02x}"


def start(run, argv, log_dir, netns=None, interface=None):
    """The daemon, with leased queues if there is a steward to be had, else by root."""
    if interface and run.steward:
        return LeasedDaemon(run.steward, argv, log_dir, netns, interface)
    return Process("daemon", argv, log_dir, netns)


def socket_bench(run, name, verb, cpu, interface, netns, size, seconds, further=()):
    """`vhost-af-xdp-bench txonly|rxdrop|l2fwd`, all of it on `cpu`; prints JSON at its end."""
    argv = [f"{run.binary}-bench", verb, "--ifname", interface, "--size", str(size), "--duration", str(seconds), "--json", *further]
    return Process(name, argv, run.log_dir, netns, cpu)


def frames_per_second(process):
    """The rate in what `bench --json` printed."""
    text = process.log()
    try:
        result = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError as error:
        raise Failed(f"{process.name} printed no JSON: {process.log_tail()}") from error
    return float(result["frames_per_second"])


def control_path(run):
    """Where the daemon of a run can be asked."""
    return os.path.join(run.log_dir, "control")


def status(run):
    """`vhost-af-xdp status --json`, or nothing."""
    try:
        return json.loads(output([run.binary, "status", "--json", "--control", control_path(run)]))
    except ValueError:
        return None


def rounds(run):
    """(rounds of the first worker that moved frames, those that did not, nanoseconds in the former), or nothing."""
    answer = status(run)
    worker = answer[0]["workers"][0] if answer else None
    return worker and (worker["busy_rounds"], worker["idle_rounds"], worker["busy_ns"])


def rounds_since(run, before, frames):
    """What the worker's rounds tell of a measurement in which so many frames were moved."""
    now = rounds(run)
    busy, idle, busy_ns = (now[i] - before[i] for i in range(3)) if now else (0, 0, 0)
    if not busy:
        return {}
    return {"batch": frames / busy, "idle_rounds_percent": idle / (busy + idle) * 100, "busy_ns": busy_ns / frames}
