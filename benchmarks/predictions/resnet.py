"""ResNet-50: what reduction in the network gives from 8 to 1,500 hosts, and what EFLOPS' server and network give.

The model is captured on the meta device (parameters, FLOPs, bytes); its computation is timed on a V100 by the roofline
of the planner, its communication by the closed forms (SHARP) and by the simulator (EFLOPS).
"""

import dataclasses
import functools

import torch
from plots import table

from hocket import algorithms, cluster
from hocket.cluster import Cluster
from hocket.planner import Constants, Network, Plan, Prediction, predict, step_graph
from hocket.schedule import Collective, Schedule
from hocket.simulate import simulate_step
from hocket.workload import Workload, capture
from hocket.workloads.resnet50.model import ResNet50

BATCH = 64
# A V100 in 16 bits: 125 TFLOP/s and 900 GB/s (data sheet), of which the shares that were fitted on A100 are reached.
FLOPS, MEMORY = "125TFLOP/s", "900GB/s"
# Horovod's default, into which all of ResNet-50's 51 MB fit, so that nothing is reduced before back-propagation ends;
# and a size that lets most of it happen meanwhile.
FUSED, BUCKETS = 64 * 2**20, 16 * 2**20


@functools.cache
def resnet() -> Workload:
    """ResNet-50 with 16-bit activations and gradients."""
    with torch.device("meta"):
        model = ResNet50().to(torch.bfloat16, memory_format=torch.channels_last)
    sample = torch.empty(BATCH, 3, 224, 224, dtype=torch.bfloat16, device="meta").to(memory_format=torch.channels_last)
    return capture(model, sample, optimizer="momentum", name="resnet50", unit="image")


def hosts(count: int, devices: int) -> Network:
    """`count` hosts at switches that reduce, an HDR NIC each; with several devices, NVLink between them."""
    inner = "server=eflops,server.devices=1" if devices == 1 else "server=dgx1"
    spec = f"star:hosts={count},bandwidth=25GB/s,latency=600ns,reduction.streaming=true,{inner},server.pcie=24GB/s"
    found = Network.of(cluster.load(spec))
    # NVLink rings of the hybrid cube mesh: six links of 25 GB/s, about 130 GB/s of busbw (published for DGX-1V).
    inside = 130e9 if devices > 1 else found.inside_Bps
    host = 25e9 * (4 if devices > 1 else 1)
    return dataclasses.replace(found, flops=125e12, memory_Bps=900e9, inside_Bps=inside, host_Bps=host)


def sharp(count: int, devices: int, in_network: bool, bucket: int) -> Prediction:
    """One step on `count` hosts."""
    constants = Constants(network_share=0.92, inside_share=1.0, in_network=in_network, jitter=0.02)
    workers = count * devices
    plan = Plan(bucket_bytes=bucket)
    return predict(plan, resnet(), hosts(count, devices), workers=workers, batch=BATCH * workers, constants=constants)


HOSTS = (8, 16, 32, 64, 128, 256, 512, 1024, 1500)


def sharp_report() -> str:
    """Images per second with and without, by hosts; with what overlaps and without."""
    rows = []
    for count in HOSTS:
        row = [str(count)]
        for devices in (1, 8):
            for bucket in (BUCKETS, FUSED):
                plain, tree = (sharp(count, devices, there, bucket) for there in (False, True))
                more = tree.throughput / plain.throughput - 1
                row.append(f"{plain.throughput:,.0f} -> {tree.throughput:,.0f} ({more:+.1%})")
            row.append(f"{plain.gradient_cost.seconds * 1e3:.1f} -> {tree.gradient_cost.seconds * 1e3:.1f}")
        rows.append(row)
    head = ["hosts"]
    for devices in (1, 8):
        head += [f"{devices} a host, buckets of 16 MiB", f"{devices} a host, all at once", "all-reduce ms"]
    return table(head, rows)


SERVERS, DEVICES = 16, 4


def eflops_cases() -> dict[str, tuple[Cluster, Schedule]]:
    """64 devices in 16 servers: servers and networks, each with the algorithm that is meant for it."""
    world = SERVERS * DEVICES
    rates = f"server.devices={DEVICES},server.flops={FLOPS},server.device_memory_bandwidth={MEMORY}"
    links = "bandwidth=100Gbit/s,latency=1us"
    collective = Collective("all_reduce", world)
    ring = algorithms.get("ring")(collective)
    halving = algorithms.get("halving_doubling")(collective)
    mapped = algorithms.get("hdrm")(collective, upper=8, ports=4)
    spine = f"leafspine:leaves=16,ports={{ports}},{links}"
    return {
        "commodity server, leaf-spine, ring": (
            cluster.load(f"{spine.format(ports=1)},server=commodity,{rates}"),
            ring,
        ),
        "commodity server, leaf-spine, halving-doubling": (
            cluster.load(f"{spine.format(ports=1)},server=commodity,{rates}"),
            halving,
        ),
        "EFLOPS server, leaf-spine, ring": (cluster.load(f"{spine.format(ports=4)},server=eflops,{rates}"), ring),
        "EFLOPS server, leaf-spine, halving-doubling": (
            cluster.load(f"{spine.format(ports=4)},server=eflops,{rates}"),
            halving,
        ),
        "EFLOPS server, BiGraph, HDRM": (
            cluster.load(f"bigraph:upper=8,ports=4,{links},server=eflops,{rates}"),
            mapped,
        ),
    }


def eflops_report() -> str:
    """Step, computation, exposed communication, busiest link of each case."""
    rows = []
    world = SERVERS * DEVICES
    for name, (where, schedule) in eflops_cases().items():
        graph = step_graph(
            Plan(bucket_bytes=BUCKETS),
            resnet(),
            where,
            workers=world,
            batch=BATCH * world,
            constants=Constants(inside_share=1.0, collective_s=0.0),  # the links as they are, and nothing besides
            pick=lambda collective, nbytes, schedule=schedule: schedule,
        )
        found = simulate_step(graph, where)
        busiest = found.busiest(1)[0]
        rate = BATCH * world / found.seconds
        alone = BATCH * world / float(found.compute_s.mean())
        rows.append(
            [name, f"{rate:,.0f}", f"{rate / alone:.0%}", f"{found.seconds * 1e3:.1f}"]
            + [f"{found.exposed_s.mean() * 1e3:.1f}", f"{busiest.name}, {busiest.busy:.0%}"]
        )
    return table(["case", "images/s", "of what devices do alone", "step ms", "exposed ms", "busiest link"], rows)


def report() -> str:
    """Both."""
    return f"{sharp_report()}\n\n{eflops_report()}"


if __name__ == "__main__":
    print(report())
