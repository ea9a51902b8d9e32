"""A plan as people see it: figures that add up, a window as text, and as an image."""

import json

import pytest
from matplotlib.figure import Figure

from ds_parity.cli.picture import drawn, figures, table, write_png
from ds_parity.planning import Rollout, plan
from tests.commands import ds_parity, started


def planned(lengths, **options):
    rollouts = [Rollout("p", (7,) * length, 1) for length in lengths]
    return plan(rollouts, **{"dp_world_size": 2, "target": len(lengths), "max_tokens": 8, **options})


def test_figures_add_up():
    shown = figures(planned([8, 4, 4, 1, 1], layout="padded", target=5))
    assert shown["rollouts"] == 5
    assert (shown["passes"], shown["fewest_passes"], shown["idle_passes"]) == (2, 2, 0)
    assert (shown["computed"], shown["padding"]) == (18, 0)
    uneven = figures(planned([8, 4, 3], layout="padded"))
    assert (uneven["computed"], uneven["padding"], uneven["waited"]) == (16, 1, 0)


def test_a_plan_without_a_window_has_figures_too():
    shown = figures(planned([3], target=2))
    assert (shown["windows"], shown["left"], shown["of_fewest"], shown["busiest"]) == (0, 1, None, None)


def test_a_window_is_drawn_a_line_a_rank_and_a_character_a_pass():
    assert drawn(planned([8, 8, 1]).windows[0], 8) == "rank    0 |█▁|\nrank    1 |█·|"


def test_the_table_holds_twenty_windows_and_says_how_many_more():
    shown = table(planned([1] * 23, target=1))
    assert shown.row_count == 20
    assert shown.caption == "and 3 more"


def command(*arguments):
    return ds_parity("plan", *arguments)


@pytest.fixture
def rollouts(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    lines = [{"prompt": "1 + 1 =", "completion": "2" * length, "reward": 1} for length in (1, 5, 3, 300)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_command_shows_windows_and_leaves_pictures(rollouts, tmp_path):
    ran = started("plan", rollouts, "--target", 2, "--report", tmp_path / "report")
    assert ran.returncode == 0, ran.stderr
    assert "window 0:\nrank    0 |" in ran.stdout
    assert "passes: 2\n" in ran.stdout
    assert [path.name for path in sorted((tmp_path / "report").iterdir())] == ["window0000.png", "window0001.png"]
    assert (tmp_path / "report" / "window0000.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_passes_and_ranks_of_a_picture_are_whole_numbers(monkeypatch, tmp_path, ranks):
    taken = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: taken.append(figure))
    write_png(planned([8, 8, 1, 5, 5], dp_world_size=ranks).windows[0], 8, tmp_path / "w.png")
    axes = taken[0].axes[0]
    taken[0].canvas.draw()
    for axis, count in (
        (axes.yaxis, ranks),
        (axes.xaxis, len(planned([8, 8, 1, 5, 5], dp_world_size=ranks).windows[0].sizes)),
    ):
        low, high = sorted(axis.get_view_interval())
        places = [place for place in axis.get_majorticklocs() if low <= place <= high]
        assert places
        assert all(place == int(place) and 0 <= place < count for place in places), places


def test_the_command_prints_json(rollouts):
    printed = json.loads(command(rollouts, "--target", 4, "--json").stdout)
    assert (printed["windows"], printed["rollouts"], printed["passes"]) == (1, 4, 1)


def test_the_command_plans_by_cost(rollouts, tmp_path):
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 99}
    config.write_text(json.dumps({**sizes, "num_attention_heads": 4, "num_key_value_heads": None}))
    for cost in ("24576,1", "24576,1,0.5", config):
        printed = json.loads(command(rollouts, "--target", 4, "--cost", cost, "--json").stdout)
        assert 0.4 < printed["waiting"] < 0.5  # one rollout is much longer than the others
        assert printed["waiting_at_steps"] == printed["waiting"]
    assert json.loads(command(rollouts, "--target", 4, "--json").stdout)["waiting"] is None
    config.write_text(json.dumps(sizes))
    assert "num_attention_heads is missing" in command(rollouts, "--cost", config).stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cost", "1"), "--cost is '1': it must be PER_TOKEN,PER_SQUARE or"),
        (("--cost", "-1,1"), "per_token is -1.0"),
        (("--cost", "cheap"), "'cheap': it is neither PER_TOKEN,PER_SQUARE nor a file"),
        (("--max-tokens", 100), "rollout 3 of prompt '1 + 1 =' has 309 tokens, more than max_tokens = 100"),
        (("--count", "token"), "count is 'token'"),
        (("--max-tokens", 10**20), "must be a whole number from 1 to 1,073,741,824"),
        (("--target", 4, "--report", "/dev/null/x"), "can't be written"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(rollouts, options, said):
    ran = command(rollouts, *options)
    assert ran.returncode == 2
    assert said in ran.stderr.replace("\n", " ")
    assert "Traceback" not in ran.stderr
