"""Distill the demo model that ships with accel from a larger fine-tuned classifier.

The smaller model (the student) has the hidden size of the larger model (the teacher), so its embeddings and its two layers start with
weights of the teacher. The student is smaller in three ways. Its vocabulary contains only the word pieces of the training queries and
all single characters, so that no word becomes unknown. It has only two layers. Each feed-forward block contains only the neurons with
the largest weights. The teacher computes logits for the training queries and for augmented copies of the queries, and the student
learns these logits (Hinton et al., 2015, "Distilling the Knowledge in a Neural Network", https://arxiv.org/abs/1503.02531).

    python examples/distill_demo_model.py TEACHER_FOLDER TRAIN.csv TEST.csv OUT_FOLDER

The CSV files have the columns `text` and `category`. Training takes about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import random
import string
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MAX_LENGTH = 64
POSITIONS = 128
TEMPERATURE = 2.0


def read_rows(path: Path) -> list[tuple[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [(row["text"], row["category"]) for row in csv.DictReader(file)]


def trim_tokenizer(teacher_folder: Path, texts: list[str], out: Path) -> list[int]:
    """Write a tokenizer with only the word pieces of `texts` and single characters. Return the teacher's ids of these tokens."""
    spec = json.loads((teacher_folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = spec["model"]["vocab"]
    teacher_tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
    used = {index for ids in teacher_tokenizer(texts)["input_ids"] for index in ids}
    characters = string.ascii_lowercase + string.digits + string.punctuation
    used |= {vocab[piece] for char in characters for piece in (char, "##" + char) if piece in vocab}
    token_ids = [vocab[token] for token in SPECIAL_TOKENS]
    token_ids += sorted(used - set(token_ids))
    token_of = {index: token for token, index in vocab.items()}
    spec["model"]["vocab"] = {token_of[old]: new for new, old in enumerate(token_ids)}
    new_id = {old: new for new, old in enumerate(token_ids)}
    for token in spec["added_tokens"]:
        token["id"] = new_id[token["id"]]
    for name, token in spec["post_processor"]["special_tokens"].items():
        token["ids"] = [SPECIAL_TOKENS.index(name)]
    spec["truncation"] = spec["padding"] = None
    (out / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(out / "tokenizer.json"),
        model_max_length=POSITIONS,
        **dict(zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], SPECIAL_TOKENS, strict=True)),
    )
    tokenizer.save_pretrained(out)
    return token_ids


def build_student(teacher, token_ids: list[int], layers: list[int], intermediate: int) -> BertForSequenceClassification:
    """Return a copy of the teacher with a smaller vocabulary, fewer layers and narrower feed-forward blocks."""
    config = copy.deepcopy(teacher.config)
    config.update(
        {
            "vocab_size": len(token_ids),
            "num_hidden_layers": len(layers),
            "intermediate_size": intermediate,
            "max_position_embeddings": POSITIONS,
            "pad_token_id": 0,
        }
    )
    student = BertForSequenceClassification(config)
    source, target = teacher.bert, student.bert
    with torch.no_grad():
        target.embeddings.word_embeddings.weight.copy_(source.embeddings.word_embeddings.weight[token_ids])
        target.embeddings.position_embeddings.weight.copy_(source.embeddings.position_embeddings.weight[:POSITIONS])
        target.embeddings.token_type_embeddings.load_state_dict(source.embeddings.token_type_embeddings.state_dict())
        target.embeddings.LayerNorm.load_state_dict(source.embeddings.LayerNorm.state_dict())
        for new, old in enumerate(layers):
            from_layer, to_layer = source.encoder.layer[old], target.encoder.layer[new]
            to_layer.attention.load_state_dict(from_layer.attention.state_dict())
            strength = from_layer.intermediate.dense.weight.norm(dim=1) * from_layer.output.dense.weight.norm(dim=0)
            best = strength.topk(intermediate).indices
            to_layer.intermediate.dense.weight.copy_(from_layer.intermediate.dense.weight[best])
            to_layer.intermediate.dense.bias.copy_(from_layer.intermediate.dense.bias[best])
            to_layer.output.dense.weight.copy_(from_layer.output.dense.weight[:, best])
            to_layer.output.dense.bias.copy_(from_layer.output.dense.bias)
            to_layer.output.LayerNorm.load_state_dict(from_layer.output.LayerNorm.state_dict())
        target.pooler.load_state_dict(source.pooler.state_dict())
        student.classifier.load_state_dict(teacher.classifier.state_dict())
    return student


