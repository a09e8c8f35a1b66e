"""TCP messages that a server of one thread sends back, by epoll and by io_uring: `vhost-af-xdp-bench echo`.

The server listens at one end of a veth pair, in a process of its own on run.backend_cpu; the client is another one at
the other end, on run.guest_cpu: 24 connections from 6 threads, each with one message under way. It copies nothing, so
that the server is what has no time left. A sample: `kqps`, `gbps` of one direction, the server's `cpu_us` a message and
`cpu_percent`, `softirq_percent` of its CPU, latencies `p50_us` and `p99_us` of the client. echo/SIZE; zcrx takes part
only if named, a veth has none.
"""

import json
import re
from contextlib import ExitStack

from .net import Veth, ip
from .process import Failed, NotHere, Process

SIZES = (65536, 16384, 4096, 1024)
CONTENDERS = ("epoll", "io-uring")
FURTHER = ("zcrx",)
NEAR, FAR = "10.77.0.1", "10.77.0.2"


def rate(run, contender, size):
    """A sample of one engine."""
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        for netns, interface, address in ((veth.near, veth.nic, NEAR), (veth.far, veth.wire, FAR)):
            ip("-n", netns, "address", "add", f"{address}/24", "dev", interface)
        argv = [f"{run.binary}-bench", "echo", "--json", "--engine", contender]
        argv += ["--listen", f"{NEAR}:0", "--cpu", str(run.backend_cpu)]
        server = stack.enter_context(Process("server", argv, run.log_dir, veth.near))
        run.remember(server)
        try:
            server.until("listening", lambda: ": listens" in server.log())
        except Failed as error:
            if "--engine" in str(error):
                raise NotHere(str(error)) from error
            raise
        port = re.search(r":(\d+): listens", server.log()).group(1)
        argv = [f"{run.binary}-bench", "echo", "--json", "--connect", f"{NEAR}:{port}"]
        argv += ["--size", str(size), "--duration", str(run.seconds)]
        client = stack.enter_context(Process("client", argv, run.log_dir, veth.far, run.guest_cpu))
        run.remember(client)
        client.wait(run.seconds + 40)
        server.stop()
        return sample(result(client), result(server))


def result(process):
    """The only run in what one of the two printed."""
    text = process.log()
    try:
        return json.loads(text[text.index("{") : text.rindex("}") + 1])["runs"][0]
    except ValueError as error:
        raise Failed(f"{process.name} printed no JSON: {process.log_tail()}") from error


def sample(client, server):
    """What is made of the two results."""
    of_server, latency = server["server"], client["latency_us"]
    received = of_server.get("received", {})
    return {
        "kqps": client["messages_per_second"] / 1e3,
        "gbps": client["bits_per_second"] / 1e9,
        "cpu_us": of_server["cpu_us_per_message"],
        "cpu_percent": of_server["cpu_percent"],
        "softirq_percent": of_server["softirq_percent"],
        "p50_us": latency["p50"],
        "p99_us": latency["p99"],
        "zero_copy_share": received.get("zero_copy_share"),
        "kernel_copies": received.get("kernel_copies"),
    }
