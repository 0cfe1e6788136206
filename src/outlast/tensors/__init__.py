"""One process, no network: buckets and blocks, the fixed reduction tree, fingerprints, robust rules. torch only.

Must never open a socket, read a clock or know membership. Read `_layout.py` first, then `_reduce.py`.
"""

from outlast.tensors._fingerprint import combine, fingerprint, fingerprint_blocks, fingerprint_named
from outlast.tensors._layout import BLOCK, Bucket, Layout
from outlast.tensors._reduce import block_norms, reduce_slice

__all__ = [
    "BLOCK", "Bucket", "Layout", "block_norms", "combine", "fingerprint", "fingerprint_blocks", "fingerprint_named",
    "reduce_slice",
]  # fmt: skip
