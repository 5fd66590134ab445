"""Use an exported folder in a process without this library, as its users do.

    python -m tests.support.stranger FOLDER OUT.json [NAME]...
    python -m tests.support.stranger FOLDER OUT.json families      FOLDER holds a saved model of each family

Each method is one entry of the table in docs/CONFORMANCE.md. It returns the values that test_conformance.py checks, or
the text of an error. All of them share one process, because each process loads torch first.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

TEXTS = ["The value of the key 'a' is", "Question: What is the job of the man who lives by the sea?"]


HELPERS = ("logits", "new", "loop")
BY_HAND = ("flex",)  # its kernel is compiled for ten seconds


def load(folder: str | Path, auto: Any = AutoModelForCausalLM, **more: Any) -> Any:
    return auto.from_pretrained(folder, trust_remote_code=True, **more).eval()


@torch.no_grad()
def output(model: Any, head: bool = True) -> Tensor:
    result = model(torch.arange(3, 24).reshape(1, 21), use_cache=False)
    return result.logits if head else result.last_hidden_state


def look(folder: Path) -> dict[str, Any]:
    """Each entry is True where the model that came back computes the same, bit for bit."""
    model, scratch = load(folder), Path(tempfile.mkdtemp())
    body, expected = load(folder, AutoModel), output(model)
    torch.save(model, scratch / "model.pt")
    model.save_pretrained(scratch / "again")
    body.save_pretrained(scratch / "body")
    copies = {
        "pickle": pickle.loads(pickle.dumps(model)),  # noqa: S301  (its own)
        "torch.save": torch.load(scratch / "model.pt", weights_only=False),
        "saved_again": load(scratch / "again"),
    }
    found: dict[str, Any] = {name: torch.equal(output(copy), expected) for name, copy in copies.items()}
    hidden = output(body, head=False)
    found["body"] = torch.equal(output(model.base_model, head=False), hidden)
    found["body_saved_again"] = torch.equal(output(load(scratch / "body", AutoModel), head=False), hidden)
    found["body_of_saved_again"] = torch.equal(output(load(scratch / "again", AutoModel), head=False), hidden)
    found["class"] = type(model).__module__.startswith("transformers_modules.")
    return found


class Stranger:
    def __init__(self, folder: str) -> None:
        self.folder, self.model = folder, load(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        self.batch = self.tokenizer(TEXTS, return_tensors="pt", padding=True, add_special_tokens=False)
        self.ids = self.tokenizer(TEXTS[:1], return_tensors="pt", add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def logits(self, model: Any, ids: Tensor | None = None) -> Tensor:
        return model(self.ids if ids is None else ids, use_cache=False).logits

    def new(self, model: Any = None, batch: Any = None, **more: Any) -> Tensor:
        """The new tokens."""
        batch = batch or {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)}
        settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **more}
        return (model or self.model).generate(**batch, **settings)[:, batch["input_ids"].shape[1] :]

    def loop(self, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """As `generate` for one prompt, token by token over whole forward passes."""
        ids = self.ids
        for _ in range(6):
            ids = torch.cat([ids, choose(self.logits(self.model, ids)[:, -1])], 1)
        return ids[:, self.ids.shape[1] :]

    def greedy(self) -> Any:
        return torch.equal(self.new(), self.loop(lambda logits: logits.argmax(-1, keepdim=True)))

    def sampling(self) -> Any:
        torch.manual_seed(5)
        drawn = self.new(do_sample=True, top_k=0)
        torch.manual_seed(5)
        by_hand = self.loop(lambda logits: torch.multinomial(logits.softmax(-1), 1))
        return torch.equal(drawn, by_hand) and not torch.equal(drawn, self.new())

    def beams(self) -> Any:
        given = {"batch": dict(self.batch), "max_new_tokens": 12}
        beams = self.new(**given, num_beams=4)
        same = torch.equal(beams, self.new(**given, num_beams=4, use_cache=False))
        return [same, not torch.equal(beams, self.new(**given))]

    def static_cache(self) -> Any:
        output = self.model.generate(
            self.ids, max_new_tokens=6, do_sample=False, cache_implementation="static", return_dict_in_generate=True
        )
        same = torch.equal(output.sequences[:, self.ids.shape[1] :], self.new())
        return [same, type(output.past_key_values).__name__]

    def padded_batch(self) -> Any:
        together = self.new(batch=dict(self.batch))
        alone = [self.tokenizer(t, return_tensors="pt", add_special_tokens=False) for t in TEXTS]
        return bool((self.batch["attention_mask"] == 0).any()) and all(
            torch.equal(row, self.new(batch={k: one[k] for k in ("input_ids", "attention_mask")})[0])
            for row, one in zip(together, alone, strict=True)
        )

    def pipeline(self) -> Any:
        generator = pipeline("text-generation", self.folder, trust_remote_code=True)
        given = {"max_new_tokens": 4, "do_sample": False}
        alone = [generator(t, **given)[0]["generated_text"] for t in TEXTS]
        together = [row[0]["generated_text"] for row in generator(TEXTS, **given, batch_size=2)]
        return [alone == together, alone[0].startswith(TEXTS[0]), len(alone[0]) > len(TEXTS[0])]

    def saved_again(self) -> Any:
        """Whole, in shards, and once more from there."""
        found, model = [], self.model
        for size in ("50GB", "50KB"):
            place = tempfile.mkdtemp()
            model.save_pretrained(place, max_shard_size=size)
            model = load(place)
            found.append(torch.equal(self.logits(model), self.logits(self.model)))
        return found

    def without_head(self) -> Any:
        body = load(self.folder, AutoModel)
        with torch.no_grad():
            hidden = body(self.ids, use_cache=False).last_hidden_state
            return torch.equal(self.model.lm_head(hidden), self.logits(self.model))

    def bf16(self) -> Any:
        model = load(self.folder, dtype=torch.bfloat16)
        kinds = {name.rsplit(".", 1)[-1]: str(p.dtype) for name, p in model.named_parameters()}
        near = (self.logits(model) - self.logits(self.model)).std() / self.logits(self.model).std()
        return [kinds["A_log"], kinds["dt_bias"], kinds["D"], kinds["weight"], float(near), self.new(model).shape[1]]

    def compiled(self) -> Any:
        """The whole forward is one graph; without inductor, whose compiler takes minutes here."""
        compiled = torch.compile(self.model, backend="aot_eager", fullgraph=True)
        return float((self.logits(compiled) - self.logits(self.model)).abs().max())

    def flex(self) -> Any:
        model = load(self.folder, attn_implementation="flex_attention").requires_grad_(False)
        return float((self.logits(model) - self.logits(self.model)).abs().max())

    def device_maps(self) -> Any:
        names = {"backbone.embeddings": "cpu", "backbone.layers.0": "cpu", "backbone.layers.1": "disk"}
        mixed = {**names, "backbone.layers.2": "disk", "backbone.norm_f": "cpu", "lm_head": "disk"}
        found = {}
        for name, device_map in (("auto", "auto"), ("cpu", "cpu"), ("disk", {"": "disk"}), ("mixed", mixed)):
            model = load(self.folder, device_map=device_map, offload_folder=tempfile.mkdtemp())
            same = torch.equal(self.logits(model), self.logits(self.model))
            found[name] = same and torch.equal(self.new(model), self.new())
        return found

    def peft(self) -> Any:
        """Adapters on every in_proj: added, trained a step, saved and loaded, merged, saved, loaded in stock."""
        torch.manual_seed(0)
        adapted = get_peft_model(load(self.folder), LoraConfig(r=4, target_modules=["in_proj"], task_type="CAUSAL_LM"))
        trained = {n.split(".")[-3] for n, p in adapted.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(4):
            loss = adapted.train()(self.ids, labels=self.ids).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        expected, place, merged_at = self.logits(adapted.eval()), tempfile.mkdtemp(), tempfile.mkdtemp()
        adapted.save_pretrained(place)
        again = PeftModel.from_pretrained(load(self.folder), place).eval()
        again.merge_and_unload().save_pretrained(merged_at)
        apart = [(self.logits(m) - expected).abs().max().item() for m in (again, load(merged_at))]
        moved = (expected - self.logits(self.model)).abs().max().item()
        return {"trained": sorted(trained), "losses": losses, "apart": apart, "moved": moved}

    def contrastive(self) -> Any:
        return self.new(penalty_alpha=0.6, top_k=4)

    def quantized_cache(self) -> Any:
        return self.new(cache_implementation="quantized")

    def continuous_batching(self) -> Any:
        return self.model.generate_batch([self.ids[0].tolist()], max_new_tokens=2)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    sys.modules["surgery"] = None  # type: ignore[assignment]
    folder, out, *names = sys.argv[1:]
    found = dict[str, Any]()
    if names == ["families"]:
        calls: dict[str, Callable[[], Any]] = {p.name: partial(look, p) for p in sorted(Path(folder).iterdir())}
    else:
        stranger = Stranger(folder)
        usual = [name for name in vars(Stranger) if not name.startswith("_") and name not in HELPERS + BY_HAND]
        calls = {name: getattr(stranger, name) for name in names or usual}
    for name, call in calls.items():
        try:
            answer = call()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        found[name] = answer if isinstance(answer, (bool, float, str, list, dict)) else repr(answer)
    with open(out, "w") as file:
        json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
