"""The sets of ranks that the tests here share: one, two and four ranks, each started once for all of them.

What takes longer than it is worth in every run is in a set of its own, for tests marked as slow.
"""

from tests.beside import begun_with_the_session
from tests.rank_sets import RankSet

# Seconds for a whole set, and for one call of it: a call that hangs is named long before the set's time is up.
LIMITS = {"timeout": 1200, "patience": 400}
on_one_rank, on_two_ranks, on_four_ranks = (RankSet(ranks, **LIMITS) for ranks in (1, 2, 4))
at_length_on_two_ranks, at_length_on_four_ranks = (RankSet(ranks, **LIMITS) for ranks in (2, 4))

# In the order in which they run: those of four ranks and of one go on from what two have left.
SETS = {
    "two_ranks": on_two_ranks,
    "four_ranks": on_four_ranks,
    "one_rank": on_one_rank,
    "two_ranks_at_length": at_length_on_two_ranks,
    "four_ranks_at_length": at_length_on_four_ranks,
}


def _begin(name, rank_set):
    @begun_with_the_session(name, lambda: ["two_ranks"] if rank_set.goes_on else [])
    def errand(folder, folder_of):
        return rank_set.errand(folder, folder_of("two_ranks"))


for _name, _set in SETS.items():
    _begin(_name, _set)
