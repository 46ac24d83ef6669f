"""Train a classifier of bank queries with simulated 4-bit weights or 8-bit arithmetic (quantization-aware training), and export it.

A small model loses accuracy if its weights are quantized to 4 bits, or with one scale for a whole layer. This example trains the demo
model with quantized weights, so that it loses less accuracy. The loss function compares its outputs mainly with the float model
(distillation), and also with the labels. To resume an interrupted run from its last checkpoint, start the script again with the same
arguments.

    python examples/quantization_aware_training.py OUT_FOLDER [--train TRAIN.csv] [--test TEST.csv] [--preset int4-per-tensor]

The CSV files have the columns `text` and `category`. By default, the script uses the data that ship with `accel`. Training takes
minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import accel
from accel.demo import CALIBRATION_SET, MODEL, TEST_SET

LENGTH = 48


def read(path: Path, label2id: dict[str, int]) -> list[dict[str, object]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{"text": row["text"], "labels": label2id[row["category"]]} for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=Path, default=Path(str(CALIBRATION_SET)))
    parser.add_argument("--test", type=Path, default=Path(str(TEST_SET)))
    parser.add_argument("--preset", default="int4-per-tensor")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--distillation", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-steps", type=int, default=100)
    arguments = parser.parse_args()

    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, dtype=torch.float32)
    train, test = (read(path, model.config.label2id) for path in (arguments.train, arguments.test))

    def collate(rows: list[dict[str, object]]) -> dict[str, torch.Tensor]:
        texts = [str(row["text"]) for row in rows]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}

    def accuracy(of: torch.nn.Module) -> float:
        of.eval()
        right = 0
        with torch.inference_mode():
            for start in range(0, len(test), 64):
                batch = collate(test[start : start + 64])
                right += int((of(**batch).logits.argmax(-1) == batch["labels"]).sum())
        return 100 * right / len(test)

    accuracies = {"float": accuracy(model)}
    calibration = None
    if arguments.preset != "int4":
        calibration = [collate(train[start : start + 32]) for start in range(0, 256, 32)]
    model = accel.prepare_qat(
        model,
        calibration=calibration,
        preset=arguments.preset,
        block_size=arguments.block_size,
        distillation=arguments.distillation,
    )
    accuracies["rounded, not trained"] = accuracy(model)

    settings = TrainingArguments(
        output_dir=str(arguments.out / "checkpoints"),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=32,
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        seed=arguments.seed,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        save_steps=arguments.save_steps,
        save_total_limit=2,
        logging_steps=50,
        report_to=[],
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=train, data_collator=collate)
    folder = arguments.out / "checkpoints"
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)
    accuracies["rounded, trained"] = accuracy(model.cpu())

    accel.export(model, arguments.out / "onnx", processor=tokenizer, task="text-classification")
    columns = {"text": "text", "label": "category"}
    report = accel.evaluate(arguments.out / "onnx", str(arguments.test), columns=columns, max_length=LENGTH)
    accuracies["exported, ONNX Runtime"] = 100 * report.value
    print(json.dumps(accuracies, indent=1))


if __name__ == "__main__":
    main()
