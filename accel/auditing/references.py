"""Answers of PyTorch for texts, and of variants of the model with a common fault of servers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..artifact.sentence_settings import sentence_settings
from ..capture.sentence_embeddings import Pooling
from ..models.embedding_and_scoring import COUNTED, Embedder, PairScorer, activation_of
from ..models.processors import kept_companion_of

Vectors = list[npt.NDArray[np.float64]]
Variant = Callable[[Sequence[str]], Vectors]

_POOLINGS = ("mean", "cls", "max", "lasttoken")


class EmbeddingReference:
    """Embeddings of sentence-transformers if it is installed, and otherwise of the same model with PyTorch.

    Args:
        model: The path of a folder, or a Hub id.
        load: Function that loads a model by the name of its class, on the PyTorch backend.
    """

    def __init__(self, model: str, load: Callable[[str], Any]) -> None:
        self.model = load("ORTModelForFeatureExtraction")
        self.settings = sentence_settings(self.model.artifact.path)
        self._embedder = Embedder(self.model)
        self.limit: int | None = self._embedder.max_length
        self.tokenizer = self._embedder.tokenizer
        self.source = "PyTorch"
        self._encode: Callable[[list[str]], Any] = lambda texts: self.model.encode(texts, batch_size=1)
        try:
            library = importlib.import_module("sentence_transformers")
        except ImportError:
            return
        encoder = library.SentenceTransformer(str(self.model.artifact.path), device="cpu")
        self.source = "sentence-transformers"
        self._encode = lambda texts: encoder.encode(texts, batch_size=1, convert_to_numpy=True, show_progress_bar=False)

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return the embeddings of texts, computed one by one."""
        return [np.asarray(row, dtype=np.float64) for row in self._encode(list(texts))]

    @property
    def normalized(self) -> bool:
        """Whether embeddings have length 1."""
        return abs(float(np.linalg.norm(self(["a text"])[0])) - 1) < 1e-4

    def prompts(self) -> Mapping[str, str]:
        """Return the prompts of the model's files by name."""
        return dict(self.settings.prompts)

    def variants(self) -> dict[str, Variant]:
        """Return common faults by description. Each computes the embeddings that a server with this fault returns."""
        default = self.settings.prompt()
        faults: dict[str, Variant] = {}
        if default:
            faults["the prompt is left out"] = partial(self._with, prompt="")
            faults["the prompt is added twice"] = partial(self._with, prompt=default * 2)
        for name, prompt in self.settings.prompts.items():
            if prompt and prompt != default:
                faults[f"the prompt {name!r} is added"] = partial(self._with, prompt=prompt)
        for mode in _POOLINGS:
            faults[f"pooling is {mode}"] = partial(self._with, pooling=mode)
        faults["texts are in lower case"] = partial(self._cut, lower=True)
        faults["texts have no special tokens"] = partial(self._with, special=False)
        for count in sorted({self.limit or 512, 128, 256, 512, 1000, 2000, 4 * (self.limit or 512)}):
            faults[f"texts are truncated to {count} characters"] = partial(self._cut, characters=count)
        for count in (32, 64, 128, 256, 384, 512):
            if self.limit is None or count < self.limit:
                faults[f"texts are truncated to {count} tokens"] = partial(self._with, limit=count)
        return faults

    def _cut(self, texts: Sequence[str], *, characters: int | None = None, lower: bool = False) -> Vectors:
        complete = [self.settings.prompt() + text for text in texts]
        return self._with([(text.lower() if lower else text)[:characters] for text in complete], prompt="")

    def _with(
        self,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        pooling: str | None = None,
        limit: int | None = None,
        special: bool = True,
    ) -> Vectors:
        embedder = Embedder(self.model)
        if limit is not None:
            embedder.max_length = limit
        vectors: Vectors = []
        for text in texts:
            rows = embedder.rows([text], prompt=prompt)
            if not special:
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: embedder.max_length]
                rows = [
                    {name: (ids if name == "input_ids" else values[: len(ids)]) for name, values in rows[0].items()}
                ]
                if not ids:
                    vectors.append(np.zeros(1))
                    continue
            if pooling is None:
                vectors.append(embedder.embed(rows)[0].double().numpy())
                continue
            inputs = embedder.batch(rows)
            counted = inputs.pop(COUNTED, None)
            output = self.model(**inputs)
            if "last_hidden_state" not in output:
                vectors.append(np.zeros(1))
                continue
            mask = inputs["attention_mask"]
            hidden = Pooling((pooling,))(output["last_hidden_state"], mask, counted if counted is not None else mask)
            vectors.append(hidden[0].double().numpy())
        return vectors


