"""Steps on the fake device: the tokens of the plain executor, and no call that waits."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from aengine.runner.cuda.graphs import graph_rows
from aengine.runner.cuda.sampler import device_thresholds
from aengine.runner.support import Cuts, thresholds
from aengine.types import PageMove, TableDelta, TokenRules
from tests.runner.conftest import MAX_LEN, PAGES, SLOTS, VOCAB, Bench, Row, make_prompt
from tests.runner.cuda.steady import FakeRunner

COLUMNS = [-(-MAX_LEN // page) for page in PAGES]


class CudaBench(Bench):
    def __init__(self, seed=0, **more):
        super().__init__()
        self.runner = FakeRunner(self.model, self.kv, COLUMNS, SLOTS, MAX_LEN, seed=seed, move=self.move, **more)

    def run(self, *rows):
        return self.runner.run(self.scheduler.plan(*rows))


KINDS = [
    {},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 4},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.3},
    {"logit_bias": {3: 4.0, 9: -5.0}, "min_tokens": 3},
]


def serve(bench, kinds, steps=10):
    """Prefill of all, a step with a prompt beside decode rows, then decode -> (tokens, logprobs) by slot."""
    prompts = [make_prompt(5 + 3 * slot, slot) for slot in range(len(kinds))]
    got = {slot: [] for slot in range(len(kinds))}
    told = {slot: [] for slot in range(len(kinds))}

    def take(result, slots):
        assert not result.failed
        for row, slot in enumerate(slots):
            got[slot].append(int(result.tokens[row, 0]))
            if row in result.logprobs:
                told[slot].append(result.logprobs[row])

    first = list(range(len(kinds) - 1))
    for slot in first:
        bench.admit(slot, prompts[slot], seed=slot, **kinds[slot])
    take(bench.run(*(Row(slot, 0, prompts[slot], 1) for slot in first)), first)
    last = len(kinds) - 1
    bench.admit(last, prompts[last], seed=last, **kinds[last])
    rows = [Row(slot, len(prompts[slot]), None, 1) for slot in first]
    take(bench.run(*rows, Row(last, 0, prompts[last], 1)), [*first, last])
    for step in range(steps):
        slots = [*first, last]
        rows = [Row(slot, len(prompts[slot]) + step + (slot != last), None, 1) for slot in slots]
        take(bench.run(*rows), slots)
    return got, told


@pytest.fixture(scope="module")
def plain():
    return serve(Bench(), KINDS)


@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_and_logprobs_are_the_plain_executors(plain, graphs):
    bench = CudaBench(graphs=graphs, pieces=50)
    got, told = serve(bench, KINDS)
    assert got == plain[0]
    for slot, logprobs in told.items():
        assert len(logprobs) == len(plain[1][slot])
        for mine, wanted in zip(logprobs, plain[1][slot], strict=True):
            assert mine.ids.tolist() == wanted.ids.tolist()
            np.testing.assert_allclose(mine.values, wanted.values, atol=1e-4)
            assert mine.ranks.tolist() == wanted.ranks.tolist()
    counts = bench.runner.device.counts
    assert (counts["replay"], counts["replay piece"]) == ((10, 6) if graphs else (0, 0))
    assert ("the pieces between recorded for 4 numbers of tokens" in bench.runner.line) == graphs


@pytest.mark.parametrize("graphs", [False, True])
def test_prompt_logprobs_and_drafts_are_the_plain_executors(graphs):
    prompt = make_prompt(20)
    results = []
    for bench in (Bench(), CudaBench(graphs=graphs, pieces=32)):
        bench.admit(0, prompt, prompt_logprobs=3)
        bench.admit(1, prompt[:6])
        first = bench.run(Row(0, 0, prompt, 1, targets=[*prompt[1:]]), Row(1, 0, prompt[:6], 1))
        right = bench.model.dense_greedy(prompt[:6], 4)
        drafted = bench.run(Row(1, 6, [*right[:3], 5], 4), Row(0, 20, None, 1))
        after = bench.run(Row(1, 9, None, 1))
        results.append((first, drafted, after))
    for mine, wanted in zip(results[1], results[0], strict=True):
        assert mine.counts.tolist() == wanted.counts.tolist()
        assert mine.tokens.tolist() == wanted.tokens.tolist()
        assert mine.failed == wanted.failed
    assert results[1][1].counts.tolist() == [3, 1]
    mine, wanted = results[1][0].prompt_logprobs[0], results[0][0].prompt_logprobs[0]
    assert mine.ids.tolist() == wanted.ids.tolist()
    np.testing.assert_allclose(mine.values, wanted.values, atol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_faulty_row_fails_alone(graphs):
    bench = CudaBench(graphs=graphs)
    for slot in range(3):
        bench.admit(slot, make_prompt(6, slot))
    result = bench.run(Row(0, 0, make_prompt(6, 0), 1), Row(1, 0, [1, VOCAB, 2], 1))
    assert list(result.failed) == [1]
    assert f"token id {VOCAB} is outside the vocabulary of {VOCAB}" in result.failed[1]
    result = bench.run(Row(0, 6, None, 1), Row(2, 0, None, 1), Row(1, 3, None, 1))
    assert sorted(result.failed) == [1, 2]
    assert "slot 2 has no sampled token to go on from" in result.failed[1]
    assert result.counts.tolist() == [1, 0, 0]
    bench.model.head.weight[:] = float("nan")
    result = bench.run(Row(0, 7, None, 1))
    assert result.failed == {0: "the model's logits hold NaN"}
    assert list(bench.run(Row(0, 8, None, 1)).failed) == [0]


def test_faults_of_ruled_rows_say_when_they_came():
    bench = CudaBench()
    bench.admit(0, [1, 2], rules=TokenRules(bad_words=((5,),)), allowed_token_ids=(5,))
    bench.admit(1, [1, 2], allowed_token_ids=(5,))
    result = bench.run(Row(0, 0, [1, 2], 1), Row(1, 0, [1, 2], 1))
    assert result.failed == {
        0: "all tokens are masked: the logits after masks and penalties are minus infinity everywhere"
    }
    assert result.tokens[1, 0] == 5
    bench.model.head.weight[7] = float("nan")  # hidden by the mask, and told all the same
    assert bench.run(Row(1, 2, None, 1)).failed == {0: "the model's logits hold NaN"}


@pytest.mark.parametrize("graphs", [False, True])
def test_a_steady_step_never_waits(graphs):
    """The fake raises where a real device would make the host wait; and here nobody waits for an event either. The last
    of the steps has a prompt beside three rows that decode."""
    bench = CudaBench(graphs=graphs, pieces=32, eager=0.0)
    kinds = [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.5, "logprobs": 3}]
    for slot, kind in enumerate(kinds):
        bench.admit(slot, make_prompt(4, slot), **kind)
    bench.run(*(Row(slot, 0, make_prompt(4, slot), 1) for slot in range(4)))
    results, device = [], bench.runner.device
    before = device.host_waits
    device.counts.clear()
    for step in range(2):
        results.append(bench.runner.launch(bench.scheduler.plan(*(Row(slot, 4 + step, None, 1) for slot in range(4)))))
    bench.admit(4, make_prompt(20, 4))
    rows = (Row(slot, 6, None, 1) for slot in range(3))
    results.append(bench.runner.launch(bench.scheduler.plan(*rows, Row(4, 0, make_prompt(20, 4), 1))))
    assert device.host_waits == before
    for result in results:
        assert not result().failed
    assert (device.counts["replay"], device.counts["replay piece"]) == ((2, 3) if graphs else (0, 0))


def test_four_sets_and_no_more():
    bench = CudaBench(eager=0.0)
    bench.admit(0, [1, 2, 3])
    launched = [bench.runner.launch(bench.scheduler.plan(Row(0, 0, [1, 2, 3], 1)))]
    launched += [bench.runner.launch(bench.scheduler.plan(Row(0, 3 + step, None, 1))) for step in range(3)]
    with pytest.raises(RuntimeError, match="all 4 staging sets are in flight"):
        bench.runner.launch(bench.scheduler.plan(Row(0, 6, None, 1)))
    tokens = [int(result().tokens[0, 0]) for result in launched]
    assert tokens == bench.model.dense_greedy([1, 2, 3], 4)


def test_an_error_while_enqueuing_fails_its_step_only():
    bench = CudaBench()
    bench.admit(0, [1, 2, 3])
    bench.run(Row(0, 0, [1, 2, 3], 1))
    forward = bench.model.forward
    bench.model.forward = lambda ops, batch: 1 / 0
    for _ in range(6):  # more than there are sets
        with pytest.raises(ZeroDivisionError):
            bench.run(Row(0, 3, None, 1))
    bench.model.forward = forward
    assert not bench.run(Row(0, 3, None, 1)).failed


def test_pages_move_on_the_compute_stream():
    """Behind the step that wrote them, which has not run when the move is launched."""
    bench = CudaBench(eager=0.0)
    bench.admit(0, [1, 2, 3])
    first = bench.scheduler.plan(Row(0, 0, [1, 2, 3], 1))
    done = bench.runner.launch(first)
    targets = [bench.scheduler.free[group].pop() for group in range(2)]
    moves = tuple(PageMove(delta.group, int(delta.pages[0]), targets[delta.group]) for delta in first.tables)
    tables = tuple(TableDelta.run(0, group, 0, (target,)) for group, target in enumerate(targets))
    plan = bench.scheduler.plan(Row(0, 3, None, 1))
    second = bench.runner.launch(msgspec.structs.replace(plan, moves=moves, tables=(*tables, *plan.tables)))
    tokens = [int(result().tokens[0, 0]) for result in (done, second)]
    assert tokens == bench.model.dense_greedy([1, 2, 3], 2)


def test_sizes_of_graphs():
    assert graph_rows(1) == (1,)
    assert graph_rows(6) == (1, 2, 4, 6)
    assert graph_rows(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert all(a < b for a, b in zip(graph_rows(512), graph_rows(512)[1:], strict=False))


def test_thresholds_of_one_sort_are_those_of_the_host():
    g = torch.Generator().manual_seed(3)
    z = torch.randn(24, 300, generator=g) * 3
    z[3] = z[3].round()  # many ties
    z[5, ::2] = float("-inf")
    z -= z.amax(-1, keepdim=True)
    rng = np.random.default_rng(0)
    cuts = Cuts(
        rng.choice([0, 1, 5, 40, 299, 300, 1000], 24),
        rng.choice([1.0, 0.9, 0.5, 0.05], 24),
        rng.choice([0.0, 0.1, 1.0], 24),
    )
    assert torch.equal(device_thresholds(z, cuts, torch.from_numpy), thresholds(z, cuts))
