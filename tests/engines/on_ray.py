"""A driver that trains on a Ray cluster: its address, a folder, the configuration, the record, the command."""

from __future__ import annotations

import sys

import ray

from outlast.adapters.ray import RayHosts, train

if __name__ == "__main__":
    address, folder, config, record, *command = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    asked = RayHosts(nodes=(2, 3), replicas=3)
    code = train(command, asked, run_dir=folder, options=["--config", config], record=record)
    ray.shutdown()
    sys.exit(code)
