"""The torch executor end to end on a tiny model: paged, chunked and batched steps against one dense forward.

Owns: inputs, relay, drafts, prompt logprobs, failures, slot reuse.
Does not know: the engine's scheduler.
Invariants: greedy tokens equal the dense ones exactly, log-probabilities within 1e-4.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from aengine.runner import torch_step
from aengine.types import PageMove, TableDelta, TokenRules

N = 12


def test_decoding_by_the_relay_equals_the_dense_forward(bench, make_prompt):
    prompt = make_prompt(9)
    assert bench.generate(0, prompt, 30) == bench.model.dense_greedy(prompt, 30)


def test_pages_move_before_tables_and_rows(bench, Row, make_prompt):
    """A step without rows that only moves, then one that moves and reads."""
    prompt = make_prompt(9)
    want = bench.model.dense_greedy(prompt, 3)
    bench.admit(0, prompt)
    got = [int(bench.run(Row(0, 0, prompt, 1)).tokens[0, 0])]
    first = int(bench.executor.state.tables[0][0, 0])
    spare, other = bench.scheduler.free[0].pop(), bench.scheduler.free[0].pop()
    told = (TableDelta.run(0, 0, 0, (spare,)),)
    empty = replace(bench.scheduler.plan(), moves=(PageMove(0, first, spare),), tables=told)
    result = bench.executor.run(bench.executor.stage(empty))
    assert (result.step, len(result.counts), len(result.tokens)) == (empty.step, 0, 0)
    got.append(int(bench.run(Row(0, 9, None, 1)).tokens[0, 0]))
    plan = bench.scheduler.plan(Row(0, 10, None, 1))
    told = (*plan.tables, TableDelta.run(0, 0, 0, (other,)))
    moving = replace(plan, moves=(PageMove(0, spare, other),), tables=told)
    got.append(int(bench.executor.run(bench.executor.stage(moving)).tokens[0, 0]))
    assert got == want


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 7, 16, 40])
def test_chunks_of_a_prompt_do_not_show(bench, Row, make_prompt, chunk):
    prompt = make_prompt(40, seed=chunk)
    bench.admit(2, prompt)
    for start in range(0, 40, chunk):
        ids = prompt[start : start + chunk]
        result = bench.run(Row(2, start, ids, int(start + len(ids) == 40)))
    assert result.counts.tolist() == [1]
    tokens = [int(result.tokens[0, 0])]
    for position in range(40, 40 + N - 1):
        tokens.append(int(bench.run(Row(2, position, None, 1)).tokens[0, 0]))
    assert tokens == bench.model.dense_greedy(prompt, N)


def test_rows_in_a_batch_do_not_see_each_other(bench, Row, make_prompt):
    """Eight requests of different lengths start one step apart; prefills and decodes share steps."""
    prompts = [make_prompt(3 + 5 * slot, seed=slot) for slot in range(8)]
    tokens = [[] for _ in prompts]
    for step in range(8 + N):
        rows = []
        for slot, prompt in enumerate(prompts):
            if step == slot:
                bench.admit(slot, prompt)
                rows.append(Row(slot, 0, prompt, 1))
            elif slot < step and len(tokens[slot]) < N:
                rows.append(Row(slot, len(prompt) + len(tokens[slot]) - 1, None, 1))
        if not rows:
            break
        result = bench.run(*rows)
        assert not result.failed
        for i, row in enumerate(rows):
            tokens[row.slot].append(int(result.tokens[i, 0]))
    assert tokens == [bench.model.dense_greedy(prompt, N) for prompt in prompts]


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing(bench, Row, make_prompt):
    prompt = make_prompt(8)
    bench.admit(0, prompt)
    result = bench.run(Row(0, 0, prompt[:5], 0))
    assert result.counts.tolist() == [0]
    assert bench.model.logit_rows == []


def test_host_ids_go_on_like_the_relay(bench, Row, make_prompt):
    prompt = make_prompt(6)
    expected = bench.model.dense_greedy(prompt, 3)
    bench.admit(0, prompt)
    bench.run(Row(0, 0, prompt, 1))
    assert bench.run(Row(0, 6, expected[:1], 1)).tokens[0, 0] == expected[1]
    assert bench.run(Row(0, 7, None, 1)).tokens[0, 0] == expected[2]


def test_a_step_staged_before_the_last_one_ran_reads_its_relay(bench, Row, make_prompt):
    """Depth 1 and 2: plans are staged while their predecessors have not run."""
    prompt = make_prompt(7)
    bench.admit(0, prompt)
    plans = [bench.scheduler.plan(Row(0, 0, prompt, 1))]
    plans += [bench.scheduler.plan(Row(0, 7 + i, None, 1)) for i in range(2)]
    staged = [bench.executor.stage(plan) for plan in plans]
    tokens = [int(bench.executor.run(step).tokens[0, 0]) for step in staged]
    assert tokens == bench.model.dense_greedy(prompt, 3)


# ---- drafts


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_are_accepted_up_to_the_first_wrong_one(bench, Row, make_prompt, right):
    prompt = make_prompt(10, seed=3)
    expected = bench.model.dense_greedy(prompt, 8)
    bench.admit(0, prompt, logprobs=2)
    bench.admit(1, prompt)
    first = bench.run(Row(0, 0, prompt, 1), Row(1, 0, prompt, 1))
    assert first.tokens[:, 0].tolist() == expected[:1] * 2
    drafts = expected[1:4]
    if right < 3:
        drafts[right] = (drafts[right] + 1) % 97
    result = bench.run(Row(0, 10, [expected[0], *drafts], 4), Row(1, 10, None, 1))
    assert result.counts.tolist() == [right + 1, 1]
    assert result.tokens.shape == (2, 4)
    assert result.tokens[0, : right + 1].tolist() == expected[1 : right + 2]
    assert result.logprobs[0].ids.shape == (right + 1, 3)
    assert result.logprobs[0].ids[:, 0].tolist() == expected[1 : right + 2]
    assert 1 not in result.logprobs
    following = bench.run(Row(0, 10 + right + 1, None, 1))
    assert following.tokens[0, 0] == expected[right + 2], "the relay is the last accepted token"


def test_seeded_drafts_use_the_noise_of_their_positions(new_bench, Row, make_prompt):
    prompt = make_prompt(10, seed=4)
    sampling = {"temperature": 1.5, "seed": 11, "top_k": 40}
    expected = new_bench().generate(0, prompt, 6, **sampling)
    bench = new_bench()
    bench.admit(0, prompt, **sampling)
    bench.run(Row(0, 0, prompt, 1))
    result = bench.run(Row(0, 10, expected[:5], 5))
    assert result.tokens[0].tolist() == expected[1:]


# ---- log-probabilities


def dense_logprobs(bench, ids):
    return bench.model.dense_logits(ids).log_softmax(-1).numpy()


def test_logprobs_are_those_of_the_raw_distribution(bench, Row, make_prompt):
    prompt = make_prompt(9)
    bench.admit(0, prompt, logprobs=5, temperature=0.3, logit_bias={7: 30.0})
    result = bench.run(Row(0, 0, prompt, 1))
    dense = dense_logprobs(bench, prompt)[-1]
    best = np.argsort(-dense, kind="stable")[:5]
    made = result.logprobs[0]
    assert made.ids.tolist() == [[7, *best]]
    np.testing.assert_allclose(made.values[0], dense[[7, *best]], atol=1e-4)
    assert made.ranks.tolist() == [np.count_nonzero(dense > dense[7]) + 1]


@pytest.mark.parametrize("k", [0, 3, 200])
@pytest.mark.parametrize("chunk", [13, 150])
def test_prompt_logprobs_in_bounded_pieces(bench, Row, make_prompt, k, chunk):
    prompt = make_prompt(150)
    bench.admit(3, prompt, prompt_logprobs=k)
    dense = dense_logprobs(bench, prompt)
    for start in range(0, 150, chunk):
        ids = prompt[start : start + chunk]
        targets = prompt[start + 1 : start + chunk + 1]
        result = bench.run(Row(3, start, ids, 0, targets))
        if not targets:
            assert result.prompt_logprobs == {}
            continue
        made = result.prompt_logprobs[0]
        assert made.ids.shape == (len(targets), min(k, 97) + 1)
        assert made.ids[:, 0].tolist() == targets
        for j, target in enumerate(targets):
            expected = dense[start + j]
            np.testing.assert_allclose(made.values[j], expected[made.ids[j]], atol=1e-4)
            assert made.ranks[j] == np.count_nonzero(expected > expected[target]) + 1
            assert (np.diff(made.values[j, 1:]) <= 0).all()
    assert max(bench.model.logit_rows) <= 64


def test_logits_exist_for_a_bounded_number_of_positions(bench, Row, make_prompt, monkeypatch):
    monkeypatch.setattr(torch_step, "LOGIT_ROWS", 3)
    prompts = [make_prompt(5, seed=slot) for slot in range(8)]
    expected = [bench.model.dense_greedy(prompt, 5) for prompt in prompts]
    for slot, prompt in enumerate(prompts):
        bench.admit(slot, prompt, logprobs=0)
    result = bench.run(*(Row(slot, 0, prompt, 1) for slot, prompt in enumerate(prompts)))
    assert result.tokens[:, 0].tolist() == [tokens[0] for tokens in expected]
    assert bench.model.logit_rows == [3, 3, 2]
    drafted = bench.run(*(Row(slot, 5, tokens[:4], 4) for slot, tokens in enumerate(expected)))
    assert drafted.tokens.tolist() == [tokens[1:] for tokens in expected], "a draft row may cross the border"
    assert sorted(drafted.logprobs) == list(range(8))


# ---- failures


def test_a_relay_that_was_never_written_fails_its_row_alone(bench, Row, make_prompt):
    prompt = make_prompt(6)
    bench.admit(0, prompt)
    bench.admit(1, prompt)
    bench.run(Row(0, 0, prompt, 1), Row(1, 0, prompt, 0))
    result = bench.run(Row(0, 6, None, 1), Row(1, 6, None, 1))
    assert result.failed == {1: "slot 1 has no sampled token to go on from"}
    assert result.counts.tolist() == [1, 0]
    assert result.tokens[0, 0] == bench.model.dense_greedy(prompt, 2)[1]


def test_a_new_owner_does_not_inherit_the_relay(bench, Row, make_prompt):
    bench.generate(0, make_prompt(6), 3)
    bench.admit(0, make_prompt(4))
    result = bench.run(Row(0, 4, None, 1))
    assert result.failed == {0: "slot 0 has no sampled token to go on from"}


def test_a_new_owner_gets_a_clean_table_and_its_own_sampling(bench, Row, make_prompt):
    bench.generate(0, make_prompt(30), 3, temperature=2.0, logit_bias={5: 100.0})
    prompt = make_prompt(6, seed=1)
    assert bench.generate(0, prompt, 5) == bench.model.dense_greedy(prompt, 5)
    table = bench.executor.state.tables[0][0]
    assert (table[3:] == 0).all(), "entries that the row does not use are 0"


@pytest.mark.parametrize("token", [-1, -5, 97, 2**31 - 1])
def test_an_id_outside_the_vocabulary_fails_its_row_alone(bench, Row, make_prompt, token):
    prompt = make_prompt(6)
    bench.admit(0, [token] * 3)
    bench.admit(1, prompt)
    result = bench.run(Row(0, 0, [1, token, 2], 1, [1, 2]), Row(1, 0, prompt, 1))
    assert result.failed == {0: f"token id {token} is outside the vocabulary of 97"}
    assert result.prompt_logprobs == {}
    assert result.tokens[1, 0] == bench.model.dense_greedy(prompt, 1)[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_unsound_logits_fails_alone_and_so_does_its_successor(bench, Row, make_prompt, value):
    prompt = [token if token != 13 else 14 for token in make_prompt(6)]
    bench.model.embedding[13] = value
    bench.admit(0, prompt, logprobs=1)
    bench.admit(1, [13, 1], logprobs=1, prompt_logprobs=1)
    result = bench.run(Row(0, 0, prompt, 1), Row(1, 0, [13, 1], 1, [1]))
    assert list(result.failed) == [1]
    assert "NaN" in result.failed[1]
    assert list(result.logprobs) == [0]
    assert result.prompt_logprobs == {}
    second = bench.run(Row(0, 6, None, 1), Row(1, 2, None, 1))
    assert second.failed == {1: "slot 1 has no sampled token to go on from"}
    tokens = [int(result.tokens[0, 0]), int(second.tokens[0, 0])]
    bench.model.embedding[13] = 0.0
    assert tokens == bench.model.dense_greedy(prompt, 2)


def test_a_row_with_all_tokens_masked_fails_alone(bench, Row, make_prompt):
    prompt = make_prompt(6)
    bench.admit(0, prompt, allowed_token_ids=(4,), rules=TokenRules(stop_ids=(4,)), min_tokens=2)
    bench.admit(1, prompt, temperature=1.0)
    result = bench.run(Row(0, 0, prompt, 1), Row(1, 0, prompt, 1))
    assert list(result.failed) == [0]
    assert "all tokens are masked" in result.failed[0]
    assert result.counts.tolist() == [0, 1]


def test_a_step_that_raises_harms_no_later_one(bench, Row, make_prompt):
    prompt = make_prompt(6)
    bench.admit(0, prompt)
    bench.run(Row(0, 0, prompt, 1))
    for _ in range(4):
        plan = bench.scheduler.plan(Row(0, 6, [1, 2], 1))
        plan.counts[0] = 3
        with pytest.raises(ValueError, match="2 ids for 3 tokens"):
            bench.executor.run(bench.executor.stage(plan))
    assert bench.run(Row(0, 6, None, 1)).tokens[0, 0] == bench.model.dense_greedy(prompt, 2)[1]


# ---- sampling state through the executor


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.2},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
        {"temperature": 0.0, "frequency_penalty": 1.5},
    ],
)
def test_a_resumed_request_goes_on_with_the_same_tokens(new_bench, Row, make_prompt, sampling):
    """Preemption: the slot is set up again, prompt and output are computed anew, maybe in another slot."""
    prompt = make_prompt(8)
    expected = new_bench().generate(0, prompt, 14, seed=5, **sampling)
    bench = new_bench()
    head = bench.generate(0, prompt, 6, seed=5, **sampling)
    assert head == expected[:6]
    known = prompt + head
    bench.admit(5, prompt, seed=5, known=known, **sampling)
    result = bench.run(Row(5, 0, known, 1))
    tokens = [int(result.tokens[0, 0])]
    for position in range(len(known), len(known) + 7):
        tokens.append(int(bench.run(Row(5, position, None, 1)).tokens[0, 0]))
    assert tokens == expected[6:]


def test_sampling_alone_and_in_a_batch_is_the_same(new_bench, Row, make_prompt):
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "frequency_penalty": 1.0},
        {"logit_bias": {3: 2.0}, "temperature": 2.0},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    ]
    prompts = [make_prompt(4 + slot, seed=slot) for slot in range(8)]
    alone = [new_bench().generate(0, p, N, seed=s, **kinds[s]) for s, p in enumerate(prompts)]
    bench = new_bench()
    for slot, prompt in enumerate(prompts):
        bench.admit(slot, prompt, seed=slot, **kinds[slot])
    order = [3, 0, 7, 1, 5, 2, 6, 4]
    result = bench.run(*(Row(slot, 0, prompts[slot], 1) for slot in order))
    tokens = {slot: [int(result.tokens[i, 0])] for i, slot in enumerate(order)}
    for step in range(N - 1):
        order = order[1:] + order[:1]
        result = bench.run(*(Row(slot, len(prompts[slot]) + step, None, 1) for slot in order))
        for i, slot in enumerate(order):
            tokens[slot].append(int(result.tokens[i, 0]))
    assert [tokens[slot] for slot in range(8)] == alone


def test_no_gradients_are_recorded(bench, make_prompt):
    bench.model.embedding.requires_grad_(True)
    bench.generate(0, make_prompt(5), 2)
    assert not bench.kv[0].k.requires_grad
    assert not torch.is_inference_mode_enabled()
