"""Several Ray nodes on one machine: placement, one copy of the weights per node, and the loss and return of a node.

A process of its own, because a process can be connected to one cluster. Prints what happened as JSON.
"""

import json
import threading
import time

import ray
import torch
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

from rlq.formats.schemes import Scheme
from rlq.publish import snapshot
from rlq.types import Request, Sampling
from samplers.options import PoolOptions
from samplers.pool.pool import SamplerPool
from samplers.testing.scripted import Script, ScriptedEngine
from samplers.transport.object_store import StoreTicket

SAMPLING = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(1,))
REQUESTS = [Request((i, 7), num_samples=2, seed=100 * i) for i in range(8)]
STORE = 100 << 20


def snap(version: int):
    weights = {"model.layers.0.mlp.up_proj.weight": torch.full((1024, 2048), float(version))}
    return snapshot(weights.items(), Scheme.preset("fp8"), version)


def tokens(pool: SamplerPool, version: int) -> list[int]:
    return [int(r.token_ids[0]) for r in pool.generate(REQUESTS, SAMPLING, version)]


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=STORE) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    found = {}
    options = PoolOptions(num_samplers=4, placement="SPREAD", max_restarts=0)
    pool = SamplerPool(ScriptedEngine, (Script(specs=snap(0).specs, call_s=2.0),), Scheme.preset("fp8"), options)
    pool.install(snap(1))
    before = tokens(pool, 1)
    homes = [m.where.node for m in pool.fleet.members if m.where]
    found["actors per node"] = sorted(homes.count(node) for node in set(homes))
    ticket = pool.shipping.outbox.whole_ticket
    assert isinstance(ticket, StoreTicket)
    found["nodes with a copy of the weights"] = len(
        set(get_object_locations(list(ticket.refs))[ticket.refs[0]]["node_ids"])
    )
    found["nodes"] = len(ray.nodes())

    threading.Timer(0.7, cluster.remove_node, (nodes[0],), {"allow_graceful": False}).start()
    found["a batch during which a node is lost is complete"] = tokens(pool, 1) == before
    pool.install(snap(2))
    found["versions go on with the rest"] = tokens(pool, 2) == before
    found["actors that serve"] = sum(m.serves == 2 for m in pool.fleet.members)
    found["restarts counted"] = pool.fleet.restarts
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    deadline = time.monotonic() + 120
    while sum(m.serves == 2 for m in pool.fleet.members) < 4 and time.monotonic() < deadline:
        tokens(pool, 2)
    found["actors that serve on the new node too"] = sum(m.serves == 2 for m in pool.fleet.members)
    pool.close()
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
