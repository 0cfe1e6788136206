"""One process, no network: reduction tree, buckets, fingerprints, robust rules. torch only."""

from outlast.tensors._gram import Node, partial_sums, total
from outlast.tensors._mixture import Mixture
from outlast.tensors._rules import Rule, aggregate, make_rule

# --- robust rules ---
__all__ = ["Mixture", "Node", "Rule", "aggregate", "make_rule", "partial_sums", "total"]
