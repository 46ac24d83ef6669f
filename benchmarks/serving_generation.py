"""Measure text generation for many callers of `accel serve` with the `openai` client.

    python benchmarks/serving_generation.py --work FOLDER [--callers 8] [--prompt 32] [--new 128] [--rounds 5]

The model has the shape of Qwen with 0.5 billion parameters and 4-bit weights. The server (`accel serve`) and the client are separate
processes. In each round, first one caller and then `--callers` callers send the same prompts, with greedy search and streaming. The script
prints one line for each round and writes FOLDER/serving_generation.json:

- tokens/s: all tokens of a round divided by the elapsed time;
- cpu s: processor time of the server for each token, which other programs on the machine change less than the elapsed time;
- same: share of answers that equal the answers of `model.generate`, which runs once for each prompt before the server starts.

The script needs `pip install openai psutil`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from generation import ROWS, artifact_of, qwen

VOCABULARY = 151_936
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def tokenizer(folder: Path) -> None:
    """Return a tokenizer with one token for each letter, because this benchmark does not measure tokenizers."""
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel

    if (folder / "tokenizer_config.json").is_file():
        return
    letters = sorted(ByteLevel.alphabet())
    names = [*letters, *(f"w{i}" for i in range(len(letters), VOCABULARY - 1)), "<|endoftext|>"]
    words = transformers.Qwen2Tokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)


def texts(callers: int, tokens: int) -> list[str]:
    chosen = random.Random(0)
    lengths = [tokens + chosen.randrange(-tokens // 4, tokens // 4 + 1) for _ in range(callers)]
    return ["".join(chosen.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(length)) for length in lengths]


def references(model: Path, prompts: list[str], new: int) -> list[str]:
    """Return the answer of `generate` to each prompt alone."""
    import torch
    import transformers

    import accel

    opened: Any = accel.ORTModelForCausalLM.from_pretrained(model)
    words = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([words(prompt)["input_ids"]])
        answer = opened.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        answers.append(words.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


async def measure(url: str, server: int, prompts: list[str], expected: list[str], args: argparse.Namespace) -> Any:
    import openai
    import psutil

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=3600, max_retries=0)
    process = psutil.Process(server)
    name = (await client.models.list()).data[0].id

    async def ask(number: int) -> tuple[int, bool]:
        stream = await client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": prompts[number]}], temperature=0, max_tokens=args.new,
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        text, tokens = "", 0
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return tokens, text == expected[number]

    async def timed(groups: list[list[int]]) -> dict[str, float]:
        """Measure the groups of callers one after another. The callers of a group send their requests at the same time."""
        cpu, start = sum(process.cpu_times()[:2]), time.perf_counter()
        replies = [reply for group in groups for reply in await asyncio.gather(*map(ask, group))]
        seconds, cpu = time.perf_counter() - start, sum(process.cpu_times()[:2]) - cpu
        tokens = sum(count for count, _ in replies)
        return {
            "tokens_per_s": tokens / seconds,
            "cpu_s_a_token": cpu / tokens,
            "same": sum(same for _, same in replies) / len(replies),
        }

    await ask(0)
    rounds = []
    for number in range(args.rounds):
        alone = [[(2 * number + i) % args.callers] for i in range(2)]
        single, many = await timed(alone), await timed([list(range(args.callers))])
        ratio = many["tokens_per_s"] / single["tokens_per_s"]
        cpu = single["cpu_s_a_token"] / many["cpu_s_a_token"]
        print(
            f"one caller {single['tokens_per_s']:6.1f} tokens/s, {args.callers} callers {many['tokens_per_s']:6.1f}: {ratio:.2f} "
            f"times; processor time {cpu:.2f} times; same {single['same']:.0%} and {many['same']:.0%}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        rounds.append({"one": single, "many": many, "ratio": ratio, "cpu_ratio": cpu})
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="your own artifact with a tokenizer and a chat template")
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument(
        "--prompt", type=int, default=32, help="average number of tokens in a prompt; prompts differ by up to a quarter"
    )
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--references", help=argparse.SUPPRESS)
    args = parser.parse_args()
    prompts = texts(args.callers, args.prompt)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.references:
        Path(args.references).write_text(json.dumps(references(args.model, prompts, args.new)), encoding="utf-8")
        return
    model = args.model
    if model is None:
        source = qwen(args.work / "qwen")
        tokenizer(source)
        model = artifact_of(args.work, source, ROWS["cpu int4"])
    file = args.work / "references.json"
    again = [sys.executable, __file__, "--work", str(args.work), "--model", str(model), "--references", str(file)]
    sizes = ["--callers", str(args.callers), "--prompt", str(args.prompt), "--new", str(args.new)]
    subprocess.run([*again, *sizes], check=True)
    expected = json.loads(file.read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "accel", "serve", str(model), "--port", "0", "--timeout", "3600"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("http")).strip().removesuffix("/docs")
        rounds = asyncio.run(measure(url, server.pid, prompts, expected, args))
    finally:
        server.terminate()
        server.wait(60)
    medians = {key: statistics.median(row[key] for row in rounds) for key in ("ratio", "cpu_ratio")}
    print(
        f"median: {medians['ratio']:.2f} times the tokens a second, {medians['cpu_ratio']:.2f} times those of processor time"
    )
    answer = {"callers": args.callers, "prompt": args.prompt, "new": args.new, **medians, "rounds": rounds}
    (args.work / "serving_generation.json").write_text(json.dumps(answer, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
