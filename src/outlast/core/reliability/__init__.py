"""The mathematics of failure: distributions, structures, availability, intervals, placement survival, inference.

For: numbers that a design rests on, each with its source, units and domain; scalars or arrays. It must never draw
without the generator handed to it, read a clock or a file, or return NaN for bad input (it refuses instead).
Read first: `_intervals.py`, then `_levels.py` and `_rates.py`.
"""

from ._availability import (
    HOURS_A_MONTH,
    HOURS_A_YEAR,
    BurnAlert,
    Lever,
    Objective,
    availability,
    budget_left_min,
    bundle_met,
    burn_alerts,
    burn_rate,
    detection_bound_s,
    downtime_h,
    error_budget_min,
    nines,
    price_the_nine,
)
from ._compose import CompetingRisks, FirstOf, Frailty, bathtub, pooled_rate, renewal_function
from ._intervals import (
    async_interval,
    daly_interval,
    ettr,
    ettr_cluster,
    exact_interval,
    expected_segment,
    first_order_waste,
    general_ettr,
    general_interval,
    predicted_interval,
    predicted_waste,
    silent_interval,
    silent_overhead,
    young_interval,
)
from ._levels import Ladder, first_order_ladder, ladder_ettr, optimal_ladder
from ._lifetimes import Exponential, Gamma, Lifetime, LogNormal, Weibull
from ._links import LinkSuspect, LinkVerdict, localise_links
from ._makespan import Makespan, makespan, segment_variance
from ._placement import (
    Placement,
    copies_mixed,
    copies_ring,
    copies_survival,
    parity_rotated,
    parity_survival,
    reed_solomon,
    survival,
    survival_sampled,
)
from ._rates import (
    HierarchicalRates,
    RateInterval,
    count_interval,
    gamma_poisson,
    hierarchical_rates,
    time_to_tell_apart,
)
from ._replication import mnfti, mnfti_hitting_dead, mtti, survive_losses
from ._standby import Standby, birth_death_stationary, first_passage, spares_needed, spares_poisson
from ._structures import (
    any_of,
    beta_factor,
    binomial_pmf,
    k_of_n,
    k_of_n_equal,
    parallel,
    poisson_binomial,
    series,
    series_power,
    shock_survivors,
)
from ._survival import (
    FAMILIES,
    Fit,
    Steps,
    best_fit,
    compare_fits,
    fit_lifetime,
    goodness_of_fit,
    kaplan_meier,
    laplace_trend,
    nelson_aalen,
)
from ._topology import (
    Connectivity,
    Topology,
    connected_bounds,
    connected_exact,
    connected_sampled,
    fat_tree,
    rails,
    ring,
    topology_reliability,
    tree,
)

__all__ = [
    "FAMILIES", "HOURS_A_MONTH", "HOURS_A_YEAR", "BurnAlert", "CompetingRisks", "Connectivity",
    "Exponential", "FirstOf", "Fit", "Frailty", "Gamma", "HierarchicalRates", "Ladder", "Lever", "Lifetime",
    "LinkSuspect", "LinkVerdict", "localise_links",
    "LogNormal", "Makespan", "Objective", "Placement", "RateInterval", "Standby", "Steps",
    "Topology", "Weibull", "any_of", "async_interval", "availability", "bathtub", "best_fit", "beta_factor",
    "binomial_pmf", "birth_death_stationary", "budget_left_min", "bundle_met", "burn_alerts", "burn_rate",
    "compare_fits", "connected_bounds", "connected_exact", "connected_sampled", "copies_mixed",
    "copies_ring", "copies_survival", "count_interval", "daly_interval", "detection_bound_s", "downtime_h",
    "error_budget_min", "ettr", "ettr_cluster", "exact_interval", "expected_segment", "fat_tree", "first_order_ladder",
    "first_order_waste", "first_passage", "fit_lifetime", "gamma_poisson", "general_ettr", "general_interval",
    "goodness_of_fit", "hierarchical_rates", "k_of_n", "k_of_n_equal", "kaplan_meier", "ladder_ettr", "laplace_trend",
    "makespan", "mnfti", "mnfti_hitting_dead", "mtti", "nelson_aalen", "nines", "optimal_ladder", "parallel",
    "parity_rotated", "parity_survival", "poisson_binomial", "pooled_rate", "predicted_interval", "predicted_waste",
    "price_the_nine", "rails", "reed_solomon", "renewal_function", "ring", "segment_variance", "series", "series_power",
    "shock_survivors", "silent_interval", "silent_overhead", "spares_needed", "spares_poisson", "survival",
    "survival_sampled", "survive_losses", "time_to_tell_apart",
    "topology_reliability", "tree",
    "young_interval",
]  # fmt: skip
