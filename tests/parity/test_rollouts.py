"""The bundled rollouts are all there, a user's file is read strictly, and advantages are those of GRPO."""

import json
import math
import subprocess
import sys
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.errors import ConfigError
from ds_parity.parity.data.rollouts import BOS, EOS, PAD, VOCAB, informative, line_turns, load_rollouts, shorten
from ds_parity.planning.rollout import Rollout

GOOD = {"prompt": "2+2=", "completion": "4", "reward": 1.0}


@pytest.fixture(scope="module")
def bundled():
    return load_rollouts()


def write(tmp_path, *lines):
    path = tmp_path / "user.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def completion(rollout):
    return bytes(rollout.tokens[rollout.prompt_length : -1]).decode()


def test_the_bundled_set_holds_four_rollouts_of_each_of_1319_prompts(bundled):
    groups = [(key, len(list(members))) for key, members in groupby(bundled, key=lambda r: r.prompt_id)]
    assert len(bundled) == 5276
    assert len(groups) == len(dict(groups)) == 1319
    assert {size for _, size in groups} == {4}


def test_bundled_completions_are_2_to_1571_characters_long(bundled):
    lengths = [len(completion(rollout)) for rollout in bundled]
    assert (min(lengths), max(lengths)) == (2, 1571)


def test_the_first_bundled_rollout_reads_as_published(bundled):
    first = bundled[0]
    prompt = bytes(first.tokens[1 : first.prompt_length]).decode()
    assert prompt.startswith("Janet’s ducks lay 16 eggs per day.")
    assert completion(first).endswith("so she makes 13 * 2 = $<<13*2=26>>26\nA: 26")
    assert [rollout.reward for rollout in bundled[:4]] == [0, 0, 0, 1]


def test_tokens_are_bos_bytes_eos_and_never_pad(bundled):
    for rollout in bundled[::50]:
        assert (rollout.tokens[0], rollout.tokens[-1]) == (BOS, EOS)
        assert max(rollout.tokens[1:-1]) < 256 <= BOS < EOS < PAD < VOCAB
        assert rollout.loss_tokens == len(completion(rollout).encode()) + 1


def test_bundled_advantages_have_mean_0_in_every_group(bundled):
    for start in range(0, len(bundled), 4):
        assert math.fsum(r.advantage for r in bundled[start : start + 4]) == pytest.approx(0, abs=1e-12)


def test_informative_keeps_the_731_groups_that_disagree(bundled):
    kept = informative(bundled)
    assert len(kept) == 731 * 4
    assert all(rollout.advantage != 0 for rollout in kept)


def test_a_user_file_is_read_in_order_and_grouped_by_prompt_id_or_else_by_prompt(tmp_path):
    same = {**GOOD, "reward": 0}
    other = {**GOOD, "prompt_id": "p", "advantage": -2}
    rollouts = load_rollouts(write(tmp_path, GOOD, "", same, other, ""))
    assert [r.prompt_id for r in rollouts] == ["2+2=", "2+2=", "p"]
    assert [r.advantage for r in rollouts] == [1.0, -1.0, -2.0]
    assert rollouts[0].tokens == (BOS, *b"2+2=4", EOS)
    assert rollouts[0].prompt_length == 5


def test_a_line_separator_inside_a_string_does_not_split_the_line(tmp_path):
    path = write(tmp_path, json.dumps({**GOOD, "completion": "a\u2028b"}, ensure_ascii=False))
    assert completion(load_rollouts(path)[0]) == "a\u2028b"


def test_further_keys_are_passed_over(tmp_path):
    assert len(load_rollouts(write(tmp_path, {**GOOD, "model": "6b", "ground_truth": "4"}))) == 1


