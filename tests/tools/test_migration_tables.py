"""Tables of the migrations' pages say what the loops do, also where it is not what a bound says."""

from tools.migrations import tables


def test_passes_of_openrlhf_say_how_full_micro_batches_get():
    """Its balancing knows no bound: it only knows how many micro-batches there are."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables.openrlhf_passes().splitlines()]
    table = {row[0]: row[1:] for row in rows}
    assert table["dynamic batches: over 2,048 tokens"] == ["8 of 812", "5 of 884", "1 of 1,048", "0 of 1,392"]
    assert table["dynamic batches: longest"] == ["2,106", "2,150", "2,055", "2,034"]
    assert all(int(one.replace(",", "")) <= 2048 for one in table["planned: longest"])
