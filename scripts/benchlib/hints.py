"""What a frame takes to be classified, with the NIC's hash and without, and Open vSwitch beside it.

`bench rxdrop` and `bench l2fwd` with --classify judge frames as a port's filter does (crates/bench/src/classify.rs), of so many
flows. *off*: the hash is computed. *nic*: the program leaves the NIC's before each frame, and reading it is part of what is measured. A
sample: `judge_cycles` of the median frame by the time stamp counter, `mpps`, `hits_percent` of the flow cache, `cpu_ns` a frame. The frames are testkit's
example `flows`', by a packet socket: what AF_XDP sends the kernel gives no hash. Those come one by one; so the receiver sleeps after each batch and
finds many, as a worker does that has much to do.

hints/reading: the cost of reading alone, with the layout of each frame looked up by its ID.

hints/ovs: *ovs* is a bridge over DPDK with the NIC as its only port, which sends each frame back to where it came from; *ovs-emc* takes each flow into its cache of
exact flows at once (emc-insert-inv-prob 1). *l2fwd* does the same with the socket alone and 10 rules before it. The frames are ours, of so many flows, sent as fast as it goes, and counted where they come back to.
"""

import json
import time
from contextlib import ExitStack

from . import example, measure, ours, ovs
from .net import Veth
from .process import Failed, Process

FLOWS = (1, 100, 10_000)
VERBS = {"rxdrop": "rxdrop", "forward": "l2fwd"}
# How long the receiver sleeps after a batch.
GATHER_US = 500


def classify(run, contender, verb, flows):
    """A sample of classification."""
    hints = ["--hints", "hash"] if contender == "nic" else []
    result = bench(run, VERBS[verb], flows, ["--classify", *hints])
    found = result["classify"]
    if contender == "nic" and found["by_hash_of_nic"] < 0.99:
        raise Failed(f"only {found['by_hash_of_nic']:.2f} of the frames had a hash")
    hits = found["hits"] / (found["hits"] + found["misses"]) * 100
    return sample(result, found["cycles_a_frame"]) | {"hits_percent": hits}


def reading(run, _contender):
    """A sample of reading hints."""
    result = bench(run, "rxdrop", 100, ["--hints", "hash,vlan"])
    return sample(result, result["hints"]["cycles_a_frame_by_id"])


def sample(result, cycles):
    """What is made of a report."""
    return {"judge_cycles": cycles, "mpps": result["frames_per_second"] / 1e6, "cpu_ns": result["cpu_ns_per_frame"]}


def bench(run, verb, flows, further):
    """Runs it while frames of so many flows come; its report."""
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        argv = [example.program("flows"), veth.wire, "64", str(flows), "0"]
        generator = stack.enter_context(Process("flows", argv, run.log_dir, veth.far, run.guest_cpu))
        run.remember(generator)
        further = ["--pause-us", str(GATHER_US), "--cpu", str(run.backend_cpu), *further]
        process = ours.socket_bench(run, "bench", verb, run.backend_cpu, veth.nic, veth.near, 64, run.seconds, further)
        stack.enter_context(process)
        run.remember(process)
        process.wait(run.seconds + 20)
        generator.check()
        text = process.log()
        try:
            return json.loads(text[text.index("{") : text.rindex("}") + 1])
        except ValueError as error:
            raise Failed(f"bench printed no JSON: {process.log_tail()}") from error


def beside_ovs(run, contender, flows):
    """Frames of so many flows, sent back."""
    with ExitStack() as stack:
        veth = stack.enter_context(Veth())
        stack.enter_context(generator_of(run, veth, flows))
        if contender.startswith("ovs"):
            switch = ovs.Switch(run, [], uplink=(veth.nic, veth.near), emc_all=contender == "ovs-emc")
            backend = measure.up(run, stack, switch)
        else:
            further = ["--classify", "--cpu", str(run.backend_cpu)]
            seconds = measure.seconds_of_bench(run)
            backend = ours.socket_bench(run, "raw", "l2fwd", run.backend_cpu, veth.nic, veth.near, 64, seconds, further)
            stack.enter_context(backend)
            run.remember(backend)
        time.sleep(run.warmup_s)
        result = measure.rate(run, veth.arrived, backend)
        return result | ({"emc_percent": backend.emc_percent()} if contender.startswith("ovs") else {})


def generator_of(run, veth, flows):
    """Ours, without a pause."""
    further = ["--flows", str(flows), "--src-mac", measure.FORWARDED_FROM]
    seconds = 2 * measure.seconds_of_bench(run)
    generator = ours.socket_bench(run, "generator", "txonly", run.guest_cpu, veth.wire, veth.far, 64, seconds, further)
    run.remember(generator)
    return generator
