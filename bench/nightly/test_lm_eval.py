"""lm-eval in memory: unavailable tasks are skipped; lengths of prompts and tokens are those of other ways to run."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from surgery.cli import app
from surgery.data.generation import answer_batches, generate_answers
from surgery.data.offsets import for_prompts, tokenized
from surgery.evaluate import lm_eval as harness
from surgery.evaluate.lm_eval import _lengths_of, run_lm_eval
from surgery.evaluate.lm_eval_files import lm_eval_groups
from surgery.models.loading import load_model, load_tokenizer
from surgery.probes.documents import rng_of
from surgery.recipe import Base, LmEval

harness_tasks = pytest.importorskip("lm_eval.tasks")
HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
EXPORT = Path(__file__).parents[2] / "checkpoints" / "quickstart" / "export"


def test_what_can_be_had_is_run_and_the_rest_says_why_not() -> None:
    base = Base(model=str(EXPORT))
    section = LmEval(tasks=("surgery_kv_retrieval_4", "no_such_task", "winogrande"), limit=8, batch_size=8)
    found = run_lm_eval(load_model(base).eval(), load_tokenizer(base), section)
    assert set(found) == set(section.tasks)
    documents = [
        lm_eval_groups()["retrieval"]["kv_retrieval_4"](rng_of("lm_eval", 0, "kv_retrieval_4", i)) for i in range(8)
    ]
    own = generate_answers(
        load_model(base).eval(), load_tokenizer(base), documents, answer_batches(documents, load_tokenizer(base), 8)
    )
    assert own.ranked is not None and found["surgery_kv_retrieval_4"]["n"] == 8
    assert found["surgery_kv_retrieval_4"]["acc,none"] == own.ranked.correct.double().mean()
    assert "no task" in found["no_such_task"]["skipped"]
    assert found["winogrande"]["skipped"].startswith("its data is not available")
    json.dumps(found)


@pytest.mark.parametrize("template", ["<|endoftext|> $A", "<|endoftext|> $A <|endoftext|>"])
def test_lm_eval_the_pipeline_and_the_command_send_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """One BOS, also if the text has it. An EOS after the prompt, which the others send, is left out."""
    base, sent = Base(model=str(tmp_path / "model")), []
    shutil.copytree(EXPORT, base.model)
    tokenizer = load_tokenizer(base)
    special = [("<|endoftext|>", 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    tokenizer.save_pretrained(base.model)
    model, after = load_model(base).eval(), template.endswith(">")

    def record(self: Any, ids: torch.Tensor, **rest: Any) -> torch.Tensor:
        sent.append(ids[0].tolist())
        return ids

    monkeypatch.setattr(type(model), "generate", record)
    stock_lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
    ours = HFLM(pretrained=model, tokenizer=for_prompts(tokenizer), backend="causal", batch_size=1)
    for text in ("The value", " of\n\n12", "<|endoftext|>The value"):
        assert CliRunner().invoke(app, ["generate", base.model, text]).exit_code == 0
        expected = sent[-1]
        assert expected.count(1) == 1
        assert ours.tok_encode(text) == ours.tok_batch_encode([text])[0][0].tolist() == expected
        if text.startswith("<"):
            continue
        assert stock_lm.tok_encode(text) == [*expected, 1][: len(expected) + after]
        assert tokenizer(text)["input_ids"] == stock_lm.tok_encode(text), "as the pipeline of transformers"
    context, answer = ours._encode_pair("The value of", " 12")
    (whole,) = tokenized(tokenizer, ["The value of 12"])
    assert context + answer == whole.ids and tokenizer.decode(answer) == " 12"


LENGTHS_TASK = """
task: {name}
custom_dataset: !function lengths.dataset
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "x"
generation_kwargs: {{max_gen_toks: 1, until: []}}
process_results: !function lengths.score
metric_list:
  - metric: words
    aggregation: mean
    higher_is_better: true
"""
LENGTHS_CODE = """
import datasets

def dataset(max_seq_lengths=(7,), **_):
    sizes = [int(max_seq_lengths[:-1])] if isinstance(max_seq_lengths, str) else max_seq_lengths
    return {"test": datasets.Dataset.from_list([{"text": "a " * size} for size in sizes])}

def score(doc, results):
    return {"words": len(doc["text"].split())}
"""


def test_lengths_of_prompts_reach_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As RULER and BABILong read them: lengths in tokens, and a name such as 2k for each run."""
    for name in ("lengths_of_texts", "babilong_like"):
        (tmp_path / f"{name}.yaml").write_text(LENGTHS_TASK.format(name=name))
    (tmp_path / "lengths.py").write_text(LENGTHS_CODE)
    monkeypatch.setattr(harness, "tasks_folder", lambda: tmp_path)
    # Without lm-eval's own tasks, whose 14,000 files take ten seconds to read for each length.
    monkeypatch.setattr(
        harness_tasks, "TaskManager", functools.partial(harness_tasks.TaskManager, include_defaults=False)
    )
    base = Base(model=str(EXPORT))
    model, tokenizer = load_model(base).eval(), load_tokenizer(base)

    def mean_words(**fields: Any) -> dict[str, float]:
        section = LmEval(tasks=("lengths_of_texts", "babilong_like"), **fields)
        return {task: metrics["words,none"] for task, metrics in run_lm_eval(model, tokenizer, section).items()}

    assert mean_words(max_seq_lengths=(2048,)) == {"lengths_of_texts": 2048, "babilong_like/2k": 2}
    lengths = _lengths_of("babilong_like", LmEval(tasks=("ruler", "babilong"), max_seq_lengths=(1024, 2048)))
    assert lengths == [("/1k", {"max_seq_lengths": "1k"}), ("/2k", {"max_seq_lengths": "2k"})]
    assert _lengths_of("ruler", LmEval(max_seq_lengths=(1024, 2048))) == [("", {"max_seq_lengths": [1024, 2048]})]
    assert _lengths_of("ruler", LmEval()) == _lengths_of("babilong", LmEval()) == [("", {})]
    with pytest.raises(ValueError, match="BABILong has multiples of 1024 tokens, not 1000"):
        mean_words(max_seq_lengths=(1000,))
    assert LmEval(tasks=("ruler",), max_seq_lengths=(1000,)).max_seq_lengths == (1000,)
