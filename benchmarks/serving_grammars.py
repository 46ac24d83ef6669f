"""Validity of JSON answers on a random model, and the time that the grammar takes in each step.

python benchmarks/serving_grammars.py --tokenizer FOLDER [--answers 500]

The folder contains a fast tokenizer. The model has random weights, so it prefers no valid JSON: every valid answer is due to the grammar.
The script needs the packages llguidance and jsonschema. It exits with 1 if an answer is invalid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from typing import Any

import jsonschema
import torch
import transformers

from accel import GenerationEngine, GenerationLimits, GenerationOptions, ORTModel
from accel.decoding.grammars import GrammarTokenizer, json_grammar
from accel.testing.generative_models import save_generator

TEXT = {"type": "string", "maxLength": 12}
COUNT = {"type": "integer", "minimum": 0, "maximum": 999}
FLAG = {"type": "boolean"}


def record(required: bool = True, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object without further properties."""
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def items(schema: Any, most: int = 3, least: int = 0) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": schema, "maxItems": most, "minItems": least}


POINT = record(x=COUNT, y=COUNT)
SCHEMAS: list[dict[str, Any]] = [
    record(name=TEXT),
    record(name=TEXT, age=COUNT, member=FLAG),
    record(required=False, name=TEXT, age=COUNT),
    items(TEXT, 4),
    items(COUNT, 5, 2),
    items(POINT),
    record(points=items(POINT, 2), closed=FLAG),
    record(kind={"enum": ["card", "cash", "transfer"]}, amount=COUNT),
    {"anyOf": [record(card=TEXT), record(cash=COUNT)]},
    record(next={"anyOf": [POINT, {"type": "null"}]}),
    record(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}),
    record(day={"type": "string", "format": "date"}),
    record(id={"type": "string", "format": "uuid"}),
    record(a=record(b=record(c=record(d=TEXT)))),
    record(matrix=items(items(COUNT, 2), 2)),
    {**record(first={"$ref": "#/$defs/p"}, last={"$ref": "#/$defs/p"}), "$defs": {"p": POINT}},
    record(fixed={"const": "yes"}, level={"enum": [1, 2, 3]}),
    record(pair={"type": "array", "prefixItems": [TEXT, COUNT], "items": False, "minItems": 2}),
    record(text={"type": "string", "minLength": 3, "maxLength": 9}, tags=items({"enum": ["a", "b", "c"]}, 3, 1)),
    record(value={"type": ["integer", "null"], "minimum": -5, "maximum": 5}, done=FLAG, why={**TEXT, "maxLength": 30}),
]


def valid(text: str, schema: Any) -> bool:
    """Return whether a text is JSON that matches a schema."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def mask_seconds(tokens: GrammarTokenizer, grammar: str, vocabulary: int) -> list[float]:
    """Return the time of each step of one answer: computing the mask, masking the logits, and accepting the token."""
    constraint, times = tokens.constraint(grammar), []
    while not constraint.complete and len(times) < 300:
        logits = torch.randn(1, vocabulary)
        start = time.perf_counter()
        scores = constraint(logits, logits)
        computed = time.perf_counter() - start
        token = int(torch.multinomial(scores.softmax(-1), 1))
        start = time.perf_counter()
        constraint.accept(token)
        times.append(computed + time.perf_counter() - start)
    return times


async def main() -> int:
    """Print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--answers", type=int, default=500)
    arguments = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.tokenizer)
    vocabulary = len(tokenizer)
    tokens = GrammarTokenizer(tokenizer, vocabulary, [tokenizer.eos_token_id])
    times = [t for schema in SCHEMAS for _ in range(3) for t in mask_seconds(tokens, json_grammar(schema), vocabulary)]
    print(f"vocabulary {vocabulary}; grammar for each row and step: mean {1e3 * statistics.mean(times):.3f} ms, "
          f"median {1e3 * statistics.median(times):.3f} ms, greatest {1e3 * max(times):.2f} ms, {len(times)} steps")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        save_generator(
            folder, "qwen3", vocab_size=vocabulary, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=4096
        )
        tokenizer.save_pretrained(folder)
        model = ORTModel.from_pretrained(folder, backend="pytorch", task="text-generation")
        with GenerationEngine(model, limits=GenerationLimits(rows=8, queue=2 * arguments.answers)) as engine:
            grammars = [json_grammar(schema) for schema in SCHEMAS]

            async def ask(number: int, most: int) -> tuple[bool, str]:
                schema = number % len(SCHEMAS)
                options = GenerationOptions(
                    max_new_tokens=most, temperature=1.0, seed=number, top_k=0, top_p=1.0, grammar=grammars[schema]
                )
                answer = await engine.answer("where is my card", options)
                return valid(answer.text, SCHEMAS[schema]), answer.finish

            long = await asyncio.gather(*(ask(i, 1000) for i in range(arguments.answers)))
            short = await asyncio.gather(*(ask(i, 2) for i in range(len(SCHEMAS))))
    print(f"valid: {sum(right for right, _ in long)} of {len(long)}; finish reasons {sorted({end for _, end in long})}")
    print(
        f"with 2 tokens: valid {sum(right for right, _ in short)}, finish reasons {sorted({end for _, end in short})}"
    )
    return 0 if all(right and end == "stop" for right, end in long) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
