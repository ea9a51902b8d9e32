"""The sets of ranks that the tests here share: one, two and four ranks, each started once for all of them.

What takes longer than it is worth in every run is in a set of its own, for tests marked as slow.
"""

from tests.rank_sets import RankSet

# Seconds for a whole set, and for one call of it: a call that hangs is named long before the set's time is up.
LIMITS = {"timeout": 1200, "patience": 400}
on_one_rank, on_two_ranks, on_four_ranks = (RankSet(ranks, **LIMITS) for ranks in (1, 2, 4))
at_length_on_two_ranks = RankSet(2, **LIMITS)
