"""lm-eval on an exported folder: the real command gives this toolkit's own numbers; what cannot be had is skipped."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from surgery.data.generation import answer_batches, generate_answers
from surgery.errors import RecipeError
from surgery.evaluate import lm_eval as harness
from surgery.evaluate.lm_eval import check_tasks, finite_metrics, run_lm_eval
from surgery.evaluate.lm_eval_files import lm_eval_groups, tasks_folder
from surgery.models.loading import load_model, load_tokenizer
from surgery.probes.documents import rng_of
from surgery.recipe import Base, LmEval
from tests.support.processes import alone

harness_tasks = pytest.importorskip("lm_eval.tasks")
HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
EXPORT = Path(__file__).parents[2] / "checkpoints" / "quickstart" / "export"
LIMIT = 16
NAME = "kv_retrieval_64"


def samples(folder: Path, task: str, metric: str) -> list[bool]:
    (path,) = folder.rglob(f"samples_{task}_2*.jsonl")
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [row[metric] == 1.0 for row in rows]


def dulled(folder: Path) -> Path:
    """The example with a part of its new head's output taken away, and not knowing a newline: some of its answers are
    right, some are chosen rightly and said wrongly, and some are wrong.
    """
    shutil.copytree(EXPORT, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.layers.3.mixer.attention.o_proj.weight"] *= 0.85
    tensors["backbone.embeddings.weight"][load_tokenizer(Base(model=str(EXPORT))).convert_tokens_to_ids("Ċ")] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_command_gives_the_same_answers_prompt_by_prompt(tmp_path: Path) -> None:
    """Run where `surgery` cannot be imported, as on a user's machine that has only the folders."""
    tasks, model = [f"surgery_{NAME}", f"surgery_{NAME}_generated"], dulled(tmp_path / "model")
    words = [
        "--model", "hf",
        "--model_args", f"pretrained={model},trust_remote_code=True,max_length=4096",
        "--include_path", str(tasks_folder()),
        "--tasks", ",".join(tasks), "--device", "cpu", "--batch_size", "16", "--limit", str(LIMIT),
        "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    folders = {"HF_HOME": str(tmp_path / "hub"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    alone("from lm_eval.__main__ import cli_evaluate; cli_evaluate()", *words, cwd=tmp_path, **folders)
    base = Base(model=str(model))
    documents = [lm_eval_groups()["retrieval"][NAME](rng_of("lm_eval", 0, NAME, i)) for i in range(LIMIT)]
    tokenizer = load_tokenizer(base)
    found = generate_answers(load_model(base).eval(), tokenizer, documents, answer_batches(documents, tokenizer, 8))
    assert found.ranked is not None
    assert samples(tmp_path, tasks[0], "acc") == found.ranked.correct.tolist()
    assert samples(tmp_path, tasks[1], "exact_match") == found.correct.tolist()
    assert samples(tmp_path, tasks[1], "begun") == found.begun.tolist()
    assert 0 < found.correct.sum() < found.ranked.correct.sum()


def test_a_task_that_lm_eval_does_not_have_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tasks:
        """Stands in for the index of all tasks, which takes ten seconds."""

        def __init__(self, include_path: str, include_defaults: bool = True) -> None:
            self.all_tasks = ["surgery_copying_8", *(["winogrande"] if include_defaults else [])]

    monkeypatch.setattr(harness_tasks, "TaskManager", Tasks)
    monkeypatch.setattr(harness, "_known_tasks", harness._known_tasks.__wrapped__)
    check_tasks(LmEval(tasks=("surgery_copying_8", "winogrande")))
    with pytest.raises(RecipeError, match=r"evaluate\.lm_eval\.tasks: winogrand\. .*Did you mean winogrande\?"):
        check_tasks(LmEval(tasks=("surgery_copying_8", "winogrand")))


def test_scores_that_are_no_number_are_listed_as_skipped() -> None:
    row = {
        "acc,none": 0.5,
        "word_perplexity,none": math.inf,
        "acc_stderr,none": "N/A",
        "alias": "x",
        "f1_stderr,none": math.nan,
    }
    assert finite_metrics(row) == {"acc,none": 0.5, "skipped": "word_perplexity,none is inf"}


def test_without_lm_eval_every_task_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    found = run_lm_eval(None, None, LmEval(tasks=("mmlu", "gsm8k")))  # type: ignore[arg-type]
    assert set(found) == {"mmlu", "gsm8k"} and "pip install lm-eval" in found["mmlu"]["skipped"]
