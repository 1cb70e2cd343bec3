"""The embedded task, "sort digits": a data set, a verifiable reward and a character tokenizer in TRL's conventions.

A prompt such as "528310=" asks for its digits in ascending order, "012358", followed by the end-of-sequence token.
The right answer is unique and cheap to check, a tiny model learns it in a minute on one CPU core, and a half-trained
model is right often enough for GRPO to have something to sharpen.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN, EOS_TOKEN, UNK_TOKEN = "<pad>", "<eos>", "<unk>"
CHARACTERS = string.digits + string.ascii_lowercase + " +-*/=?:,.()"
VOCABULARY = {token: index for index, token in enumerate([PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *CHARACTERS])}

_TRAILING_SPECIAL_TOKENS = re.compile(f"(?:{PAD_TOKEN}|{EOS_TOKEN})+$")


def sort_digits_dataset(num_rows: int, seed: int, num_digits: int = 6) -> Dataset:
    """Draw prompts whose digits are independent and uniform on 0-9, repeats allowed.

    Args:
        num_rows: number of rows.
        seed: equal seeds give equal rows; a longer data set begins with the rows of a shorter one.
        num_digits: digits per prompt.

    Returns:
        Columns `prompt` ("528310=") and `answer` ("012358"), both plain strings.
    """
    from datasets import Dataset

    rng = random.Random(seed)
    digits = ["".join(rng.choices(string.digits, k=num_digits)) for _ in range(num_rows)]
    return Dataset.from_dict({"prompt": [f"{d}=" for d in digits], "answer": ["".join(sorted(d)) for d in digits]})


def exact_match(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """TRL reward: 1.0 where the completion equals the answer, else 0.0.

    Trailing `<eos>` and `<pad>` are ignored; white space is not.

    Args:
        completions: N texts, or N conversations `[{"role": ..., "content": text}]`, whose first message counts.
        answer: N expected texts (the data set's column of that name).
        kwargs: the other columns and hooks that TRL passes; the share of right answers is logged through `log_metric`.
    """
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    rewards = [float(_TRAILING_SPECIAL_TOKENS.sub("", t) == a) for t, a in zip(texts, answer, strict=True)]
    if "log_metric" in kwargs:
        kwargs["log_metric"]("rlq/rollout/accuracy", sum(rewards) / len(rewards))
    return rewards


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of `CHARACTERS`; any other character becomes `<unk>`.

    No token is added on either side of a text, and `decode(encode(s)) == s` for every text over `CHARACTERS`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK_TOKEN))
    # [\s\S] and not ".": the latter leaves out line breaks, and a run of them would merge into one token.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()  # joins tokens without the space that a word-level model puts between them
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


DATASETS: dict[str, Callable[..., Dataset]] = {"sort_digits": sort_digits_dataset}
REWARDS: dict[str, Callable[..., list[float]]] = {"exact_match": exact_match}
