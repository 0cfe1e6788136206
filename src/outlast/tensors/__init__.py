"""One process, no network: buckets and blocks, the fixed reduction tree, fingerprints, robust rules. torch only.

Must never open a socket, read a clock or know membership. Read `_layout.py` first, then `_reduce.py`; for the robust
rules `_program.py`, then `_rules.py`.
"""

from outlast.tensors._fingerprint import (
    block_prints,
    combine,
    fingerprint,
    fingerprint_all,
    fingerprint_named,
)
from outlast.tensors._fold import (
    Fold,
    Looked,
    add_and_print_blocks,
    look,
    packed_prints,
    prepare_fold,
    reduce_and_look,
    sum_of_squares,
)
from outlast.tensors._layout import BLOCK, Bucket, Layout
from outlast.tensors._reduce import reduce_slice
from outlast.tensors._shards import (
    TENSOR_PARALLEL,
    WIDEST,
    Grid,
    gradient_of,
    grid_of,
    grid_of_params,
    is_shard,
    like,
    local,
    on_mesh,
    part_of,
    reshard,
    whole,
)
from outlast.tensors._sums import Misfit, Sums, prepare_sums, product_misfit, spread_of, sums_of, within_bound

# robust rules
from outlast.tensors._attacks import ATTACKS, flip_labels, inconsistent, lying_reducer, strongest  # isort: skip
from outlast.tensors._gram import partial_grams, total_gram  # isort: skip
from outlast.tensors._guards import (  # isort: skip
    ActivationStats,
    Band,
    Nonfinite,
    BandReading,
    activation_stats,
    collapse_reasons,
    find_nonfinite,
)
from outlast.tensors._mixture import Mixture  # isort: skip
from outlast.tensors._named import (  # isort: skip
    bulyan,
    centered_clipping,
    geometric_median,
    krum,
    krum_all_honest,
    mean,
    mean_around_median,
    median,
    minimum_diameter,
    multi_krum,
    trimmed_mean,
)
from outlast.tensors._rules import Rule, aggregate, make_rule  # isort: skip

__all__ = [
    "BLOCK", "Bucket", "Fold", "Layout", "Looked", "add_and_print_blocks", "block_prints", "combine", "fingerprint",
    "fingerprint_all", "fingerprint_named", "look", "packed_prints", "prepare_fold", "reduce_and_look",
    "reduce_slice", "sum_of_squares", "TENSOR_PARALLEL", "WIDEST", "Grid", "gradient_of", "grid_of",
    "grid_of_params", "is_shard", "like", "local", "on_mesh", "part_of",
    "reshard", "whole", "Misfit", "Sums", "prepare_sums", "product_misfit", "spread_of", "sums_of", "within_bound",
    "ATTACKS", "ActivationStats", "Band", "Mixture", "Nonfinite", "BandReading", "Rule", "activation_stats",
    "aggregate", "collapse_reasons", "find_nonfinite", "flip_labels", "inconsistent", "lying_reducer", "make_rule",
    "partial_grams", "strongest", "total_gram", "bulyan", "centered_clipping", "geometric_median", "krum",
    "krum_all_honest", "mean", "mean_around_median", "median", "minimum_diameter", "multi_krum", "trimmed_mean",
]  # fmt: skip
