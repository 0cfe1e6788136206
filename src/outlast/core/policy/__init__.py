"""decide(belief, state) -> Decision. The same objects decide at plan time and at run time; scalars or arrays."""

from outlast.core.policy._admission import Admission, admit_view, most_rows_per_host
from outlast.core.policy._rules_catalogue import PRE_STEPS, RULES, PreFact, RuleFact, check_rule, kappa, largest_f

__all__ = [
    "PRE_STEPS", "RULES", "Admission", "PreFact", "RuleFact", "admit_view", "check_rule", "kappa", "largest_f",
    "most_rows_per_host",
]  # fmt: skip
