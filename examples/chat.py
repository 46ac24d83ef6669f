"""Chat with a decoder-only model. Each turn computes only the new tokens, because the KV cache stores the earlier tokens.

    python examples/chat.py [MODEL]

MODEL is a Hub id, a transformers folder or an artifact of `accel`. It should have a chat template. Without MODEL, the example uses a tiny
random model.
Type a line and press Enter; an empty line ends the conversation.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from accel import ORTModelForCausalLM
from accel.testing.generative_models import save_generator


def template(tokenizer: transformers.PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> torch.Tensor:
    """Return the token ids of the conversation."""
    if tokenizer.chat_template:
        encoding = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        return encoding["input_ids"]
    return tokenizer(" ".join(m["content"] for m in messages), return_tensors="pt")["input_ids"]


def chat(folder: str | Path, lines: list[str] | None = None, max_new_tokens: int = 60) -> list[str]:
    """Chat until an empty line, and return the answers."""
    model = ORTModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.artifact.path)
    cache, messages, answers = model.new_cache(), [], []
    read: list[int] = []
    user_lines = iter(lines) if lines is not None else iter(lambda: input("> "), "")
    for line in user_lines:
        messages.append({"role": "user", "content": line})
        tokens = template(tokenizer, messages)
        # Some chat templates change earlier turns, for example by removing the model's reasoning. The cache keeps only the tokens
        # that the old and the new conversation have in common.
        same = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(read, tokens[0, :-1].tolist(), strict=False)
            )
        )
        cache.crop(same - cache.get_seq_length())
        streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        generated = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            streamer=streamer,
        )
        read = generated[0, : cache.get_seq_length()].tolist()
        answers.append(tokenizer.decode(generated[0, tokens.shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


if __name__ == "__main__":
    if len(sys.argv) > 1:
        chat(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            tiny = save_generator(Path(scratch) / "tiny", "llama")
            print(chat(tiny, ["where is my card", "i lost it"], max_new_tokens=8))