def augment(texts: list[str], copies: int, rng: random.Random) -> list[str]:
    """Return changed copies of the queries. Words are removed, swapped or replaced, and halves of two queries are joined."""
    words = [text.split() for text in texts]
    pool = [word for query in words for word in query]
    augmented_queries = []
    for _ in range(copies):
        for query in words:
            query = list(query)
            if rng.random() < 0.35:
                other = rng.choice(words)
                query = query[: max(1, len(query) // 2)] + other[len(other) // 2 :]
            for position in range(len(query)):
                chance = rng.random()
                if chance < 0.08:
                    query[position] = ""
                elif chance < 0.16:
                    query[position] = rng.choice(pool)
            if len(query) > 2 and rng.random() < 0.3:
                position = rng.randrange(len(query) - 1)
                query[position], query[position + 1] = query[position + 1], query[position]
            augmented_queries.append(" ".join(word for word in query if word) or "help")
    return augmented_queries


@torch.no_grad()
def predict(model, tokenizer, texts: list[str], batch_size: int = 128) -> torch.Tensor:
    """Return logits with the shape `(len(texts), num_labels)`. Texts of similar length share a batch."""
    model.eval()
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    logits = torch.empty(len(texts), model.config.num_labels)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        batch = tokenizer(
            [texts[i] for i in part], padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
        )
        logits[part] = model(**batch).logits
    return logits


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return (logits.argmax(-1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--intermediate", type=int, default=384)
    parser.add_argument("--copies", type=int, default=7, help="augmented copies of the training set")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training set and its copies")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    teacher = AutoModelForSequenceClassification.from_pretrained(args.teacher, dtype=torch.float32)
    teacher_tokenizer = AutoTokenizer.from_pretrained(args.teacher)
    train, test = read_rows(args.train), read_rows(args.test)
    texts = [text for text, _ in train]
    token_ids = trim_tokenizer(args.teacher, texts, args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    student = build_student(teacher, token_ids, args.layers, args.intermediate)
    size = sum(p.numel() for p in student.parameters())
    print(f"student: {size / 1e6:.2f} M parameters, {2 * size / 1e6:.2f} MB in float16, vocabulary {len(token_ids)}")

    test_labels = torch.tensor([teacher.config.label2id[label] for _, label in test])
    everything = texts + augment(texts, args.copies, rng)
    targets = predict(teacher, teacher_tokenizer, everything)
    train_labels = torch.tensor([teacher.config.label2id[label] for _, label in train])
    # The loss also uses the true labels of the original queries. Augmented queries have no label: `cross_entropy` ignores -100.
    labels = torch.cat([train_labels, torch.full((len(everything) - len(texts),), -100)])
    print(f"teacher on {len(everything)} queries done", flush=True)

    batch_size = 64
    encoded = tokenizer(everything, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.learning_rate, weight_decay=0.01)
    total_steps = args.epochs * (len(everything) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, total_steps=total_steps, pct_start=0.06
    )
    step = 0
    for epoch in range(args.epochs):
        student.train()
        order = list(range(len(everything)))
        rng.shuffle(order)
        # Sorting by length within windows of 50 batches reduces padding. The order of the batches stays random.
        window = 50 * batch_size
        order = [
            i
            for s in range(0, len(order), window)
            for i in sorted(order[s : s + window], key=lambda i: len(encoded[i]))
        ]
        batches = [order[s : s + batch_size] for s in range(0, len(order) - batch_size + 1, batch_size)]
        rng.shuffle(batches)
        running = 0.0
        for batch in batches[: total_steps - step]:
            inputs = tokenizer.pad({"input_ids": [encoded[i] for i in batch]}, return_tensors="pt")
            logits = student(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            loss = F.kl_div(
                F.log_softmax(logits / TEMPERATURE, -1),
                F.log_softmax(targets[batch] / TEMPERATURE, -1),
                log_target=True,
                reduction="batchmean",
            ) * TEMPERATURE**2 + 0.5 * F.mse_loss(logits, targets[batch])
            true = labels[batch]
            if (true >= 0).any():
                loss = loss + 0.2 * F.cross_entropy(logits, true, ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            running += loss.item()
        logits = predict(student, tokenizer, [text for text, _ in test])
        print(
            f"epoch {epoch + 1}: loss {running / len(batches):.4f}, test accuracy {accuracy(logits, test_labels):.4f}",
            flush=True,
        )

    student.half().save_pretrained(args.out)
    reloaded = AutoModelForSequenceClassification.from_pretrained(args.out, dtype=torch.float32)
    logits = predict(reloaded, tokenizer, [text for text, _ in test])
    print(f"saved in float16, test accuracy in float32: {accuracy(logits, test_labels):.4f}")


if __name__ == "__main__":
    main()
