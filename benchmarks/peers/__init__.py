"""The other systems' workers, each training `benchmarks._workload` with its own means of surviving.

They run in an environment of their own (`--peers-python`), and import only torch, their system and two modules of this
package: `_probe` and `_workload`.
"""
