"""Runs flows in SimGrid, under the interpreter that has its bindings; JSON in on stdin, JSON out on stdout.

In: `settings` (SimGrid's own, as "network/model:CM02"), `cases`, each with `links` ([bandwidth in B/s, latency in s],
shared by all that cross them) and `rounds`: lists of flows ([start in s, bytes, [links]]). A case with `hosts` ([link
up, link down] of each) is a star, and its flows name hosts: [start, bytes, [source, destination]]; SimGrid keeps its
routes in a line per host and not in a square. A case's round begins when its round before has ended.
Out: `ends` (of every case the end of every flow, in order) and `cpu_s`, of the simulation without setting up.
"""

import json
import sys
import time

import simgrid


def add_case(root: simgrid.NetZone, number: int, case: dict) -> list:
    """Makes the case's zone: the links, and for every flow two hosts with a route over its links."""
    zone = simgrid.NetZone.create_full_zone(f"case{number}")
    zone.set_parent(root)
    links = []
    for index, (bandwidth, latency) in enumerate(case["links"]):
        link = zone.create_link(f"{number}.{index}", bandwidth)
        links.append(link.set_latency(latency).seal())
    ends = []
    known = {}
    for flow, (_, _, crossed) in enumerate(flow for one in case["rounds"] for flow in one):
        key = tuple(crossed)
        if key not in known:
            pair = tuple(zone.create_host(f"{number}.{flow}.{side}", 1e9) for side in "ab")
            route = [simgrid.LinkInRoute(links[link]) for link in crossed]
            # The way back has links of its own kind nowhere: it is the same, and carries nothing.
            zone.add_route(pair[0].netpoint, pair[1].netpoint, None, None, route, True)
            known[key] = pair
        ends.append(known[key])
    zone.seal()
    return ends


def add_star(root: simgrid.NetZone, number: int, case: dict) -> list:
    """Makes a star's zone; of every flow its two hosts."""
    zone = simgrid.NetZone.create_star_zone(f"case{number}")
    zone.set_parent(root)
    links = []
    for index, (bandwidth, latency) in enumerate(case["links"]):
        links.append(zone.create_link(f"{number}.{index}", bandwidth).set_latency(latency).seal())
    hosts = []
    for index, (up, down) in enumerate(case["hosts"]):
        host = zone.create_host(f"{number}.{index}", 1e9)
        zone.add_route(host.netpoint, None, None, None, [simgrid.LinkInRoute(links[up])], False)
        zone.add_route(None, host.netpoint, None, None, [simgrid.LinkInRoute(links[down])], False)
        hosts.append(host)
    zone.seal()
    return [(hosts[a], hosts[b]) for flows in case["rounds"] for _, _, (a, b) in flows]


def drive(number: int, case: dict, pairs: list, ends: list) -> None:
    """One actor: starts every flow in time, and notes when each has ended."""
    begin = 0
    for flows in case["rounds"]:
        started = {}
        for flow in sorted(range(len(flows)), key=lambda index: flows[index][0]):
            start, nbytes, _ = flows[flow]
            if start > simgrid.Engine.clock:
                simgrid.this_actor.sleep_until(start)
            source, destination = pairs[begin + flow]
            started[flow] = simgrid.Comm.sendto_async(source, destination, round(nbytes))
        for flow, comm in started.items():
            comm.wait()
            ends[number][begin + flow] = comm.finish_time
        begin += len(flows)


def main() -> None:
    asked = json.load(sys.stdin)
    engine = simgrid.Engine(["runner", "--log=root.thres:error", *(f"--cfg={one}" for one in asked["settings"])])
    root = simgrid.NetZone.create_full_zone("root")
    ends = []
    for number, case in enumerate(asked["cases"]):
        pairs = (add_star if "hosts" in case else add_case)(root, number, case)
        ends.append([None] * len(pairs))
        home = pairs[0][0]
        simgrid.Actor.create(f"driver{number}", home, drive, number, case, pairs, ends)
    root.seal()
    begin = time.process_time()
    engine.run()
    json.dump({"ends": ends, "cpu_s": time.process_time() - begin}, sys.stdout)


main()
