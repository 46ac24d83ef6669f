"""The command `accel generate`, which generates text for a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from . import options
from .application import app, command, emit, print_line


@app.command(epilog='Example: accel generate Qwen/Qwen3-0.6B --prompt "Why is the sky blue?" --max-new-tokens 200')
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, transformers folder or artifact.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt; read from standard input if omitted.")] = None,
    system: Annotated[str | None, typer.Option(help="System message, for chat models.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help="Apply the tokenizer's chat template or not; applied if the tokenizer has one."
        ),
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Image file, for models with image input.")] = None,
    audio: Annotated[Path | None, typer.Option(help="Audio file, for speech models.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Maximum number of generated tokens.")] = 256,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample tokens instead of choosing the most likely token.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=1e-6, help="With --sample: temperature; values above 1 give more random text.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=0, help="With --sample: sample from this number of the most likely tokens; 0 for all."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="With --sample: sample from the most likely tokens with this total probability."
        ),
    ] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Number of beams of a beam search.")] = 1,
    seed: Annotated[int | None, typer.Option(help="With --sample: random seed, for a repeatable answer.")] = None,
    task: options.Task = None,
    backend: options.Backend = None,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Answer a prompt. The text is printed while it is generated; the speed is printed on standard error."""
    with command(as_json, verbose):
        text = sys.stdin.read() if prompt is None and image is None and audio is None else prompt or ""
        if not sample and (temperature is not None or top_k is not None or top_p is not None or seed is not None):
            raise ConfigError(
                "--temperature, --top-k, --top-p and --seed have an effect only with --sample.", fix="add --sample."
            )
        import transformers

        from ..models.processors import companion_of
        from ..models.single_prompt import answer, open_generator, prompt_inputs

        model_session = open_generator(
            model, task=task, backend=backend, device=device, revision=revision, trust_remote_code=trust_remote_code
        )
        tokenizer = companion_of(model_session, "AutoTokenizer")
        inputs = prompt_inputs(model_session, tokenizer, text, system=system, chat=chat, image=image, audio=audio)
        if seed is not None:
            transformers.set_seed(seed)
        choices = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if sample else {}

        def show(piece: str) -> None:
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()

        result = answer(
            model_session,
            tokenizer,
            inputs,
            on_text=show,
            max_new_tokens=max_new_tokens,
            do_sample=sample,
            num_beams=num_beams,
            **{name: value for name, value in choices.items() if value is not None},
        )
        if as_json:
            emit(result, as_json, "")
            return
        print_line()
        first = (
            f"{result.prompt_tokens} prompt tokens in {result.first_token_s * 1e3:.0f} ms, " if num_beams == 1 else ""
        )
        sys.stderr.write(f"{first}{result.new_tokens} new tokens, {result.tokens_per_s:.1f} a second\n")
