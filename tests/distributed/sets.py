"""The sets of ranks that the tests here share: one, two and four ranks, each started once for all of them.

What takes longer than it is worth in every run is in a set of its own, for tests marked as slow.
"""

import pytest

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


def either(request, usual, at_length, *, seldom, fixture="two_ranks"):
    """Return what a task has found for a cell of `by_length`: that of the fixture's set, or that of the one at length.

    Args:
        request: pytest's.
        usual: the task of the cells of every run.
        at_length: that of the slow ones.
        seldom: whether the cell is one of these.
        fixture: as in `by_length`.
    """
    return request.getfixturevalue(f"{fixture}_at_length" if seldom else fixture).of(at_length if seldom else usual)


def by_length(often, seldom, fixture):
    """Return cells for `parametrize`: those of every run, and slow ones whose set of ranks is `fixture` at length.

    Args:
        often: cells whose results the set of the fixture has.
        seldom: those of the set that is called so with `_at_length`.
        fixture: such as "two_ranks".
    """
    of_slow = [pytest.mark.slow, pytest.mark.waits_for(f"{fixture}_at_length")]
    return [
        *(pytest.param(cell, marks=pytest.mark.waits_for(fixture)) for cell in often),
        *(pytest.param(cell, marks=of_slow) for cell in seldom),
    ]
