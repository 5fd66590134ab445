"""A tokenizer with one token a byte but for its merges."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(*merges: tuple[str, str], end: bool = False) -> PreTrainedTokenizerFast:
    """Numbers of the same first digit start with the same token. The first merge has precedence.

    Args:
        end: `<end>` is the end token. Otherwise there is none.
    """
    alphabet = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>" if end else None)