BAD = {
    "missing key": ({"prompt": "a", "completion": "b"}, "key 'reward' is missing"),
    "wrong type": ({**GOOD, "prompt": 3}, "key 'prompt' is 3; it must be a string"),
    "null id": ({**GOOD, "prompt_id": None}, "key 'prompt_id' is None; it must be a string"),
    "text for a number": ({**GOOD, "reward": "1"}, "key 'reward' is '1'; it must be a number"),
    "true for a number": ({**GOOD, "reward": True}, "key 'reward' is True; it must be a number"),
    "NaN reward": ({**GOOD, "reward": math.nan}, "key 'reward' is nan; it must be a finite number"),
    "infinite advantage": ({**GOOD, "advantage": -math.inf}, "key 'advantage' is -inf; it must be a finite number"),
    "number beyond floats": ({**GOOD, "reward": 10**400}, "key 'reward' is inf; it must be a finite number"),
    "lone surrogate": ({**GOOD, "completion": "\ud800"}, "key 'completion' is not Unicode text"),
    "misspelt key": ({**GOOD, "advantages": 1.0}, "key 'advantages' is unknown; did you mean 'advantage'"),
    "invalid JSON": ('{"prompt": "a"', "not valid JSON"),
    "repeated key": (
        '{"prompt": "a", "completion": "b", "reward": 1, "reward": 0}',
        "key 'reward' is given more than once: which of them would count is not defined; keep one",
    ),
    "not an object": ("[1]", "a JSON list; each line holds one JSON object"),
}


@pytest.mark.parametrize(("line", "rule"), BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_refused_with_file_line_number_key_and_rule(tmp_path, line, rule):
    path = write(tmp_path, GOOD, "", line)
    with pytest.raises(ConfigError) as caught:
        load_rollouts(path)
    assert f"{path}:3: " in str(caught.value)
    assert rule in str(caught.value)


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_an_empty_file_is_refused(tmp_path, lines):
    with pytest.raises(ConfigError, match="holds no rollouts"):
        load_rollouts(write(tmp_path, *lines))


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl: can't be read"):
        load_rollouts(tmp_path / "gone.jsonl")


def test_shorten_takes_the_prompt_from_its_left_and_keeps_bos():
    rollout = Rollout("p", (BOS, 1, 2, 3, 7, 8, EOS), prompt_length=4, advantage=0.5)
    (short,) = shorten([rollout], 5)
    assert short == Rollout("p", (BOS, 3, 7, 8, EOS), prompt_length=2, advantage=0.5)


def test_shorten_takes_the_completion_at_its_end_only_where_the_prompt_is_gone():
    rollout = Rollout("p", (BOS, 1, 2, 7, 8, EOS), prompt_length=3)
    assert shorten([rollout], 3) == (Rollout("p", (BOS, 7, 8), prompt_length=1),)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 50))
def test_shorten_always_fits_and_leaves_a_loss_token(prompt, answer, max_tokens):
    rollout = Rollout("p", (BOS, *range(prompt + answer), EOS), prompt_length=1 + prompt)
    (short,) = shorten([rollout], max_tokens)
    assert len(short.tokens) == min(len(rollout.tokens), max_tokens)
    assert short.tokens[0] == BOS
    assert short.prompt_length >= 1
    assert short.loss_tokens == min(rollout.loss_tokens, max_tokens - 1)


def test_shorten_keeps_the_start_of_a_rollout_without_prompt():
    assert shorten([Rollout("p", (7, 8, EOS), prompt_length=0)], 2) == (Rollout("p", (7, 8), prompt_length=0),)


def test_shorten_refuses_a_length_without_room_for_a_loss_token():
    with pytest.raises(ConfigError, match="max_tokens = 1"):
        shorten([], 1)


def test_rollouts_are_read_without_torch():
    code = "import sys, ds_parity.parity.data.rollouts; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_turns_of_the_bundled_rollouts_are_the_lines_of_their_solutions(bundled):
    """1 to 24 a solution; together they score each loss token once, after all that came before it."""
    for rollout in bundled[:400]:
        turns = list(line_turns([rollout]))
        assert len(turns) == completion(rollout).rstrip("\n").count("\n") + 1
        assert [token for turn in turns for token in turn.tokens[turn.prompt_length :]] == [
            *rollout.tokens[rollout.prompt_length :]
        ]
        assert all(turn.tokens == rollout.tokens[: len(turn.tokens)] for turn in turns)
        assert {turn.advantage for turn in turns} == {rollout.advantage}


def test_turns_of_rollouts_that_are_alike_have_names_of_their_own(bundled):
    twice = list(line_turns([bundled[0], bundled[0]]))
    assert len({turn.rollout_id for turn in twice}) == 2
