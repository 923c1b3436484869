"""The baselines count pages as they say, and all schemes agree on what a job needs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import shapes
import traces
from report import Report
from schemes import EqualPages, Job, MultiSize, Scheme, all_layers, needed_bytes, padded
from traces import Traced

MIB = 2**20
CHUNK = 2048
SPECS = {
    "llama": shapes.llama_32_vision,
    "gemma": shapes.gemma_3_27b,
    "gpt-oss": shapes.gpt_oss_120b,
    "jamba": shapes.jamba_52b,
    "qwen": shapes.qwen3_next_80b,
}


def schemes(name: str, budget: int = 20 * 10**9) -> list[Scheme]:
    specs = SPECS[name]()
    return [
        all_layers(specs, budget, CHUNK),
        padded(specs, budget, CHUNK),
        MultiSize(specs, budget, CHUNK, caching=False),
        MultiSize(specs, budget, CHUNK, caching=True),
    ]


def test_payloads_are_those_of_the_published_configurations() -> None:
    sizes = {name: [spec.payload_bytes for spec in make()] for name, make in SPECS.items()}
    assert sizes == {
        "llama": [2_097_152, 524_288],
        "gemma": [1_310_720, 6_815_744],
        "gpt-oss": [589_824, 589_824],
        "jamba": [262_144, 8_716_288],
        "qwen": [393_216, 39_518_208],
    }


@pytest.mark.parametrize(
    ("name", "page_bytes", "page_tokens", "tables"),
    [
        ("llama", 8 * 16 * 4096, 16, (4, 1)),
        ("gemma", 10 * 16 * 8192, 16, (1, 6)),
        ("gpt-oss", 18 * 16 * 2048, 16, (1, 1)),
        ("jamba", 4 * 80 * 4096, 80, (1, 7)),
        ("qwen", 12 * 544 * 2048, 544, (1, 3)),
    ],
)
def test_padded_pages(name: str, page_bytes: int, page_tokens: int, tables: tuple[int, ...]) -> None:
    scheme = padded(SPECS[name](), 10**10, CHUNK)
    assert (scheme.page_bytes, scheme.page_tokens) == (page_bytes, page_tokens)
    assert tuple(count for _, count in scheme.tables) == tables


def test_all_layers_pages_hold_image_tokens_in_every_layer() -> None:
    scheme = all_layers(SPECS["llama"](), 10**10, CHUNK)
    assert scheme.admit(Job(1, prompt=100, total=200, media=(6404,)))
    assert scheme.held_bytes() == 407 * 16 * 4096 * 40


def test_a_window_is_let_go_of() -> None:
    scheme = padded(SPECS["gemma"](), 10**11, CHUNK)
    assert scheme.admit(Job(1, prompt=16_000, total=17_000))
    full, window = 1000, 64
    assert scheme.held_bytes() == (full + 6 * window) * scheme.page_bytes


@pytest.mark.parametrize("name", SPECS)
def test_every_scheme_holds_at_least_what_is_needed_and_gives_all_back(name: str) -> None:
    specs = SPECS[name]()
    for scheme in schemes(name):
        empty = scheme.held_bytes()
        jobs = [Job(n, prompt=500 * n + 3, total=500 * n + 40, media=(1601,) * (name == "llama")) for n in (1, 2, 3)]
        for job in jobs:
            assert scheme.fits_alone(job)
            assert scheme.admit(job)
        for job in jobs:
            assert scheme.advance(job, job.length + 37)
            job.length += 37
        scheme.end_step()
        assert scheme.held_bytes() >= needed_bytes(specs, jobs), scheme.name
        for job in jobs:
            scheme.release(job)
        scheme.end_step()
        assert scheme.held_bytes() == empty, scheme.name


@pytest.mark.parametrize("name", SPECS)
def test_a_refused_job_leaves_nothing_behind(name: str) -> None:
    for scheme in schemes(name, budget=512 * MIB):
        empty = scheme.held_bytes()
        job = Job(1, prompt=100_000, total=100_010)
        assert not scheme.fits_alone(job)
        assert not scheme.admit(job)
        scheme.end_step()
        assert scheme.held_bytes() == empty, scheme.name


def test_what_is_needed_of_each_lifetime() -> None:
    gemma, jamba, llama = SPECS["gemma"](), SPECS["jamba"](), SPECS["llama"]()
    long = Job(1, prompt=5000, total=5001)
    assert needed_bytes(gemma, [long]) == 8192 * (10 * 5000 + 52 * 1023)
    assert needed_bytes(jamba, [long]) == 4096 * 4 * 5000 + 28 * 311_296
    seen = dataclasses.replace(long, media=(1601, 3202))
    assert needed_bytes(llama, [seen]) == 4096 * (32 * 5000 + 8 * 4803)


def test_equal_pages_refuse_to_grow_beyond_the_budget() -> None:
    scheme = EqualPages("one", 1000, 16, ((shapes.gemma_3_27b()[0].lifetime, 1),), 3000, CHUNK)
    job = Job(1, prompt=48, total=64)
    assert scheme.admit(job)
    assert not scheme.advance(job, 49)
    assert scheme.held_bytes() == 3000


def test_blocks_expand_to_the_same_tokens_and_different_ones() -> None:
    one = traces.expand(Traced(1300, 1, (7, 8, 9)))
    two = traces.expand(Traced(1500, 1, (7, 8, 10)))
    assert one.dtype == np.int32
    assert len(one) == 1300
    assert (one[:1024] == two[:1024]).all()
    assert (one[1024:] != two[1024:1300]).all()
    assert one.min() >= 0
    assert len(np.unique(traces.expand(Traced(512 * 200, 1, tuple(range(200)))))) > 0.99 * 512 * 200


def test_a_claim_shows_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("x", "it works", {"n": 1})
    report.at_most("time", 3.0, 2.0, "ms")
    report.at_least("rate", 0.5, 0.5)
    assert not report.close()
    printed = capsys.readouterr().out
    assert "MISSED  time: 3 <= 2 ms" in printed
    assert "holds   rate: 0.5 >= 0.5" in printed
