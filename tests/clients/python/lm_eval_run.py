"""lm-eval: a generation task by both local models and a log-likelihood task, from a file of its own (no downloads)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import BASE, MODEL, check, run_checks

HERE = Path(tempfile.mkdtemp(prefix="lm-eval-"))
FACTS = [
    ("France", "Paris", "Moon"),
    ("Italy", "Rome", "Potato"),
    ("Japan", "Tokyo", "Green"),
    ("Spain", "Madrid", "Up"),
]
(HERE / "facts.jsonl").write_text(
    "".join(json.dumps({"country": c, "right": r, "wrong": w}) + "\n" for c, r, w in FACTS)
)
COMMON = f"""dataset_path: json
dataset_kwargs:
  data_files:
    test: {HERE}/facts.jsonl
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
"""
(HERE / "choice.yaml").write_text(
    f"""task: facts_choice
{COMMON}output_type: multiple_choice
doc_to_choice: "{{{{[right, wrong]}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
"""
)
(HERE / "written.yaml").write_text(
    f"""task: facts_written
{COMMON}output_type: generate_until
doc_to_target: "{{{{right}}}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 8
  temperature: 0
filter_list:
  - name: first
    filter:
      - function: regex
        regex_pattern: "([A-Z][a-z]+)"
      - function: take_first
metric_list:
  - metric: exact_match
"""
)
(HERE / "rolling.yaml").write_text(
    f"""task: facts_rolling
{COMMON.replace("doc_to_text", "doc_to_target")}output_type: loglikelihood_rolling
doc_to_text: ""
metric_list:
  - metric: word_perplexity
"""
)


def evaluate(model, endpoint, task, *more, extra=""):
    out = HERE / f"{model}-{task}"
    command = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", model, "--tasks", task]
    arguments = f"model={MODEL},base_url={BASE}/{endpoint},num_concurrent=2,max_retries=1{extra}"
    command += ["--include_path", str(HERE), "--model_args", arguments, "--output_path", str(out), "--limit", "4"]
    command += ["--log_samples", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"][task]
    samples = [json.loads(line) for line in next(out.rglob("samples_*.jsonl")).read_text().splitlines()]
    assert len(samples) == 4
    return results, samples


REMOTE = ",tokenizer_backend=remote,max_length=2048"


@check
def loglikelihood():
    results, samples = evaluate("local-completions", "completions", "facts_choice", extra=REMOTE)
    assert results["acc,none"] == 1.0, results
    scores = [float(score) for sample in samples for score, _ in sample["filtered_resps"]]
    assert all(score < 0 for score in scores), scores


@check
def rolling_loglikelihood():
    results, _ = evaluate("local-completions", "completions", "facts_rolling", extra=REMOTE)
    assert 1 < results["word_perplexity,none"] < 10_000, results


@check
def generation():
    results, _ = evaluate("local-completions", "completions", "facts_written", extra=REMOTE)
    assert results["exact_match,first"] >= 0.75, results


@check
def chat_generation():
    _, samples = evaluate("local-chat-completions", "chat/completions", "facts_written", "--apply_chat_template")
    assert all(sample["resps"][0][0].strip() for sample in samples), samples


run_checks()