class LabelReference:
    """Scores of the labels: a softmax, or a sigmoid for models with several labels per text or only one label."""

    def __init__(self, load: Callable[[str], Any]) -> None:
        self.model = load("ORTModelForSequenceClassification")
        self.tokenizer = kept_companion_of(self.model, "AutoTokenizer")
        config = self.model.config
        self.labels = [config.id2label[i] for i in range(config.num_labels)]
        self.source = "PyTorch"
        self._scorer = PairScorer(self.model)
        self.limit = self._scorer.max_length
        several = getattr(config, "problem_type", None) == "multi_label_classification" or config.num_labels == 1
        self._function: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid if several else lambda x: x.softmax(-1)

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return the scores of texts, computed one by one."""
        rows = [self._scorer.logits(self._scorer.rows([text], prompt=""))[0] for text in texts]
        return [self._function(row).double().numpy() for row in rows]

    def variants(self) -> dict[str, Variant]:
        """Return common faults by description."""
        return {
            "texts are in lower case": lambda texts: self([text.lower() for text in texts]),
            "texts are truncated to 512 characters": lambda texts: self([text[:512] for text in texts]),
        }


class RelevanceReference:
    """Relevance scores of documents for a query."""

    def __init__(self, load: Callable[[str], Any], query: str) -> None:
        self.model = load("ORTModelForSequenceClassification")
        self.source = "PyTorch"
        self.query = query
        self._scorer = PairScorer(self.model)
        self.limit = self._scorer.max_length
        self.tokenizer = self._scorer.tokenizer
        self._activation = activation_of(self.model)

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return the scores of documents, computed one by one."""
        return [self._activation(row).double().numpy().reshape(-1)[-1:] for row in self._logits(texts, self.query)]

    def _logits(self, texts: Sequence[str], query: str, *, swapped: bool = False) -> list[torch.Tensor]:
        pairs = [(text, query) if swapped else (query, text) for text in texts]
        return [self._scorer.logits(self._scorer.rows([first], [second]))[0] for first, second in pairs]

    def variants(self) -> dict[str, Variant]:
        """Return common faults by description."""

        def raw(texts: Sequence[str]) -> Vectors:
            return [row.double().numpy().reshape(-1)[-1:] for row in self._logits(texts, self.query)]

        def swapped(texts: Sequence[str]) -> Vectors:
            rows = self._logits(texts, self.query, swapped=True)
            return [self._activation(row).double().numpy().reshape(-1)[-1:] for row in rows]

        return {
            "the scores are logits": raw,
            "query and document are swapped": swapped,
            "texts are in lower case": lambda texts: self([text.lower() for text in texts]),
        }


class ChatReference:
    """Greedy answers of a model with its chat template."""

    def __init__(self, load: Callable[[str], Any]) -> None:
        self.model = load("ORTModelForCausalLM")
        self.tokenizer = kept_companion_of(self.model, "AutoTokenizer")
        self.source = "PyTorch"

    def __call__(self, text: str, tokens: int) -> tuple[str, int]:
        """Return the answer to a message of the user, and the number of tokens of the prompt."""
        messages = [{"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        ids = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        count = int(inputs["input_ids"].shape[1])
        return str(self.tokenizer.decode(ids[0, count:], skip_special_tokens=True)), count
